"""Measures a server that speaks the OpenAI API: streamed completions of random token ids, many at once.

    python scripts/bench_serve.py --base-url http://127.0.0.1:8000 --input-len 1024 --output-len 128 -c 1 8 64

Closed loop: each of C clients sends its next request when the last one has ended. With --request-rate instead, requests
arrive as a Poisson process. The time to the first token (TTFT) ends with the first event that the client sees; the time
per output token (TPOT) is (last event - first event) / (tokens - 1), and tokens are what the server's usage says,
so an event may carry several. Keys of the output are those of `vllm bench serve`. Standard library and uvloop only.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httptools
import uvloop

MAX_REQUESTS = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One run. Lengths in tokens."""

    base_url: str
    model: str | None
    input_len: int
    output_len: int
    num_prompts: int
    warmup: int  # requests before the run that are not measured
    concurrency: int  # clients; with a request rate, the most requests that are open at once
    request_rate: float | None  # requests per second; None: closed loop
    vocab_size: int
    seed: int
    max_seconds: float
    extra_body: dict[str, Any]

    def payload(self, number: int) -> bytes:
        """The body of request `number`: no two have a prefix in common, and every run has the same ones."""
        rng = random.Random(f"{self.seed}/{number}")
        body = {
            "prompt": rng.choices(range(self.vocab_size), k=self.input_len),
            "max_tokens": self.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body | ({"model": self.model} if self.model else {}) | self.extra_body).encode()


@dataclasses.dataclass(slots=True)
class Measured:
    """One request. Times in seconds of the machine's monotonic clock."""

    sent_s: float
    events_s: list[float] = dataclasses.field(default_factory=list)  # arrival of each event with choices
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


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
        self._now_s = 0.0

    async def complete(self, payload: bytes) -> Measured:
        """Sends a request and waits for its end; what goes wrong is in the result."""
        self._parser = httptools.HttpResponseParser(self)
        self._rest, self._refusal = b"", b""
        self._measured = Measured(time.monotonic())
        self._ended = asyncio.get_running_loop().create_future()
        try:
            if self._transport is None or self._transport.is_closing():
                await asyncio.get_running_loop().create_connection(lambda: self, self.host, self.port)
            assert self._transport is not None
            self._transport.write(self._head + b"%d\r\n\r\n" % len(payload) + payload)
            await self._ended
        except OSError as error:
            self._measured.error = str(error)
        except asyncio.CancelledError:
            self._measured.error = "out of time"
        if self._measured.error is not None:
            self.close()
        return self._measured

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the server closed the connection {exc or ''}".rstrip())

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
        elif self._measured.completion_tokens == 0:
            self._end("the stream ended without usage")
        else:
            self._end(None)

    def _on_event(self, event: bytes) -> None:
        if b'"usage":{' in event or b'"usage": {' in event or event.startswith(b'data: {"error"'):
            self._on_rare_event(event)
        elif event.startswith(b"data: {"):
            self._measured.events_s.append(self._now_s)

    def _on_rare_event(self, event: bytes) -> None:
        body = json.loads(event.removeprefix(b"data: "))
        if "error" in body:
            self._measured.error = self._measured.error or str(body["error"])
            return
        if body["choices"]:  # running usage
            self._measured.events_s.append(self._now_s)
        self._measured.prompt_tokens = body["usage"]["prompt_tokens"]
        self._measured.completion_tokens = body["usage"]["completion_tokens"]

    def _end(self, error: str | None) -> None:
        if not self._ended.done():
            self._measured.error = self._measured.error or error
            self._ended.set_result(None)


def client_process(workload: Workload, rank: int, num_processes: int, barrier: Any, results: Any) -> None:
    """Runs this process's share of the clients and of the requests; puts a list of Measured."""
    try:
        measured = asyncio.run(_clients(workload, rank, num_processes, barrier), loop_factory=uvloop.new_event_loop)
        results.put(measured)
    except Exception as error:
        barrier.abort()
        results.put(error)


