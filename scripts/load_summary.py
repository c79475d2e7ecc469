"""What a run of bench_serve.py amounts to: the keys of `vllm bench serve --save-result`, and a few of our own."""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from load_client import Measured, Part, Workload


def summary(workload: Workload, parts: Sequence[Part]) -> dict[str, Any]:
    """One row. Rates per second, times in ms, `duration` in seconds from the first request to the last event.

    Besides vLLM's keys: input_len, output_len and start as asked; wrong_length, the completed requests whose token
    counts are not what was asked; total_output_events, less than the tokens where an event carries several or none;
    client_processes, and the CPU time that these took per event and as a share of one core (of the busiest).
    """
    measured = [one for part in parts for one in part.measured]
    good = [one for one in measured if one.error is None and not one.cut]
    errors = collections.Counter("out of time" if m.cut else m.error for m in measured if m.cut or m.error is not None)
    num_prompts = len(measured) if workload.num_prompts is None else workload.num_prompts
    if len(measured) < num_prompts:
        errors["never sent"] = num_prompts - len(measured)
    start_s = min((one.sent_s for one in measured), default=0.0)
    duration_s = max((one.events_s[-1] for one in good), default=start_s) - start_s
    num_input = sum(workload.input_len if m.prompt_tokens is None else m.prompt_tokens for m in good)
    num_output, num_events = sum(m.num_tokens for m in good), sum(len(m.events_s) for m in good)

    def rate(count: int) -> float:
        return round(count / duration_s, 3) if duration_s > 0 else 0.0

    row: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "num_prompts": num_prompts,
        "request_rate": workload.request_rate,
        "max_concurrency": workload.concurrency,
        "duration": round(duration_s, 4),
        "completed": len(good),
        "failed": num_prompts - len(good),
        "wrong_length": sum(_is_wrong(workload, one) for one in good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_output_events": num_events,
        "request_throughput": rate(len(good)),
        "output_throughput": rate(num_output),
        "total_token_throughput": rate(num_input + num_output),
        "max_output_tokens_per_s": _peak_per_second(good, start_s),
        "max_concurrent_requests": _most_at_once(good),
    }
    row |= distribution("ttft", [m.events_s[0] - m.sent_s for m in good])
    row |= distribution("tpot", [tpot for m in good if (tpot := _tpot_s(m)) is not None])
    row |= distribution("itl", [gap for m in good for gap in _gaps_s(m.events_s)])
    row |= distribution("e2el", [m.events_s[-1] - m.sent_s for m in good])
    row |= _client_figures(parts)
    return row | ({"error_counts": dict(errors.most_common(5))} if errors else {})


def detail(parts: Sequence[Part]) -> dict[str, list[Any]]:
    """The lists of `vllm bench serve --save-detailed`, in order of the requests' start. Times in seconds."""
    measured = sorted((one for part in parts for one in part.measured), key=lambda one: one.sent_s)
    return {
        "input_lens": [one.prompt_tokens for one in measured],
        "output_lens": [one.num_tokens for one in measured],
        "start_times": [one.sent_s for one in measured],
        "ttfts": [one.events_s[0] - one.sent_s if one.events_s else 0.0 for one in measured],
        "itls": [_gaps_s(one.events_s) for one in measured],
        "errors": ["out of time" if one.cut else one.error or "" for one in measured],
    }


def mixed_summary(
    background: tuple[Workload, Sequence[Part]], arriving: tuple[Workload, Sequence[Part]], settle_s: float
) -> dict[str, Any]:
    """The row of the arriving prompts, and how the streams beside them fared before they came and while they did.

    "alone": from `settle_s` after the first stream's start to the first arrival; "mixed": from there to the last event
    of the last prompt. Percentiles of the time between two events of a stream, in ms.
    """
    streams = [one for part in background[1] for one in part.measured]
    row = summary(*arriving)
    arrivals = [one for part in arriving[1] for one in part.measured if one.events_s]
    begin_s = min((one.sent_s for one in streams), default=0.0)
    first_s = min((one.sent_s for one in arrivals), default=begin_s)
    last_s = max((one.events_s[-1] for one in arrivals), default=first_s)
    failed = [one for one in streams if one.error is not None]
    finished = [one for one in streams if one.error is None and not one.cut]
    row["background"] = {
        "streams": background[0].concurrency,
        "input_len": background[0].input_len,
        "output_len": background[0].output_len,
        "failed": len(failed),
        "wrong_length": sum(_is_wrong(background[0], one) for one in finished),
        "alone": _between(streams, begin_s + settle_s, first_s),
        "mixed": _between(streams, first_s, last_s),
        **_client_figures(background[1]),
    }
    if failed:
        row["background"]["error_counts"] = dict(collections.Counter(str(one.error) for one in failed).most_common(5))
    return row


def distribution(name: str, values_s: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation, 99th percentile and maximum in milliseconds; None where there is no value."""
    ordered = sorted(1e3 * value for value in values_s)
    if not ordered:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p99", "max")}
    kinds = {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "std": statistics.pstdev(ordered),
        "p99": percentile(ordered, 99),
        "max": ordered[-1],
    }
    return {f"{kind}_{name}_ms": round(value, 3) for kind, value in kinds.items()}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, interpolated between the two nearest as numpy and vLLM do."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _between(streams: Sequence[Measured], begin_s: float, end_s: float) -> dict[str, Any]:
    """Gaps that end within the window, and events per second in it."""
    gaps = [
        later - earlier
        for one in streams
        for earlier, later in itertools.pairwise(one.events_s)
        if begin_s < later <= end_s
    ]
    num_events = sum(begin_s < at <= end_s for one in streams for at in one.events_s)
    length_s = end_s - begin_s
    figures = {"seconds": round(length_s, 3), "events": num_events}
    figures["events_per_second"] = round(num_events / length_s, 3) if length_s > 0 else 0.0
    return figures | distribution("itl", gaps)


def _is_wrong(workload: Workload, one: Measured) -> bool:
    return one.num_tokens != workload.output_len or one.prompt_tokens not in (None, workload.input_len)


def _gaps_s(events_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(events_s)]


def _tpot_s(one: Measured) -> float | None:
    return (one.events_s[-1] - one.events_s[0]) / (one.num_tokens - 1) if one.num_tokens > 1 else None


def _peak_per_second(good: Sequence[Measured], start_s: float) -> int:
    """Most events in one second, counted from the start."""
    return max(collections.Counter(int(at - start_s) for one in good for at in one.events_s).values(), default=0)


def _most_at_once(good: Sequence[Measured]) -> int:
    changes = sorted([(one.sent_s, 1) for one in good] + [(one.events_s[-1], -1) for one in good])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _client_figures(parts: Sequence[Part]) -> dict[str, Any]:
    num_events = sum(len(one.events_s) for part in parts for one in part.measured)
    cpu_s = sum(part.cpu_s for part in parts)
    return {
        "client_processes": len(parts),
        "client_cpu_us_per_event": round(1e6 * cpu_s / num_events, 2) if num_events else None,
        "client_cpu_share": round(max((part.cpu_s / part.wall_s for part in parts if part.wall_s), default=0.0), 3),
    }
