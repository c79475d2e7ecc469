"""Requests by address, method and status, under the names that dashboards of web servers read."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxinfer.http.counters import Counters, Histogram

ADDRESSES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/models", "/tokenize", "/detokenize", "/health", "/ready", "/ping", "/version", "/metrics"),
)
BELOW = ("/v1/responses/", "/v1/models/", "/v1/sessions/")
"""Addresses that go on with an id, which would be a label without end."""
OTHER = "other"
METHODS = ("GET", "POST", "DELETE", OTHER)
STATUSES = ("2xx", "3xx", "4xx", "5xx", "gone")
"""gone: the client left before there was a status."""
BOUNDS_S = (0.01, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0)


class HttpMetrics(Collector):
    """Of all front ends: see `Counters`."""

    def __init__(self, model: str, counters: Counters):
        self._labels = {"model_name": model}
        handlers = (*ADDRESSES, *BELOW, OTHER)
        self._rows = {
            (handler, method): i * len(STATUSES)
            for i, (handler, method) in enumerate((handler, method) for handler in handlers for method in METHODS)
        }
        self._counts = counters.take(len(self._rows) * len(STATUSES))
        self._durations = {handler: Histogram(BOUNDS_S, counters) for handler in handlers}

    def count(self, method: str, path: str, status: int, duration_s: float) -> None:
        """A request that has ended; status 0: its client left before there was one."""
        handler = path if path in ADDRESSES else next(filter(path.startswith, BELOW), OTHER)
        row = self._rows[handler, method if method in METHODS else OTHER]
        self._counts.own[row + (status // 100 - 2 if status else STATUSES.index("gone"))] += 1
        self._durations[handler].observe(duration_s)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "http_requests", "Requests that have ended.", labels=[*self._labels, "handler", "method", "status"]
        )
        totals = self._counts.totals()
        for (handler, method), row in self._rows.items():
            for status, count in zip(STATUSES, totals[row : row + len(STATUSES)], strict=True):
                if count:
                    requests.add_metric([*self._labels.values(), handler, method, status], count)
        yield requests
        durations = HistogramMetricFamily(
            "http_request_duration_seconds",
            "From the head of a request to the end of its reply.",
            labels=[*self._labels, "handler"],
        )
        for handler, histogram in self._durations.items():
            histogram.add_to(durations, [*self._labels.values(), handler])
        yield durations
