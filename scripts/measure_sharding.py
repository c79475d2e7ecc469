"""Times decode steps of whole models on one GPU and on two, with four ways to sum over them.

    python scripts/measure_sharding.py --out sharding.json             # all sections, on two H200s
    python scripts/measure_sharding.py --sections qwen3-32b-1 --out sharding.json
    python scripts/measure_sharding.py --tiny --out sharding.json      # the same on a CPU's virtual devices

A section is a process of its own: a model with random weights on a mesh, without a server. Steps of 1 and of 64 rows
after 1,024 tokens each are launched back to back; their slots are filled by real prompts. Each result has the plan's
prediction for an H200 beside it, and what a step samples is compared with the section on one GPU: all rows of it are
given the same tokens there.

Variants of sums: `written`, our kernels that write into the other GPU's memory, in the graph like all others: what the
engine takes where it can. The others are XLA's collectives: `split`, graphs between its own one-shot kernels of small
sums; `captured`, one graph with NCCL, which is recorded anew at every step; `profiled`, the same with buffers that XLA
keeps at their addresses.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from results_file import describe, write_json
from step_spec import StepSpec

_QWEN3 = {"head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 40960}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-32b": {**_QWEN3, "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 64,
                  "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 25600},
    "qwen3-30b-a3b": {**_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48,
                      "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
                      "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
}  # fmt: skip
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 256}
"""In place of a model's sizes, to see on a CPU that all of it runs; with few heads, and narrow MLPs and experts."""
TINY_WIDTHS = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32,
               "num_experts": 8}  # fmt: skip

CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE,COLLECTIVES"
_ONE_GRAPH = {"xla_gpu_enable_command_buffer": CAPTURED, "xla_gpu_experimental_use_collective_kernels": ""}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "written": {},
    "split": {},
    "captured": {**_ONE_GRAPH, "xla_gpu_command_buffer_update_mode": "ALWAYS_UPDATE"},
    "profiled": {**_ONE_GRAPH, "xla_gpu_command_buffer_update_mode": "SKIP_PROFILED"},
}
"""Options of XLA for captured programs, besides the engine's own."""


class Section(NamedTuple):
    """What one process measures."""

    model: str
    mesh: str
    variants: tuple[str, ...]
    flags: str = ""  # XLA's, of the process
    rules: str = "tensor"  # name of a preset


_PROFILED = "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED"  # its allocator is chosen when the process starts
SECTIONS: Mapping[str, Section] = {
    "qwen3-32b-1": Section("qwen3-32b", "tensor=1", ("written",)),
    "qwen3-32b-2": Section("qwen3-32b", "tensor=2", ("written",)),
    "qwen3-32b-2-xla": Section("qwen3-32b", "tensor=2", ("split", "captured")),
    "qwen3-32b-2-profiled": Section("qwen3-32b", "tensor=2", ("profiled",), _PROFILED),
    "qwen3-32b-data": Section("qwen3-32b", "data=2", ("written",)),
    "qwen3-32b-pipeline": Section("qwen3-32b", "pipeline=2", ("written", "captured")),
    "qwen3-30b-a3b-1": Section("qwen3-30b-a3b", "tensor=1", ("written",)),
    "qwen3-30b-a3b-2": Section("qwen3-30b-a3b", "expert=2", ("written",)),
    "qwen3-30b-a3b-2-xla": Section("qwen3-30b-a3b", "expert=2", ("split", "captured")),
    "qwen3-30b-a3b-2-profiled": Section("qwen3-30b-a3b", "expert=2", ("profiled",), _PROFILED),
    "qwen3-30b-a3b-expert-heads": Section("qwen3-30b-a3b", "expert=2", ("written",), rules="expert-heads"),
    "qwen3-30b-a3b-data": Section("qwen3-30b-a3b", "data=2", ("written",)),
    "qwen3-30b-a3b-data-attention": Section(
        "qwen3-30b-a3b", "expert=2", ("written", "captured"), rules="data-attention"
    ),
}
"""Expected of each on H200s: JAX's start 8 s, weights 5, compilation 5 to 10 a variant, steps 3 a variant."""
ROWS, CONTEXT, CHUNK = (1, 64), 1024, 512
NUM_SLOTS = 64


def model_config(section: Section, *, tiny: bool) -> dict[str, Any]:
    config = dict(MODELS[section.model])
    if tiny:
        config |= TINY | {name: size for name, size in TINY_WIDTHS.items() if name in config}
        config |= {"num_experts_per_tok": 2} if "num_experts" in config else {}
    return config


