"""A plan for people: as tables, and as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.runner import cache
from jaxinfer.sharding.report import ShardReport, StepReport

COLOURS = ("#1f6fb4", "#d9822b", "#5a9e4b", "#b04a5a", "#7a62a8", "#8a8a8a", "#c2a83e", "#4ba3a3", "#a0623c", "#333333")


def mesh_text(mesh: Mapping[str, int]) -> str:
    """As --mesh takes it."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def parts(report: ShardReport) -> dict[str, int]:
    """Bytes of one device by what takes them."""
    found = {f"weights: {part}": size for part, size in report.weights.items()}
    found["KV cache"] = report.kv_bytes
    if report.recurrent_bytes:
        found["recurrent states"] = report.recurrent_bytes
    found["slots"] = report.slot_bytes
    found["temporaries"] = report.temp_bytes
    found["left free"] = cache.GPU_RESERVE_BYTES
    return found


def text(report: ShardReport, model: str) -> str:
    """The whole report."""
    load, card = report.load, report.card
    split = "; ".join(f"{axis} over {' and '.join(over)}" for axis, over in report.rules.items()) or "nothing is split"
    lines = [
        f"{model}: {report.architecture} in {load.dtype} on {mesh_text(report.mesh)}, {report.num_devices} x "
        f"{report.card_name}",
        f"  {split}",
        *([f"  {report.kv_copies} devices share each KV head, each with a copy"] if report.kv_copies > 1 else []),
        f"  {card.read_bytes_per_s / 1e12:g} TB/s, {card.matrix_flops / 1e12:g} TFLOP/s, links of "
        f"{card.link_bytes_per_s / 1e9:g} GB/s each way, {card.collective_s * 1e6:g} us a collective: {card.source}",
        "",
        f"bytes of each device, {load.num_seqs} sequences of {load.tokens_per_seq:,} tokens",
    ]
    exact = "as compiled" if report.temp_is_compiled else "estimated"
    for name, size in parts(report).items():
        lines.append(f"  {name:24}{size:>18,}" + (f"  {exact}" if name == "temporaries" else ""))
    verdict = "fits" if report.fits else "DOES NOT FIT"
    lines.append(f"  {'together':24}{report.total_bytes:>18,}  of {report.usable_bytes:,}: {verdict}")
    for step in report.steps:
        lines += ["", *_step_lines(step)]
    return "\n".join(lines)


def _step_lines(step: StepReport) -> list[str]:
    after = f" after {step.context:,} tokens each" if step.context else ""
    rate = (
        f", {step.rows / step.total_s:,.0f} tokens/s"
        if step.context
        else f", {step.tokens / step.total_s:,.0f} tokens/s"
    )
    lines = [
        f"{step.name}{after}: at least {step.total_s * 1e3:.3f} ms{rate}",
        f"  reading {step.memory_s * 1e3:.3f} ms, products {step.matrix_s * 1e3:.3f} ms, "
        f"links {step.link_s * 1e3:.3f} ms",
    ]
    for c in step.collectives:
        lines.append(f"  {c.count:>5} x {c.kind:20} over {'+'.join(c.axes):20}{c.num_bytes:>15,} bytes each")
    if step.compiled is not None:
        lines.append(f"  as XLA compiles it: {step.compiled.temp_bytes:,} bytes of temporaries")
        for c in step.compiled.collectives:
            lines.append(f"  {c.count:>5} x {c.kind:20} of {c.num_devices} devices{c.num_bytes:>20,} bytes each")
    return lines


def ranking(reports: Sequence[ShardReport], refused: Mapping[tuple[tuple[str, int], ...], str]) -> str:
    """A line for each mesh, the quickest to decode first; then why others cannot be."""
    lines = [f"{'mesh':36}{'decode, ms':>12}{'prefill, ms':>13}{'GiB a device':>14}{'links, ms':>11}"]
    for r in reports:
        fit = "" if r.fits else "  does not fit"
        lines.append(
            f"{mesh_text(r.mesh):36}{r.decode.total_s * 1e3:>12.3f}{r.steps[-1].total_s * 1e3:>13.3f}"
            f"{r.total_bytes / 2**30:>14.1f}{r.decode.link_s * 1e3:>11.3f}{fit}"
        )
    lines += [f"{mesh_text(dict(sizes)):36}refused: {reason}" for sizes, reason in refused.items()]
    return "\n".join(lines)


def draw(reports: Sequence[ShardReport], title: str, path: Path) -> None:
    """Writes a chart: for each mesh the bytes of a device by part, and the times of its steps. ImportError without
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [mesh_text(report.mesh) for report in reversed(reports)]
    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        height = 2.2 + 0.35 * len(reports)
        figure, panels = pyplot.subplots(1, 3, figsize=(14, height), layout="constrained", sharey=True)
        figure.suptitle(title, fontsize=12)
        _bars(panels[0], names, [parts(r) for r in reversed(reports)], 2**30)
        panels[0].axvline(reports[0].usable_bytes / 2**30, color="black", linestyle=":", linewidth=1)
        panels[0].set_title("GiB of each device; dotted: what it has", fontsize=9)
        for panel, number in zip(panels[1:], (0, -1), strict=True):
            steps = [r.steps[number] for r in reversed(reports)]
            times = [{"reading or products": s.total_s - s.link_s, "collectives": s.link_s} for s in steps]
            _bars(panel, names, times, 1e-3)
            panel.set_title(f"{steps[0].name}: least time, ms", fontsize=9)
        for panel in panels:
            panel.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
            panel.grid(alpha=0.25, axis="x")
        figure.savefig(path, dpi=120, metadata={"Software": None})
        pyplot.close(figure)


def _bars(panel: Any, names: Sequence[str], values: Sequence[Mapping[str, float]], unit: float) -> None:
    left = [0.0] * len(names)
    for part, colour in zip(dict.fromkeys(part for bar in values for part in bar), COLOURS * 2, strict=False):
        widths = [bar.get(part, 0) / unit for bar in values]
        panel.barh(range(len(names)), widths, left=left, color=colour, label=part, height=0.7)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, end in enumerate(left):
        panel.annotate(f"{end:.3g}", (end, row), xytext=(3, 0), textcoords="offset points", va="center", fontsize=7)
    panel.set_yticks(range(len(names)), names)
    panel.margins(x=0.12)
