"""The cases of bench_cache.py: what a prompt costs that is cached, and what it costs those who decode meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from load_client import Connection, Measured
from load_summary import percentile

STREAM_INPUT = 16
"""Tokens of the prompts of the streams that decode."""
MAX_FILLERS = 2000
"""Prompts after which the device pool should be full."""
SETTLE_POLL_S = 0.1
HOST_PAGES = "jaxinfer:kv_host_pages"
GENERATED = "jaxinfer:generation_tokens_total"
RESTORED, OFFLOADED = "jaxinfer:kv_restored_pages_total", "jaxinfer:kv_offloaded_pages_total"
ALLOWED = 1.4
"""Times that the bare copy of its bytes takes: what a restore may take."""


class CaseError(RuntimeError):
    """A case that cannot be measured on this server, or whose figure would not be what it says."""


class Client:
    """Asks one server, one request at a time on each connection."""

    def __init__(self, base_url: str, *, model: str | None, vocab_size: int, page_size: int, seed: int):
        """page_size: tokens of a page of the server."""
        self.base_url = base_url
        self.page_size = page_size
        self._body: dict[str, Any] = {"model": model} if model else {}
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._free: list[Connection] = []

    def payload(self, length: int, max_tokens: int = 1) -> bytes:
        """A request for a prompt of `length` tokens that no other one has."""
        body = {
            "prompt": self._rng.choices(range(self._vocab_size), k=length),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body | self._body).encode()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        one = self._free.pop() if self._free else Connection(self.base_url)
        yield one
        self._free.append(one)

    async def ask(self, payload: bytes) -> Measured:
        """Sends a request. CaseError if it fails, or if the server does not say what was cached."""
        async with self.connection() as connection:
            measured = await connection.complete(payload)
        if measured.error is not None:
            raise CaseError(measured.error)
        if measured.cut:
            raise asyncio.CancelledError
        if measured.cached_tokens is None:
            raise CaseError("the server does not say how many tokens were cached: prefix caching is off there")
        return measured

    async def metrics(self) -> dict[str, float]:
        """The values of /metrics by name."""
        return await asyncio.to_thread(_metrics, self.base_url)

    def num_pages(self, length: int) -> int:
        """That a prompt of `length` tokens takes."""
        return -(-length // self.page_size)

    def close(self) -> None:
        for connection in self._free:
            connection.close()


def _metrics(base_url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)}


def ttft_ms(measured: Measured) -> float:
    """From sending the request to its first event."""
    return (measured.events_s[0] - measured.sent_s) * 1e3


def spread(times_ms: Sequence[float], name: str) -> dict[str, float]:
    """Of times in ms, under median_`name`_ms and so on."""
    ordered = sorted(times_ms)
    values = {"median": percentile(ordered, 50), "p99": percentile(ordered, 99), "min": ordered[0], "max": ordered[-1]}
    return {f"{which}_{name}_ms": round(value, 3) for which, value in values.items()}


async def cached(client: Client, length: int, repeats: int) -> dict[str, Any]:
    """A prompt of `length` tokens that nobody sent before, and then again, `repeats` times."""
    await client.ask(client.payload(STREAM_INPUT))  # opens the connection
    payload = client.payload(length)
    cold = await client.ask(payload)
    times = []
    for _ in range(repeats):
        again = await client.ask(payload)
        if again.cached_tokens != length - 1:
            raise CaseError(
                f"of a prompt of {length} tokens that was sent before, {again.cached_tokens} were cached, not all but "
                "the last"
            )
        times.append(ttft_ms(again))
    row = {"case": "cached", "prompt_tokens": length, "repeats": repeats, "cached_tokens": length - 1}
    return row | {"cold_ttft_ms": round(ttft_ms(cold), 3)} | spread(times, "ttft")


async def settle(client: Client) -> dict[str, float]:
    """The metrics once no page is being moved."""
    before = await client.metrics()
    while True:
        await asyncio.sleep(SETTLE_POLL_S)
        now = await client.metrics()
        if all(now.get(name) == before.get(name) for name in (OFFLOADED, RESTORED, "jaxinfer:num_requests_running")):
            return now
        before = now


async def pool_pages(client: Client, length: int) -> int:
    """Pages of the device's cache, which prompts of `length` tokens fill until it grows no more."""
    name, need = "jaxinfer:prefix_cache_pages", client.num_pages(length)
    pages = (await client.metrics()).get(name, 0.0)
    for _ in range(MAX_FILLERS):
        await client.ask(client.payload(length))
        now = (await client.metrics())[name]
        if now - pages < need / 2:
            return int(max(now, pages))
        pages = now
    raise CaseError(f"{MAX_FILLERS} prompts did not fill the device's cache ({pages:.0f} pages): start it with less")