def measure(name: str, *, tiny: bool, num_steps: int) -> dict[str, Any]:
    """The results of a section, in this process."""
    section = SECTIONS[name]
    config = model_config(section, tiny=tiny)
    jax, timing = importlib.import_module("jax"), importlib.import_module("step_timing")
    compiled, report = (importlib.import_module(f"jaxinfer.{m}") for m in ("runner.compiled", "sharding.report"))
    dataclasses, peers = (importlib.import_module(m) for m in ("dataclasses", "jaxinfer.runner.peers"))
    meshes = importlib.import_module("jaxinfer.sharding.mesh")
    if jax.default_backend() != ("cpu" if tiny else "gpu"):
        raise SystemExit(f"measure_sharding: JAX runs on {jax.default_backend()}; --tiny is for the CPU, and only that")
    context, chunk = (32, 64) if tiny else (CONTEXT, CHUNK)
    load = report.Load(num_seqs=NUM_SLOTS, tokens_per_seq=context + 64, dtype="float32" if tiny else "bfloat16")
    mesh = meshes.choose_mesh(section.mesh)
    builder = make_builder(config, section, mesh, load, chunk)
    start_s = time.perf_counter()
    params = random_weights(builder)
    found: dict[str, Any] = {
        "section": name,
        "commit": describe()["commit"],
        "model": section.model,
        "mesh": section.mesh,
        "rules": section.rules,
        "tiny": tiny,
        "variants": {},
    }
    found["weights_s"] = round(time.perf_counter() - start_s, 2)
    found["weights_bytes"] = {str(d.id): bytes_on(params, d) for d in mesh.devices.flat}
    planned = {
        rows: report.plan(config, meshes.parse(section.mesh), axis_rules=section.rules, load=report.Load(
            num_seqs=rows, tokens_per_seq=context + 1, dtype=load.dtype))
        for rows in ROWS
    }  # fmt: skip
    found["planned_weights_bytes"] = sum(planned[1].weights.values())
    for variant in section.variants:
        reachable = peers.reachable if variant == "written" else lambda _: False
        with (
            mock.patch.dict(compiled.GPU_OPTIONS, VARIANTS[variant]),
            mock.patch.object(peers, "reachable", reachable),
        ):
            rows = measure_variant(timing, dataclasses.replace(builder), params, config, context, num_steps)
        for row in rows:
            plan = planned[row["rows"]]
            row["predicted_ms"] = round(plan.decode.total_s * 1e3, 4)
            row["predicted_links_ms"] = round(plan.decode.link_s * 1e3, 4)
        found["variants"][variant] = rows
        print(f"{name} {variant}: " + ", ".join(f"{r['rows']} rows {r['step_ms']} ms" for r in rows), flush=True)
    return found


def make_builder(config: Mapping[str, Any], section: Section, mesh: Any, load: Any, chunk: int) -> Any:
    """Of decode steps of each number of rows, and of the step that fills their slots."""
    dataclasses, buckets = importlib.import_module("dataclasses"), importlib.import_module("jaxinfer.runner.buckets")
    report, rules = (importlib.import_module(f"jaxinfer.sharding.{m}") for m in ("report", "rules"))
    builder = report.make_builder(config, mesh, rules.find(section.rules), load)
    slots = builder.shape.num_slots  # of each group
    sizes = [buckets.Bucket(True, rows, rows) for rows in sorted({max(shares(rows, builder)) for rows in ROWS})]
    sizes.append(buckets.Bucket(False, max(chunk, slots), slots))
    return dataclasses.replace(builder, buckets=tuple(sizes))


