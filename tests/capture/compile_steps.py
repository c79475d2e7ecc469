"""Compiles the steps of a model for an H200 on a machine without one, and prints what XLA made of them as JSON.

Runs in an environment of its own (the extra `capture`), since the CUDA plugin must not be installed beside the tests:

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_dump_to=FOLDER python compile_steps.py TARGET_CONFIG FOLDER
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

from jaxinfer.models import registry
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.compiled import compile_lowered, lower_sampler, lower_step
from jaxinfer.runner.step import StepBuilder
from jaxinfer.sharding import rules
from pallas_kernels.paged_attention import reference

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
BUCKETS = (Bucket(True, 1, 1), Bucket(True, 64, 64), Bucket(False, 256, 8))


def make_builder(target: str) -> StepBuilder:
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x1"
    )
    # The backend of this process is the CPU, but what is compiled takes the GPU's pass over the context.
    reference.KEY_CHUNK["cpu"] = reference.KEY_CHUNK["gpu"]
    model = registry.from_config(QWEN3_4B)
    shape = StateShape(
        cache=model.cache,
        num_pages=4000,
        page_size=16,
        num_slots=64,
        max_model_len=1024,
        vocab_rows=model.vocab_rows,
        dtype=jnp.dtype("bfloat16"),
    )
    mesh = topologies.make_mesh(topology, (1,), (rules.TENSOR,))
    return StepBuilder(model=model, shape=shape, vocab_size=model.vocab_rows, mesh=mesh, buckets=BUCKETS)


def facts(builder: StepBuilder, lowered: jax.stages.Lowered, dump: str) -> dict[str, object]:
    for file in glob.glob(f"{dump}/*"):
        os.remove(file)
    compiled = compile_lowered(builder, lowered)
    (thunks,) = glob.glob(f"{dump}/*thunk_sequence_after_thunk_passes*")
    text = Path(thunks).read_text()
    return {
        "top_level": [re.search(r"\bk[A-Z]\w+", line)[0] for line in text.splitlines() if re.match(r"\d+:", line)],
        "aliases": re.search(r"input_output_alias={(.*?)}, entry", compiled.as_text())[1].count("may-alias"),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "matmuls": len(re.findall(r"kCublasLtMatmul +\[", text)),
    }


def main() -> None:
    target, dump = sys.argv[1:]
    builder = make_builder(Path(target).read_text())
    shardings = rules.shardings(builder.model.specs, builder.mesh)
    params = {
        name: jax.ShapeDtypeStruct(spec.array_shape, jnp.bfloat16, sharding=shardings[name])
        for name, spec in builder.model.specs.items()
    }
    with jax.set_mesh(builder.mesh):
        found = {str(bucket): facts(builder, lower_step(builder, params, bucket), dump) for bucket in BUCKETS}
        found["sampler"] = facts(builder, lower_sampler(builder, 64), dump)
    print(json.dumps({"state_leaves": len(jax.tree.leaves(builder.abstract_state)), "programs": found}))


if __name__ == "__main__":
    main()
