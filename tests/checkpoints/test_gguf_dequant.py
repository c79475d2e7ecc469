import gguf
import numpy as np
import pytest

from checkpoints import gguf_dequant
from checkpoints.gguf_dequant import TYPES, UNSUPPORTED_NAMES, dequantise

TYPE_IDS = {kind.name: number for number, kind in TYPES.items()}


def random_rows(kind: gguf_dequant.TensorType, rows: int, row_blocks: int) -> np.ndarray:
    """Random bytes whose scales are finite; negative scales, subnormals and every quant value occur."""
    rng = np.random.default_rng(kind.block_bytes)
    data = rng.integers(0, 256, (rows * row_blocks, kind.block_bytes), dtype=np.uint8)
    places = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0]}.get(kind.name, [0, 2])
    if kind.block_values == 1:
        return rng.standard_normal((rows, row_blocks), dtype=np.float32).view(np.uint8)
    for place in places:
        scales = (rng.standard_normal(len(data)) * 10.0 ** rng.integers(-7, 4, len(data))).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", TYPE_IDS)
def test_every_type_dequantises_to_the_bits_of_the_reference_library(name):
    kind = TYPES[TYPE_IDS[name]]
    data = random_rows(kind, rows=48, row_blocks=64)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[name])
    found = dequantise(data, kind)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_chunks_do_not_change_the_result(name, monkeypatch):
    kind = TYPES[TYPE_IDS[name]]
    data = random_rows(kind, rows=5, row_blocks=3)
    whole = dequantise(data, kind)
    monkeypatch.setattr(gguf_dequant, "CHUNK_VALUES", 2 * kind.block_values)
    assert np.array_equal(dequantise(data, kind), whole)


def test_block_sizes_and_names_are_those_of_the_reference_library():
    for number, kind in TYPES.items():
        published = gguf.GGMLQuantizationType(number)
        assert (published.name, *gguf.GGML_QUANT_SIZES[published]) == kind[:3]
    for number, name in UNSUPPORTED_NAMES.items():
        assert gguf.GGMLQuantizationType(number).name == name