async def _clients(workload: Workload, rank: int, num_processes: int, barrier: Any) -> list[Measured]:
    connections = [Connection(workload.base_url) for _ in range(rank, workload.concurrency, num_processes)]
    warmup = [workload.payload(-1 - number) for number in range(rank, workload.warmup, num_processes)]
    numbers = range(rank, workload.num_prompts, num_processes)
    payloads = [workload.payload(number) for number in numbers]
    for failed in (m for m in await _closed_loop(connections, warmup) if m.error is not None):
        raise RuntimeError(f"a warm-up request failed: {failed.error}")
    await asyncio.to_thread(barrier.wait, workload.max_seconds)
    if workload.request_rate is None:
        task = asyncio.create_task(_closed_loop(connections, payloads))
    else:
        task = asyncio.create_task(_open_loop(connections, payloads, _arrivals_s(workload, numbers)))
    await asyncio.wait({task}, timeout=workload.max_seconds)
    if not task.done():
        task.cancel()
    measured = await task
    for connection in connections:
        connection.close()
    return measured


async def _closed_loop(connections: Sequence[Connection], payloads: Sequence[bytes]) -> list[Measured]:
    """Every connection takes the next payload as soon as it is free. When cancelled, ends with what is done."""
    waiting = collections.deque(payloads)
    measured: list[Measured] = []

    async def client(connection: Connection) -> None:
        while waiting:
            measured.append(await connection.complete(waiting.popleft()))
            if measured[-1].error == "out of time":
                return

    await _until_done([asyncio.create_task(client(connection)) for connection in connections])
    return measured


async def _open_loop(
    connections: Sequence[Connection], payloads: Sequence[bytes], arrivals_s: Sequence[float]
) -> list[Measured]:
    """Sends each payload at its time, or as soon after as a connection is free."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
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


def _arrivals_s(workload: Workload, numbers: Sequence[int]) -> list[float]:
    """When each of `numbers` is due, in seconds from the start: one Poisson process over all processes."""
    assert workload.request_rate is not None
    rng, times, now_s = random.Random(workload.seed), [], 0.0
    for _ in range(workload.num_prompts):
        now_s += rng.expovariate(workload.request_rate)
        times.append(now_s)
    return [times[number] for number in numbers]


def run(workload: Workload, num_processes: int) -> dict[str, Any]:
    """Runs the workload and sums it up. Raises RuntimeError where a client process failed."""
    num_processes = max(1, min(num_processes, workload.concurrency, workload.num_prompts))
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(num_processes), spawn.Queue()
    processes = [
        spawn.Process(target=client_process, args=(workload, rank, num_processes, barrier, results), daemon=True)
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    measured: list[Measured] = []
    try:
        for _ in processes:
            part = results.get(timeout=2 * workload.max_seconds + 60)
            if isinstance(part, Exception):
                raise RuntimeError(str(part) or type(part).__name__)
            measured += part
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return summary(workload, measured) | {"client_processes": num_processes}


def summary(workload: Workload, measured: Sequence[Measured]) -> dict[str, Any]:
    good = [one for one in measured if one.error is None]
    errors = collections.Counter(one.error for one in measured if one.error is not None)
    start_s = min((one.sent_s for one in measured), default=0.0)
    duration_s = max((one.events_s[-1] for one in good), default=start_s) - start_s
    num_input, num_output = sum(m.prompt_tokens for m in good), sum(m.completion_tokens for m in good)

    def rate(count: int) -> float:
        return round(count / duration_s, 3) if duration_s > 0 else 0.0

    row: dict[str, Any] = {
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "max_concurrency": workload.concurrency,
        "request_rate": workload.request_rate,
        "num_prompts": workload.num_prompts,
        "completed": len(good),
        "failed": workload.num_prompts - len(good),
        "duration": round(duration_s, 4),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": rate(len(good)),
        "output_throughput": rate(num_output),
        "total_token_throughput": rate(num_input + num_output),
        "events_per_second": rate(sum(len(m.events_s) for m in good)),
    }
    row |= _distribution("ttft", [m.events_s[0] - m.sent_s for m in good])
    row |= _distribution("tpot", [tpot for m in good if (tpot := _tpot_s(m)) is not None])
    row |= _distribution("itl", [b - a for m in good for a, b in zip(m.events_s, m.events_s[1:], strict=False)])
    row |= _distribution("e2el", [m.events_s[-1] - m.sent_s for m in good])
    return row | ({"errors": dict(errors.most_common(5))} if errors else {})


def _tpot_s(one: Measured) -> float | None:
    return (one.events_s[-1] - one.events_s[0]) / (one.completion_tokens - 1) if one.completion_tokens > 1 else None


def _distribution(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and 99th percentile in milliseconds; None where there is no value."""
    ordered = [1e3 * value for value in sorted(values_s)]
    kinds: dict[str, Callable[[], float]] = {
        "mean": lambda: statistics.fmean(ordered),
        "median": lambda: statistics.median(ordered),
        "std": lambda: statistics.pstdev(ordered),
        "p99": lambda: ordered[math.ceil(0.99 * len(ordered)) - 1],
    }
    return {f"{kind}_{name}_ms": round(of(), 3) if ordered else None for kind, of in kinds.items()}


