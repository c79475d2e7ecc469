"""Takes a step of a model apart: its time on the device and on the host, its kernels, and the limits of the card.

    python scripts/profile_step.py measure --steps 1x16,64x1024,32x1024+512 --out profile -- \
        --model FOLDER --load-format dummy --max-model-len 2048
    python scripts/profile_step.py plot profile/profile.json        # profile/profile.png; needs matplotlib
    python scripts/profile_step.py table profile/profile.json       # the tables again; or those of any trace.json.gz

What follows the two dashes goes to EngineConfig, under the names that `jaxinfer serve` has. A step is ROWSxCONTEXT
(sequences that decode, each after so many tokens), +CHUNK (a prompt's tokens), or ROWSxCONTEXT+CHUNK. The runner is
the engine's own and its slots are filled by real prompts. Times come from launches without the profiler; a few more
under it give the kernels, and a file that ui.perfetto.dev opens. On a CPU there are no times of kernels.

With --record LABEL a step's figures go to the results file: its times, the device's time by part (attention, products,
norms, sampling, copies, and by name what is none of these), and the floor, in which the card would do nothing but read
each weight that the step needs once (of a table that is only looked up in nothing, a tied head once).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import operator
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results_file
import step_trace
from results_file import describe, write_json
from step_spec import parse_specs

from checkpoints.resolve import resolve
from jaxinfer.config import EngineConfig

TRACE_FLAGS = {
    # Under the profiler XLA runs everything operation by operation, unless the first is true; it has to be so when the
    # step is compiled. The time of a captured step is in its graph, the names of operations are in the other.
    "graph": "--xla_enable_command_buffers_during_profiling=true",
    "operations": "--xla_enable_command_buffers_during_profiling=false",
}
LIMITS = ("copy_bytes_per_s", "matrix_flops", "read_bytes_per_s")
"""Of the card, in profile.json."""
RECORDED = ("step", "bucket", "step_ms", "waited_ms", "dispatch_ms", "weights_bytes", "kv_bytes", "flops", "floor_ms",
            "times_floor")  # fmt: skip
"""Of a step in profile.json, what the results file keeps besides its parts."""
TYPES = {"int": int, "float": float, "str": str, "bool": bool, "Any": str}
READ_TB_PER_S = 4.3
"""At which an H200 reads."""
HOST_BOUND = 0.9
"""Share of a step's time from which launching it takes the host as long as the device needs."""
MAX_SEGMENTS = 9
"""Kernels with a colour of their own in the chart; the rest are one segment."""


def engine_config(flags: Sequence[str]) -> EngineConfig:
    """From flags, one for each field."""
    parser = argparse.ArgumentParser(prog="profile_step.py measure ... --", allow_abbrev=False)
    for field in dataclasses.fields(EngineConfig):
        kind = TYPES[str(field.type).split(" | ")[0]]
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{field.name.replace('_', '-')}", **how, help=f"EngineConfig.{field.name}")
    given = vars(parser.parse_args([flag for flag in flags if flag != "--"]))
    return EngineConfig(**{name: value for name, value in given.items() if value is not None})


