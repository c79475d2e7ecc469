"""Paged attention against a dense float64 softmax over each row's own keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import CPU
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.api import plan as plan_attention
from pallas_kernels.paged_attention.cases import CASES, Arrays, Case, make
from tests.pallas_kernels import oracle

LAYER = 1
TOLERANCE = 2e-5
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def run(case: Case, arrays: Arrays, *, planned: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output [T, H, E] and the pools afterwards."""

    def step(q, k_pool, v_pool, rows, sinks, layer, window):
        pools = jax.new_ref(k_pool), jax.new_ref(v_pool)
        sizes = {"num_heads": case.num_heads, "max_query_len": case.max_query_len, "target": CPU}
        out = paged_attention(
            q,
            pools,
            layer,
            rows,
            scale=case.head_width**-0.5,
            max_query_len=case.max_query_len,
            target=CPU,
            window=window,
            soft_cap=case.soft_cap,
            sinks=sinks,
            plan=plan_attention(rows, pools, **sizes) if planned else None,
        )
        return out, jax.freeze(pools[0]), jax.freeze(pools[1])

    window = None if case.window is None else np.int32(case.window)
    call = (arrays.q, arrays.k_pool, arrays.v_pool, arrays.rows, arrays.sinks, np.int32(LAYER), window)
    return tuple(np.asarray(a) for a in jax.jit(step)(*call))


def real(case: Case) -> int:
    """Tokens that belong to a row; the first of the step."""
    return sum(new for new, _ in case.rows)


@by_name
def test_every_token_sees_all_of_its_sequence_up_to_itself_and_nothing_else(case):
    arrays = make(case)
    out, k_pool, v_pool = run(case, arrays)
    np.testing.assert_allclose(out[: real(case)], oracle.attention(case, arrays, LAYER)[: real(case)], atol=TOLERANCE)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(k_pool, arrays.k_pool)
    np.testing.assert_array_equal(v_pool, arrays.v_pool)


@by_name
def test_what_pages_hold_past_a_rows_tokens_does_not_matter(case):
    arrays = make(case)
    out, _, _ = run(case, oracle.without_others(case, arrays, LAYER))
    np.testing.assert_allclose(out[: real(case)], oracle.attention(case, arrays, LAYER)[: real(case)], atol=TOLERANCE)


def test_the_cases_meet_every_edge():
    assert {case.head_width for case in CASES} >= {64, 128, 256}
    assert {case.num_heads // case.num_kv_heads for case in CASES} >= {1, 2, 3, 4, 7, 8}
    lengths = {new + old for case in CASES for new, old in case.rows if case.page_size == 16}
    assert {length % 16 for length in lengths} >= {0, 1, 15}
    chunk, block = reference.KEY_CHUNK["cpu"], reference.MAX_QUERY_BLOCK
    assert any(case.decode and old > 2 * chunk for case in CASES for _, old in case.rows)
    assert any(not case.decode and new > block and old > chunk for case in CASES for new, old in case.rows)
    assert any(case.decode and case.pad_rows for case in CASES)
    for decode in (True, False):
        kinds = [case for case in CASES if case.decode == decode]
        assert any(case.window for case in kinds)
        assert any(case.soft_cap for case in kinds)
        assert any(case.sinks for case in kinds)
    assert len({case.name for case in CASES}) == len(CASES)


def test_what_lies_beyond_a_row_does_not_change_it():
    case = named("mixed, decode rows and a chunk")
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
    np.testing.assert_array_equal(out[: real(case)], expected[: real(case)])


@pytest.mark.parametrize("name", ["decode, padded rows", "mixed, decode rows and a chunk"])
def test_a_plan_changes_nothing(name):
    case = named(name)
    np.testing.assert_array_equal(run(case, make(case), planned=True)[0], run(case, make(case))[0])


def test_of_narrow_numbers_only_weights_and_results_are_rounded():
    case = named("mixed, decode rows and a chunk")
    arrays = make(case)
    narrow = {name: jnp.asarray(getattr(arrays, name), jnp.bfloat16) for name in ("q", "k_pool", "v_pool")}
    out, _, _ = run(case, arrays._replace(**narrow))
    assert out.dtype == jnp.bfloat16
    same = arrays._replace(**{name: np.asarray(array, np.float32) for name, array in narrow.items()})
    expected = oracle.attention(case, same, LAYER)[: real(case)]
    np.testing.assert_allclose(out[: real(case)].astype(np.float64), expected, atol=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (4, 5, 8)}, r"q \(4, 5, 8\) \[T, H, E\] does not fit pools \(1, 2, 8, 2, 8\) and"),
        ({"q": (4, 4, 16)}, r"q \(4, 4, 16\) \[T, H, E\] does not fit pools \(1, 2, 8, 2, 8\) and"),
        ({"q": (4, 32)}, r"q \(4, 32\) \[T, H, E\] does not fit pools"),
        ({"v_pool": (1, 3, 8, 2, 8)}, r"does not fit pools \(1, 2, 8, 2, 8\) and \(1, 3, 8, 2, 8\) \[L, P, S, K, E\]"),
        ({"sinks": (2,)}, r"sinks \(2,\) \[H\] do not fit q \(4, 4, 8\) \[T, H, E\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_their_sizes(change, message):
    shapes = {"q": (4, 4, 8), "k_pool": (1, 2, 8, 2, 8), "v_pool": (1, 2, 8, 2, 8), "sinks": (4,), **change}
    q, k_pool, v_pool, sinks = (jnp.zeros(shape, jnp.float32) for shape in shapes.values())
    rows = make(Case(name="", num_heads=4, num_kv_heads=2, head_width=8, rows=((4, 0),))).rows
    pools = jax.new_ref(k_pool), jax.new_ref(v_pool)
    with pytest.raises(ValueError, match=message):
        paged_attention(q, pools, 0, rows, scale=1.0, max_query_len=4, target=CPU, sinks=sinks)
