"""Compiles the steps of a model for an H200 on a machine without one, and prints what XLA made of them as JSON.

Runs in an environment of its own (the extra `capture`), since the CUDA plugin must not be installed beside the tests:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_dump_to=FOLDER python compile_steps.py TARGET_CONFIG FOLDER MODEL
"""

import contextlib
import dataclasses
import functools
import glob
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxinfer.models import registry
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.compiled import compile_lowered, lower_long, lower_masks, lower_sampler, lower_small, lower_step
from jaxinfer.runner.long_context import LongContext
from jaxinfer.runner.step import StepBuilder
from jaxinfer.sharding import rules
from pallas_kernels import triton_call

QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    **QWEN3_4B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
QWEN3_5_4B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
QWEN3_5_35B_A3B = {
    **QWEN3_5_4B,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
LONG_TOKENS = 200_000
"""On the host: 29 GB. The target description knows of no host memory, so here these arrays are the device's."""
BUCKETS = (Bucket(True, 1, 1), Bucket(True, 64, 64), Bucket(False, 256, 8))
LARGE = (*BUCKETS[:2], Bucket(False, 8192, 8))
MODELS = {
    "qwen3-4b": (QWEN3_4B, BUCKETS),
    "qwen3-30b-a3b": (QWEN3_30B_A3B, LARGE),
    "qwen3.5-4b": (QWEN3_5_4B, LARGE),
    "qwen3.5-35b-a3b": (QWEN3_5_35B_A3B, LARGE),
}
"""Configs, and the steps that are compiled of each."""


def make_builder(target: str, config: Mapping[str, Any], buckets: tuple[Bucket, ...]) -> StepBuilder:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x1"
    )
    model = registry.from_config(config)
    shape = StateShape(
        cache=model.cache,
        recurrent=model.recurrent,
        num_pages=4000,
        page_size=16,
        num_slots=64,
        max_model_len=1024,
        vocab_rows=model.vocab_rows,
        dtype=jnp.dtype("bfloat16"),
    )
    mesh = topologies.make_mesh(topology, (1,), (rules.TENSOR,))
    return StepBuilder(model=model, shape=shape, vocab_size=model.vocab_rows - 267, mesh=mesh, buckets=buckets)


class Thunk(NamedTuple):
    """A line of XLA's listing of what a program runs, in order."""

    index: int
    kind: str
    label: str  # a kernel's name, for instance
    part: str  # "body" or "condition" of a loop, or "" outside of loops


def read_thunks(text: str) -> list[Thunk]:
    """Loops are not nested here. What a thunk holds is indented under it; a loop's parts have headings."""
    found, part, loop_indent = [], "", 0
    for line in text.splitlines():
        if line.strip() in ("condition:", "body:"):
            part = line.strip(" :")
        elif thunk := re.match(r"( *)(\d+): (k\w+) *(?:\[.*?\])?(.*)", line):
            indent = len(thunk[1])
            if part and indent <= loop_indent:
                part = ""
            if thunk[3] == "kWhile":
                loop_indent = indent
            found.append(Thunk(int(thunk[2]), thunk[3], (thunk[4].split() or [""])[0], part))
    return found


def copied_bytes(thunks: list[Thunk], metadata: str, hlo: str) -> list[int | None]:
    """Of every copy in a loop; None for one that cannot be found in the optimised program."""
    found = re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', metadata)
    names = {int(index): name for name, index in found}
    sizes = []
    for thunk in thunks:
        if "Copy" in thunk.kind and thunk.part:
            shape = re.search(rf"%?{re.escape(names.get(thunk.index, '?'))} = (\w+)\[([\d,]*)\]", hlo)
            sizes.append(shape and math.prod(map(int, filter(None, shape[2].split(",")))) * itemsize(shape[1]))
    return sizes