async def check_host(client: Client, num_pages: float) -> None:
    """CaseError unless the server's host tier has room for that many pages."""
    has = (await client.metrics()).get(HOST_PAGES, 0)
    if not has:
        raise CaseError("the server has no host tier: start it with --kv-host-gib (and --num-pages to keep it small)")
    if has < num_pages:
        raise CaseError(f"the host tier has {has:.0f} pages, and this case fills {num_pages:.0f}: more --kv-host-gib")


class Copy(NamedTuple):
    """What a restore is held against. None: not known."""

    page_bytes: int | None
    to_device_gb_s: float | None  # of a copy from pinned memory; GB: 1e9 bytes

    def allowed_ms(self, num_pages: float) -> float | None:
        """For that many pages."""
        if not self.page_bytes or not self.to_device_gb_s:
            return None
        return round(ALLOWED * num_pages * self.page_bytes / self.to_device_gb_s / 1e6, 3)


async def restore(client: Client, length: int, repeats: int, copy: Copy) -> dict[str, Any]:
    """A prompt that others push out to the host tier, sent again; `repeats` times."""
    await check_host(client, 1)
    need, pool = client.num_pages(length), await pool_pages(client, length)
    num_fillers = -(-pool // need) + 1
    await check_host(client, (num_fillers + 1) * need)
    payload = client.payload(length)
    cold = [ttft_ms(await client.ask(payload))]
    times, hits, restored, num_cached = [], [], [], []
    for _ in range(repeats):
        cold += [ttft_ms(await client.ask(client.payload(length))) for _ in range(num_fillers)]
        before = await settle(client)
        back = await client.ask(payload)
        hit = await client.ask(payload)
        restored.append((await settle(client))[RESTORED] - before[RESTORED])
        num_cached.append(back.cached_tokens or 0)
        if restored[-1] < need - 1 or num_cached[-1] < length - client.page_size:
            raise CaseError(
                f"{restored[-1]:.0f} of {need} pages were restored and {num_cached[-1]} of {length} tokens cached: the "
                f"prompt was not pushed out by {num_fillers} others, or was lost"
            )
        times.append(ttft_ms(back))
        hits.append(ttft_ms(hit))
    row = {"case": "restore", "prompt_tokens": length, "repeats": repeats, "pool_pages": pool, "fillers": num_fillers}
    row |= {"restored_pages": max(restored), "cached_tokens": min(num_cached), **copy._asdict()}
    row |= {"bytes": max(restored) * copy.page_bytes if copy.page_bytes else None}
    row |= spread(times, "ttft") | spread(hits, "hit_ttft") | spread(cold, "cold_ttft")
    row |= {"restore_ms": round(row["median_ttft_ms"] - row["median_hit_ttft_ms"], 3)}
    allowed = copy.allowed_ms(max(restored))
    return row | {"allowed_ms": allowed, "within": None if allowed is None else row["restore_ms"] <= allowed}


class Window(NamedTuple):
    """A stretch of a run: tokens that the server generated in a second of it, and the requests beside the streams."""

    tokens_per_s: float
    extra: Sequence[Measured]
    moved: dict[str, float]  # pages

    def row(self) -> dict[str, Any]:
        """What the streams got, and what the extra requests found."""
        row: dict[str, Any] = {"tokens_per_s": round(self.tokens_per_s, 1), **self.moved}
        if self.extra:
            asked = sum(one.prompt_tokens or 0 for one in self.extra)
            share = sum(one.cached_tokens or 0 for one in self.extra) / asked
            row |= {"requests": len(self.extra), "cached_share": round(share, 4)}
            row |= spread([ttft_ms(one) for one in self.extra], "ttft")
        return row


class Streams:
    """Streams that decode until they are stopped."""

    def __init__(self, client: Client, num_streams: int, output_len: int):
        self._first = [client.payload(STREAM_INPUT) for _ in range(num_streams)]
        self._connections = [Connection(client.base_url) for _ in range(num_streams)]
        self._measured: list[Measured] = []
        self._payloads = (client.payload(STREAM_INPUT, output_len) for _ in itertools.count())
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns once every stream had a first, short answer. CaseError if one failed."""
        pairs = zip(self._connections, self._first, strict=True)
        for one in await asyncio.gather(*(connection.complete(payload) for connection, payload in pairs)):
            if one.error is not None:
                raise CaseError(f"a stream failed: {one.error}")
        self._tasks = [asyncio.create_task(self._run(one, self._payloads)) for one in self._connections]

    async def _run(self, connection: Connection, payloads: Iterator[bytes]) -> None:
        for payload in payloads:
            self._measured.append(await connection.complete(payload))
            if self._measured[-1].cut or self._measured[-1].error is not None:
                return

    async def stop(self) -> list[Measured]:
        """Every request, those included that are cut now. CaseError if one failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._connections:
            connection.close()
        for error in (one.error for one in self._measured if one.error is not None):
            raise CaseError(f"a stream failed: {error}")
        return self._measured


async def window(client: Client, seconds: float, rate: float, payloads: Sequence[bytes]) -> Window:
    """Lets `seconds` go by, and sends the payloads in turn, `rate` a second, if there are any."""
    before, start_s = await client.metrics(), time.monotonic()
    tasks = []
    if payloads:
        for number, payload in zip(range(max(1, int(seconds * rate))), itertools.cycle(payloads), strict=False):
            await asyncio.sleep(start_s + number / rate - time.monotonic())
            tasks.append(asyncio.create_task(client.ask(payload)))
    await asyncio.sleep(start_s + seconds - time.monotonic())
    after, end_s = await client.metrics(), time.monotonic()
    extra = await asyncio.gather(*tasks)
    names = {"restored_pages": RESTORED, "offloaded_pages": OFFLOADED}
    moved = {name: after.get(metric, 0) - before.get(metric, 0) for name, metric in names.items()}
    num_tokens = after[GENERATED] - before[GENERATED] - len(extra)  # of the streams
    return Window(num_tokens / (end_s - start_s), extra, moved)


class DecodeCase(NamedTuple):
    """Lengths in tokens, times in seconds. rate: extra requests a second, of prompts of `length` tokens."""

    streams: int
    output_len: int
    window_s: float
    settle_s: float
    length: int
    rate: float


async def decode(client: Client, case: DecodeCase) -> dict[str, Any]:
    """Streams that decode: alone; beside requests that the device's cache has; beside such that the host tier has.

    The last only where there is a host tier. Its prompts are more than the device holds and come in turn, so that each
    was pushed out when it comes again. What the tier costs is the difference between the last two.
    """
    hot = [client.payload(case.length) for _ in range(2)]
    kinds = {"quiet": (), "host": [], "device": hot}  # the host's first: the streams push its pages out, too
    if (await client.metrics()).get(HOST_PAGES):
        need, pool = client.num_pages(case.length), await pool_pages(client, case.length)
        kinds["host"] = [client.payload(case.length) for _ in range(-(-pool // need) + 1)]
        await check_host(client, (len(kinds["host"]) + 1) * need + pool)
    else:
        del kinds["host"]
    for payload in [*kinds.get("host", ()), *hot]:
        await client.ask(payload)
    streams, windows = Streams(client, case.streams, case.output_len), {}
    try:
        await streams.start()
        await asyncio.sleep(case.settle_s)
        for kind, payloads in (kinds | {"quiet_after": ()}).items():
            if kind == "device":  # the streams may have pushed them out
                for payload in payloads:
                    await client.ask(payload)
            windows[kind] = await window(client, case.window_s, case.rate, payloads)
    finally:
        await streams.stop()
    rows = {kind: one.row() for kind, one in windows.items()}
    _check_windows(rows, client.num_pages(case.length))
    row = {"case": "decode", **case._asdict(), **rows}
    quiet = (rows["quiet"]["tokens_per_s"] + rows["quiet_after"]["tokens_per_s"]) / 2
    row["device_ratio"] = _ratio(rows["device"]["tokens_per_s"], quiet)
    if "host" in rows:
        row["host_ratio"] = _ratio(rows["host"]["tokens_per_s"], quiet)
        row["host_to_device_ratio"] = _ratio(rows["host"]["tokens_per_s"], rows["device"]["tokens_per_s"])
    return row


def _ratio(one: float, other: float) -> float:
    return round(one / other, 4)


def _check_windows(rows: dict[str, dict[str, Any]], num_pages: int) -> None:
    """CaseError where requests did not find what their window is about. num_pages: of each of their prompts."""
    if not min(rows["quiet"]["tokens_per_s"], rows["quiet_after"]["tokens_per_s"]):
        raise CaseError("the streams had no token in a quiet window: make it longer")
    for kind in ("device", "host"):
        if kind in rows and rows[kind]["cached_share"] < 0.9:
            raise CaseError(f"the requests of the {kind} window had {rows[kind]['cached_share']:.0%} cached, not 90%")
    share = {
        kind: row["restored_pages"] / (row["requests"] * num_pages) for kind, row in rows.items() if "requests" in row
    }
    if share["device"] > 0.1:
        raise CaseError(f"{share['device']:.0%} of the device window's pages came from the host: more --num-pages")
    if share.get("host", 1) < 0.9:
        raise CaseError(f"{share['host']:.0%} of the host window's pages came from the host: fewer --num-pages")
