"""Compiles the gated delta rule for an H200 on a machine without one, in the shapes of published models; prints JSON.

Runs in an environment of its own, as tests/capture/compile_steps.py does:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_dump_to=FOLDER python delta_compile.py TARGET FOLDER
"""

import glob
import json
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.runner.compiled import GPU_OPTIONS
from pallas_kernels.delta_rule import api
from pallas_kernels.delta_rule.cases import QWEN35_08B, QWEN35_4B, QWEN35_27B
from pallas_kernels.dispatch import Target
from tests.capture.compile_steps import read_thunks, recorded_kernels, spilled_bytes

LAYERS, SLOTS = 24, 256
CALLS = {
    "decode, 1 row": (QWEN35_4B, 1, 1),
    "decode, 64 rows": (QWEN35_4B, 64, 64),
    "decode, 64 rows, group of 3": (QWEN35_27B, 64, 64),
    "8192 tokens, 8 rows": (QWEN35_4B, 8192, 8),
    "2048 tokens, 256 rows": (QWEN35_4B, 2048, 256),
    "2048 tokens, 8 rows, group of 1": (QWEN35_08B, 2048, 8),
    "2048 tokens, 8 rows, group of 3": (QWEN35_27B, 2048, 8),
}
"""Heads, tokens and rows. As many rows as tokens is a decode step."""


def facts(mesh: jax.sharding.Mesh, heads: dict[str, int], tokens: int, rows: int, dump: str) -> dict[str, object]:
    """A loop over the layers, the pools donated and Refs made inside the jit, as in a step."""
    key_heads, group, key_width, value_width = heads.values()
    channels = 2 * key_width + group * value_width

    def array(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    how = {"max_query_len": 1 if tokens == rows else tokens, "target": Target("gpu", 90)}

    def step(state, conv, x, weights, places):
        pools = api.DeltaPools(jax.new_ref(state), jax.new_ref(conv))
        plan = api.plan(places, **how)

        def body(total, layer):
            out = api.delta_rule(x, weights, pools, layer, places, eps=1e-6, plan=plan, **how)
            return total + out[-1], None

        start = jnp.zeros((key_heads, group, value_width), x.dtype)
        total, _ = jax.lax.scan(body, start, jnp.arange(LAYERS, dtype=jnp.int32))
        return jax.freeze(pools.state), jax.freeze(pools.conv), total

    for file in glob.glob(f"{dump}/*"):
        os.remove(file)
    half, integers = jnp.bfloat16, jnp.int32
    weights = api.DeltaWeights(
        array(LAYERS, key_heads, channels, api.TAPS, dtype=half),
        array(LAYERS, key_heads, group),
        array(LAYERS, key_heads, group),
        array(LAYERS, value_width, dtype=half),
    )
    arguments = (
        array(LAYERS, SLOTS + 1, key_heads, group, key_width, value_width),
        array(LAYERS, SLOTS + 1, api.TAPS, key_heads, channels),
        array(tokens, key_heads, channels + group * value_width + 2 * group, dtype=half),
        weights,
        api.SlotRows(*[array(rows, dtype=integers)] * 4, *[array(tokens, dtype=integers)] * 2),
    )
    with recorded_kernels() as kernels:
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments)
    compiled = lowered.compile(compiler_options=GPU_OPTIONS)
    (listing,) = glob.glob(f"{dump}/*thunk_sequence_after_thunk_passes*")
    text = Path(listing).read_text()
    thunks = [thunk for thunk in read_thunks(text) if thunk.part == "body"]
    return {
        "top_level": [re.search(r"\bk[A-Z]\w+", line)[0] for line in text.splitlines() if re.match(r"\d+:", line)],
        "aliases": re.search(r"input_output_alias={(.*?)}, entry", compiled.as_text())[1].count("may-alias"),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "calls": [thunk.label for thunk in thunks if thunk.label in {kernel.name for kernel in kernels}],
        "spilled_bytes": {kernel.name: spilled_bytes(kernel.ptx) for kernel in kernels},
        "tensor_core_instructions": {kernel.name: kernel.ptx.count("wgmma.mma_async") for kernel in kernels},
    }


def main() -> None:
    target, dump = sys.argv[1:]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=Path(target).read_text(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("tensor",))
    api.ROUTES = api.ROUTES[:1]
    with jax.set_mesh(mesh):
        print(json.dumps({name: facts(mesh, *call, dump) for name, call in CALLS.items()}))


if __name__ == "__main__":
    main()
