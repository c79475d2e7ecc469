"""Compiles the Hopper route of paged attention for an H200 on a machine without one; prints what came of it as JSON.

Runs in an environment of its own, as tests/capture/compile_steps.py does:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_dump_to=FOLDER MOSAIC_GPU_DUMP_TO=FOLDER python mosaic_compile.py TARGET FOLDER
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

from pallas_kernels.paged_attention import mosaic_prefill
from pallas_kernels.paged_attention.api import PagedRows

NUM_HEADS, NUM_KV_HEADS, WIDTH = 32, 8, 128  # Qwen3-4B
POOL = (36, 4000, 16, NUM_KV_HEADS, WIDTH)  # [L, P, S, K, E]
NUM_ROWS, TABLE_WIDTH = 8, 1024


def facts(mesh: jax.sharding.Mesh, num_tokens: int, dump: str) -> dict[str, object]:
    """The pools are Refs made inside the jit, as in a step; queries and pools are donated."""

    def array(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def attend(q, k_pool, v_pool, layer, rows):
        ref, pools = jax.new_ref(q), (jax.new_ref(k_pool), jax.new_ref(v_pool))
        mosaic_prefill.attend_rows(ref, pools, layer, rows, scale=WIDTH**-0.5)
        return jax.freeze(ref), jax.freeze(pools[0]), jax.freeze(pools[1])

    for file in glob.glob(f"{dump}/*"):
        os.remove(file)
    integers = jnp.int32
    rows = PagedRows(
        array((NUM_ROWS, TABLE_WIDTH), integers),
        *[array((NUM_ROWS,), integers)] * 3,
        *[array((num_tokens,), integers)] * 3,
    )
    q, pool = array((num_tokens, NUM_HEADS, WIDTH), jnp.bfloat16), array(POOL, jnp.bfloat16)
    lowered = jax.jit(attend, donate_argnums=(0, 1, 2)).lower(q, pool, pool, array((), integers), rows)
    compiled = lowered.compile()
    (thunks,) = glob.glob(f"{dump}/*thunk_sequence_after_thunk_passes*")
    (assembler,) = glob.glob(f"{dump}/*.ptxas")
    (code,) = glob.glob(f"{dump}/*.ptx")
    text = Path(thunks).read_text()
    return {
        "top_level": [re.search(r"\bk[A-Z]\w+", line)[0] for line in text.splitlines() if re.match(r"\d+:", line)],
        "copies": len(re.findall(r"kCopy\b", text)),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", Path(assembler).read_text())[1]),
        "wgmma": Path(code).read_text().count("wgmma.mma_async"),
    }


def main() -> None:
    target, dump = sys.argv[1:]
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=Path(target).read_text(), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("tensor",))
    with jax.set_mesh(mesh):
        print(json.dumps({f"{tokens} tokens": facts(mesh, tokens, dump) for tokens in (8192, 2048)}))


if __name__ == "__main__":
    main()
