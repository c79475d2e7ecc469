"""From a trace of jax.profiler to a table: which kernels a step runs, how long each takes, and what lies between.

jax.profiler.trace writes Chrome's trace format, `<host>.trace.json.gz`: a process named "/device:GPU:0" has a thread
named "Stream #N(Compute)" for each CUDA stream, whose complete events ("ph": "X", `ts` and `dur` in us) are kernels or
copies. Its other threads ("XLA Ops", "XLA Modules", ...) tell the same time again, and are left out.
"""

from __future__ import annotations

import collections
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_NAME = 72
"""Characters of a kernel's name that a table shows."""
PARTS = {
    "attention": "attention|^_combine$|^_kv_write$",
    "products": "^_one_row$|^_few_rows$|^_chain$|nvjet|gemm|gemv|cutlass|cublas|splitK",
    "experts": "^_(router|choose|count|sort|product|sum|gate_up|down)$",
    "delta rule": "^_one_token$|^_norm_heads$|^_prepare_chunks$|^states_of_chunks$|^outputs_of_tokens$",
    "norms": "^_rms_norm$",
    "collectives": "^_collective$|^nccl",
    "sampling": "^input_reduce_fusion$|^_scan$|^cut$|^_draw$|^logprobs$",
    "copies": "^Mem(cpy|set)",
}
"""What kernels do, by their names; any other is "other". XLA's reductions choose the likeliest token: norms are kernels
of ours, or part of a product."""
MIN_GAP_US = 0.05
"""Shorter gaps are the rounding of time stamps."""


class TraceError(Exception):
    """A trace that holds no times of kernels; the message says what is missing."""


class Kernel(NamedTuple):
    """A kernel or copy on the device. Times in us."""

    name: str
    start_us: float
    duration_us: float
    stream: str

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


class TraceFiles(NamedTuple):
    """What one recording left."""

    chrome: Path  # for `load_kernels`
    perfetto: Path | None  # for ui.perfetto.dev


def find_files(folder: Path) -> TraceFiles:
    """The newest recording below a folder that was given to jax.profiler.trace. TraceError if there is none."""
    found = sorted(folder.rglob("*.json.gz"), key=lambda path: path.stat().st_mtime)
    perfetto = [path for path in found if path.name == "perfetto_trace.json.gz"]
    chrome = [path for path in found if path.name.endswith(".trace.json.gz")] or perfetto
    if not chrome:
        raise TraceError(f"{folder} holds no *.trace.json.gz")
    return TraceFiles(chrome[-1], perfetto[-1] if perfetto else None)


def load_kernels(path: Path, device: str | None = None) -> list[Kernel]:
    """Everything that ran on a device ("/device:GPU:0"; None: the first), in order. TraceError if nothing did."""
    events = _read(path)
    names = _names(events, "process_name", "pid")
    devices = {pid: name for pid, name in names.items() if name.startswith("/device:GPU")}
    wanted = device or min(devices.values(), default="/device:GPU:0")
    pids = [pid for pid, name in devices.items() if name == wanted]
    if not pids:
        raise TraceError(f"{path} has no process named {wanted!r}; it has {_listed(names.values())}")
    threads = {key: name for key, name in _names(events, "thread_name", "pid", "tid").items() if key[0] in pids}
    streams = {key: name for key, name in threads.items() if name.startswith("Stream #")}
    if not streams:
        raise TraceError(f"{path}: {wanted} has no thread named 'Stream #...'; it has {_listed(threads.values())}")
    kernels = [
        Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]), streams[event["pid"], event["tid"]])
        for event in events
        if event.get("ph") == "X" and (event.get("pid"), event.get("tid")) in streams and "dur" in event
    ]
    if not kernels:
        raise TraceError(f"{path}: nothing ran on {_listed(streams.values())}")
    return sorted(kernels, key=lambda kernel: kernel.start_us)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = content["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace: {type(error).__name__}: {error}") from error
    return [event for event in events if event]  # the profiler ends the list with an empty one


def _names(events: Sequence[Mapping[str, Any]], kind: str, *keys: str) -> dict[Any, str]:
    return {
        event["pid"] if len(keys) == 1 else tuple(event.get(key) for key in keys): str(event["args"]["name"])
        for event in events
        if event.get("ph") == "M" and event.get("name") == kind and event.get("args", {}).get("name") is not None
    }


def _listed(names: Any) -> str:
    return ", ".join(sorted(set(names))) or "none with a name"


def group_name(kernel: str) -> str:
    """The name without the numbers that tell one use from another: "loop_add_fusion_12.3" is "loop_add_fusion"."""
    name = re.sub(r"(?:[._]\d+)+$", "", kernel.removeprefix("void ")) or kernel
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."


