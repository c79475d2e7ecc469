"""Prometheus metrics: what requests took, counted here, and what the engine says of itself, asked for at each scrape.

Observations sit on the path of every token, so a histogram is a row of numbers that is turned into Prometheus' own form
only when scraped. Where several front ends serve, their rows lie in memory that they share, and whichever is scraped
adds them up: a scrape is of the whole server. Every metric has a `jaxinfer:` name and, for dashboards made for vLLM,
that engine's name.
"""

from __future__ import annotations

import bisect
import dataclasses
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxinfer.types import EngineStats, FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIXES = ("jaxinfer:", "vllm:")
REASONS = tuple(FinishReason)

# Upper bounds in seconds, those of vLLM, so that its dashboards' quantiles stay comparable.
TTFT_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)


class Counters:
    """Counts of several front ends: a row for each, which it alone writes and all read.

    Doubles, of which a processor stores one at once, so that nobody reads half of one; whole up to 2**53.
    """

    NUM_CELLS = len(FinishReason) + sum(len(bounds) + 2 for bounds in (TTFT_BOUNDS, TOKEN_BOUNDS, REQUEST_BOUNDS))
    ROW_BYTES = NUM_CELLS * 8

    def __init__(self, fd: int = -1, num_rows: int = 1, row: int = 0):
        """fd: a file of `num_rows` rows that all front ends map; -1: memory of this process. row: the one to write."""
        cells = memoryview(mmap.mmap(fd, num_rows * self.ROW_BYTES)).cast("d")
        self._rows = [cells[i * self.NUM_CELLS : (i + 1) * self.NUM_CELLS] for i in range(num_rows)]
        self._row = row
        self._used = 0

    @staticmethod
    def make_file(num_rows: int) -> int:
        """A file in memory, of zeros; returns its descriptor."""
        fd = os.memfd_create("jaxinfer-counters")
        os.ftruncate(fd, num_rows * Counters.ROW_BYTES)
        return fd

    def take(self, num_cells: int) -> Cells:
        """The next cells of each row."""
        start, self._used = self._used, self._used + num_cells
        rows = [row[start : self._used] for row in self._rows]
        return Cells(rows[self._row], rows)


class Cells(NamedTuple):
    """A part of the counters."""

    own: memoryview[float]
    all: Sequence[memoryview[float]]

    def totals(self) -> list[float]:
        """What all front ends counted."""
        return [sum(column) for column in zip(*self.all, strict=True)]


class Histogram:
    """Counts of observations by upper bound, in seconds."""

    def __init__(self, bounds_s: tuple[float, ...], counters: Counters):
        self._bounds_s = bounds_s
        self._cells = counters.take(len(bounds_s) + 2)  # a count for each bound and for what is above, then the sum
        self._own = self._cells.own

    def observe(self, value_s: float, count: int = 1) -> None:
        """Adds `count` observations of `value_s` each."""
        own = self._own
        own[bisect.bisect_left(self._bounds_s, value_s)] += count
        own[-1] += value_s * count

    def family(self, name: str, text: str, labels: dict[str, str]) -> Metric:
        *counts, sum_s = self._cells.totals()
        buckets, total = [], 0.0
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, sum_s)
        return family


