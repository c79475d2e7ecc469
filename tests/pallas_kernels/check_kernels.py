"""Runs the checks of an op through each of its routes for GPUs, and compares the results with the reference's.

    TRITON_INTERPRET=1 JAX_PLATFORMS=cpu python check_kernels.py OP     float32, in Triton's interpreter on any CPU
    python check_kernels.py OP                                          bfloat16, on a GPU

Prints one JSON object: by check and route the relative error in the norm of the worst result and what else is wrong,
or why the route refused, or how it failed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import triton_call
from pallas_kernels.delta_rule import api as delta_api
from pallas_kernels.delta_rule import cases as delta_cases
from pallas_kernels.dispatch import CPU, Route, Target
from pallas_kernels.kv_write import api as kv_write_api
from pallas_kernels.kv_write import cases as kv_write_cases
from pallas_kernels.linear import api as linear_api
from pallas_kernels.linear import cases as linear_cases
from pallas_kernels.moe import api as moe_api
from pallas_kernels.moe import cases as moe_cases
from pallas_kernels.moe import routing as routing_api
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention import decode as decode_api
from pallas_kernels.sample import api as sample_api
from pallas_kernels.sample import cases as sample_cases
from tests.pallas_kernels import oracle
from tests.pallas_kernels.decode_steps import make as decode_arrays
from tests.pallas_kernels.kernel_checks import CHECKS, Check

LAYER = 1
EPS = 1e-6
INTERPRETING = triton_call.INTERPRETING
DTYPE = jnp.float32 if INTERPRETING else jnp.bfloat16
COUNTERS = 4096


class Found(NamedTuple):
    """What came of a call."""

    results: list[jax.Array]
    holds: dict[str, jax.Array]
    """What must be true besides, by what is wrong if it is not."""
    exact: tuple[jax.Array, ...] = ()
    """What must be the same number by number."""


class Call(NamedTuple):
    """A call of an op: a function of the target, counters and arrays; and the arrays."""

    function: Callable[..., Found]
    arrays: tuple[np.ndarray | None, ...]
    narrows: bool = True
    """Whether the arrays are of the run's dtype, rather than of their own."""


def linear(case: linear_cases.Case) -> Call:
    def function(target, counters, x, weight, norm, bias, residual):
        layer = jnp.asarray(LAYER, jnp.int32)
        out = linear_api.linear(
            x,
            weight,
            layer,
            norm=None if norm is None else linear_api.Norm(norm, EPS),
            bias=bias,
            gated=case.gated,
            residual=residual,
            out_dtype=jnp.float32 if case.float32_out else None,
            counters=counters,
            target=target,
        )
        return Found([out], {})

    return Call(function, linear_cases.make(case))


def kv_write(case: kv_write_cases.Case) -> Call:
    a = kv_write_cases.make(case)
    mine = np.zeros(a.k_pool.shape[:3], bool)
    mine[LAYER, a.page, a.position % case.page_size] = True

    def function(target, counters, qkv, k_pool, v_pool, q_norm, k_norm):
        del counters
        pools = jax.new_ref(k_pool), jax.new_ref(v_pool)
        norms = kv_write_api.HeadNorms(q_norm, k_norm, EPS) if case.norm else None
        rotary, places = jax.tree.map(jnp.asarray, ((a.cos, a.sin), (a.page, a.position)))
        q = kv_write_api.kv_write(qkv, rotary, pools, jnp.asarray(LAYER, jnp.int32), places, norms=norms, target=target)
        after = jax.freeze(pools[0]), jax.freeze(pools[1])
        kept = [jnp.array_equal(new[~mine], old[~mine]) for new, old in zip(after, (k_pool, v_pool), strict=True)]
        return Found([q, after[0][mine], after[1][mine]], {"other places changed": kept[0] & kept[1]})

    return Call(function, (a.qkv, a.k_pool, a.v_pool, a.q_norm, a.k_norm))


def paged_attention(case: attention_cases.Case) -> Call:
    a = oracle.without_others(case, attention_cases.make(case), LAYER)
    rows = jax.tree.map(jnp.asarray, a.rows)
    real = sum(new for new, _ in case.rows)

    def function(target, counters, q, k_pool, v_pool):
        pools = jax.new_ref(k_pool), jax.new_ref(v_pool)
        sizes = {"max_query_len": case.max_query_len, "target": target}
        # As a step does it; a single row does without.
        plan = attention_api.plan(rows, pools, num_heads=case.num_heads, **sizes) if len(case.rows) > 1 else None
        out = attention_api.paged_attention(
            q,
            pools,
            jnp.asarray(LAYER, jnp.int32),
            rows,
            scale=case.head_width**-0.5,
            window=None if case.window is None else jnp.asarray(case.window, jnp.int32),
            soft_cap=case.soft_cap,
            sinks=None if a.sinks is None else jnp.asarray(a.sinks),
            counters=counters,
            plan=plan,
            **sizes,
        )
        before = k_pool, v_pool
        kept = [jnp.array_equal(jax.freeze(pool), old, equal_nan=True) for pool, old in zip(pools, before, strict=True)]
        holds = {"the pools changed": kept[0] & kept[1], "padding is not finite": jnp.isfinite(out).all()}
        return Found([out[:real]], holds)

    return Call(function, (a.q, a.k_pool, a.v_pool))


