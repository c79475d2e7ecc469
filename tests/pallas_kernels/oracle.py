"""What contracts say, in float64; and a case of paged attention with nothing in the pools that it may not read."""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.cases import Arrays, Case


def attention(case: Case, arrays: Arrays, layer: int) -> np.ndarray:
    """[T, H, E]: a dense softmax over each row's own keys and values; zeros for tokens that belong to no row."""
    out = np.zeros(arrays.q.shape)
    group = case.num_heads // case.num_kv_heads
    token = 0
    for row, (new, old) in enumerate(case.rows):
        table = np.asarray(arrays.rows.page_table[row])
        keys, values = (
            np.repeat(_in_order(pool, layer, table)[: old + new], group, axis=1)
            for pool in (arrays.k_pool, arrays.v_pool)
        )
        queries = np.asarray(arrays.q[token : token + new], np.float64)
        scores = np.einsum("the,phe->htp", queries, keys) * case.head_width**-0.5
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        behind = (old + np.arange(new))[:, None] - np.arange(old + new)
        seen = (behind >= 0) & (behind < (case.window or np.inf))
        weights = np.where(seen, np.exp(scores), 0.0)
        total = weights.sum(-1, keepdims=True)
        if arrays.sinks is not None:
            total += np.exp(arrays.sinks.astype(np.float64))[:, None, None]
        out[token : token + new] = np.einsum("htp,phe->the", weights / total, values)
        token += new
    return out


def turned(x: np.ndarray, weight: np.ndarray | None, cos: np.ndarray, sin: np.ndarray, eps: float) -> np.ndarray:
    """x [T, N, E] normalised where a weight [E] is given, and turned as complex numbers of channels (i, i + E / 2)."""
    x = np.asarray(x, np.float64)
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)
    half = x.shape[-1] // 2
    turn = np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64)
    z = (x[..., :half] + 1j * x[..., half:]) * turn[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def without_others(case: Case, arrays: Arrays, layer: int) -> Arrays:
    """The case with NaN wherever the pools hold nothing of its rows: other layers, free pages, what follows a row.

    A sequence whose numbers overflowed leaves such pages to those that get them next.
    """
    pools = []
    for pool in (np.asarray(arrays.k_pool), np.asarray(arrays.v_pool)):
        left = np.full_like(pool, np.nan)
        for row, (new, old) in enumerate(case.rows):
            position = np.arange(old + new)
            page = np.asarray(arrays.rows.page_table[row])[position // case.page_size]
            at = (layer, page, position % case.page_size)
            left[at] = pool[at]
        pools.append(left)
    return arrays._replace(k_pool=pools[0], v_pool=pools[1])


def _in_order(pool: np.ndarray, layer: int, table: np.ndarray) -> np.ndarray:
    """[W * S, K, E] float64: what the pages of one row hold."""
    pages = np.asarray(pool[layer])[table]
    return pages.reshape(-1, *pages.shape[2:]).astype(np.float64)
