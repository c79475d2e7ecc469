"""Times the kernels on a GPU and says what share of the card's limit each reaches.

    python scripts/bench_kernels.py [--only SUBSTRING] [--route NAME] [--record LABEL]

Every case runs on each route that takes it, but for the reference. Limits are measured first, on the same card: bytes
against a device copy (read and written bytes both count), operations against a product of bfloat16 matrices. A case
loops over several layers of its own in one captured graph, so that no cache holds what it reads (but for the sampler's
logits) and gaps between kernels count.
"""

from __future__ import annotations

import argparse
import functools
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results_file
from step_timing import Rates, measure_rates

from jaxinfer.runner.compiled import GPU_OPTIONS
from jaxinfer.runner.sampling import num_top
from pallas_kernels.delta_rule import api as delta_api
from pallas_kernels.delta_rule import cases as delta_cases
from pallas_kernels.dispatch import Route, Target
from pallas_kernels.kv_write import api as kv_write_api
from pallas_kernels.linear import api as linear_api
from pallas_kernels.moe import api as moe_api
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.sample import api as sample_api
from pallas_kernels.sample import cases as sample_cases

RUNS = 20
DTYPE = jnp.bfloat16
NUM_COUNTERS = 2**14
QWEN3_4B = {"H": 32, "K": 8, "E": 128, "D": 2560, "F": 9728, "V": sample_cases.QWEN3}
QWEN3_30B_A3B = {"D": 2048, "I": 768, "X": 128, "k": 8}
ASKS = {
    "temperature": sample_cases.Ask(temperature=0.7),
    "top-k and top-p": sample_cases.Ask(temperature=0.6, top_k=20, top_p=0.95),
}


class Case(NamedTuple):
    """A loop over `layers` layers of one op. call(route, layer, counters, arrays) -> anything of it."""

    name: str
    layers: int
    routes: tuple[Route, ...]
    call: Callable[..., Any]
    arrays: Callable[[], Any]
    layer_bytes: float  # least bytes that a layer moves; 0 where operations bind
    layer_flops: float
    pools: Callable[[], Any] = tuple
    """Arrays that the op changes in place: call gets Refs of them after `arrays`."""