def sample(case: sample_cases.Case) -> Call:
    a = sample_cases.make(case)
    num_top = min(20, case.vocab)

    def function(target, counters, *arrays):
        logits, parameters, history, places = jax.tree.unflatten(jax.tree.structure(a), arrays)
        rows, history = sample_api.Parameters(*parameters), sample_api.History(*history)
        places = sample_api.Places(*places)
        how = {"num_top": num_top, "counters": counters, "target": target}
        tokens, found = sample_api.sample(logits, rows, history, places, **how)
        asks = any(ask.logprobs and ask.active for ask in case.asks)
        logprobs = [found.chosen, found.top] if asks else [1.0 + found.chosen, 1.0 + found.top]  # all 1: a norm
        return Found(logprobs, {}, (jnp.where(places.active, tokens, 0), found.top_ids))

    return Call(function, tuple(jax.tree.leaves(a)), narrows=False)


def decode_attention(case: attention_cases.Case) -> Call:
    """With norms where heads are 128 wide. What the cache holds in the places of the new tokens is NaN before."""
    a = decode_arrays(case)
    mine = np.zeros(a.k_pool.shape[:3], bool)
    real = len(case.rows)
    mine[LAYER, a.rows.token_page[:real], a.rows.token_position[:real] % case.page_size] = True
    others = ~mine
    others[:, 0] = False  # Padding may be written there.
    rows, rotary = jax.tree.map(jnp.asarray, (a.rows, (a.cos, a.sin)))

    def function(target, counters, qkv, k_pool, v_pool, q_norm, k_norm):
        pools = jax.new_ref(k_pool), jax.new_ref(v_pool)
        out = decode_api.decode_attention(
            qkv,
            rotary,
            pools,
            jnp.asarray(LAYER, jnp.int32),
            rows,
            norms=kv_write_api.HeadNorms(q_norm, k_norm, EPS) if case.head_width == 128 else None,
            scale=case.head_width**-0.5,
            window=None if case.window is None else jnp.asarray(case.window, jnp.int32),
            counters=counters,
            target=target,
        )
        before, after = (k_pool, v_pool), (jax.freeze(pools[0]), jax.freeze(pools[1]))
        kept = [jnp.array_equal(x[others], y[others], equal_nan=True) for x, y in zip(after, before, strict=True)]
        return Found([out[:real], after[0][mine], after[1][mine]], {"other places changed": kept[0] & kept[1]})

    return Call(function, (a.qkv, a.k_pool, a.v_pool, a.q_norm, a.k_norm))


def moe(case: moe_cases.Case) -> Call:
    *arrays, valid = moe_cases.make(case)

    def function(target, counters, x, router, gate_up, down, norm, residual):
        out = moe_api.moe(
            x,
            moe_api.Experts(router, gate_up, down),
            jnp.asarray(LAYER, jnp.int32),
            norm=linear_api.Norm(norm, EPS, case.offset),
            top_k=case.top_k,
            renormalise=case.renormalise,
            residual=residual,
            first_expert=case.first_expert,
            valid=None if valid is None else jnp.asarray(valid),
            counters=counters,
            target=target,
        )
        return Found([out], {})

    return Call(function, tuple(arrays))


def route(case: moe_cases.Case) -> Call:
    made = moe_cases.make(case)

    def function(target, counters, x, router, norm):
        found = routing_api.route(
            x,
            router,
            jnp.asarray(LAYER, jnp.int32),
            norm=linear_api.Norm(norm, EPS, case.offset),
            top_k=case.top_k,
            renormalise=case.renormalise,
            valid=None if made.valid is None else jnp.asarray(made.valid),
            counters=counters,
            target=target,
        )
        expert, weight = found
        falls = (weight[:, :-1] >= weight[:, 1:]).all()
        if not (INTERPRETING or case.ties):
            # Which are chosen is clear (see `moe_cases.make`), but not, in bfloat16, which of two comes first.
            order = jnp.argsort(expert, axis=-1)
            expert, weight = (jnp.take_along_axis(of, order, axis=-1) for of in found)
        nowhere = case.padding == case.tokens  # then all are 0: a norm
        return Found([weight + 1 if nowhere else weight], {"the weights rise": falls}, (expert,))

    return Call(function, (made.x, made.router, made.norm))


