"""What XLA makes of the steps on an H200, learned without one: one graph each, and every buffer in its place."""

import pytest

from tests.capture import environment

SCRIPT = "tests/capture/compile_steps.py"
MAX_TEMP_MB = {"decode 1 rows": 4, "decode 64 rows": 32, "mixed 256 tokens, 8 rows": 96}
"""The largest weight is the embedding, 778 MB; a layer's slice of all weights is 200 MB; the cache is 9.4 GB."""
MAX_KERNELS = {"decode 1 rows": 8, "decode 64 rows": 11, "mixed 256 tokens, 8 rows": 11}
"""Of a layer: on an H200 each of them takes 2 us and more of a step besides its work."""
STEPS = tuple(MAX_TEMP_MB)
NUM_LAYERS = 36
MAX_LONG_TEMP_MB = {"long 1 tokens": 16, "long 1024 tokens": 400}
"""What the step computes for the host is 151 MB of the latter."""
of_every_step = pytest.mark.parametrize("step", STEPS)
of_every_program = pytest.mark.parametrize("program", [*STEPS, "sampler"])

pytestmark = [pytest.mark.long, pytest.mark.capture, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    dump = tmp_path_factory.mktemp("xla")
    flags = f"--xla_dump_to={dump}"
    return environment.run(SCRIPT, environment.H200, dump, "qwen3-4b", timeout_s=900, XLA_FLAGS=flags)


@of_every_program
def test_a_program_is_one_graph(compiled, program):
    assert compiled["programs"][program]["top_level"] == ["kCommandBuffer"]


@of_every_program
def test_every_part_of_the_state_keeps_its_buffer(compiled, program):
    assert compiled["programs"][program]["aliases"] == compiled["state_leaves"]


def test_a_prefix_is_put_in_place_by_a_few_kernels_with_room_for_a_page(compiled):
    """A page of all layers is 2.4 MB, keys and values together."""
    found = compiled["programs"]["set_up_prefix"]
    assert found["aliases"] == compiled["state_leaves"] + 1  # with the staged inputs
    assert found["temp_bytes"] < 2.5e6
    assert set(found["kinds"]) <= {"kCustomKernel", "kCopy"} and len(found["top_level"]) <= 8


def test_masks_are_put_in_place_by_a_few_kernels_with_room_for_their_biases(compiled):
    """16 rows of 151,936 float32 are 9.7 MB."""
    found = compiled["programs"]["set_masks"]
    assert found["aliases"] == compiled["state_leaves"]
    assert found["temp_bytes"] < 10e6
    assert set(found["kinds"]) <= {"kCustomKernel", "kCopy"} and len(found["top_level"]) <= 5


@pytest.mark.parametrize("step", MAX_LONG_TEMP_MB)
def test_a_long_step_keeps_every_buffer_and_copies_no_context(compiled, step):
    found = compiled["programs"][step]
    assert found["aliases"] == compiled["state_leaves"]
    assert found["temp_bytes"] / 1e6 < MAX_LONG_TEMP_MB[step]


@of_every_step
def test_no_step_needs_room_for_a_copy_of_weights_or_cache(compiled, step):
    assert compiled["programs"][step]["temp_bytes"] / 1e6 < MAX_TEMP_MB[step]


@of_every_step
def test_the_layers_are_one_loop_whose_length_is_known(compiled, step):
    found = compiled["programs"][step]
    assert found["loops"] == 1
    assert found["trip_counts"] == [NUM_LAYERS]


@of_every_step
def test_no_layer_copies_more_than_its_number(compiled, step):
    copied = compiled["programs"][step]["copied_bytes_in_loop"]
    assert None not in copied
    assert sum(copied) <= 16


@of_every_step
def test_a_layer_takes_few_kernels(compiled, step):
    kernels = compiled["programs"][step]["kernels_in_loop"]
    assert 0 < len(kernels) <= MAX_KERNELS[step], kernels


@of_every_step
def test_every_kernel_of_triton_is_a_node_of_the_graph(compiled, step):
    """A custom call is a graph in the graph, prepared anew at every launch. Only Mosaic's kernel is one."""
    found = compiled["programs"][step]
    assert found["triton_kernels"]
    assert set(map(tuple, found["triton_kernels"].values())) == {("kCustomKernel",)}, found["triton_kernels"]
    assert found["custom_calls"] == (0 if step.startswith("decode") else 1)


@pytest.mark.parametrize("step", [step for step in STEPS if step.startswith("decode")])
def test_no_kernel_of_a_decode_step_spills_registers(compiled, step):
    spilled = compiled["programs"][step]["spilled_bytes"]
    assert spilled
    assert {name: size for name, size in spilled if size} == {}


def test_the_sampler_neither_asks_the_host_nor_sorts_the_vocabulary(compiled):
    found = compiled["programs"]["sampler"]
    assert len(found["triton_kernels"]) == 4
    assert found["kinds"]
    assert not [kind for kind in found["kinds"] if "Conditional" in kind or "Sort" in kind or "While" in kind]
    assert {name: size for name, size in found["spilled_bytes"] if size} == {}
