"""Draws throughput, time per token and time to the first token against the number of clients, beside vLLM's.

    python scripts/plot_results.py            # scripts/results/h200.json and vllm_h200.json -> scripts/results/h200.png
    python scripts/plot_results.py --table    # the same figures as the table in README.md, which a test compares

The picture needs matplotlib (the extra `plot`). The same figures give the same picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
WORKLOADS = ((16, 128), (1024, 128))
"""Tokens in and out, a row of panels each."""
PANELS = (
    ("output_throughput", "output tokens per second", "higher is better", True),
    ("median_tpot_ms", "time per output token, ms (median)", "lower is better", False),
    ("median_ttft_ms", "time to first token, ms (median)", "lower is better", True),
)
"""Key, title, what is better, and whether the axis is logarithmic."""
STYLES = {"jaxinfer": ("#1f6fb4", "o-"), "vLLM": ("#d9822b", "s--")}
"""Colour and line of each engine."""


class Unplottable(Exception):
    """There is nothing to draw; the message says why."""


def load_rows(path: Path, label: str) -> list[dict[str, Any]]:
    """The closed-loop rows of a results file under a label. Unplottable where there are none."""
    if not path.is_file():
        raise Unplottable(f"{path} is no file")
    by_label = json.loads(path.read_text()).get("serve", {})
    if not by_label.get(label):
        raise Unplottable(f"{path} has no rows of {label!r}; known: {', '.join(sorted(by_label)) or 'none'}")
    return [row for row in by_label[label] if row.get("request_rate") is None and row["max_concurrency"]]


def series(rows: Sequence[dict[str, Any]], lengths: tuple[int, int], key: str) -> list[tuple[int, float]]:
    """(clients, value) of the rows with these lengths that have a value, by clients."""
    chosen = [row for row in rows if (row["input_len"], row["output_len"]) == lengths and row.get(key) is not None]
    return sorted((row["max_concurrency"], row[key]) for row in chosen)


def table(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> str:
    """Our rows of WORKLOADS in Markdown, with vLLM's throughput and time per token."""
    lines = [
        "| clients, in / out | output tokens/s | vLLM | TTFT p50 / p99, ms | TPOT, ms | vLLM |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    peers = {_workload(row): row for row in theirs}
    for row in sorted(ours, key=_workload):
        input_len, output_len, clients = _workload(row)
        if (input_len, output_len) not in WORKLOADS:
            continue
        peer = peers.get(_workload(row))
        cells = [
            f"{clients}, {input_len} / {output_len}",
            f"{row['output_throughput']:,.0f}",
            f"{peer['output_throughput']:,.0f}" if peer else "-",
            f"{_ms(row['median_ttft_ms'])} / {_ms(row['p99_ttft_ms'])}",
            f"{row['median_tpot_ms']:.2f}",
            f"{peer['median_tpot_ms']:.2f}" if peer else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _workload(row: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens in and out, and clients: of one such workload a file has one row."""
    return row["input_len"], row["output_len"], row["max_concurrency"]


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def draw(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Writes the picture. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_engine = {"jaxinfer": ours, "vLLM": theirs}
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(len(WORKLOADS), len(PANELS), figsize=(12.5, 7.2), layout="constrained")
        figure.suptitle(title, fontsize=12)
        for (input_len, output_len), row in zip(WORKLOADS, axes, strict=True):
            for (key, title, direction, is_log), panel in zip(PANELS, row, strict=True):
                lines = {name: series(rows, (input_len, output_len), key) for name, rows in by_engine.items()}
                _lines(panel, lines)
                _dress(panel, f"{title}\n{input_len} tokens in, {output_len} out; {direction}", is_log=is_log)
        handles, labels = axes[0][0].get_legend_handles_labels()
        axes[0][0].legend(handles, labels, frameon=False, loc="upper left")
        # Without a date or a version the same figures give the same bytes.
        figure.savefig(path, dpi=120, metadata={"Software": None})
        pyplot.close(figure)


def _lines(panel: Any, lines: dict[str, Sequence[tuple[int, float]]]) -> None:
    """A line for each engine, every point with its value: of two at one place the higher has it above."""
    for engine, points in lines.items():
        colour, style = STYLES[engine]
        panel.plot([x for x, _ in points], [y for _, y in points], style, color=colour, label=engine, markersize=5)
    for engine, points in lines.items():
        for x, y in points:
            others = [value for name, other in lines.items() if name != engine for at, value in other if at == x]
            above = all(y >= value for value in others)
            panel.annotate(
                f"{y:,.0f}" if y >= 100 else f"{y:.3g}",
                (x, y),
                xytext=(0, 6 if above else -6),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                fontsize=7,
                color=STYLES[engine][0],
            )


def _dress(panel: Any, title: str, *, is_log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_title(title, fontsize=9)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.margins(x=0.1, y=0.2)
    if is_log:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    panel.set_xlabel("clients")
    panel.grid(alpha=0.25, which="major")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS / "h200.json", help="our figures (default: %(default)s)")
    add("--peer", type=Path, default=RESULTS / "vllm_h200.json", help="vLLM's figures (default: %(default)s)")
    add("--label", default="qwen3-4b-dummy", help="what was measured, in both files (default: %(default)s)")
    add(
        "--title",
        default="Qwen3-4B, bfloat16, one H200, greedy, streamed",
        help="of the picture (default: %(default)s)",
    )
    add("--table", action="store_true", help="print the table and draw nothing")
    add("--out", type=Path, default=RESULTS / "h200.png", help="the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        ours, theirs = load_rows(args.results, args.label), load_rows(args.peer, args.label)
        if args.table:
            print(table(ours, theirs))
            return 0
        draw(ours, theirs, args.title, args.out)
    except Unplottable as error:
        print(f"plot_results: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        print(f"plot_results: {error}; pip install matplotlib", file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