@dataclasses.dataclass(slots=True)
class SequenceTimer:
    """The times of one choice, from the arrival of its request (tokenising included); one monotonic clock."""

    metrics: ServerMetrics
    arrival_s: float
    last_s: float | None = None
    finished: bool = False

    def tokens(self, count: int, now_s: float) -> None:
        if self.last_s is None:
            self.metrics.first_token.observe(now_s - self.arrival_s)
        else:
            self.metrics.between_tokens.observe((now_s - self.last_s) / count, count)
        self.last_s = now_s

    def finish(self, reason: FinishReason, now_s: float) -> None:
        """Counts the end of the choice, once: what comes after the first call is ignored."""
        if self.finished:
            return
        self.finished = True
        self.metrics.count_finished(reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.metrics.whole_request.observe(now_s - self.arrival_s)


class ServerMetrics(Collector):
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str, counters: Counters, *, prefix_caching: bool):
        self._prefix_caching = prefix_caching
        self._labels = {"model_name": model, "engine": "0"}
        self.engine = EngineStats()  # as of the last scrape
        self.first_token = Histogram(TTFT_BOUNDS, counters)
        self.between_tokens = Histogram(TOKEN_BOUNDS, counters)
        self.whole_request = Histogram(REQUEST_BOUNDS, counters)
        self._finished = counters.take(len(FinishReason))
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_finished(self, reason: FinishReason) -> None:
        """Counts the end of a sequence."""
        self._finished.own[REASONS.index(reason)] += 1

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for prefix in PREFIXES:
            yield from self._gauges(prefix)
            yield from self._counters(prefix)
            yield from self._histograms(prefix)

    def _gauges(self, prefix: str) -> Iterator[Metric]:
        engine = self.engine
        used = engine.num_pages_used / engine.num_pages if engine.num_pages else 0.0
        gauges = [
            ("num_requests_running", "Sequences that hold a slot.", engine.num_running),
            ("num_requests_waiting", "Sequences that wait for a slot.", engine.num_waiting),
            ("kv_cache_usage_perc", "Share of the pages of the KV cache in use; 1 is all.", used),
        ]
        if prefix == "jaxinfer:":
            text = "Pages that no sequence holds, kept for requests that begin alike."
            gauges += [
                ("prefix_cache_pages", text, engine.num_pages_cached),
                ("kv_host_pages_used", "Pages of the KV cache in the host's memory.", engine.num_host_pages_used),
                ("kv_host_pages", "Pages that the host's memory has room for.", engine.num_host_pages),
                ("kv_disk_pages_used", "Pages of the KV cache on disk.", engine.num_disk_pages_used),
                ("num_requests_restoring", "Sequences that wait for pages from host or disk.", engine.num_restoring),
                ("num_sessions", "Sessions that are known, in memory or on disk.", engine.num_sessions),
            ]
        for name, text, value in gauges:
            family = GaugeMetricFamily(prefix + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family

    def _counters(self, prefix: str) -> Iterator[Metric]:
        engine = self.engine
        looked_up = engine.prompt_tokens if self._prefix_caching else 0
        counters = [
            ("prompt_tokens", "Prompt tokens of admitted requests.", engine.prompt_tokens),
            ("generation_tokens", "Tokens generated.", engine.generation_tokens),
            ("num_preemptions", "Sequences that lost their pages and were computed again.", engine.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.", looked_up),
            ("prefix_cache_hits", "Prompt tokens that were found in it.", engine.cached_prompt_tokens),
            ("corrupted_requests", "Requests that ended because logits were no numbers.", engine.num_nan_requests),
        ]
        if prefix == "jaxinfer:":
            counters += [
                ("steps", "Steps of the engine.", engine.num_steps),
                ("failed_steps", "Steps that failed, and with them the requests that ran.", engine.num_failed_steps),
                ("stuck_steps", "Steps and waits that made no progress in time.", engine.num_stuck_steps),
                ("prefix_cache_evictions", "Pages of the prefix cache that were given up.", engine.num_evictions),
                ("kv_offloaded_pages", "Pages copied from the device to the host.", engine.num_offloaded_pages),
                ("kv_restored_pages", "Pages copied from the host to the device.", engine.num_restored_pages),
                ("kv_disk_written_pages", "Pages written to disk.", engine.num_disk_writes),
                ("kv_disk_read_pages", "Pages read from disk.", engine.num_disk_reads),
                (
                    "xla_compilations_after_ready",
                    "Compilations since the server was ready; more than 0 is a fault.",
                    engine.compilations_after_ready,
                ),
            ]
        for name, text, value in counters:
            family = CounterMetricFamily(prefix + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        family = CounterMetricFamily(
            prefix + "request_success", "Sequences that ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in zip(REASONS, self._finished.totals(), strict=True):
            family.add_metric([*self._labels.values(), reason], count)
        yield family

    def _histograms(self, prefix: str) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.first_token),
            ("inter_token_latency_seconds", "From token to token.", self.between_tokens),
            ("e2e_request_latency_seconds", "From arrival to the end; not of aborted or failed.", self.whole_request),
        ):
            yield histogram.family(prefix + name, text, self._labels)
