"""Cases of paged attention with one token a row, with what comes before attention: projections, angles and norms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pallas_kernels.paged_attention import cases
from pallas_kernels.paged_attention.api import PagedRows
from tests.pallas_kernels import oracle

LAYER = 1


class Arrays(NamedTuple):
    """A case with numbers, float32 but for the rows; NaN in the pools where the new keys and values belong."""

    qkv: np.ndarray  # [R, K, G + 2, E]
    cos: np.ndarray  # [R, E / 2]
    sin: np.ndarray  # [R, E / 2]
    k_pool: np.ndarray  # [L, P, S, K, E]
    v_pool: np.ndarray  # [L, P, S, K, E]
    rows: PagedRows
    q_norm: np.ndarray  # [L, E]
    k_norm: np.ndarray  # [L, E]


def make(case: cases.Case) -> Arrays:
    a, rng = oracle.without_others(case, cases.make(case), LAYER), np.random.default_rng(1)
    heads = a.q.reshape(case.num_rows, case.num_kv_heads, -1, case.head_width)
    angle = rng.uniform(0, 6.3, (case.num_rows, case.head_width // 2)).astype(np.float32)
    norms = 1 + 0.1 * rng.standard_normal((2, a.k_pool.shape[0], case.head_width), np.float32)
    real = len(case.rows)
    at = LAYER, a.rows.token_page[:real], a.rows.token_position[:real] % case.page_size
    for pool in (a.k_pool, a.v_pool):
        pool[at] = np.nan
    qkv = np.concatenate([heads, a.keys[:, :, None], a.values[:, :, None]], axis=2)
    return Arrays(qkv, np.cos(angle), np.sin(angle), a.k_pool, a.v_pool, a.rows, *norms)
