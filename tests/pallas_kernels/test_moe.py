"""Layers of experts against the formula in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import CPU
from pallas_kernels.linear.api import Norm
from pallas_kernels.moe.api import Experts, moe, route
from pallas_kernels.moe.cases import CASES, Arrays, Case, make

LAYER = 1
EPS = 1e-6
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def run(case: Case, arrays: Arrays, *, traced_first: bool = False) -> jax.Array:
    def call(arrays, layer, first):
        x, router, gate_up, down, norm, residual, valid = arrays
        return moe(
            x,
            Experts(router, gate_up, down),
            layer,
            norm=Norm(norm, EPS, case.offset),
            top_k=case.top_k,
            renormalise=case.renormalise,
            residual=residual,
            first_expert=first if traced_first else case.first_expert,
            valid=valid,
            target=CPU,
        )

    return jax.jit(call)(arrays, np.int32(LAYER), np.int32(case.first_expert))


def choose(case: Case, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    norm = Norm(jnp.asarray(arrays.norm), EPS, case.offset)
    how = {"top_k": case.top_k, "renormalise": case.renormalise, "valid": arrays.valid, "target": CPU}
    return tuple(map(np.asarray, route(jnp.asarray(arrays.x), arrays.router, jnp.int32(LAYER), norm=norm, **how)))


def formula(case: Case, arrays: Arrays) -> tuple[np.ndarray, list[dict[int, float]]]:
    """[T, D] float64, token by token, and what each token chose."""
    x, router, gate_up, down, norm, residual = (None if a is None else np.asarray(a, np.float64) for a in arrays[:6])
    out = np.zeros(x.shape) if residual is None else residual.copy()
    chosen: list[dict[int, float]] = []
    for token in range(case.tokens):
        chosen.append({})
        if arrays.valid is not None and not arrays.valid[token]:
            continue
        h = x[token] / np.sqrt((x[token] ** 2).mean() + EPS) * (case.offset + norm[LAYER])
        logits = [float(np.float32(logit)) for logit in router[LAYER] @ h]  # rounded, or ties would be of float64
        odds = np.exp(np.array(logits) - max(logits))
        best = sorted(range(case.experts), key=lambda e, logits=logits: (-logits[e], e))[: case.top_k]
        whole = odds[best].sum() if case.renormalise else odds.sum()
        for expert in best:
            chosen[-1][expert] = odds[expert] / whole
            place = expert - case.first_expert
            if 0 <= place < case.num_here:
                gate, up = gate_up[LAYER, place] @ h
                out[token] += chosen[-1][expert] * (down[LAYER, place] @ (gate / (1 + np.exp(-gate)) * up))
    return out, chosen


@by_name
def test_the_result_is_what_the_formula_says(case):
    arrays = make(case)
    out = run(case, arrays)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, formula(case, arrays)[0], atol=2e-5)


@by_name
def test_the_choices_are_the_likeliest_experts_the_first_of_equals_first(case):
    arrays = make(case)
    expert, weight = choose(case, arrays)
    assert (expert.dtype, weight.dtype) == (np.int32, np.float32)
    for token, chosen in enumerate(formula(case, arrays)[1]):
        assert expert[token].tolist() == (list(chosen) or [case.experts] * case.top_k), token
        np.testing.assert_allclose(weight[token], list(chosen.values()) or 0, rtol=1e-5)


def test_ties_are_met_by_their_cases():
    case = named("ties, 20 tokens")
    chosen = formula(case, make(case))[1]
    assert sum(len(set(weights.values())) < case.top_k for weights in chosen) > 10


@by_name
def test_a_narrow_result_is_in_the_dtype_of_the_input_and_as_near_as_that_allows(case):
    arrays = make(case)
    narrow = Arrays(*(None if a is None else jnp.asarray(a, jnp.bfloat16) for a in arrays[:6]), arrays.valid)
    out, (expected, _) = run(case, narrow), formula(case, narrow)
    assert out.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(out, np.float64) - expected)
    assert error <= 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "name", ["tiny, 4 tokens", "tiny, 2 tokens", "128 experts, 9 tokens", "128 experts, 40 tokens"]
)
def test_only_the_asked_layer_is_read_and_of_it_what_was_chosen(name):
    case = named(name)
    arrays = make(case)
    unread = {name: getattr(arrays, name).copy() for name in ("router", "gate_up", "down", "norm")}
    for array in unread.values():
        array[LAYER ^ 1] = np.nan
    used = {expert for chosen in formula(case, arrays)[1] for expert in chosen}
    for expert in set(range(case.experts)) - used:
        unread["gate_up"][LAYER, expert] = unread["down"][LAYER, expert] = np.nan
    np.testing.assert_array_equal(run(case, arrays._replace(**unread)), run(case, arrays))


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_shares_of_devices_add_up_to_the_whole(tokens):
    whole = Case(name="", tokens=tokens, depth=64, width=32, experts=9, top_k=4, residual=False)
    arrays, total = make(whole), np.zeros((tokens, 64), np.float32)
    for first in (0, 3, 6):
        mine = {name: getattr(arrays, name)[:, first : first + 3] for name in ("gate_up", "down")}
        part = Case(name="", tokens=tokens, depth=64, width=32, experts=9, top_k=4, here=3, first_expert=first)
        share = run(part, arrays._replace(**mine), traced_first=True)
        np.testing.assert_array_equal(share, run(part, arrays._replace(**mine)))
        total += share
    np.testing.assert_allclose(total, run(whole, arrays), atol=1e-5)


def test_a_row_is_the_same_beside_others_but_for_the_order_of_sums():
    case = named("tiny, 70 tokens")
    arrays = make(case)
    part = slice(20, 45)
    some = run(case, arrays._replace(x=arrays.x[part], residual=arrays.residual[part]))
    np.testing.assert_allclose(run(case, arrays)[part], some, atol=2e-6)


def test_the_cases_meet_every_edge():
    for kinds in ([case for case in CASES if case.tokens == 1], [case for case in CASES if case.tokens > 16]):
        assert any(case.here is not None for case in kinds)
        assert any(not case.residual for case in kinds) and any(not case.renormalise for case in kinds)
        assert any(case.experts & (case.experts - 1) for case in kinds)
        assert any(case.ties for case in kinds) and any(case.padding for case in kinds)
    assert any(case.offset for case in CASES) and any(case.top_k & (case.top_k - 1) for case in CASES)
    assert any(case.top_k == case.experts for case in CASES)
    assert max(case.tokens * case.top_k for case in CASES) > 2048
    assert len({case.name for case in CASES}) == len(CASES)


FITTING = {"x": (2, 8), "router": (1, 6, 8), "gate_up": (1, 3, 2, 4, 8), "down": (1, 3, 8, 4), "norm": (1, 8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (8,)}, r"x \(8,\) \[T, D\] does not fit router \(1, 6, 8\) \[L, X, D\]"),
        ({"x": (2, 9)}, r"x \(2, 9\) \[T, D\] does not fit router \(1, 6, 8\)"),
        ({"router": (6, 8)}, r"does not fit router \(6, 8\) \[L, X, D\]"),
        ({"norm": (2, 8)}, r"norm \(2, 8\) \[L, D\] does not fit router \(1, 6, 8\)"),
        ({"gate_up": (1, 3, 4, 8)}, r"gate_up \(1, 3, 4, 8\) \[L, X, 2, I, D\] does not fit router \(1, 6, 8\)"),
        ({"gate_up": (1, 3, 3, 4, 8)}, r"gate_up \(1, 3, 3, 4, 8\) \[L, X, 2, I, D\] does not fit"),
        ({"gate_up": (2, 3, 2, 4, 8)}, r"gate_up \(2, 3, 2, 4, 8\) \[L, X, 2, I, D\] does not fit"),
        ({"down": (1, 2, 8, 4)}, r"down \(1, 2, 8, 4\) \[L, X, D, I\] does not fit gate_up \(1, 3, 2, 4, 8\)"),
        ({"down": (1, 3, 4, 8)}, r"down \(1, 3, 4, 8\) \[L, X, D, I\] does not fit gate_up \(1, 3, 2, 4, 8\)"),
        ({"residual": (2, 4)}, r"residual \(2, 4\) does not fit x \(2, 8\) \[T, D\]"),
        ({"valid": (3,)}, r"valid bool \(3,\) is not bool \[T\] of x \(2, 8\) \[T, D\]"),
        ({"top_k": 0}, "top_k is 0; there are 6 experts, of which 1 at least is chosen"),
        ({"top_k": 7}, "top_k is 7; there are 6 experts"),
        ({"first_expert": 4}, r"experts 4 to 4 \+ 3 are not among the router's 6"),
        ({"first_expert": -1}, r"experts -1 to -1 \+ 3 are not among the router's 6"),
        ({"gate_up": (1, 7, 2, 4, 8), "down": (1, 7, 8, 4)}, r"experts 0 to 0 \+ 7 are not among the router's 6"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_sizes(change, message):
    what = FITTING | change
    arrays = {name: jnp.zeros(what.pop(name)) for name in FITTING}
    if "residual" in what:
        what["residual"] = jnp.zeros(what["residual"])
    if "valid" in what:
        what["valid"] = jnp.ones(what["valid"], bool)
    experts, norm = Experts(arrays["router"], arrays["gate_up"], arrays["down"]), Norm(arrays["norm"], EPS)
    with pytest.raises(ValueError, match=message):
        moe(arrays["x"], experts, jnp.int32(0), norm=norm, renormalise=True, target=CPU, **{"top_k": 2, **what})
