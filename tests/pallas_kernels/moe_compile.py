"""Compiles layers of experts for an H200 on a machine without one; prints what came of it as JSON.

Runs in an environment of its own, as tests/capture/compile_steps.py does:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_dump_to=FOLDER python moe_compile.py TARGET FOLDER
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.runner.compiled import GPU_OPTIONS
from pallas_kernels.dispatch import Target
from pallas_kernels.linear.api import Norm
from pallas_kernels.moe.api import Experts, moe
from tests.capture.compile_steps import read_thunks, recorded_kernels, spilled_bytes

HOPPER = Target("gpu", 90)
LAYERS = 4


class Model(NamedTuple):
    """Sizes of a layer of experts; `here` of the `experts` are on the device."""

    depth: int
    width: int
    experts: int
    here: int
    top_k: int


MODELS = {
    "Qwen3-30B-A3B": (Model(2048, 768, 128, 128, 8), (1, 2, 8, 16, 64, 256, 1024, 8192)),
    "Qwen3-Next, a quarter": (Model(2048, 512, 512, 128, 10), (1, 32, 2048)),
    "Mixtral": (Model(4096, 14336, 8, 8, 2), (1, 8, 512)),
    "Qwen1.5-MoE": (Model(2048, 1408, 60, 60, 4), (1, 9, 512)),
}
"""By name: sizes, and numbers of tokens."""


def facts(mesh: jax.sharding.Mesh, model: Model, tokens: int, dump: str) -> dict[str, object]:
    """Of a loop over layers, as a step has it."""
    m = model

    def array(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def layers(x, experts, norm, first, valid):
        counters = jax.new_ref(jnp.zeros(4096, jnp.int32))

        def body(state):
            layer, x = state
            how = {"top_k": m.top_k, "renormalise": True, "first_expert": first, "valid": valid, "target": HOPPER}
            return layer + 1, moe(x, experts, layer, norm=Norm(norm, 1e-6), residual=x, counters=counters, **how)

        return jax.lax.while_loop(lambda state: state[0] < LAYERS, body, (jnp.zeros((), jnp.int32), x))[1]

    for file in glob.glob(f"{dump}/*"):
        os.remove(file)
    weights = Experts(
        array(LAYERS, m.experts, m.depth),
        array(LAYERS, m.here, 2, m.width, m.depth),
        array(LAYERS, m.here, m.depth, m.width),
    )
    rest = array(LAYERS, m.depth), array(dtype=jnp.int32), array(tokens, dtype=jnp.bool_)
    with recorded_kernels() as kernels:
        lowered = jax.jit(layers, donate_argnums=0).lower(array(tokens, m.depth), weights, *rest)
    compiled = lowered.compile(compiler_options=GPU_OPTIONS)
    (listing,) = glob.glob(f"{dump}/*thunk_sequence_after_thunk_passes*")
    text = Path(listing).read_text()
    body = [thunk for thunk in read_thunks(text) if thunk.part == "body"]
    return {
        "top_level": [re.search(r"\bk[A-Z]\w+", line)[0] for line in text.splitlines() if re.match(r"\d+:", line)],
        "kernels_in_loop": [
            f"{thunk.kind} {thunk.label}"
            for thunk in body
            if thunk.kind != "kDynamicSliceFusion" and "Copy" not in thunk.kind
        ],
        "copies_in_loop": sum("Copy" in thunk.kind for thunk in body),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernels": {kernel.name: [spilled_bytes(kernel.ptx), kernel.shared_bytes] for kernel in kernels},
    }


def main() -> None:
    target, dump = sys.argv[1:]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=Path(target).read_text(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("tensor",))
    with jax.set_mesh(mesh):
        found = {
            f"{name}, {tokens} tokens": facts(mesh, model, tokens, dump)
            for name, (model, all_tokens) in MODELS.items()
            for tokens in all_tokens
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
