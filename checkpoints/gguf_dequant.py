"""The quantised tensor types of GGUF, dequantised to float32.

A row is a sequence of blocks; the functions here take blocks as uint8 [N, bytes per block] and give float32
[N, values per block]. Every product and sum is a float32 operation in the order of the format's own library, which
makes the results equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CHUNK_VALUES = 1 << 18
"""Values dequantised at once: temporaries of 1 MB stay in a core's cache."""


def _half(blocks: np.ndarray, byte: int) -> np.ndarray:
    """The float16 at a byte of each block, as float32 [N, 1]."""
    return blocks[:, byte : byte + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Low nibbles of uint8 [N, ..., C] to out[..., 0, :], high nibbles to out[..., 1, :]."""
    np.bitwise_and(packed, 15, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])


def _fifth_bits(blocks: np.ndarray, byte: int) -> np.ndarray:
    """The 32 bits at a byte of each block as uint8 [N, 2, 16], each worth 16."""
    bits = np.unpackbits(blocks[:, byte : byte + 4], axis=1, bitorder="little")
    return (bits << 4).reshape(-1, 2, 16)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 2:], quants)
    np.multiply(quants.reshape(-1, 32).view(np.int8) - np.int8(8), _half(blocks, 0), out=out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 4:], quants)
    np.multiply(quants.reshape(-1, 32), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 6:], quants)
    quants |= _fifth_bits(blocks, 2)
    np.multiply(quants.reshape(-1, 32).view(np.int8) - np.int8(16), _half(blocks, 0), out=out)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 2, 16), np.uint8)
    _nibbles(blocks[:, 8:], quants)
    quants |= _fifth_bits(blocks, 4)
    np.multiply(quants.reshape(-1, 32), _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight 6-bit minima, uint8 [N, 8] each, from 12 bytes [N, 12].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; bytes 8-11 hold the low four bits of
    scales and minima 4-7, whose top two bits are those of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _scale_k(blocks: np.ndarray, quants: np.ndarray, out: np.ndarray) -> None:
    """out = (d * scale) * quant - dmin * minimum, over eight groups of 32; quants are uint8 [N, 8, 32]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    grouped = out.reshape(-1, 8, 32)
    np.multiply(quants, (_half(blocks, 0) * scales)[:, :, None], out=grouped)
    grouped -= (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 4, 2, 32), np.uint8)
    _nibbles(blocks[:, 16:144].reshape(-1, 4, 32), quants)
    _scale_k(blocks, quants.reshape(-1, 8, 32), out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 4, 2, 32), np.uint8)
    _nibbles(blocks[:, 48:176].reshape(-1, 4, 32), quants)
    quants = quants.reshape(-1, 8, 32)
    # Bit g of byte i is the fifth bit of value i in group g.
    quants |= ((blocks[:, 16:48][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    _scale_k(blocks, quants, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = np.empty((len(blocks), 2, 2, 64), np.uint8)  # half of the block, nibble, byte
    _nibbles(blocks[:, 0:128].reshape(-1, 2, 64), low)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = low.reshape(-1, 2, 4, 32) | (high << 4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    values = quants.reshape(-1, 16, 16).view(np.int8) - np.int8(32)
    np.multiply(values, scales[:, :, None], out=out.reshape(-1, 16, 16))


class TensorType(NamedTuple):
    """values and bytes of one block, and the function that dequantises; None for plain numbers."""

    name: str
    block_values: int
    block_bytes: int
    dequantise: Callable[[np.ndarray, np.ndarray], None] | None


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, None),
    1: TensorType("F16", 1, 2, None),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    6: TensorType("Q5_0", 32, 22, _q5_0),
    7: TensorType("Q5_1", 32, 24, _q5_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    30: TensorType("BF16", 1, 2, None),
}
"""By the type number of the file format."""

UNSUPPORTED_NAMES = {
    **dict(enumerate(["Q8_1", "Q2_K", "Q3_K"], start=9)),
    **dict(
        enumerate(["Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"], start=15)
    ),
    **dict(enumerate(["I8", "I16", "I32", "I64", "F64", "IQ1_M"], start=24)),
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of type numbers that are refused, for the message."""


def dequantise(data: np.ndarray, kind: TensorType) -> np.ndarray:
    """float32 values of uint8 `data` [..., row bytes], as [..., row values]. F32 data is returned as a view."""
    shape = (*data.shape[:-1], data.shape[-1] // kind.block_bytes * kind.block_values)
    if kind.name == "F32":
        return data.view("<f4").reshape(shape)
    if kind.name == "F16":
        return data.view("<f2").astype(np.float32).reshape(shape)
    if kind.name == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    assert kind.dequantise is not None
    blocks = data.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_values), np.float32)
    step = CHUNK_VALUES // kind.block_values
    for start in range(0, len(blocks), step):
        kind.dequantise(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)
