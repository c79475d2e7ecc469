"""Layers of experts of published sizes, compiled for an H200 on a machine without one."""

from __future__ import annotations

import pytest

from tests.capture import environment

MAX_KERNELS = {"Qwen3-30B-A3B, 1 tokens": 4, "Qwen3-30B-A3B, 8 tokens": 6, "Qwen3-30B-A3B, 256 tokens": 7}
"""Of a layer; above 256 tokens 8. A kernel takes 2 us and more of a step besides its work."""
LIMIT_BYTES = 227 * 1024
"""Shared memory of a program on Hopper."""

pytestmark = [pytest.mark.long, pytest.mark.capture, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """By model and number of tokens."""
    dump = tmp_path_factory.mktemp("xla")
    flags = f"--xla_dump_to={dump}"
    return environment.run("tests/pallas_kernels/moe_compile.py", environment.H200, dump, XLA_FLAGS=flags)


def test_layers_of_experts_are_one_graph(compiled):
    assert len(compiled) > 15
    assert {name: found["top_level"] for name, found in compiled.items()} == dict.fromkeys(compiled, ["kCommandBuffer"])


def test_no_kernel_spills_and_each_fits_its_multiprocessor(compiled):
    wrong = {
        name: {kernel: sizes for kernel, sizes in found["kernels"].items() if sizes[0] or sizes[1] > LIMIT_BYTES}
        for name, found in compiled.items()
    }
    assert not any(wrong.values()), wrong


def test_no_expert_is_copied_and_a_long_chunk_needs_room_for_its_choices_alone(compiled):
    """A layer's experts are 1.2 GB of Qwen3-30B-A3B; 65,536 choices 100 MB before the last product, 268 MB after it."""
    for name, found in compiled.items():
        assert found["temp_bytes"] / 1e6 < (450 if name == "Qwen3-30B-A3B, 8192 tokens" else 120), name


def test_a_layer_is_few_kernels(compiled):
    for name, found in compiled.items():
        kernels = [kernel for kernel in found["kernels_in_loop"] if "loop_add_fusion" not in kernel]  # that counts
        if "30B" in name:
            tokens = int(name.split(", ")[1].split()[0])
            most = 4 if tokens <= 4 else 6 if tokens <= 16 else 7 if tokens <= 256 else 8
            assert len(kernels) <= most, (name, kernels)
