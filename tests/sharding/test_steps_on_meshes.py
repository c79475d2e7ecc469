"""Logits of random legal meshes of up to eight devices equal those of one."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from jaxinfer.models import registry
from jaxinfer.sharding import rules
from jaxinfer.sharding.mesh import AXES, ShardingError
from jaxinfer.sharding.report import all_meshes
from tests.sharding.configs import CONFIGS

ROOT = Path(__file__).parents[2]
NUM_CASES, PER_PROCESS, SEED = 30, 5, 10
TOLERANCE = 1e-4


def candidates():
    for name, preset, count in itertools.product(CONFIGS, rules.PRESETS, (2, 4, 8)):
        for sizes in all_meshes(count):
            yield {"model": name, "mesh": sizes, "rules": preset}


def is_legal(case):
    mesh = AbstractMesh(tuple(case["mesh"].values()), tuple(case["mesh"]))
    try:
        registry.for_mesh(CONFIGS[case["model"]], (), mesh, rules.PRESETS[case["rules"]])
    except ShardingError:
        return False
    return True


def chosen():
    """As many of each family, which then share what one device gives."""
    drawn, found = random.Random(SEED), []
    for name in CONFIGS:
        legal = [case for case in candidates() if case["model"] == name and is_legal(case)]
        found += drawn.sample(legal, NUM_CASES // len(CONFIGS))
    return found


def test_random_meshes_are_of_every_family_and_every_axis():
    cases = chosen()
    assert len(cases) == NUM_CASES
    assert {case["model"] for case in cases} == set(CONFIGS)
    assert {axis for case in cases for axis in case["mesh"]} == set(AXES)
    assert {case["rules"] for case in cases} == set(rules.PRESETS)
    assert {len(case["mesh"]) for case in cases} >= {1, 2, 3}
    # Experts for the tokens of all, with attention on each device's own.
    sparse = [case for case in cases if case["model"] in ("qwen3_moe", "qwen3_next") and "expert" in case["mesh"]]
    assert {case["rules"] for case in sparse} == set(rules.PRESETS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, NUM_CASES, PER_PROCESS))
def test_logits_on_a_random_legal_mesh_equal_those_of_one_device(first):
    cases = chosen()[first : first + PER_PROCESS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, ROOT / "tests/sharding/steps_on_meshes.py", json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    print(f"seed {SEED}: {cases}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = [(case, result) for case, result in zip(cases, found, strict=True) if not result["difference"] <= TOLERANCE]
    assert not wrong
    # Logits in which nothing differs from token to token would equal anything.
    assert all(result["spread"] > 0.05 for result in found), found
