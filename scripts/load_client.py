"""The clients of bench_serve.py: processes that stream completions of random token ids and note when events arrive.

HTTP is httptools' parser under uvloop. Of the CPU time of an event (12.7 us at 32 streams a process on a small virtual
machine) a bare recv and epoll loop takes 9.2 and the parser 2.1, so that a parser of our own would gain little.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import os
import random
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import httptools
import uvloop

WARMUP_TOKENS = 16
"""Most tokens in and out of a request that warms up."""
POLL_S = 0.02
"""How often a client that runs until it is stopped looks whether it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One run. Lengths in tokens."""

    base_url: str
    model: str | None  # None: the requests name no model
    input_len: int
    output_len: int
    num_prompts: int | None  # None: until stopped, and what is then unfinished is cut, not failed
    warmup: int  # short requests before the run that are not measured
    concurrency: int | None  # clients; with a request rate, the most requests that are open at once (None: all)
    request_rate: float | None  # requests per second; None: closed loop
    vocab_size: int
    seed: int
    max_seconds: float  # a run that takes longer is cut, and its unfinished requests have failed
    extra_body: dict[str, Any]
    start_delay_s: float = 0.0  # between the common start of all clients and the first request

    def payload(self, number: int, *, short: bool = False) -> bytes:
        """The body of request `number`. The same run again has the same ones.

        No two begin alike, be they of runs with other clients or lengths: none finds another's prompt in the cache.
        """
        rng = random.Random(f"{self.seed}/{self.concurrency}/{self.input_len}/{number}")
        input_len, output_len = self.input_len, self.output_len
        if short:
            input_len, output_len = min(input_len, WARMUP_TOKENS), min(output_len, WARMUP_TOKENS)
        body = {
            "prompt": rng.choices(range(self.vocab_size), k=input_len),
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body | ({"model": self.model} if self.model else {}) | self.extra_body).encode()


@dataclasses.dataclass(slots=True)
class Measured:
    """One request. Times in seconds of the machine's monotonic clock, which its processes share."""

    sent_s: float
    events_s: list[float] = dataclasses.field(default_factory=list)  # arrival of each event with choices
    prompt_tokens: int | None = None  # as the server's usage says; None: it said nothing
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt
    error: str | None = None
    cut: bool = False  # the run ended first

    @property
    def num_tokens(self) -> int:
        """Tokens of the output: those of the usage, or else the events."""
        return len(self.events_s) if self.completion_tokens is None else self.completion_tokens


class Part(NamedTuple):
    """What one process saw."""

    measured: list[Measured]
    cpu_s: float  # CPU time of the process during the run
    wall_s: float  # length of the run


