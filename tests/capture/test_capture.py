"""What XLA makes of the steps on an H200, learned without one: one graph each, and every buffer in its place."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-capture" / "bin" / "python"
TARGET = ROOT / "tests" / "data" / "h200_target_config.pbtxt"
STEPS = ("decode 1 rows", "decode 64 rows", "mixed 256 tokens, 8 rows")

pytestmark = [pytest.mark.long, pytest.mark.capture]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    if not PYTHON.exists():
        pytest.skip("no .venv-capture: run JAXINFER_VENV=.venv-capture bash scripts/setup.sh capture")
    # What conftest sets for the tests on the CPU would change what is compiled.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    dump = tmp_path_factory.mktemp("xla")
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_dump_to={dump}"}
    script = ROOT / "tests" / "capture" / "compile_steps.py"
    run = subprocess.run(
        [PYTHON, script, TARGET, dump], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", [*STEPS, "sampler"])
def test_a_program_is_one_graph(compiled, program):
    assert compiled["programs"][program]["top_level"] == ["kCommandBuffer"]


@pytest.mark.parametrize("program", [*STEPS, "sampler"])
def test_every_part_of_the_state_keeps_its_buffer(compiled, program):
    assert compiled["programs"][program]["aliases"] == compiled["state_leaves"]


def test_no_step_needs_room_for_a_copy_of_weights_or_cache(compiled):
    """The largest weight is the embedding, 778 MB; a layer's slice of all weights is 200 MB; the cache is 9.4 GB."""
    temp_mb = {name: compiled["programs"][name]["temp_bytes"] / 1e6 for name in STEPS}
    assert temp_mb["decode 1 rows"] < 64
    assert temp_mb["mixed 256 tokens, 8 rows"] < 256
    assert temp_mb["decode 64 rows"] < 1024


def test_the_layers_are_one_loop(compiled):
    """Four products with weights and two of attention in the layer, one with the head, for all 36 layers."""
    assert compiled["programs"]["decode 1 rows"]["matmuls"] == 7