def delta_rule(case: delta_cases.Case) -> Call:
    """The weights of the gates and the pools are float32, as in a model."""
    a = delta_cases.make(case)
    real, mine = case.num_tokens - case.pad_tokens, a.rows.slot[: len(case.rows)]
    others = np.ones(a.state_pool.shape[:2], bool)
    others[LAYER, [*mine, case.num_slots]] = False
    kept_inputs = np.zeros(a.conv_pool.shape[:3], bool)
    for row, (new, old) in enumerate(case.rows):
        kept_inputs[LAYER, mine[row], [p % 4 for p in range(max(0, old + new - 4), old + new)]] = True
    rows = jax.tree.map(jnp.asarray, a.rows)

    def function(target, counters, x, conv, norm):
        del counters
        before = jnp.asarray(a.state_pool), jnp.asarray(a.conv_pool)
        pools = delta_api.DeltaPools(*map(jax.new_ref, before))
        weights = delta_api.DeltaWeights(conv, jnp.asarray(a.a_log), jnp.asarray(a.dt_bias), norm)
        how = {"max_query_len": case.max_query_len, "target": target}
        # As a step does it; a single row does without.
        plan = delta_api.plan(rows, **how) if len(case.rows) > 1 else None
        out = delta_api.delta_rule(x, weights, pools, jnp.asarray(LAYER, jnp.int32), rows, eps=EPS, plan=plan, **how)
        after = tuple(map(jax.freeze, pools))
        kept = [jnp.array_equal(x[others], y[others], equal_nan=True) for x, y in zip(after, before, strict=True)]
        holds = {"other slots changed": kept[0] & kept[1], "padding is not finite": jnp.isfinite(out).all()}
        return Found([out[:real], after[0][LAYER, mine]], holds, (after[1][kept_inputs],))

    return Call(function, (a.x, a.conv, a.norm))


OPS = {
    "linear": (linear, linear_api),
    "kv_write": (kv_write, kv_write_api),
    "paged_attention": (paged_attention, attention_api),
    "decode_attention": (decode_attention, decode_api),
    "sample": (sample, sample_api),
    "route": (route, routing_api),
    "moe": (moe, moe_api),
    "delta_rule": (delta_rule, delta_api),
}


def run(call: Call, target: Target, *, counters: bool) -> Found:
    """The call's results in float32; for the CPU from the same numbers, rounded to DTYPE, in float32 throughout."""
    dtype = DTYPE if call.narrows else None

    def whole(arrays):
        ref = jax.new_ref(jnp.zeros(COUNTERS, jnp.int32)) if counters else None
        found = call.function(target, ref, *arrays)
        if ref is not None:
            found.holds["counters are not zero"] = ~jax.freeze(ref).any()
        return found

    arrays = [None if array is None else jnp.asarray(array, dtype) for array in call.arrays]
    if target == CPU and call.narrows:
        arrays = [None if array is None else array.astype(jnp.float32) for array in arrays]
    found = whole(arrays) if INTERPRETING and target != CPU else jax.jit(whole)(arrays)
    return jax.tree.map(lambda a: np.asarray(a, bool if a.dtype == bool else np.float32), found)


def compare(found: Found, expected: Found) -> dict[str, Any]:
    errors = [np.linalg.norm(f - e) / np.linalg.norm(e) for f, e in zip(found.results, expected.results, strict=True)]
    wrong = [what for what, holds in found.holds.items() if not holds]
    for f, e in zip(found.exact, expected.exact, strict=True):
        wrong += [f"at {at.tolist()} it is {f[tuple(at)]}, not {e[tuple(at)]}" for at in np.argwhere(f != e)[:4]]
    return {"error": float(np.max(errors)), "wrong": wrong}


def by_route(check: Check, make: Callable[[Any], Call], api: Any, target: Target) -> dict[str, dict[str, Any]]:
    call, routes = make(check.case), api.ROUTES
    with jax.default_device(jax.devices("cpu")[0]):
        expected = run(call, CPU, counters=check.counters)
    found = {}
    for route in routes[:-1]:  # The last is the reference.
        refusals = []
        try:
            api.ROUTES = (Route(route.name, noting(route.run, refusals), route.plan),)
            found[route.name] = compare(run(call, target, counters=check.counters), expected)
        except Exception as error:
            failed = f"{route.name}: {error!r}\n{traceback.format_exc()[-1500:]}"
            found[route.name] = {"refused": refusals[0]} if refusals else {"failed": failed}
        finally:
            api.ROUTES = routes
    return found


def noting(function: Callable[..., Any], refusals: list[str]) -> Callable[..., Any]:
    """The function, whose refusals are added to the list."""

    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(str(refusal))
            raise

    return call


def main() -> None:
    op = sys.argv[1]
    target = Target("gpu", 90) if INTERPRETING else Target.of(jax.devices()[0])
    if target == CPU:
        sys.exit("there is no GPU, and TRITON_INTERPRET is not 1")
    print(json.dumps({check.name: by_route(check, *OPS[op], target) for check in CHECKS[op]}))


if __name__ == "__main__":
    main()
