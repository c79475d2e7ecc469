"""QK-norm, RoPE and the write to the KV cache against the formulas in float64."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import CPU
from pallas_kernels.kv_write.api import HeadNorms, kv_write
from pallas_kernels.kv_write.cases import CASES, Arrays, Case, make
from tests.pallas_kernels import oracle

LAYER = 1
EPS = 1e-5
TOLERANCE = 1e-5
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class Written(NamedTuple):
    """Queries [T, H, E] and the pools afterwards."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray


def run(case: Case, arrays: Arrays) -> Written:
    def call(a: Arrays, layer: jax.Array) -> tuple[jax.Array, ...]:
        pools = jax.new_ref(a.k_pool), jax.new_ref(a.v_pool)
        norms = HeadNorms(a.q_norm, a.k_norm, EPS) if case.norm else None
        q = kv_write(a.qkv, (a.cos, a.sin), pools, layer, (a.page, a.position), norms=norms, target=CPU)
        return q, jax.freeze(pools[0]), jax.freeze(pools[1])

    return Written(*map(np.asarray, jax.jit(call)(Arrays(*map(jnp.asarray, arrays)), np.int32(LAYER))))


def expected(case: Case, arrays: Arrays) -> Written:
    """What the contract says, in float64; the pools a token and a head at a time."""
    q_norm, k_norm = (a[LAYER] if case.norm else None for a in (arrays.q_norm, arrays.k_norm))
    turn = {"cos": arrays.cos, "sin": arrays.sin, "eps": EPS}
    q = oracle.turned(np.asarray(arrays.qkv)[:, :, :-2].reshape(case.tokens, case.num_heads, -1), q_norm, **turn)
    keys = oracle.turned(arrays.qkv[:, :, -2], k_norm, **turn)
    k_pool, v_pool = (np.array(pool, np.float64) for pool in (arrays.k_pool, arrays.v_pool))
    for token in range(case.tokens):
        at = LAYER, arrays.page[token], arrays.position[token] % case.page_size
        k_pool[at] = keys[token]
        v_pool[at] = arrays.qkv[token, :, -1]
    return Written(q, k_pool, v_pool)


def places(case: Case, arrays: Arrays) -> np.ndarray:
    """[L, P, S]: whether a token of the step has this place."""
    mine = np.zeros(arrays.k_pool.shape[:3], bool)
    mine[LAYER, arrays.page, arrays.position % case.page_size] = True
    return mine


@by_name
def test_queries_keys_and_values_are_what_the_formulas_say(case):
    arrays = make(case)
    for found, wanted in zip(run(case, arrays), expected(case, arrays), strict=True):
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE)


@by_name
def test_only_the_places_of_the_steps_tokens_change_in_the_asked_layer_alone(case):
    arrays = make(case)
    mine, written = places(case, arrays), run(case, arrays)
    assert mine.sum() == case.tokens
    for after, before in ((written.k_pool, arrays.k_pool), (written.v_pool, arrays.v_pool)):
        np.testing.assert_array_equal(after[~mine], before[~mine])
        assert (after[mine] != before[mine]).all()


def test_what_the_cache_held_before_does_not_matter():
    case = CASES[1]
    arrays = make(case)
    lost = arrays._replace(k_pool=np.full_like(arrays.k_pool, np.nan), v_pool=np.full_like(arrays.v_pool, np.nan))
    mine, written, again = places(case, arrays), run(case, arrays), run(case, lost)
    np.testing.assert_array_equal(again.q, written.q)
    np.testing.assert_array_equal(again.k_pool[mine], written.k_pool[mine])
    np.testing.assert_array_equal(again.v_pool[mine], written.v_pool[mine])


def test_tokens_of_padding_meet_on_the_page_that_is_nobodys():
    case = next(case for case in CASES if case.name == "an odd number of tokens")
    arrays = make(case)
    page, position = arrays.page.copy(), arrays.position.copy()
    page[-5:], position[-5:] = 0, 0
    written = run(case, arrays._replace(page=page, position=position))
    wanted = expected(case, arrays)
    mine = places(case, arrays._replace(page=page[:-5], position=position[:-5]))
    for after, before, new in (
        (written.k_pool, arrays.k_pool, wanted.k_pool),
        (written.v_pool, arrays.v_pool, wanted.v_pool),
    ):
        np.testing.assert_allclose(after[mine], new[mine], atol=TOLERANCE)
        mine_or_nobodys = mine.copy()
        mine_or_nobodys[LAYER, 0, 0] = True
        np.testing.assert_array_equal(after[~mine_or_nobodys], before[~mine_or_nobodys])
        assert np.isfinite(after).all()


@by_name
def test_narrow_values_are_written_as_they_are_and_the_rest_as_near_as_the_dtype_allows(case):
    arrays = make(case)
    names = ("qkv", "k_pool", "v_pool", "q_norm", "k_norm")
    narrow = arrays._replace(**{name: np.asarray(getattr(arrays, name), jnp.bfloat16) for name in names})
    written, wanted = run(case, narrow), expected(case, narrow)
    assert {array.dtype for array in written} == {np.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(written.v_pool.astype(np.float64), wanted.v_pool)
    for found, exact in ((written.q, wanted.q), (written.k_pool, wanted.k_pool)):
        error = np.linalg.norm(found.astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error < 1e-2


def test_the_cases_meet_every_edge():
    assert {case.head_width for case in CASES} >= {64, 96, 128, 256}
    assert {case.num_heads // case.num_kv_heads for case in CASES} >= {1, 3, 4, 7}
    assert {case.norm for case in CASES} == {True, False}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": (3, 2, 2, 8)}, r"qkv \(3, 2, 2, 8\) is not \[T, K, G \+ 2, E\]"),
        ({"qkv": (3, 6, 8)}, r"qkv \(3, 6, 8\) is not \[T, K, G \+ 2, E\]"),
        (
            {"v_pool": (1, 4, 4, 2, 8)},
            r"pools \(1, 3, 4, 2, 8\) and \(1, 4, 4, 2, 8\) \[L, P, S, K, E\] do not fit qkv \(3, 2, 3, 8\)",
        ),
        ({"qkv": (3, 4, 3, 8)}, r"pools \(1, 3, 4, 2, 8\) and .* do not fit qkv \(3, 4, 3, 8\)"),
        ({"qkv": (3, 2, 3, 16)}, r"pools \(1, 3, 4, 2, 8\) and .* do not fit qkv \(3, 2, 3, 16\)"),
        ({"rotary": (3, 8)}, r"rotary \(3, 8\) \[T, E / 2\] does not fit qkv \(3, 2, 3, 8\)"),
        ({"rotary": (2, 4)}, r"rotary \(2, 4\) \[T, E / 2\] does not fit qkv \(3, 2, 3, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_their_sizes(change, message):
    shapes = {"qkv": (3, 2, 3, 8), "k_pool": (1, 3, 4, 2, 8), "v_pool": (1, 3, 4, 2, 8), "rotary": (3, 4), **change}
    qkv, k_pool, v_pool, rotary = (jnp.zeros(shape) for shape in shapes.values())
    pools, token = (jax.new_ref(k_pool), jax.new_ref(v_pool)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=message):
        kv_write(qkv, (rotary, rotary), pools, jnp.int32(0), (token, token), norms=None, target=CPU)
