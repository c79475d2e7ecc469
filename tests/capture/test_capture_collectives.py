"""What XLA makes of decode steps of two H200s whose kernels write to each other, learned without one."""

import pytest

from tests.capture import environment

SCRIPT = "tests/capture/compile_collectives.py"
GATHER_OF_LOGITS = ["kCommandBuffer", "kAllGather", "kCommandBuffer"]
"""19 MB of 64 rows are more than what kernels of ours gather."""
TOP_LEVEL = {
    "tensor, decode 1 rows": ["kCommandBuffer"],
    "tensor, decode 64 rows": GATHER_OF_LOGITS,
    "expert, decode 1 rows": ["kCommandBuffer"],
    "expert, decode 64 rows": ["kCommandBuffer"],
}
SUMS = {"tensor": 2, "expert": 1}
"""Of a layer."""

pytestmark = [pytest.mark.long, pytest.mark.capture, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    dump = tmp_path_factory.mktemp("xla")
    return environment.run(SCRIPT, environment.H200, dump, timeout_s=900, XLA_FLAGS=f"--xla_dump_to={dump}")


@pytest.mark.parametrize("step", TOP_LEVEL)
def test_a_step_is_one_graph_but_for_large_gathers(compiled, step):
    assert compiled["programs"][step]["top_level"] == TOP_LEVEL[step]


@pytest.mark.parametrize("step", TOP_LEVEL)
def test_a_layer_sums_by_kernels_of_the_graph_and_copies_nothing(compiled, step):
    found = compiled["programs"][step]
    assert found["kernels_in_loop"].count("kCustomKernel _collective") == SUMS[step.split(",")[0]]
    assert found["copied_bytes_in_loop"] == [] and found["aliases"] == compiled["state_leaves"]
    assert all(spilled == 0 for name, spilled in found["spilled_bytes"] if name == "_collective")
