"""Whole engines on meshes give the tokens of transformers: with a prefix cache, and with too few pages for all."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.sharding import rules
from jaxinfer.types import Request
from tests.engine.drive import build, drive, num_equal

OPTIONS = {"page_size": 8, "num_pages": 12, "max_num_seqs": 3, "max_num_batched_tokens": 16}
"""Pages for two of the three prompts and their answers."""
WITHOUT_DELTA = {axis: over for axis, over in rules.TENSOR_PARALLEL.items() if axis != "delta_heads"}
long = pytest.mark.long
CASES = [
    ("qwen3_moe", {"expert": 2, "tensor": 2}, "tensor"),
    pytest.param("qwen3_moe", {"expert": 4}, "tensor", marks=long),
    pytest.param("qwen3_moe", {"tensor": 4}, "tensor", marks=long),
    pytest.param("qwen3_moe", {"tensor": 4}, "whole-experts", marks=long),
    pytest.param("llama", {"tensor": 4}, "tensor", marks=long),
    pytest.param("llama", {"pipeline": 2, "tensor": 2}, "tensor", marks=long),
    pytest.param("qwen3", {"tensor": 4}, "tensor", marks=long),
    pytest.param("qwen3", {"pipeline": 2, "tensor": 2}, "tensor", marks=long),
    pytest.param("qwen3_5", {"pipeline": 2, "tensor": 2}, "tensor", marks=long),
    pytest.param("qwen3_5", {"tensor": 4}, WITHOUT_DELTA, marks=long),
]


@pytest.mark.parametrize(("family", "mesh", "axis_rules"), CASES, ids=str)
def test_a_mesh_gives_the_tokens_of_transformers_with_prefix_hits_and_preemption(family, mesh, axis_rules, golden):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    expected = golden(family)
    engine = build(expected.folder, mesh=mesh, rules=axis_rules, **OPTIONS)
    found = list(zip(expected.prompts, expected.tokens, expected.margins, strict=True))[:3]
    requests = [
        Request(request_id=f"{i} {turn}", prompt_ids=found[i][0].tolist(), max_tokens=16, temperature=0.0)
        for turn in range(2)
        for i in range(3)
    ]
    outputs = drive(engine, requests, arrivals=[0, 0, 0, 40, 40, 40])
    stats, has_states = engine.stats(), engine._runner._builder.model.recurrent is not None
    engine.close()
    for request in requests:
        _, tokens, margins = found[int(request.request_id[0])]
        num_equal(outputs[request.request_id].tokens, tokens.tolist(), margins)
    assert stats.num_preemptions > 0
    # These prompts are shorter than what lies between two copies of recurrent states.
    assert (stats.cached_prompt_tokens > 0) != has_states


def test_a_mesh_and_rules_of_the_users_own_serve(golden):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    expected = golden("llama")
    mesh = Mesh(np.asarray(jax.devices()[4:1:-1][:2]), ("mine",))
    engine = build(expected.folder, mesh=mesh, rules={"kv_heads": "mine", "mlp": ("mine",)}, **OPTIONS)
    request = Request(request_id="a", prompt_ids=expected.prompts[1].tolist(), max_tokens=4, temperature=0.0)
    output = drive(engine, [request])["a"]
    devices = engine._runner._state.k_pages.sharding.device_set
    engine.close()
    num_equal(output.tokens, expected.tokens[1][:4].tolist(), expected.margins[1])
    assert devices == set(mesh.devices.flat)
