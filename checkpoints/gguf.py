"""A GGUF file as a published checkpoint: tensors under Hugging Face names, dequantised, and a config to match."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints.gguf_dequant import dequantise
from checkpoints.gguf_file import GgufFile
from checkpoints.source import CheckpointError


class _Architecture(NamedTuple):
    """interleaved_rope: rows of q and k are stored so that rotated channels are neighbours, not half a head apart."""

    class_name: str
    interleaved_rope: bool


ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", True),
    "qwen2": _Architecture("Qwen2ForCausalLM", False),
    "qwen3": _Architecture("Qwen3ForCausalLM", False),
}

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def published_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that has none is returned as it is, and so shows up as extra."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


class GgufSource:
    """The tensors of a GGUF file, float32, under published names and in the published order of rows."""

    def __init__(self, file: GgufFile):
        architecture(file)
        self._file = file
        self._names = {published_name(name): name for name in file.tensors if name != _ROPE_FACTORS}
        if len(self._names) != len(file.tensors) - (_ROPE_FACTORS in file.tensors):
            raise CheckpointError(f"{file.path}: two tensors have the same published name")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {published: self._file.tensors[name].shape for published, name in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32; KeyError for an unknown name."""
        stored = self._names[name]
        data = self._file.raw(stored)
        kind = self._file.tensors[stored].kind
        num_heads = self._interleaved_heads(name)
        if num_heads is None:
            return dequantise(data, kind)
        if data.ndim == 1:
            return _half_split_rows(dequantise(data, kind), num_heads, name)
        # Rows are whole blocks, so moving the stored bytes is the same as moving the values, and 5 to 8 times less.
        return dequantise(_half_split_rows(data, num_heads, name), kind)

    def _interleaved_heads(self, name: str) -> int | None:
        """Number of heads whose rows have to be put back in order; None where rows are in order already."""
        if not architecture(self._file).interleaved_rope:
            return None
        if ".self_attn.q_proj." in name:
            return _heads(self._file)[0]
        if ".self_attn.k_proj." in name:
            return _heads(self._file)[1]
        return None


def _half_split_rows(rows: np.ndarray, num_heads: int, name: str) -> np.ndarray:
    """[H * E, ...] with channels i and i + E/2 of a head side by side, to the published order."""
    if len(rows) % (2 * num_heads):
        raise CheckpointError(f"tensor {name!r} has {len(rows)} rows, which {num_heads} heads cannot share")
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def architecture(file: GgufFile) -> _Architecture:
    """What is particular to the file's architecture. CheckpointError for one that is not known."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: architecture {name!r} is not supported from GGUF; known: {', '.join(ARCHITECTURES)}"
        )
    num_files = file.metadata.get("split.count", 1)
    if num_files not in (0, 1):
        raise CheckpointError(f"{file.path}: one of {num_files} files; join them first (gguf-split --merge)")
    return ARCHITECTURES[str(name)]


def _key(file: GgufFile, key: str, kinds: type | tuple[type, ...], default: object = None) -> object:
    """A value of the file's architecture, checked for its type; without a default its absence is an error."""
    full = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full, default)
    if value is None:
        raise CheckpointError(f"{file.path}: metadata key {full!r} is missing")
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise CheckpointError(f"{file.path}: metadata key {full!r} is {value!r}, not a number of the expected type")
    return value


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _key(file, key, int, default)
    assert isinstance(value, int)
    return value