def record(path: Path, label: str, rows: Sequence[dict[str, Any]]) -> None:
    """Merges rows into a results file, under "serve" and the label; a row of the same workload is replaced."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("input_len", "output_len", "max_concurrency", "request_rate"))

    results = json.loads(path.read_text()) if path.exists() else {}
    known = {key(row): row for row in results.setdefault("serve", {}).get(label, [])}
    known |= {key(row): row for row in rows}
    results["serve"][label] = sorted(known.values(), key=lambda row: [value or 0 for value in key(row)])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(partial, path)


def workload_of(args: argparse.Namespace, concurrency: int) -> Workload:
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)}
    given["concurrency"] = concurrency
    given["num_prompts"] = args.num_prompts or max(30, 4 * concurrency)
    given["warmup"] = concurrency if args.warmup is None else args.warmup
    return Workload(**given)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000")
    add("--model", help="name to ask for; without it the request names none")
    add("--input-len", type=int, default=16, help="tokens")
    add("--output-len", type=int, default=128, help="tokens")
    add("--num-prompts", type=int, help="requests per run; default: 4 per client and at least 30")
    add("-c", "--concurrency", type=int, nargs="+", default=[1], help="clients; one run for each value")
    add("--request-rate", type=float, help="requests per second, Poisson, instead of a closed loop")
    add("--warmup", type=int, help="requests before each run; default: one per client")
    add("--vocab-size", type=int, default=32000, help="prompts are of ids below this")
    add("--processes", type=int, default=min(8, os.cpu_count() or 1), help="client processes")
    add("--max-seconds", type=float, default=600.0, help="a run that takes longer is cut")
    add("--seed", type=int, default=0)
    add("--extra-body", type=json.loads, default="{}", help="JSON fields added to each request")
    add("--record", type=Path, help="results file to merge the rows into")
    add("--label", default="jaxinfer", help="what was measured, in the results file")
    args = parser.parse_args(argv)
    for name in ("input_len", "output_len", "vocab_size", "processes", "max_seconds"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if args.request_rate is not None and args.request_rate <= 0:
        parser.error(f"--request-rate is {args.request_rate}; it must be above 0")
    if min(args.concurrency) < 1 or (args.num_prompts or 1) not in range(1, MAX_REQUESTS + 1):
        parser.error(f"--concurrency must be at least 1, --num-prompts from 1 to {MAX_REQUESTS}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = []
    print(f"{'C':>5} {'in/out':>10} {'tok/s':>9} {'req/s':>8} {'TTFT p50/p99 ms':>17} {'TPOT ms':>8} {'failed':>6}")
    for concurrency in args.concurrency:
        row = run(workload_of(args, concurrency), args.processes)
        rows.append(row)
        lengths, ttft = "{input_len}/{output_len}".format(**row), "{median_ttft_ms}/{p99_ttft_ms}".format(**row)
        numbers = (
            f"{row['output_throughput']:>9} {row['request_throughput']:>8} {ttft:>17} {row['median_tpot_ms']!s:>8}"
        )
        print(f"{concurrency:>5} {lengths:>10} {numbers} {row['failed']:>6}", flush=True)
        for error, count in row.get("errors", {}).items():
            print(f"      {count} x {error}", file=sys.stderr)
    print(json.dumps(rows))
    if args.record is not None:
        record(args.record, args.label, rows)
    return 1 if any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