def random(index: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Normal numbers, made on the card piece by piece, since random bits are twice as wide."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key, rest):
        return jax.random.normal(key, rest, DTYPE) * jnp.asarray(scale, DTYPE)

    keys = jax.random.split(jax.random.key(index), shape[0])
    return jnp.stack([draw(key, shape[1:]) for key in keys]) if len(shape) > 2 else draw(keys[0], shape)


def seconds(function: Callable[[Any], Any], state: Any) -> float:
    """Median over RUNS of a call that hands on its donated state."""
    for _ in range(4):
        state = jax.block_until_ready(function(state))
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        state = jax.block_until_ready(function(state))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def attention_case(
    name: str, rows: list[tuple[int, int]], layers: int, *, heads: dict[str, int], page_size: int = 16
) -> Case:
    """rows: tokens in the step and in the cache before it."""
    num_heads, num_kv_heads, width = heads["H"], heads["K"], heads["E"]
    new, old = (np.array(part, np.int32) for part in zip(*rows, strict=True))
    pages = -(-(new + old) // page_size)
    free = np.random.default_rng(0).permutation(int(pages.sum())) + 1
    table = np.zeros((len(rows), int(pages.max())), np.int32)
    for row, (count, start) in enumerate(zip(pages, np.cumsum(pages) - pages, strict=True)):
        table[row, :count] = free[start : start + count]
    row_of = np.repeat(np.arange(len(rows), dtype=np.int32), new)
    start = (np.cumsum(new) - new).astype(np.int32)
    position = (old[row_of] + np.arange(len(row_of)) - start[row_of]).astype(np.int32)
    page = table[row_of, position // page_size]
    placed = attention_api.PagedRows(*map(jnp.asarray, (table, start, new, old, row_of, position, page)))
    decode = max(new) == 1
    visible = int(sum(n * o + n * (n + 1) // 2 for n, o in zip(new.tolist(), old.tolist(), strict=True)))

    def arrays():
        pool = (layers, int(pages.sum()) + 1, page_size, num_kv_heads, width)
        return random(1, len(row_of), num_heads, width), random(2, *pool), random(3, *pool)

    def call(route, layer, counters, arrays, target):
        q, k_pool, v_pool = arrays
        return route.run(
            q,
            (k_pool, v_pool),
            layer,
            placed,
            scale=width**-0.5,
            max_query_len=1 if decode else len(row_of),
            window=None,
            soft_cap=None,
            sinks=None,
            counters=counters,
            plan={},
            target=target,
        )

    kv_bytes = 2.0 * num_kv_heads * width * 2 * int((new + old).sum())
    return Case(
        name=name,
        layers=layers,
        routes=attention_api.ROUTES[:-1],
        call=call,
        arrays=arrays,
        layer_bytes=kv_bytes if decode else 0,
        layer_flops=4.0 * num_heads * width * visible,
    )


def linear_case(name: str, rows: int, depth: int, out: int, layers: int, **more: bool) -> Case:
    """A product with `layers` different weights."""
    gated, norm, residual = (more.get(key, False) for key in ("gated", "norm", "residual"))
    parts = (2,) if gated else ()

    def arrays():
        weight = random(1, layers, *parts, out, depth, scale=depth**-0.5)
        return random(2, rows, depth), weight, jnp.ones((layers, depth), DTYPE), random(3, rows, out)

    def call(route, layer, counters, arrays, target):
        x, weight, scale, residue = arrays
        return route.run(
            x,
            weight,
            layer,
            norm=linear_api.Norm(scale, 1e-6) if norm else None,
            bias=None,
            gated=gated,
            residual=residue if residual else None,
            out_dtype=jnp.dtype(DTYPE),
            counters=counters,
            target=target,
        )

    weights = (2 if gated else 1) * depth * out
    return Case(name, layers, linear_api.ROUTES[:-1], call, arrays, 2.0 * weights, 2.0 * weights * rows)


def moe_case(name: str, tokens: int, layers: int, sizes: dict[str, int]) -> Case:
    """A layer of experts. Its bytes are those of the experts that random choices meet, on average."""
    depth, width, num_experts, top_k = (sizes[key] for key in "DIXk")

    def arrays():
        experts = moe_api.Experts(
            random(1, layers, num_experts, depth, scale=depth**-0.5),
            random(2, layers, num_experts, 2, width, depth, scale=depth**-0.5),
            random(3, layers, num_experts, depth, width, scale=width**-0.5),
        )
        return random(4, tokens, depth), experts, jnp.ones((layers, depth), DTYPE)

    def call(route, layer, counters, arrays, target):
        x, experts, scale = arrays
        return route.run(
            x,
            experts,
            layer,
            norm=linear_api.Norm(scale, 1e-6),
            top_k=top_k,
            renormalise=True,
            residual=x,
            first_expert=jnp.zeros((), jnp.int32),
            valid=None,
            counters=counters,
            target=target,
        )

    met = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
    expert = 3.0 * depth * width
    return Case(name, layers, moe_api.ROUTES[:-1], call, arrays, 2 * met * expert, 2 * tokens * top_k * expert)


def kv_write_case(name: str, tokens: int, layers: int, heads: dict[str, int]) -> Case:
    """QK-norm, RoPE and KV write of `tokens` tokens."""
    num_kv_heads, width, group, page_size = heads["K"], heads["E"], heads["H"] // heads["K"], 16
    position = jnp.arange(tokens, dtype=jnp.int32)
    rotary = jnp.cos(jnp.ones((tokens, width // 2))), jnp.sin(jnp.ones((tokens, width // 2)))

    def arrays():
        pool = (layers, tokens // page_size + 2, page_size, num_kv_heads, width)
        ones = jnp.ones((layers, width), DTYPE)
        return random(1, tokens, num_kv_heads, group + 2, width), random(2, *pool), random(3, *pool), ones

    def call(route, layer, counters, arrays, target):
        del counters
        qkv, k_pool, v_pool, scale = arrays
        pools = jax.new_ref(k_pool), jax.new_ref(v_pool)
        norms = kv_write_api.HeadNorms(scale, scale, 1e-6)
        places = position // page_size + 1, position
        return route.run(qkv, rotary, pools, layer, places, norms=norms, target=target)

    moved = 2.0 * tokens * num_kv_heads * width * (2 * group + 4)
    return Case(name, layers, kv_write_api.ROUTES[:-1], call, arrays, moved, 0)


def sample_case(name: str, rows: int, vocab: int, ask: sample_cases.Ask, layers: int) -> Case:
    """A token for each of `rows`. Every layer draws anew, from the same logits: a step has just written them, too."""

    def arrays():
        made = sample_cases.make(sample_cases.Case(name=name, asks=(ask,) * rows, vocab=vocab))
        return jax.tree.map(jnp.asarray, made)

    def call(route, layer, counters, arrays, target):
        logits, parameters, history, (slot, position, active) = arrays
        tokens, _ = route.run(
            logits,
            sample_api.Parameters(*parameters),
            sample_api.History(*history),
            sample_api.Places(slot, position + layer, active),
            num_top=num_top(vocab),
            counters=counters,
            target=target,
        )
        return tokens

    return Case(name, layers, sample_api.ROUTES[:-1], call, arrays, 4.0 * rows * vocab, 0)


def delta_case(name: str, rows: tuple[tuple[int, int], ...], layers: int, heads: dict[str, int]) -> Case:
    """rows: tokens in the step and of the sequence before it. As many slots as rows."""
    case = delta_cases.Case(name=name, rows=rows, free_slots=0, **heads)
    key_heads, group, key_width, value_width = heads.values()
    placed = jax.tree.map(jnp.asarray, delta_cases.place(case))
    value_heads, slots = key_heads * group, case.num_slots + 1

    def arrays():
        conv = random(1, layers, key_heads, case.channels, delta_api.TAPS, scale=0.5)
        gates = jnp.zeros((layers, key_heads, group))
        width = case.channels + group * value_width + 2 * group
        return random(2, case.num_tokens, key_heads, width), conv, gates, jnp.ones((layers, value_width), DTYPE)

    def pools():
        state = jnp.zeros((layers, slots, key_heads, group, key_width, value_width))
        return delta_api.DeltaPools(state, jnp.zeros((layers, slots, delta_api.TAPS, key_heads, case.channels)))

    def call(route, layer, counters, arrays, target, pools):
        del counters
        x, conv, gates, norm = arrays
        weights = delta_api.DeltaWeights(conv, gates, gates, norm)
        how = {"max_query_len": case.max_query_len, "target": target}
        with jax.ensure_compile_time_eval():  # not a part of what a layer takes
            plan = delta_api.plan(placed, **how)
        return route.run(x, weights, pools, layer, placed, eps=1e-6, plan=plan, **how)

    moved = 2.0 * case.num_tokens * key_heads * (case.channels + 2 * group * value_width)
    moved += 8.0 * len(rows) * value_heads * key_width * value_width
    # Past one token a row, with a state a chunk: what a token adds, and reads, and half of the triangle before it.
    flops = 2.0 * case.num_tokens * value_heads * (3 * key_width * value_width + 64 * (key_width + value_width))
    return Case(name, layers, delta_api.ROUTES[:-1], call, arrays, moved, 0 if case.decode else flops, pools)


def cases() -> Iterator[Case]:
    """The shapes of Qwen3-4B, and of Qwen3-30B-A3B and Qwen3.5-4B where they have other layers."""
    q = QWEN3_4B
    heads = {key: q[key] for key in "HKE"}
    yield attention_case("decode attention, 1 x 131,072", [(1, 131071)], 8, heads=heads)
    yield attention_case("decode attention, 64 x 4,096", [(1, 4095)] * 64, 6, heads=heads)
    yield attention_case("decode attention, 64 x 1,024", [(1, 1023)] * 64, 16, heads=heads)
    yield attention_case("decode attention, 256 x 128", [(1, 127)] * 256, 36, heads=heads)
    yield attention_case("decode attention, 1 x 128", [(1, 127)], 36, heads=heads)
    yield attention_case("prefill attention, 8,192", [(8192, 0)], 8, heads=heads)
    yield attention_case("prefill attention, 8 x 1,024", [(1024, 0)] * 8, 8, heads=heads)
    yield attention_case("prefill attention, 2,048 after 30,720", [(2048, 30720)], 4, heads=heads)
    for rows in (1, 8, 32, 64, 128, 256, 1024, 8192):
        layers = 36 if rows < 1024 else 8
        yield linear_case(f"gate and up, {rows} rows", rows, q["D"], q["F"], layers, gated=True, norm=True)
        yield linear_case(f"down, {rows} rows", rows, q["F"], q["D"], layers, residual=True)
        yield linear_case(f"qkv, {rows} rows", rows, q["D"], 6144, layers, norm=True)
        yield linear_case(f"out, {rows} rows", rows, 4096, q["D"], layers, residual=True)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192):
        yield moe_case(f"experts of Qwen3-30B-A3B, {tokens} tokens", tokens, 24, QWEN3_30B_A3B)
    for tokens in (1, 256, 8192):
        yield kv_write_case(f"QK-norm, RoPE and KV write, {tokens} tokens", tokens, 16, heads)
    for rows in (1, 64, 256):
        for what, ask in ASKS.items():
            yield sample_case(f"sample by {what}, {rows} rows", rows, q["V"], ask, 8)
    for rows in (1, 8, 64, 256):
        yield delta_case(f"delta rule, {rows} rows", ((1, 100),) * rows, 24, delta_cases.QWEN35_4B)
    for tokens in (512, 2048, 8192):
        yield delta_case(f"delta rule, {tokens} tokens", ((tokens, 0),), 8, delta_cases.QWEN35_4B)
    mixed = ((1, 100),) * 32 + ((2048, 2048),)
    yield delta_case("delta rule, 32 rows and 2,048 tokens", mixed, 8, delta_cases.QWEN35_4B)


def loop(case: Case, route: Route, target: Target, arrays: Any, pools: Any) -> Any:
    """One run: every layer once. Hands its pools back, so that they stay where they are."""
    counters = jax.new_ref(jnp.zeros(NUM_COUNTERS, jnp.int32))
    refs = jax.tree.map(jax.new_ref, pools)
    more = {"pools": refs} if pools else {}

    def body(state):
        layer, kept = state
        out = case.call(route, layer, counters, arrays, target, **more)
        # Something of every result must be wanted, or XLA drops what has no other effect.
        return layer + 1, kept + out.reshape(-1)[0].astype(jnp.float32)

    start = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    total = jax.lax.while_loop(lambda state: state[0] < case.layers, body, start)[1]
    return total, jax.tree.map(jax.freeze, refs)


def measure(case: Case, route: Route, target: Target, arrays: Any, rates: Rates) -> dict[str, float]:
    """Time per layer, and its share of the nearer limit."""
    pools = jax.block_until_ready(case.pools())
    stepped = jax.jit(functools.partial(loop, case, route, target), donate_argnums=1)
    run = stepped.lower(arrays, pools).compile(compiler_options=GPU_OPTIONS)
    layer_s = seconds(lambda state: run(arrays, state[1]), (None, pools)) / case.layers
    floor_s = max(case.layer_bytes / rates.copy_bytes_per_s, case.layer_flops / rates.matrix_flops)
    result = {"us": layer_s * 1e6, "share_of_limit": floor_s / layer_s}
    if case.layer_bytes:
        result["tb_per_s"] = case.layer_bytes / layer_s / 1e12
    if case.layer_flops:
        result["tflop_per_s"] = case.layer_flops / layer_s / 1e12
    return {key: float(f"{value:.4g}") for key, value in result.items()}


def bench(
    chosen: Iterable[Case], route_name: str, target: Target, rates: Rates, results: results_file.Results | None
) -> None:
    """Prints a line a case and route, and keeps it in the results."""
    for case in chosen:
        arrays = jax.block_until_ready(case.arrays())
        for route in case.routes:
            if route_name not in ("", route.name):
                continue
            try:
                found = measure(case, route, target, arrays, rates)
            except NotImplementedError:
                continue
            print(f"{case.name:45s} {route.name:12s} {found}", flush=True)
            if results is not None:
                row = {"case": case.name, "route": route.name, **found}
                results.row("kernels", row, operator.itemgetter("case", "route"))
        del arrays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--route", default="", help="run this route only")
    results_file.add_flags(parser)
    args = parser.parse_args()
    target = Target.of(jax.devices()[0])
    if target.platform != "gpu":
        parser.error("there is no GPU here")
    rates = measure_rates()
    print(f"limits: {rates.copy_bytes_per_s / 1e12:.2f} TB/s, {rates.matrix_flops / 1e12:.0f} TFLOP/s", flush=True)
    results = results_file.from_flags(args, limits={name: round(value) for name, value in rates._asdict().items()})
    bench((case for case in cases() if args.only in case.name), args.route, target, rates, results)


if __name__ == "__main__":
    main()
