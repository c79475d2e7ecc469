"""What XLA makes of the steps of sparse and hybrid models on an H200, learned without one."""

import pytest

from tests.capture import environment

STEPS = ("decode 1 rows", "decode 64 rows", "mixed 8192 tokens, 8 rows")
MAX_TEMP_MB = dict(zip(STEPS, (4, 64, 1500), strict=True))
"""The weights of a layer's experts are 1.2 GB and more, the states of 64 sequences 3.2 GB."""
TURNS = {"qwen3-30b-a3b": 48, "qwen3.5-4b": 8, "qwen3.5-35b-a3b": 10}
"""Of the loop over the layers: a hybrid takes four layers a turn."""
MAX_KERNELS = {
    "qwen3-30b-a3b": dict(zip(STEPS, (8, 12, 16), strict=True)),
    "qwen3.5-4b": dict(zip(STEPS, (33, 45, 56), strict=True)),
    "qwen3.5-35b-a3b": dict(zip(STEPS, (63, 79, 92), strict=True)),
}
"""Of a turn: on an H200 each of them takes 1 us and more of a step besides its work."""
SPILLED_BYTES = 300
"""Of registers, in the decode attention of wide heads and large groups."""

pytestmark = [pytest.mark.long, pytest.mark.capture, pytest.mark.timeout(900)]
of_every_step = pytest.mark.parametrize("step", STEPS)


@pytest.fixture(scope="module", params=list(TURNS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(family, tmp_path_factory):
    dump = tmp_path_factory.mktemp("xla")
    script = "tests/capture/compile_steps.py"
    return environment.run(script, environment.H200, dump, family, timeout_s=900, XLA_FLAGS=f"--xla_dump_to={dump}")


@of_every_step
def test_a_step_is_one_graph_whose_state_keeps_its_buffers(compiled, step):
    found = compiled["programs"][step]
    assert found["top_level"] == ["kCommandBuffer"]
    assert found["aliases"] == compiled["state_leaves"]


@of_every_step
def test_no_step_needs_room_for_a_copy_of_experts_or_states(compiled, step):
    assert compiled["programs"][step]["temp_bytes"] / 1e6 < MAX_TEMP_MB[step]


@of_every_step
def test_the_layers_are_one_loop_that_copies_no_weights_and_takes_few_kernels(compiled, family, step):
    found = compiled["programs"][step]
    assert found["trip_counts"] == [TURNS[family]]
    assert None not in found["copied_bytes_in_loop"] and sum(found["copied_bytes_in_loop"]) <= 64
    assert 0 < len(found["kernels_in_loop"]) <= MAX_KERNELS[family][step], found["kernels_in_loop"]
    assert not [kernel for kernel in found["kernels_in_loop"] if "concatenate" in kernel]


@of_every_step
def test_every_kernel_of_triton_is_a_node_of_the_graph(compiled, step):
    found = compiled["programs"][step]["triton_kernels"]
    assert found
    assert set(map(tuple, found.values())) == {("kCustomKernel",)}, found


@pytest.mark.parametrize("step", STEPS[:2])
def test_the_kernels_of_a_decode_step_spill_next_to_no_registers(compiled, step):
    spilled = compiled["programs"][step]["spilled_bytes"]
    assert spilled
    assert {name for name, size in spilled if size} <= {"_decode_attention"}
    assert max(size for _, size in spilled) <= SPILLED_BYTES