def kernel_bytes(entries: Sequence[str], param_bytes: Mapping[str, int], kv_bytes: int, devices: int) -> dict[str, int]:
    """PATTERN=NAME,NAME: bytes that kernels matching the pattern read, from names of parameters, or kv. ValueError."""
    found = {}
    for entry in entries:
        pattern, _, names = entry.rpartition("=")
        known = {name: size // devices for name, size in param_bytes.items()} | {"kv": kv_bytes}
        unknown = sorted(set(names.split(",")) - set(known))
        if not pattern or unknown:
            raise ValueError(f"--kernel-bytes {entry!r}: {unknown} are not among {', '.join(sorted(known))}")
        found[pattern] = sum(known[name] for name in names.split(","))
    return found


def measure(args: argparse.Namespace) -> int:
    """Writes profile.json after every step. Sets JAX's flags, so that JAX may only be imported here."""
    config = engine_config(args.engine)
    if args.platform is not None:
        os.environ["JAX_PLATFORMS"] = {"gpu": "cuda", "cpu": "cpu"}[args.platform]
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {TRACE_FLAGS[args.trace_mode]}".strip()
    timing = importlib.import_module("step_timing")
    build = importlib.import_module("jaxinfer.build")
    build.set_up_jax(config)
    rates = timing.measure_rates()
    print(
        f"copy {rates.copy_bytes_per_s / 1e12:.3f} TB/s, products {rates.matrix_flops / 1e12:.1f} TFLOP/s", flush=True
    )
    built = timing.build_runner(config, show_progress=not args.quiet)
    profile: dict[str, Any] = {
        "model": config.model,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": describe(),
        "platform": built.builder.platform,
        "ready_s": round(built.ready_s, 2),
        "copy_bytes_per_s": round(rates.copy_bytes_per_s),
        "matrix_flops": round(rates.matrix_flops),
        "read_bytes_per_s": round(1e12 * args.read_tb_per_s),
        "param_bytes": dict(built.param_bytes),
        "trace_mode": args.trace_mode,
        "steps": [],
    }
    hf_config = resolve(config.model, revision=config.revision, load_format=config.load_format).config
    results = results_file.from_flags(args, limits={name: profile[name] for name in LIMITS})
    for spec in args.steps:
        try:
            step = _measure_step(args, timing, built, spec, rates, hf_config)
        except ValueError as error:  # the other steps may still be measured
            print(f"profile_step: {error}", file=sys.stderr)
            profile.setdefault("errors", []).append(str(error))
            continue
        if "kernels_missing" in step and built.builder.platform != "cpu":
            profile.setdefault("errors", []).append(step["kernels_missing"])
        profile["steps"].append(step)
        write_json(args.out / "profile.json", profile)
        print(_text(step), flush=True)
        if results is not None:
            results.row("steps", recorded(step), operator.itemgetter("step"))
    if built.runner.compilations_after_ready:
        print(f"profile_step: {built.runner.compilations_after_ready} compilations while serving", file=sys.stderr)
    built.runner.close()
    return 1 if "errors" in profile else 0


def _measure_step(
    args: argparse.Namespace, timing: Any, built: Any, spec: Any, rates: Any, hf_config: Mapping[str, Any]
) -> dict[str, Any]:
    plans = timing.Plans(built, spec)
    moved = timing.traffic(built, spec, hf_config)
    mapped = kernel_bytes(args.kernel_bytes, built.param_bytes, moved["kv_bytes"], built.builder.mesh.size)
    plans.fill()
    times = timing.time_plan(built.runner, plans.plan, args.num_steps)
    step = {"step": str(spec), "bucket": str(plans.bucket), **times, **moved}
    step |= timing.limits(moved, rates, times["step_ms"])
    step |= timing.floor(moved, 1e12 * args.read_tb_per_s, times["step_ms"])
    trace = args.out / f"{spec.file_name}.trace.json.gz"
    perfetto = args.out / f"{spec.file_name}.perfetto.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        timing.record_trace(built.runner, plans.plan, args.trace_steps, Path(folder))
        files = step_trace.find_files(Path(folder))
        args.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(files.chrome, trace)
        shutil.copy(files.perfetto or files.chrome, perfetto)
    step |= {"trace": trace.name, "perfetto": perfetto.name}
    try:
        kernels = step_trace.load_kernels(trace)
        figures = step_trace.table(
            kernels, args.trace_steps, bytes_by_pattern=mapped, bytes_per_s=rates.copy_bytes_per_s
        )
    except step_trace.TraceError as error:  # the times without the profiler are worth keeping
        why = " on a CPU" if built.builder.platform == "cpu" else ""
        return step | {"kernels_missing": f"times of kernels are missing{why}: {error}"}
    return step | {"kernels": figures}


def recorded(step: Mapping[str, Any]) -> dict[str, Any]:
    """Of a step in profile.json, what the results file keeps."""
    kept = {name: step[name] for name in RECORDED}
    if "kernels" not in step:
        return kept | {"kernels_missing": step["kernels_missing"]}
    return kept | {"device": step_trace.parts(step["kernels"])}


def _text(step: Mapping[str, Any], max_rows: int = 30) -> str:
    slow = " (the host is the limit)" if step["dispatch_ms"] > HOST_BOUND * step["step_ms"] else ""
    lines = [
        f"step {step['step']} ({step['bucket']}): {step['step_ms']:.3f} ms back to back, {step['waited_ms']:.3f} when "
        f"the host waits for each, {step['dispatch_ms']:.3f} to launch{slow}",
        f"  limit {step['limit_ms']:.3f} ms by {step['bound_by']} ({step['share_of_limit']:.0%} of it reached): "
        f"{step['weights_bytes'] / 1e9:.3f} GB weights, {step['kv_bytes'] / 1e9:.3f} GB KV, "
        f"{step['flops'] / 1e12:.4f} TFLOP",
        f"  {step['times_floor']:.2f} times the floor of {step['floor_ms']:.3f} ms, in which the weights are read",
        f"  ui.perfetto.dev opens {step['perfetto']}",
    ]
    if "kernels_missing" in step:
        return "\n".join([*lines, f"  {step['kernels_missing']}"])
    by_part = step_trace.parts(step["kernels"])["parts_ms"].items()
    lines.append("  on the device, ms: " + ", ".join(f"{part} {ms:.4f}" for part, ms in by_part))
    return "\n".join([*lines, step_trace.format_table(step["kernels"], max_rows)])


def show_table(args: argparse.Namespace) -> int:
    """The tables of a profile, or that of one trace."""
    try:
        if args.file.suffix == ".gz":
            figures = step_trace.table(step_trace.load_kernels(args.file, args.device), args.num_steps)
            print(step_trace.format_table(figures, args.max_rows))
        else:
            for step in json.loads(args.file.read_text())["steps"]:
                print(_text(step, args.max_rows))
    except step_trace.TraceError as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return 1
    return 0


def segments(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """ms by name, a value for each step: the kernels that take most over all steps, the rest, and the gaps."""
    by_step = [{row["name"]: row["ms"] for row in step.get("kernels", {}).get("kernels", [])} for step in steps]
    totals: dict[str, float] = {}
    for rows in by_step:
        for name, ms in rows.items():
            totals[name] = totals.get(name, 0.0) + ms
    chosen = sorted(totals, key=lambda name: (-totals[name], name))[:MAX_SEGMENTS]
    found = {name: [rows.get(name, 0.0) for rows in by_step] for name in chosen}
    found["other kernels"] = [sum(ms for name, ms in rows.items() if name not in chosen) for rows in by_step]
    found["gaps"] = [step.get("kernels", {}).get("gap_ms", 0.0) for step in steps]
    return {name: values for name, values in found.items() if any(values)}


def plot(args: argparse.Namespace) -> int:
    """A bar for each step, made of its kernels and gaps, beside its time without the profiler and the limit."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        print(f"profile_step: {error}; pip install matplotlib", file=sys.stderr)
        return 1
    profile = json.loads(args.profile.read_text())
    steps = profile["steps"]
    if not steps:
        print(f"profile_step: {args.profile} has no steps", file=sys.stderr)
        return 1
    out = args.out or args.profile.with_suffix(".png")
    height = 2.2 + 0.55 * len(steps)
    figure, axes = pyplot.subplots(figsize=(12, height + 1.6), layout="constrained")
    places, left = list(range(len(steps))), [0.0] * len(steps)
    colours = pyplot.get_cmap("tab10").colors
    for index, (name, values) in enumerate(segments(steps).items()):
        special = {"gaps": ("white", "//"), "other kernels": ("#bbbbbb", None)}
        colour, hatch = special.get(name, (colours[index % len(colours)], None))
        axes.barh(
            places, values, 0.6, left, label=name[:60], color=colour, hatch=hatch, edgecolor="#555555", linewidth=0.4
        )
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.plot([step["step_ms"] for step in steps], places, "kD", markersize=6, label="step without the profiler")
    axes.plot([step["limit_ms"] for step in steps], places, "r|", markersize=26, markeredgewidth=2.5, label="limit")
    axes.set_yticks(places, [f"{step['step']}\n{step['share_of_limit']:.0%} of the limit" for step in steps])
    axes.invert_yaxis()
    axes.set_ylim(len(steps) - 0.4, -0.6)
    axes.set_xlabel("ms per step")
    axes.set_xlim(left=0)
    axes.set_title(f"{Path(profile['model']).name} on {profile['run']['card']}, {profile['date'][:10]}")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False, markerscale=0.5)
    figure.savefig(out, dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    print(out)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="build the runner, time steps, record traces", description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    one.set_defaults(run=measure)
    one.add_argument("--steps", default="1x16,8x16,64x16,64x1024,+1024,32x1024+512", help="ROWSxCONTEXT, +CHUNK or "
                     "ROWSxCONTEXT+CHUNK, between commas (default: %(default)s)")  # fmt: skip
    one.add_argument("--out", type=Path, default=Path("profile"), help="folder for profile.json and the traces")
    one.add_argument("--num-steps", type=int, default=50, help="launches that are timed (default: %(default)s)")
    one.add_argument("--trace-steps", type=int, default=5, help="launches that are traced (default: %(default)s)")
    one.add_argument("--trace-mode", choices=list(TRACE_FLAGS), default="graph", help="trace the captured graph, or "
                     "operation by operation, which has more names but not the times of serving")  # fmt: skip
    one.add_argument("--kernel-bytes", nargs="+", default=[], metavar="PATTERN=NAME,...", help="bytes that kernels "
                     "read: names of parameters (param_bytes in profile.json), or kv")  # fmt: skip
    one.add_argument("--read-tb-per-s", type=float, default=READ_TB_PER_S, help="of the card, for the floor (default: "
                     "%(default)s, an H200's)")  # fmt: skip
    results_file.add_flags(one)
    one.add_argument("--platform", choices=("cpu", "gpu"), help="default: what JAX finds")
    one.add_argument("--quiet", action="store_true", help="no progress bars")
    one.add_argument("engine", nargs=argparse.REMAINDER, help="fields of EngineConfig as flags, after --")
    two = commands.add_parser("table", help="print the tables of a profile or of a trace")
    two.set_defaults(run=show_table)
    two.add_argument("file", type=Path, help="profile.json, or a trace.json.gz")
    two.add_argument("--num-steps", type=int, default=1, help="steps that the trace holds (default: %(default)s)")
    two.add_argument("--device", help="of the trace (default: the first GPU)")
    two.add_argument("--max-rows", type=int, default=30, help="kernels to show (default: %(default)s)")
    three = commands.add_parser("plot", help="draw a profile as PNG; needs matplotlib, but neither JAX nor a GPU")
    three.set_defaults(run=plot)
    three.add_argument("profile", type=Path, help="profile.json")
    three.add_argument("--out", type=Path, help="default: beside the profile")
    args = parser.parse_args(argv)
    if args.command == "measure":
        try:
            args.steps = parse_specs(args.steps)
        except ValueError as error:
            parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
