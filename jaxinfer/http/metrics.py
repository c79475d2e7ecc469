"""Prometheus metrics: what requests took, counted here, and what the engine says of itself, asked for at each scrape.

Every metric has a `jaxinfer:` name and, for dashboards made for vLLM, that engine's name. What vLLM counts and a front
end cannot know (how long a request waited for its slot, and how long its prompt took from then on) has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxinfer.http.counters import Counters, Histogram
from jaxinfer.types import EngineInfo, EngineStats, FinishReason

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
COUNT_BOUNDS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))
"""Of tokens: 1, 2, 5, 10, ... 5 million."""
CHOICE_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclasses.dataclass(slots=True)
class SequenceTimer:
    """The times of one choice, from the arrival of its request (tokenising included); one monotonic clock."""

    metrics: ServerMetrics
    arrival_s: float
    prompt_tokens: int = 0
    max_tokens: int = 0  # that it may have
    num_tokens: int = 0  # so far, as they came from the engine
    first_s: float | None = None
    last_s: float | None = None
    finished: bool = False

    def tokens(self, count: int, now_s: float) -> None:
        self.num_tokens += count
        if self.last_s is None:
            self.first_s = now_s
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
            self.metrics.decoding.observe(now_s - (now_s if self.first_s is None else self.first_s))
            self.metrics.prompt_tokens.observe(self.prompt_tokens)
            self.metrics.generated_tokens.observe(self.num_tokens)
            self.metrics.tokens_allowed.observe(self.max_tokens)


class ServerMetrics(Collector):
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str, counters: Counters, info: EngineInfo):
        self._info = info
        self._labels = {"model_name": model, "engine": "0"}
        self.engine = EngineStats()  # as of the last scrape
        self.first_token = Histogram(TTFT_BOUNDS, counters)
        self.between_tokens = Histogram(TOKEN_BOUNDS, counters)
        self.whole_request = Histogram(REQUEST_BOUNDS, counters)
        self.decoding = Histogram(REQUEST_BOUNDS, counters)
        self.prompt_tokens = Histogram(COUNT_BOUNDS, counters)
        self.generated_tokens = Histogram(COUNT_BOUNDS, counters)
        self.tokens_allowed = Histogram(COUNT_BOUNDS, counters)
        self.choices_asked = Histogram(CHOICE_BOUNDS, counters)
        self._finished = counters.take(len(FinishReason))
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_finished(self, reason: FinishReason) -> None:
        """Counts the end of a sequence."""
        self._finished.own[REASONS.index(reason)] += 1

    def add(self, collector: Collector) -> None:
        """What else a scrape is to show."""
        self._registry.register(collector)

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
        if prefix == "vllm:":
            gauges.append(("gpu_cache_usage_perc", "The older name of kv_cache_usage_perc.", used))
        else:
            text = "Pages that no sequence holds, kept for requests that begin alike."
            gauges += [
                ("prefix_cache_pages", text, engine.num_pages_cached),
                ("kv_host_pages_used", "Pages of the KV cache in the host's memory.", engine.num_host_pages_used),
                ("kv_host_pages", "Pages that the host's memory has room for.", engine.num_host_pages),
                ("kv_disk_pages_used", "Pages of the KV cache on disk.", engine.num_disk_pages_used),
                ("num_requests_restoring", "Sequences that wait for pages from host or disk.", engine.num_restoring),
                ("num_sessions", "Sessions that are known, in memory or on disk.", engine.num_sessions),
            ]
        yield self._cache_config(prefix)
        for name, text, value in gauges:
            family = GaugeMetricFamily(prefix + name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family

    def _counters(self, prefix: str) -> Iterator[Metric]:
        engine = self.engine
        looked_up = engine.prompt_tokens if self._info.prefix_caching else 0
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

    def _cache_config(self, prefix: str) -> Metric:
        """What does not change, as labels of a gauge that is 1."""
        info = self._info
        settings = {
            "block_size": info.page_size,
            "num_gpu_blocks": info.num_pages,
            "num_cpu_blocks": info.num_host_pages,
            "enable_prefix_caching": info.prefix_caching,
        }
        labels = self._labels | {name: str(value) for name, value in settings.items()}
        family = GaugeMetricFamily(
            prefix + "cache_config_info", "Pages (blocks) of the KV cache, and tokens of each.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1)
        return family

    def _histograms(self, prefix: str) -> Iterator[Metric]:
        histograms = [
            ("time_to_first_token_seconds", "From arrival to the first token.", self.first_token),
            ("inter_token_latency_seconds", "From token to token.", self.between_tokens),
            ("e2e_request_latency_seconds", "From arrival to the end; not of aborted or failed.", self.whole_request),
            ("request_decode_time_seconds", "From the first token to the end; of the same.", self.decoding),
            ("request_prompt_tokens", "Tokens of a sequence's prompt; of the same.", self.prompt_tokens),
            ("request_generation_tokens", "Tokens of a sequence's output; of the same.", self.generated_tokens),
            ("request_params_max_tokens", "Tokens that an output might have; of the same.", self.tokens_allowed),
            ("request_params_n", "Choices per prompt that a request asked for.", self.choices_asked),
        ]
        if prefix == "vllm:":
            text = "The older name of inter_token_latency_seconds."
            histograms.append(("time_per_output_token_seconds", text, self.between_tokens))
            text = "The same as request_params_max_tokens: of a sequence, not of all choices together."
            histograms.append(("request_max_num_generation_tokens", text, self.tokens_allowed))
        for name, text, histogram in histograms:
            family = HistogramMetricFamily(prefix + name, text, labels=list(self._labels))
            histogram.add_to(family, list(self._labels.values()))
            yield family
