"""Paged attention against a dense float64 softmax over each row's own keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.cases import CASES, Arrays, Case, make

LAYER = 1
TOLERANCE = 2e-5
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def run(case: Case, arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output [T, H, E] and the pools afterwards."""

    def step(q, keys, values, k_pool, v_pool, rows, layer, window):
        pools = jax.new_ref(k_pool), jax.new_ref(v_pool)
        out = paged_attention(
            q,
            (keys, values),
            pools,
            layer,
            rows,
            scale=case.head_width**-0.5,
            max_query_len=case.max_query_len,
            window=window,
        )
        return out, jax.freeze(pools[0]), jax.freeze(pools[1])

    window = None if case.window is None else np.int32(case.window)
    return tuple(np.asarray(a) for a in jax.jit(step)(*arrays, np.int32(LAYER), window))


def dense(case: Case, arrays: Arrays) -> np.ndarray:
    """[T, H, E] float64: what the contract says, a token at a time."""
    out = np.zeros(arrays.q.shape)
    group = case.num_heads // case.num_kv_heads
    token = 0
    for row, (new, old) in enumerate(case.rows):
        kv = []
        for pool, step in ((arrays.k_pool, arrays.keys), (arrays.v_pool, arrays.values)):
            pages = pool[LAYER, arrays.rows.page_table[row]].reshape(-1, *pool.shape[3:])
            kv.append(np.concatenate([pages[:old], step[token : token + new]]).astype(np.float64))
        for i in range(new):
            first = 0 if case.window is None else max(0, old + i + 1 - case.window)
            keys, values = (np.repeat(a[first : old + i + 1], group, axis=1) for a in kv)
            scores = np.einsum("he,phe->hp", arrays.q[token].astype(np.float64), keys) * case.head_width**-0.5
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[token] = np.einsum("hp,phe->he", weights / weights.sum(1, keepdims=True), values)
            token += 1
    return out


@by_name
def test_every_token_sees_all_of_its_sequence_up_to_itself_and_nothing_else(case):
    arrays = make(case)
    out, k_pool, v_pool = run(case, arrays)
    real = sum(new for new, _ in case.rows)
    np.testing.assert_allclose(out[:real], dense(case, arrays)[:real], atol=TOLERANCE)
    assert np.isfinite(out).all()
    for after, before, new in ((k_pool, arrays.k_pool, arrays.keys), (v_pool, arrays.v_pool, arrays.values)):
        expected = before.copy()
        offset = arrays.rows.token_position % case.page_size
        expected[LAYER, arrays.rows.token_page[:real], offset[:real]] = new[:real]
        # Padding writes to page 0 alone, and what it writes there is nobody's.
        np.testing.assert_array_equal(after[:, 1:], expected[:, 1:])
        np.testing.assert_array_equal(after[LAYER ^ 1], before[LAYER ^ 1])
        assert np.isfinite(after).all()


@by_name
def test_what_pages_hold_past_a_rows_tokens_does_not_matter(case):
    """A sequence whose numbers overflowed leaves NaN in pages that others get next."""
    arrays = make(case)
    pools = []
    for pool in (arrays.k_pool, arrays.v_pool):
        left = np.full_like(pool, np.nan)
        for row, (_, old) in enumerate(case.rows):
            positions = np.arange(old)
            page = arrays.rows.page_table[row][positions // case.page_size]
            at = (LAYER, page, positions % case.page_size)
            left[at] = pool[at]
        pools.append(left)
    out, _, _ = run(case, arrays._replace(k_pool=pools[0], v_pool=pools[1]))
    real = sum(new for new, _ in case.rows)
    np.testing.assert_allclose(out[:real], dense(case, arrays)[:real], atol=TOLERANCE)


def test_the_cases_meet_every_edge():
    assert {case.head_width for case in CASES} >= {64, 128, 256}
    assert {case.num_heads // case.num_kv_heads for case in CASES} >= {1, 2, 3, 4, 7, 8}
    lengths = {new + old for case in CASES for new, old in case.rows if case.page_size == 16}
    assert {length % 16 for length in lengths} >= {0, 1, 15}
    chunk, block = reference.KEY_CHUNK["cpu"], reference.MAX_QUERY_BLOCK
    assert any(case.decode and old > 2 * chunk for case in CASES for _, old in case.rows)
    assert any(not case.decode and new > block and old > chunk for case in CASES for new, old in case.rows)
    assert any(case.decode and case.pad_rows for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)


def test_what_lies_beyond_a_row_does_not_change_it():
    case = next(case for case in CASES if case.name == "mixed, decode rows and a chunk")
    arrays = make(case)
    expected, _, _ = run(case, arrays)
    others = arrays._replace(k_pool=arrays.k_pool.copy(), v_pool=arrays.v_pool.copy())
    for row, (new, old) in enumerate(case.rows):
        page, offset = arrays.rows.page_table[row, (new + old - 1) // case.page_size], (new + old - 1) % case.page_size
        for pool in (others.k_pool, others.v_pool):
            pool[LAYER, page, offset + 1 :] = 1e4
            pool[:, 0] = -1e4
            pool[LAYER ^ 1] = 77.0
    out, _, _ = run(case, others)
    real = sum(new for new, _ in case.rows)
    np.testing.assert_array_equal(out[:real], expected[:real])


def test_narrow_pools_round_keys_and_values_once_and_nothing_more():
    case = next(case for case in CASES if case.name == "mixed, decode rows and a chunk")
    arrays = Arrays(*(jnp.asarray(a, jnp.bfloat16) for a in make(case)[:5]), make(case).rows)
    out, _, _ = run(case, arrays)
    assert out.dtype == jnp.bfloat16
    wide = Arrays(*(np.asarray(a, np.float32) for a in arrays[:5]), arrays.rows)
    real = sum(new for new, _ in case.rows)
    np.testing.assert_allclose(out[:real].astype(np.float64), dense(case, wide)[:real], atol=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (4, 5, 8)}, r"q \(4, 5, 8\) \[T, H, E\] does not fit keys \(4, 2, 8\)"),
        ({"keys": (3, 2, 8)}, r"q \(4, 4, 8\) \[T, H, E\] does not fit keys \(3, 2, 8\)"),
        ({"pool": (1, 2, 8, 4, 8)}, r"pools \(1, 2, 8, 4, 8\) .* do not fit keys \(4, 2, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_their_sizes(change, message):
    shapes = {"q": (4, 4, 8), "keys": (4, 2, 8), "pool": (1, 2, 8, 2, 8), **change}
    q, keys, pool = (np.zeros(shape, np.float32) for shape in shapes.values())
    rows = make(Case(name="", num_heads=4, num_kv_heads=2, head_width=8, rows=((4, 0),))).rows
    pools = jax.new_ref(jnp.asarray(pool)), jax.new_ref(jnp.asarray(pool))
    with pytest.raises(ValueError, match=message):
        paged_attention(q, (keys, keys), pools, 0, rows, scale=1.0, max_query_len=4)
