"""Whole engines on meshes give the tokens of transformers: with a prefix cache, and with too few pages for all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.sharding import rules
from jaxinfer.sharding.mesh import AXES
from jaxinfer.types import Request
from tests.engine.drive import build, drive, num_equal
from tests.sharding import engines_on_meshes

ROOT = Path(__file__).parents[2]
WITHOUT_DELTA = {axis: over for axis, over in rules.TENSOR_PARALLEL.items() if axis != "delta_heads"}
CASES = {
    "llama": [
        ({"tensor": 4}, "tensor"),
        ({"data": 2, "pipeline": 2, "tensor": 2}, "tensor"),
        ({"data": 4, "tensor": 2}, "whole-experts"),
        ({"expert": 2, "sequence": 2, "tensor": 2}, "data-attention"),
        ({"expert": 2, "tensor": 2}, "expert-heads"),
    ],
    "qwen3": [
        ({"sequence": 2, "tensor": 4}, "tensor"),
        ({"pipeline": 2, "sequence": 2, "tensor": 2}, "whole-experts"),
        ({"data": 2, "expert": 2, "tensor": 2}, "data-attention"),
        ({"expert": 2, "tensor": 2}, "expert-heads"),
    ],
    "qwen3_moe": [
        ({"data": 2, "expert": 2, "tensor": 2}, "tensor"),
        ({"sequence": 2, "expert": 2, "tensor": 2}, "whole-experts"),
        ({"data": 2, "expert": 4}, "data-attention"),
        ({"sequence": 2, "expert": 2, "tensor": 2}, "data-attention"),
        ({"expert": 2, "tensor": 2}, "expert-heads"),
    ],
    "qwen3_5": [
        ({"pipeline": 2, "tensor": 2}, "tensor"),
        ({"data": 2, "sequence": 2, "tensor": 2}, "whole-experts"),
        ({"expert": 2, "sequence": 2, "pipeline": 2}, "data-attention"),
        ({"expert": 2, "pipeline": 2}, "expert-heads"),
        ({"tensor": 4}, WITHOUT_DELTA),
    ],
}
"""Every preset with every family, and every axis."""


def test_every_family_is_served_by_every_preset_and_some_mesh_has_each_axis():
    for cases in CASES.values():
        assert {name for _, name in cases if isinstance(name, str)} >= set(rules.PRESETS)
    assert {axis for cases in CASES.values() for sizes, _ in cases for axis in sizes} == set(AXES)


def test_each_device_along_experts_attends_to_sequences_of_its_own():
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    engines_on_meshes.check(engines_on_meshes.run("qwen3_moe", {"expert": 2, "tensor": 2}, "data-attention"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", CASES)
def test_meshes_give_the_tokens_of_transformers_with_prefix_hits_and_preemption(family):
    cases = [{"family": family, "mesh": mesh, "rules": axis_rules} for mesh, axis_rules in CASES[family]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, ROOT / "tests/sharding/engines_on_meshes.py", json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for found in json.loads(done.stdout.splitlines()[-1]):
        engines_on_meshes.check(found)


def test_a_mesh_and_rules_of_the_users_own_serve(golden):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices; 4 are needed")
    expected = golden("llama")
    mesh = Mesh(np.asarray(jax.devices()[4:1:-1][:2]), ("mine",))
    engine = build(
        expected.folder, mesh=mesh, rules={"kv_heads": "mine", "mlp": ("mine",)}, **engines_on_meshes.OPTIONS
    )
    request = Request(request_id="a", prompt_ids=expected.prompts[1].tolist(), max_tokens=4, temperature=0.0)
    output = drive(engine, [request])["a"]
    devices = engine._runner._state.k_pages.sharding.device_set
    engine.close()
    num_equal(output.tokens, expected.tokens[1][:4].tolist(), expected.margins[1])
    assert devices == set(mesh.devices.flat)