def itemsize(dtype: str) -> int:
    """Bytes of a number of XLA's dtype; those of less than 8 bits are counted as 8."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@functools.cache
def spilled_bytes(ptx: str) -> int:
    """Registers that the GPU's assembler puts in memory, for a kernel of Triton's; fails if it refuses the kernel."""
    (packages,) = importlib.util.find_spec("nvidia").submodule_search_locations
    (assembler,) = glob.glob(f"{packages}/*/bin/ptxas")
    command = [assembler, "-v", "--gpu-name=sm_90a", "--output-file=/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{assembler} refused a kernel: {done.stderr[-2000:]}")
    return sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))


@contextlib.contextmanager
def recorded_kernels() -> Iterator[list[triton_call.Compiled]]:
    """The Triton kernels that programs which are traced meanwhile call, one for each call."""
    calls, make = [], triton_call._compile

    def compile_and_record(*args):
        calls.append(make(*args))
        return calls[-1]

    triton_call._compile = compile_and_record
    try:
        yield calls
    finally:
        triton_call._compile = make


def facts(builder: StepBuilder, lower: Callable[[], jax.stages.Lowered], dump: str, *, captured: bool) -> dict:
    with recorded_kernels() as kernels:
        lowered = lower()
    for file in glob.glob(f"{dump}/*"):
        os.remove(file)
    compiled = compile_lowered(builder, lowered, captured=captured)
    sequence = "thunk_sequence_after_thunk_passes" if captured else "thunk_sequence"
    listing, metadata = (Path(*glob.glob(f"{dump}/*{name}*")).read_text() for name in (sequence, "metadata"))
    thunks, hlo = read_thunks(listing), compiled.as_text()
    names = {kernel.name for kernel in kernels}
    return {
        "top_level": [re.search(r"\bk[A-Z]\w+", line)[0] for line in listing.splitlines() if re.match(r"\d+:", line)],
        "aliases": re.search(r"input_output_alias={(.*?)}, entry", hlo)[1].count("may-alias"),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "loops": sum(thunk.kind == "kWhile" for thunk in thunks),
        "trip_counts": [int(n) for n in re.findall(r'known_trip_count":{"n":"(\d+)"', hlo)],
        # Besides those that only say where a slice of another's operand is.
        "kernels_in_loop": [
            f"{thunk.kind} {thunk.label}"
            for thunk in thunks
            if thunk.part == "body" and thunk.kind != "kDynamicSliceFusion" and "Copy" not in thunk.kind
        ],
        "copied_bytes_in_loop": copied_bytes(thunks, metadata, hlo),
        "kinds": sorted({thunk.kind for thunk in thunks}),
        "custom_calls": sum(thunk.kind == "kCustomCall" for thunk in thunks),
        "triton_kernels": {name: sorted({thunk.kind for thunk in thunks if thunk.label == name}) for name in names},
        "spilled_bytes": [[kernel.name, spilled_bytes(kernel.ptx)] for kernel in kernels],
    }


def main() -> None:
    target, dump, name = sys.argv[1:]
    config, buckets = MODELS[name]
    builder = make_builder(Path(target).read_text(), config, buckets)
    shardings = rules.shardings(builder.model.specs, builder.mesh)
    params = {
        name: jax.ShapeDtypeStruct(spec.array_shape, jnp.bfloat16, sharding=shardings[name])
        for name, spec in builder.model.specs.items()
    }
    with jax.set_mesh(builder.mesh):
        lower = {str(bucket): functools.partial(lower_step, builder, params, bucket) for bucket in buckets}
        lower["sampler"] = functools.partial(lower_sampler, builder, 64)
        found = {name: facts(builder, how, dump, captured=True) for name, how in lower.items()}
        if config is QWEN3_4B:
            longer = dataclasses.replace(builder, long=LongContext.of("gpu", LONG_TOKENS))
            for size in longer.long.sizes:
                how = functools.partial(lower_long, longer, params, size)
                found[f"long {size} tokens"] = facts(longer, how, dump, captured=False)
        masks = functools.partial(lower_masks, builder, builder.mask_rows[-1])
        found["set_masks"] = facts(builder, masks, dump, captured=False)
        found["set_up_prefix"] = facts(builder, lambda: lower_small(builder)["set_up_prefix"], dump, captured=False)
    print(json.dumps({"state_leaves": len(jax.tree.leaves(builder.abstract_state)), "programs": found}))


if __name__ == "__main__":
    main()
