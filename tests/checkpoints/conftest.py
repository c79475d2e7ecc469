"""Small checkpoints, written where a test can damage them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from checkpoints import resolve
from checkpoints.resolve import Checkpoint
from checkpoints.source import CheckpointError

HIDDEN, HEADS, KV_HEADS, WIDTH, VOCAB, LAYERS = 64, 4, 2, 96, 40, 2


def tiny_tensors(*, tied: bool = False) -> dict[str, np.ndarray]:
    """A llama under GGUF names, rows of q and k already interleaved; float32."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"token_embd.weight": draw(VOCAB, HIDDEN), "output_norm.weight": draw(HIDDEN)}
    if not tied:
        tensors["output.weight"] = draw(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // 2, HIDDEN),
            "attn_v": (HIDDEN // 2, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (WIDTH, HIDDEN),
            "ffn_up": (WIDTH, HIDDEN),
            "ffn_down": (HIDDEN, WIDTH),
        }
        tensors |= {f"blk.{layer}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
    return tensors


def tiny_metadata(architecture: str) -> dict[str, object]:
    sizes = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = ["<unk>", "<s>", "</s>", *letters, "ab", "abc", *(f"[{i}]" for i in range(VOCAB - 31))]
    return {f"{architecture}.{key}": value for key, value in sizes.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (VOCAB - 3),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(name, architecture, tensors, metadata) -> path. Metadata of None drops a key; tensors may be pairs of
    uint8 rows and their type."""

    def write(
        name: str = "tiny.gguf",
        *,
        architecture: str = "llama",
        tensors: dict[str, object] | None = None,
        metadata: dict[str, object] | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in (tiny_metadata(architecture) | (metadata or {})).items():
            if value is not None:
                add_metadata(writer, key, value)
        for tensor, data in (tiny_tensors() if tensors is None else tensors).items():
            array, kind = data if isinstance(data, tuple) else (data, None)
            writer.add_tensor(tensor, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def tiny() -> Callable[..., dict[str, np.ndarray]]:
    return tiny_tensors


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    try:
        return resolve.resolve("smollm2-135m")
    except CheckpointError as error:
        pytest.skip(str(error))