def table(
    kernels: Sequence[Kernel],
    num_steps: int,
    *,
    bytes_by_pattern: Mapping[str, int] | None = None,
    bytes_per_s: float | None = None,
) -> dict[str, Any]:
    """Figures of a step, from a trace of `num_steps` alike. Times in ms a step.

    span: from the first kernel's start to the last one's end; busy: some kernel runs; gap: none does; overlap: what
    kernels that run side by side count twice in the sum of all. bytes_by_pattern: bytes a step that the kernels whose
    name matches the pattern move; with bytes_per_s, the rate of a copy, these get their share of that limit.
    """
    busy_us, gaps = _busy_and_gaps(kernels)
    span_us = max(kernel.end_us for kernel in kernels) - kernels[0].start_us
    total_us = sum(kernel.duration_us for kernel in kernels)
    groups: dict[str, list[Kernel]] = collections.defaultdict(list)
    for kernel in kernels:
        groups[group_name(kernel.name)].append(kernel)

    def per_step(value_us: float) -> float:
        return round(value_us / num_steps / 1e3, 5)

    rows = [_row(name, group, num_steps, total_us) for name, group in groups.items()]
    for pattern, num_bytes in (bytes_by_pattern or {}).items():
        _add_bytes([row for row in rows if re.search(pattern, row["name"])], pattern, num_bytes, bytes_per_s)
    return {
        "num_steps": num_steps,
        "span_ms": per_step(span_us),
        "busy_ms": per_step(busy_us),
        "gap_ms": per_step(span_us - busy_us),
        "overlap_ms": per_step(total_us - busy_us),
        "num_kernels": round(len(kernels) / num_steps, 2),
        "num_gaps": round(sum(len(found) for found in gaps.values()) / num_steps, 2),
        "kernels": sorted(rows, key=lambda row: (-row["ms"], row["name"])),
        "gaps": sorted(
            (
                {"after": after, "before": before, "calls": round(len(us) / num_steps, 2), "ms": per_step(sum(us))}
                for (after, before), us in gaps.items()
            ),
            key=lambda row: (-row["ms"], row["after"], row["before"]),
        ),
    }


def part_of(name: str) -> str:
    """The part of a step that a kernel, named as in a table, belongs to."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), "other")


def parts(figures: Mapping[str, Any]) -> dict[str, Any]:
    """A table in short: ms a step by part, and of the kernels of "other" the names."""
    ms = dict.fromkeys([*PARTS, "other"], 0.0)
    for row in figures["kernels"]:
        ms[part_of(row["name"])] += row["ms"]
    others = {row["name"]: row["ms"] for row in figures["kernels"] if part_of(row["name"]) == "other"}
    return {
        **{name: figures[name] for name in ("span_ms", "busy_ms", "gap_ms", "overlap_ms", "num_kernels")},
        "parts_ms": {part: round(value, 5) for part, value in ms.items()},
        "other_ms": others,
    }


def _busy_and_gaps(kernels: Sequence[Kernel]) -> tuple[float, dict[tuple[str, str], list[float]]]:
    """Time in which something runs, and the gaps by what ends before and what begins after; us."""
    gaps: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    last = kernels[0]
    busy_us = last.duration_us
    for kernel in kernels[1:]:
        gap_us = kernel.start_us - last.end_us
        if gap_us > MIN_GAP_US:
            gaps[group_name(last.name), group_name(kernel.name)].append(gap_us)
        busy_us += max(0.0, kernel.end_us - max(kernel.start_us, last.end_us))
        if kernel.end_us > last.end_us:
            last = kernel
    return busy_us, gaps


def _row(name: str, group: Sequence[Kernel], num_steps: int, total_us: float) -> dict[str, Any]:
    us = sum(kernel.duration_us for kernel in group)
    return {
        "name": name,
        "calls": round(len(group) / num_steps, 2),
        "ms": round(us / num_steps / 1e3, 5),
        "us_per_call": round(us / len(group), 3),
        "share": round(us / total_us, 4) if total_us else 0.0,
    }


def _add_bytes(rows: Sequence[dict[str, Any]], pattern: str, num_bytes: int, bytes_per_s: float | None) -> None:
    """Spreads the bytes over the rows by their time. TraceError where no kernel matches."""
    ms = sum(row["ms"] for row in rows)
    if not ms:
        raise TraceError(f"no kernel's name matches {pattern!r}")
    for row in rows:
        row["bytes"] = round(num_bytes * row["ms"] / ms)
        row["tb_per_s"] = round(num_bytes / ms / 1e9, 3)
        if bytes_per_s:
            row["share_of_limit"] = round(num_bytes / (ms / 1e3) / bytes_per_s, 3)


def format_table(figures: Mapping[str, Any], max_rows: int = 30) -> str:
    """The table as text."""
    lines = [
        f"{figures['num_kernels']:g} kernels a step: span {figures['span_ms']:.3f} ms = busy {figures['busy_ms']:.3f} "
        f"+ gaps {figures['gap_ms']:.3f} ({figures['num_gaps']:g}); overlap {figures['overlap_ms']:.3f}",
        f"{'kernel':<{MAX_NAME}} {'calls':>7} {'ms/step':>9} {'us/call':>9} {'share':>6} {'TB/s':>6} {'limit':>6}",
    ]
    for row in figures["kernels"][:max_rows]:
        rate = f"{row['tb_per_s']:>6.2f}" if "tb_per_s" in row else f"{'-':>6}"
        limit = f"{row['share_of_limit']:>6.0%}" if "share_of_limit" in row else f"{'-':>6}"
        numbers = f"{row['calls']:>7g} {row['ms']:>9.4f} {row['us_per_call']:>9.2f} {row['share']:>6.1%}"
        lines.append(f"{row['name']:<{MAX_NAME}} {numbers} {rate} {limit}")
    if rest := figures["kernels"][max_rows:]:
        lines.append(f"... and {len(rest)} more: {sum(row['ms'] for row in rest):.4f} ms/step")
    for gap in figures["gaps"][:8]:
        lines.append(f"gap {gap['ms']:.4f} ms/step in {gap['calls']:g}: after {gap['after']}, before {gap['before']}")
    return "\n".join(lines)