class Connection(asyncio.Protocol):
    """One kept-alive HTTP/1.1 connection that streams one completion at a time."""

    def __init__(self, url: str):
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self._head = (
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now_s = 0.0

    async def complete(self, payload: bytes) -> Measured:
        """Sends a request and waits for its end; what goes wrong is in the result."""
        measured = Measured(time.monotonic())
        try:
            was_open = self._is_open
            await self._exchange(payload, measured)
            if was_open and not self._answered and not self._is_open:  # it was closed for being idle
                measured.error = None
                await self._exchange(payload, measured)
        except OSError as error:
            measured.error = str(error)
        except asyncio.CancelledError:
            measured.cut = True
        if measured.error is not None or measured.cut:
            self.close()
        return measured

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def _exchange(self, payload: bytes, measured: Measured) -> None:
        loop = asyncio.get_running_loop()
        self._ended = None  # an older connection that is lost only now ends nothing
        if not self._is_open:
            await loop.create_connection(lambda: self, self.host, self.port)
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._rest, self._refusal, self._answered, self._is_done = b"", b"", False, False
        self._measured, self._ended = measured, loop.create_future()
        self._transport.write(self._head + b"%d\r\n\r\n" % len(payload) + payload)
        await self._ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None if self._ended and self._is_done else f"the server closed the connection {exc or ''}".rstrip())

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._refusal += body
            return
        events = (self._rest + body).split(b"\n\n") if self._rest else body.split(b"\n\n")
        self._rest = events.pop()
        for event in events:
            self._on_event(event)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"HTTP {status}: {self._refusal[:500].decode(errors='replace')}")
        elif not self._measured.events_s:
            self._end("the stream held no event")
        else:
            self._end(None)
        if not self._parser.should_keep_alive():
            self.close()

    def _on_event(self, event: bytes) -> None:
        if b'"usage":{' in event or b'"usage": {' in event or event.startswith(b'data: {"error"'):
            self._on_rare_event(event)
        elif event.startswith(b"data: {"):
            self._measured.events_s.append(self._now_s)
        elif event.startswith(b"data: [DONE]"):
            self._is_done = True

    def _on_rare_event(self, event: bytes) -> None:
        body = json.loads(event.removeprefix(b"data: "))
        if "error" in body:
            self._measured.error = self._measured.error or str(body["error"])
            return
        if body["choices"]:  # running usage
            self._measured.events_s.append(self._now_s)
        usage = body["usage"]
        self._measured.prompt_tokens = usage["prompt_tokens"]
        self._measured.completion_tokens = usage["completion_tokens"]
        self._measured.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _end(self, error: str | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._measured.error = self._measured.error or error
            self._ended.set_result(None)


def default_processes(num_streams: int) -> int:
    """At most 32 streams a process, and not more processes than the cores less four, which the server needs."""
    return max(1, min(-(-num_streams // 32), (os.cpu_count() or 1) - 4))


def client_process(workload: Workload, rank: int, num_processes: int, shared: tuple[Any, Any], results: Any) -> None:
    """Runs this process's share of the clients and of the requests; puts its Part, or the error that it ended with.

    shared: the barrier that all processes of the run pass together, and the event that stops those without an end.
    """
    barrier, stop = shared
    try:
        run = _clients(workload, rank, num_processes, barrier, stop)
        results.put(asyncio.run(run, loop_factory=uvloop.new_event_loop))
    except Exception as error:
        barrier.abort()
        results.put(error)


async def _clients(workload: Workload, rank: int, num_processes: int, barrier: Any, stop: Any) -> Part:
    numbers = range(rank, workload.num_prompts or 2**60, num_processes)
    payloads: Iterable[bytes]
    if workload.num_prompts is None:
        payloads = (workload.payload(number) for number in numbers)
    else:
        payloads = [workload.payload(number) for number in numbers]
    warmup = [workload.payload(-1 - number, short=True) for number in range(rank, workload.warmup, num_processes)]
    num_connections = len(numbers)
    if workload.concurrency is not None:
        num_connections = len(range(rank, workload.concurrency, num_processes))
    connections = [Connection(workload.base_url) for _ in range(min(num_connections, len(numbers)))]
    for failed in (m for m in await _closed_loop(connections, iter(warmup)) if m.error is not None):
        raise RuntimeError(f"a warm-up request failed: {failed.error}")
    gc.collect()
    gc.disable()  # a collection would hold up every stream of the process
    await asyncio.to_thread(barrier.wait, workload.max_seconds)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(workload.start_delay_s)
    if workload.request_rate is None:
        endless = workload.num_prompts is None
        task = asyncio.create_task(_closed_loop(connections, iter(payloads), until_error=endless))
    else:
        arrivals_s = itertools.islice(_arrivals_s(workload), rank, workload.num_prompts, num_processes)
        task = asyncio.create_task(_open_loop(connections, payloads, arrivals_s))
    await _wait(task, start_s + workload.max_seconds, stop if workload.num_prompts is None else None)
    measured = await task
    part = Part(measured, time.process_time() - start_cpu_s, time.monotonic() - start_s)
    for connection in connections:
        connection.close()
    return part


async def _wait(task: asyncio.Task[Any], end_s: float, stop: Any | None) -> None:
    """Until the task is done; cancels it at `end_s`, or once it is stopped."""
    while not task.done() and (left_s := end_s - time.monotonic()) > 0:
        await asyncio.wait({task}, timeout=left_s if stop is None else min(left_s, POLL_S))
        if stop is not None and stop.is_set():
            break
    if not task.done():
        task.cancel()


async def _closed_loop(
    connections: Sequence[Connection], payloads: Iterator[bytes], *, until_error: bool = False
) -> list[Measured]:
    """Every connection takes the next payload as soon as it is free. When cancelled, ends with what is done.

    until_error: a connection whose request failed sends no more, as it would fail without end.
    """
    measured: list[Measured] = []

    async def client(connection: Connection) -> None:
        for payload in payloads:
            measured.append(await connection.complete(payload))
            if measured[-1].cut or (until_error and measured[-1].error is not None):
                return

    await _until_done([asyncio.create_task(client(connection)) for connection in connections])
    return measured


async def _open_loop(
    connections: Sequence[Connection], payloads: Iterable[bytes], arrivals_s: Iterable[float]
) -> list[Measured]:
    """Sends each payload at its time, or as soon after as a connection is free."""
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()  # those that are open already come first
    for connection in connections:
        free.put_nowait(connection)
    start_s = time.monotonic()
    measured: list[Measured] = []

    async def send(payload: bytes, arrival_s: float) -> None:
        await asyncio.sleep(start_s + arrival_s - time.monotonic())
        connection = await free.get()
        result = await connection.complete(payload)
        result.sent_s = min(result.sent_s, start_s + arrival_s)  # time in our own queue counts as waiting
        measured.append(result)
        free.put_nowait(connection)

    pairs = zip(payloads, arrivals_s, strict=True)
    await _until_done([asyncio.create_task(send(payload, arrival_s)) for payload, arrival_s in pairs])
    return measured


async def _until_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _arrivals_s(workload: Workload) -> Iterator[float]:
    """When each request is due, in seconds from the start: one Poisson process over all client processes."""
    assert workload.request_rate is not None
    rng, now_s = random.Random(workload.seed), 0.0
    while True:
        now_s += rng.expovariate(workload.request_rate)
        yield now_s
