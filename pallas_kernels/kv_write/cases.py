"""Named shapes that tests and benchmarks share."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call on tokens of random places."""

    name: str
    num_heads: int  # H
    num_kv_heads: int  # K
    head_width: int  # E
    tokens: int  # T
    page_size: int = 16  # S
    norm: bool = True


CASES = (
    Case(name="one token", num_heads=32, num_kv_heads=8, head_width=128, tokens=1),
    Case(name="eight tokens", num_heads=32, num_kv_heads=8, head_width=128, tokens=8),
    Case(name="an odd number of tokens", num_heads=16, num_kv_heads=8, head_width=128, tokens=67, page_size=8),
    Case(name="no norm, group of 3", num_heads=9, num_kv_heads=3, head_width=64, tokens=5, norm=False),
    Case(name="no norm, group of 7", num_heads=28, num_kv_heads=4, head_width=128, tokens=70, norm=False),
    Case(name="group of 1", num_heads=4, num_kv_heads=4, head_width=128, tokens=3),
    Case(name="heads of 96", num_heads=8, num_kv_heads=2, head_width=96, tokens=6),
    Case(name="wide heads", num_heads=4, num_kv_heads=1, head_width=256, tokens=66, page_size=32),
)


class Arrays(NamedTuple):
    """A case with numbers, float32 but for the places."""

    qkv: np.ndarray  # [T, K, G + 2, E]
    cos: np.ndarray  # [T, E / 2]
    sin: np.ndarray  # [T, E / 2]
    k_pool: np.ndarray  # [L, P, S, K, E]
    v_pool: np.ndarray  # [L, P, S, K, E]
    page: np.ndarray  # [T] int32
    position: np.ndarray  # [T] int32
    q_norm: np.ndarray  # [L, E]
    k_norm: np.ndarray  # [L, E]


def make(case: Case, *, num_layers: int = 2, seed: int = 0) -> Arrays:
    """Random numbers for a case; every token has a place of its own."""
    rng = np.random.default_rng(seed)
    tokens, size, width = case.tokens, case.page_size, case.head_width
    num_pages = 2 + tokens // size
    place = rng.permutation((num_pages - 1) * size)[:tokens] + size  # page 0 is nobody's
    turns = rng.integers(0, 50, tokens)  # pages before the token's own in its sequence
    angle = rng.uniform(0, 6.3, (tokens, width // 2)).astype(np.float32)
    heads = (case.num_kv_heads, case.num_heads // case.num_kv_heads + 2, width)
    pool = (num_layers, num_pages, size, case.num_kv_heads, width)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return Arrays(
        qkv=normal(tokens, *heads),
        cos=np.cos(angle),
        sin=np.sin(angle),
        k_pool=normal(*pool),
        v_pool=normal(*pool),
        page=(place // size).astype(np.int32),
        position=(turns * size + place % size).astype(np.int32),
        q_norm=1 + 0.1 * normal(num_layers, width),
        k_norm=1 + 0.1 * normal(num_layers, width),
    )