def _number(file: GgufFile, key: str, default: float | None = None) -> float:
    value = _key(file, key, (int, float), default)
    assert isinstance(value, (int, float))
    return _shortest(value)


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32, so that 9.999999747378752e-06 is the published 1e-05 again."""
    return float(str(np.float32(value)))


def _heads(file: GgufFile) -> tuple[int, int]:
    """Numbers of query and of key-value heads."""
    num_heads = _integer(file, "attention.head_count")
    return num_heads, _integer(file, "attention.head_count_kv", num_heads)


def config(file: GgufFile) -> dict[str, object]:
    """A config.json for the file. A missing key, or a feature that the named class lacks, raises CheckpointError."""
    arch = architecture(file)
    for key in ("expert_count", "attention.sliding_window"):
        if _integer(file, key, 0):
            raise CheckpointError(f"{file.path}: {key} is {_integer(file, key)}, which is not supported from GGUF")
    hidden_size = _integer(file, "embedding_length")
    num_heads, num_kv_heads = _heads(file)
    if num_heads < 1 or num_kv_heads < 1:
        raise CheckpointError(f"{file.path}: {num_heads} heads and {num_kv_heads} key-value heads")
    head_dim = _integer(file, "attention.key_length", hidden_size // num_heads)
    rotated = _integer(file, "rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise CheckpointError(f"{file.path}: rope.dimension_count is {rotated}, but heads are {head_dim} wide")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: there is no tensor 'token_embd.weight'")
    result: dict[str, object] = {
        "architectures": [arch.class_name],
        "model_type": file.metadata["general.architecture"],
        "hidden_size": hidden_size,
        "num_hidden_layers": _integer(file, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(file, "rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "max_position_embeddings": _integer(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch.class_name == "LlamaForCausalLM" and "blk.0.attn_q.bias" in file.tensors,
    }
    return result | {k: v[0] if len(v) == 1 else v for k, v in _token_ids(file).items()}


def generation_config(file: GgufFile) -> dict[str, object]:
    """A generation_config.json: the ids that begin, end and pad a text."""
    return {k: v[0] if len(v) == 1 else v for k, v in _token_ids(file).items()}


def _token_ids(file: GgufFile) -> dict[str, list[object]]:
    """bos, eos and pad ids that the file names. Ends of turn and of message end a generation as the EOS does."""
    wanted = {"bos_token_id": ["bos"], "eos_token_id": ["eos", "eot", "eom"], "pad_token_id": ["padding"]}
    found = {
        name: [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys] for name, keys in wanted.items()
    }
    return {
        name: ids for name, values in found.items() if (ids := [*dict.fromkeys(v for v in values if v is not None)])
    }


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, object] | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim)
    name = f"{file.metadata['general.architecture']}.rope.scaling.type"
    kind = file.metadata.get(name, "none")
    if kind == "none":
        return None
    scaling: dict[str, object] = {"rope_type": kind, "factor": _number(file, "rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise CheckpointError(f"{file.path}: {name} is {kind!r}; known: none, linear, yarn")
    scaling["original_max_position_embeddings"] = _integer(file, "rope.scaling.original_context_length")
    published = {
        "attention_factor": "rope.scaling.attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    return scaling | {
        name: _number(file, key)
        for name, key in published.items()
        if f"{file.metadata['general.architecture']}.{key}" in file.metadata
    }


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """What the llama3 scaling divides each frequency by, float64 [E / 2], with its published bounds 1 and 4.

    Wavelengths above `original` tokens are stretched by `factor`, those below a quarter of it are kept, and between
    them the frequencies are interpolated (the formula of Llama 3.1's reference code).
    """
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - 1) / 3, 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _llama3_scaling(file: GgufFile, head_dim: int) -> dict[str, object]:
    """The llama3 scaling whose factors the file stores. Factors that none of its published settings give are refused.

    The file keeps only the resulting divisors; the largest is the factor, and the original context is a power of two.
    """
    stored = dequantise(file.raw(_ROPE_FACTORS), file.tensors[_ROPE_FACTORS].kind).reshape(-1)
    factor = _shortest(float(stored.max(initial=0)))
    theta = _number(file, "rope.freq_base", 10000.0)
    for original in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
        if stored.shape == (head_dim // 2,) and factor >= 1:
            expected = llama3_factors(theta, head_dim, factor, original)
            if np.allclose(expected, stored, rtol=1e-3):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": original,
                }
    raise CheckpointError(
        f"{file.path}: the {stored.size} factors of {_ROPE_FACTORS} (largest {factor}, theta {theta}) "
        f"are not those of a llama3 RoPE scaling"
    )


def open_gguf(path: str | Path) -> GgufFile:
    """Opens a GGUF file of a supported architecture."""
    file = GgufFile(path)
    architecture(file)
    return file
