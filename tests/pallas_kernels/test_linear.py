"""Linear layers with their neighbours against the formula in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import CPU
from pallas_kernels.linear.api import Norm, linear
from pallas_kernels.linear.cases import CASES, Arrays, Case, make

LAYER = 1
EPS = 1e-5
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def run(case: Case, arrays: Arrays) -> jax.Array:
    def call(x, weight, norm, bias, residual, layer):
        return linear(
            x,
            weight,
            layer,
            target=CPU,
            norm=None if norm is None else Norm(norm, EPS),
            bias=bias,
            gated=case.gated,
            residual=residual,
            out_dtype=jnp.float32 if case.float32_out else None,
        )

    return jax.jit(call)(*arrays, np.int32(LAYER))


def formula(arrays: Arrays, layer: int = LAYER) -> np.ndarray:
    """[M, N] float64, a part of the contract at a time."""
    x, weight, norm, bias, residual = (None if a is None else np.asarray(a, np.float64) for a in arrays)
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm[layer]
    y = x @ np.moveaxis(weight[layer], -1, -2)  # [M, N], or [2, M, N] where gated
    if bias is not None:
        y = y + bias[layer][..., None, :]
    if y.ndim == 3:
        gate, up = y
        y = gate / (1 + np.exp(-gate)) * up
    return y if residual is None else residual + y


def cast(arrays: Arrays, dtype: jnp.dtype) -> Arrays:
    return Arrays(*(None if a is None else jnp.asarray(a, dtype) for a in arrays))


@by_name
def test_the_result_is_what_the_formula_says(case):
    arrays = make(case)
    out = run(case, arrays)
    assert out.shape == (case.rows, case.out)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, formula(arrays), atol=2e-5)


def test_only_the_asked_layer_is_read():
    case = next(case for case in CASES if case.norm and case.bias and case.gated)
    arrays = make(case)
    others = {name: getattr(arrays, name).copy() for name in ("weight", "norm", "bias")}
    for array in others.values():
        array[LAYER ^ 1] = np.nan
    np.testing.assert_array_equal(run(case, arrays._replace(**others)), run(case, arrays))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_float32_result_of_narrow_numbers_is_a_float32_sum_that_nothing_rounds(dtype, rows):
    case = Case(name="", rows=rows, depth=256, out=512, float32_out=True)
    arrays = cast(make(case), dtype)
    out = run(case, arrays)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, formula(arrays), atol=1e-5)


@by_name
def test_a_narrow_result_is_in_the_dtype_of_the_input_and_as_near_as_that_allows(case):
    arrays = cast(make(case), jnp.bfloat16)
    out, expected = run(case, arrays), formula(arrays)
    assert out.dtype == (jnp.float32 if case.float32_out else jnp.bfloat16)
    error = np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected)
    assert error < 1e-2


def test_the_cases_meet_every_edge():
    for kinds in ([case for case in CASES if case.rows == 1], [case for case in CASES if case.rows > 1]):
        for part in ("norm", "bias", "gated", "residual", "float32_out"):
            assert any(getattr(case, part) for case in kinds), part
        assert any(case.depth % 512 for case in kinds)
    assert {case.rows for case in CASES} >= {1, 2, 16, 17, 32, 33}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("x", "weight", "how", "message"),
    [
        ((2, 8), (1, 4, 9), {}, r"x \(2, 8\) \[M, D\] does not fit weight \(1, 4, 9\), gated: False"),
        ((2, 8), (4, 8), {}, r"x \(2, 8\) \[M, D\] does not fit weight \(4, 8\), gated: False"),
        ((8,), (1, 4, 8), {}, r"x \(8,\) \[M, D\] does not fit weight \(1, 4, 8\), gated: False"),
        ((2, 8), (1, 4, 8), {"gated": True}, r"x \(2, 8\) .* does not fit weight \(1, 4, 8\), gated: True"),
        ((2, 8), (1, 3, 4, 8), {"gated": True}, r"x \(2, 8\) .* does not fit weight \(1, 3, 4, 8\), gated: True"),
        ((2, 8), (1, 2, 4, 8), {}, r"x \(2, 8\) .* does not fit weight \(1, 2, 4, 8\), gated: False"),
        (
            (2, 8),
            (1, 4, 8),
            {"residual": jnp.zeros((2, 8))},
            r"residual \(2, 8\) \[M, N\] does not fit x \(2, 8\) and weight \(1, 4, 8\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_their_sizes(x, weight, how, message):
    with pytest.raises(ValueError, match=message):
        linear(jnp.zeros(x), jnp.zeros(weight), jnp.int32(0), target=CPU, **how)