def shares(rows: int, builder: Any) -> list[int]:
    """Of so many rows, how many each group of devices has."""
    groups = range(builder.num_groups)
    return [rows // len(groups) + (group < rows % len(groups)) for group in groups]


def random_weights(builder: Any) -> Any:
    jax, params = importlib.import_module("jax"), importlib.import_module("jaxinfer.params")
    rules = importlib.import_module("jaxinfer.sharding.rules")
    shardings = rules.shardings(builder.model.specs, builder.mesh, builder.axis_rules)
    return jax.block_until_ready(params.random_params(builder.model.specs, builder.shape.dtype, shardings, seed=0))


def bytes_on(params: Mapping[str, Any], device: Any) -> int:
    shards = [shard for array in params.values() for shard in array.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def measure_variant(
    timing: Any, builder: Any, params: Any, config: Mapping[str, Any], context: int, num_steps: int
) -> list[dict[str, Any]]:
    """A row for each number of rows: times, and the tokens of a step of given inputs, with their logits' margins."""
    np = importlib.import_module("numpy")
    compiled, runners = (importlib.import_module(f"jaxinfer.runner.{m}") for m in ("compiled", "runner"))
    plan = importlib.import_module("jaxinfer.scheduler.plan")
    executables = importlib.import_module("jaxinfer.runner.executables").Executables(None, config)
    start_s = time.perf_counter()
    programs = compiled.compile_programs(builder, params, executables, lambda *_: None)
    compile_s = time.perf_counter() - start_s
    runner = runners.ModelRunner(builder, params, programs, lambda *_: None)
    built = timing.Built(runner, builder, {}, time.perf_counter() - start_s)
    found = []
    for rows in ROWS:
        counts, parts = shares(rows, builder), [plan.StepPlan(1, (), ())] * builder.num_groups
        for group, count in enumerate(counts):
            if count:
                plans = timing.Plans(built, StepSpec(count, context, 0), group=group, first=sum(counts[:group]))
                plans.fill()
                parts[group] = plans.plan
        step = timing.of_groups(parts)
        row = {"rows": rows, "context": context, **timing.time_plan(runner, step, num_steps)}
        force_inputs(runner, counts)
        result = runner.collect(runner.launch(step))
        logits = np.asarray(runner._state.logits).reshape(builder.num_groups, builder.shape.num_slots, -1)
        logits = np.sort(np.concatenate([of_group[:n] for of_group, n in zip(logits, counts, strict=True)]), axis=-1)
        row["tokens_per_s"] = round(1e3 * rows / row["step_ms"], 1)
        found_of = zip(result.groups or [result], counts, strict=True)
        row["tokens"] = [of_group.token_ids[slot] for of_group, n in found_of for slot in range(n)]
        row["margins"] = [round(float(m), 6) for m in logits[:, -1] - logits[:, -2]]
        row |= {"compile_s": round(compile_s, 2), "ready_s": round(built.ready_s, 2)}
        found.append(row)
    runner.close()  # the weights stay for the next variant
    return found


def force_inputs(runner: Any, counts: Sequence[int]) -> None:
    """Gives rows their numbers as the tokens that come next, instead of what was sampled for them: where sums are
    rounded otherwise a step samples another token now and then, and the next step would be another one."""
    jax, np = importlib.import_module("jax"), importlib.import_module("numpy")
    last = runner._state.last_token
    tokens = np.zeros(last.shape, last.dtype).reshape(len(counts), -1)
    for group, count in enumerate(counts):
        tokens[group, :count] = sum(counts[:group]) + np.arange(count)
    runner._state = runner._state.replace(last_token=jax.device_put(tokens.reshape(-1), last.sharding))


def compare(sections: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each result on several GPUs beside that of the same model on one."""
    rows = []
    for name, section in sections.items():
        base = sections.get(f"{section['model']}-1")
        for variant, found in section["variants"].items():
            for row in found:
                line = {key: row[key] for key in ("rows", "step_ms", "waited_ms", "dispatch_ms", "tokens_per_s",
                                                  "predicted_ms")}  # fmt: skip
                line = {
                    "section": name,
                    "mesh": section["mesh"],
                    "rules": section.get("rules", "tensor"),
                    "variant": variant,
                    **line,
                }
                if base is not None and base is not section:
                    (only,) = base["variants"].values()
                    (one,) = [r for r in only if r["rows"] == row["rows"]]
                    pairs = zip(row["tokens"], one["tokens"], one["margins"], strict=True)
                    margins = [margin for ours, theirs, margin in pairs if ours != theirs]
                    line |= {
                        "speed_up": round(one["step_ms"] / row["step_ms"], 3),
                        "predicted_speed_up": round(one["predicted_ms"] / row["predicted_ms"], 3),
                        "num_other_tokens": len(margins),
                        "largest_margin_of_those": max(margins, default=0.0),
                    }
                rows.append(line)
    return rows


def run_all(args: argparse.Namespace) -> int:
    """Every section in a process of its own; the file is written after each. 1 if any failed."""
    found: dict[str, Any] = {"run": describe(), "sections": {}, "failed": {}}
    if args.out.exists():
        found["sections"] = json.loads(args.out.read_text())["sections"]
    for name in args.sections:
        start_s = time.perf_counter()
        command = [sys.executable, __file__, "--section", name, "--steps", str(args.steps), "--out", str(args.out)]
        command += ["--tiny"] if args.tiny else []
        # NVLink's multicast may be forbidden to guests of a host.
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "JAX_ENABLE_COMPILATION_CACHE": "false"}
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")
        environment["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} {'' if args.tiny else SECTIONS[name].flags}".strip()
        )
        if args.tiny:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
        try:
            done = subprocess.run(command, env=environment, check=False, timeout=args.timeout_s)
            failure = None if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"no end within {args.timeout_s:g} s"
        part = args.out.with_suffix(f".{name}.json")
        if failure is None:
            found["sections"][name] = json.loads(part.read_text())
            part.unlink()
        else:
            found["failed"][name] = failure
            print(f"measure_sharding: {name}: {failure}", file=sys.stderr)
        found["comparison"] = compare(found["sections"])
        write_json(args.out, found)
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", flush=True)
    for line in found.get("comparison", ()):
        print(json.dumps(line))
    return 1 if found["failed"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="which, in this order (default: all)")
    add("--section", choices=SECTIONS, help="measure this one, in this process")
    add("--steps", type=int, default=100, help="launches that a time is taken from (default: %(default)s)")
    add("--timeout-s", type=float, default=120.0, help="of a section (default: %(default)s)")
    add("--tiny", action="store_true", help="tiny models on a CPU: shows that everything runs, and times of no use")
    add("--out", type=Path, required=True, help="JSON file; what it has of other sections stays")
    args = parser.parse_args(argv)
    if args.section is None:
        return run_all(args)
    found = measure(args.section, tiny=args.tiny, num_steps=args.steps)
    write_json(args.out.with_suffix(f".{args.section}.json"), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
