"""A decode step's attention from projections to results, against the formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import CPU
from pallas_kernels.kv_write.api import HeadNorms
from pallas_kernels.paged_attention import cases
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.decode import decode_attention
from tests.pallas_kernels import oracle
from tests.pallas_kernels.decode_steps import LAYER, make
from tests.pallas_kernels.kernel_checks import IN_ONE

EPS = 1e-5
TOLERANCE = 2e-5


@pytest.mark.parametrize("case", IN_ONE, ids=lambda case: case.name)
def test_every_new_token_is_written_and_sees_itself_and_all_before_it(case):
    a, normed = make(case), case.head_width == 128

    def step(a, layer):
        pools = jax.new_ref(a.k_pool), jax.new_ref(a.v_pool)
        out = decode_attention(
            a.qkv,
            (a.cos, a.sin),
            pools,
            layer,
            a.rows,
            norms=HeadNorms(a.q_norm, a.k_norm, EPS) if normed else None,
            scale=case.head_width**-0.5,
            target=CPU,
            window=None if case.window is None else jnp.int32(case.window),
        )
        return out, jax.freeze(pools[0]), jax.freeze(pools[1])

    out, k_pool, v_pool = map(np.asarray, jax.jit(step)(jax.tree.map(jnp.asarray, a), np.int32(LAYER)))
    q_norm, k_norm = (norm[LAYER] if normed else None for norm in (a.q_norm, a.k_norm))
    turn = {"cos": a.cos, "sin": a.sin, "eps": EPS}
    real = len(case.rows)
    at = LAYER, a.rows.token_page[:real], a.rows.token_position[:real] % case.page_size
    expected_k, expected_v = a.k_pool.astype(np.float64), a.v_pool.astype(np.float64)
    expected_k[at] = oracle.turned(a.qkv[:, :, -2], k_norm, **turn)[:real]
    expected_v[at] = a.qkv[:real, :, -1]
    for found, expected in ((k_pool, expected_k), (v_pool, expected_v)):
        # Page 0 is nobody's: padding is written there.
        np.testing.assert_allclose(found[:, 1:], expected[:, 1:], atol=TOLERANCE)
    q = oracle.turned(a.qkv[:, :, :-2].reshape(case.num_rows, case.num_heads, -1), q_norm, **turn)
    arrays = cases.make(case)._replace(q=q, k_pool=expected_k, v_pool=expected_v)
    np.testing.assert_allclose(out[:real], oracle.attention(case, arrays, LAYER)[:real], atol=TOLERANCE)


@pytest.mark.parametrize("shape", [(3, 2, 4, 8), (2, 4, 8)])
def test_shapes_that_do_not_fit_are_refused_with_their_sizes(shape):
    rows = make(Case(name="", num_heads=4, num_kv_heads=2, head_width=8, rows=((1, 0), (1, 3)))).rows
    pools, half = [jax.new_ref(jnp.zeros((1, 3, 16, 2, 8))) for _ in range(2)], jnp.zeros((2, 4))
    message = rf"qkv \({', '.join(map(str, shape))}\) \[R, K, G \+ 2, E\] does not fit 2 rows"
    with pytest.raises(ValueError, match=message):
        decode_attention(jnp.zeros(shape), (half, half), pools, jnp.int32(0), rows, norms=None, scale=1.0, target=CPU)
