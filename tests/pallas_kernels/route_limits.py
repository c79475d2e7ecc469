"""Calls that a route for GPUs takes, and some that it does not.

    JAX_PLATFORMS=cpu python route_limits.py

Run as a script, where Triton is, it prints one JSON object: by the name of a call why it was refused, or null where it
was not. Nothing runs on a device: calls are traced, which compiles the kernels of those that are taken.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule import api as delta_api
from pallas_kernels.dispatch import CPU, Target
from pallas_kernels.kv_write import api as kv_write_api
from pallas_kernels.linear import api as linear_api
from pallas_kernels.moe import api as moe_api
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.paged_attention import decode as decode_api
from pallas_kernels.paged_attention.api import PagedRows

HALF, FULL = jnp.bfloat16, jnp.float32
AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL = (Target("gpu", number) for number in (80, 89, 90, 100, 120))
NUM_LAYERS, NUM_PAGES, NUM_ROWS, NUM_HEADS, NUM_KV_HEADS = 2, 5, 2, 4, 2
NARROW_ONLY = r"dtypes \['float32'\]; it takes one of bfloat16, float16"


@dataclasses.dataclass(frozen=True)
class Call:
    """A small call of an op, but for `change`, through one route alone."""

    op: str
    route: str
    change: dict[str, Any]
    refusal: str | None = None
    """What the route must say, a regular expression; None where it must take the call."""

    @property
    def name(self) -> str:
        change = ", ".join(f"{name} {spoken(value)}" for name, value in self.change.items())
        return f"{self.op}, {self.route}: {change or 'no change'}"


def spoken(value: Any) -> str:
    if isinstance(value, Target):
        return f"{value.platform} {value.compute_capability or ''}".strip()
    return getattr(value, "__name__", str(value))


def refused(op: str, route: str, *changes: tuple[dict[str, Any], str]) -> tuple[Call, ...]:
    return tuple(Call(op, route, change, refusal) for change, refusal in changes)


REFUSED = (
    *refused(
        "linear",
        "triton",
        ({"rows": 17}, "17 rows; it takes 16 at most"),
        ({"dtype": FULL}, NARROW_ONLY),
        ({"weight_dtype": jnp.float16}, r"dtypes \['bfloat16', 'float16'\]"),
        ({"norm_dtype": FULL}, r"dtypes \['bfloat16', 'float32'\]"),
        ({"out": 131}, "a weight of 131 x 256; they must be multiples of"),
        ({"depth": 250}, "a weight of 384 x 250"),
        ({"target": CPU}, "the target is a cpu"),
    ),
    *refused(
        "linear",
        "cublas",
        ({"dtype": FULL}, NARROW_ONLY),
        ({"norm_dtype": FULL}, r"dtypes \['bfloat16', 'float32'\]"),
        ({"target": CPU}, "the target is a cpu"),
    ),
    *refused(
        "moe",
        "triton",
        ({"dtype": FULL}, NARROW_ONLY),
        ({"weight_dtype": jnp.float16}, r"dtypes \['bfloat16', 'float16'\]"),
        ({"norm_dtype": FULL}, r"dtypes \['bfloat16', 'float32'\]"),
        ({"experts": 1025}, "1025 experts; it takes 1024 at most"),
        ({"target": CPU}, "the target is a cpu"),
    ),
    *refused(
        "kv_write",
        "triton",
        ({"dtype": FULL}, NARROW_ONLY),
        ({"pool_dtype": jnp.float16}, r"dtypes \['bfloat16', 'float16'\]"),
        ({"norm_dtype": FULL}, r"dtypes \['bfloat16', 'float32'\]"),
        ({"target": CPU}, "the target is a cpu"),
    ),
    *refused(
        "paged_attention",
        "triton",
        ({"dtype": FULL}, NARROW_ONLY),
        ({"pool_dtype": jnp.float16}, r"dtypes \['bfloat16', 'float16'\]"),
        ({"width": 512}, "heads are 512 wide; it takes 16 to 256"),
        ({"width": 8}, "heads are 8 wide; it takes 16 to 256"),
        ({"width": 256, "target": ADA}, r"_prefill_attention needs \d+ bytes of shared memory; there are 101376"),
        ({"target": CPU}, "the target is a cpu"),
    ),
    *refused(
        "decode_attention",
        "triton",
        ({"dtype": FULL}, NARROW_ONLY),
        ({"pool_dtype": jnp.float16}, r"dtypes \['bfloat16', 'float16'\]"),
        ({"norm_dtype": FULL}, r"dtypes \['bfloat16', 'float32'\]"),
        ({"width": 96}, "heads are 96 wide; it takes powers of two from 16 to 256"),
        ({"width": 512}, "heads are 512 wide; it takes powers of two from 16 to 256"),
        ({"width": 8}, "heads are 8 wide; it takes powers of two from 16 to 256"),
        ({"target": CPU}, "the target is a cpu"),
    ),
    *refused(
        "paged_attention",
        "mosaic_gpu",
        ({"dtype": FULL}, "queries float32 and pools float32"),
        ({"pool_dtype": jnp.float16}, "queries bfloat16 and pools float16"),
        ({"width": 256}, "head width 256"),
        ({"page_size": 8}, "8 tokens per page"),
        ({"tokens": 68}, "68 tokens are no multiple of 8"),
        ({"tokens": 56}, "56 tokens; it takes 64 at least"),
        ({"scale": -1.0}, "scale -1.0 is not positive"),
        ({"window": 5}, "it has no window"),
        ({"soft_cap": 5.0}, "it has no soft cap"),
        ({"sinks": True}, "it has no sinks"),
        ({"max_query_len": 1}, "every row has one token"),
        ({"target": BLACKWELL}, "compute_capability=.*; it needs compute capability 90"),
        ({"target": AMPERE}, "compute_capability=.*; it needs compute capability 90"),
        ({"target": CPU}, "the target is a cpu"),
    ),
    *refused(
        "delta_rule",
        "triton",
        ({"dtype": FULL}, NARROW_ONLY),
        ({"key_width": 96}, "keys are 96 wide; it takes powers of two from 16 to 256"),
        ({"key_width": 512}, "keys are 512 wide; it takes powers of two from 16 to 256"),
        ({"value_width": 8}, "values are 8 wide; it takes powers of two from 16 to 256"),
        ({"target": CPU}, "the target is a cpu"),
    ),
)

EVERY_GPU = (
    Call("linear", "triton", {"rows": 1}),
    Call("linear", "triton", {"rows": 8}),
    Call("linear", "cublas", {"rows": 64}),
    *(Call("moe", "triton", {"tokens": tokens}) for tokens in (1, 8, 64, 200, 4000)),
    Call("kv_write", "triton", {}),
    Call("paged_attention", "triton", {"width": 64}),
    Call("paged_attention", "triton", {"width": 128}),
    Call("paged_attention", "triton", {"width": 256, "max_query_len": 1, "tokens": NUM_ROWS}),
    Call("decode_attention", "triton", {"width": 64}),
    Call("decode_attention", "triton", {"width": 128}),
    Call("delta_rule", "triton", {"tokens": NUM_ROWS, "max_query_len": 1}),
    Call("delta_rule", "triton", {}),
    Call("delta_rule", "triton", {"key_width": 16, "value_width": 16, "group": 3}),
)
TAKEN = (
    *(
        dataclasses.replace(call, change={**call.change, "target": target})
        for call in EVERY_GPU
        for target in (AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL)
    ),
    # Widths of GLM-4.5 and Mixtral 8x22B, and experts of Qwen2-MoE and Qwen3-Next.
    *(
        Call("moe", "triton", {"depth": depth, "tokens": tokens})
        for depth, tokens in ((5120, 1), (5120, 8), (6144, 64))
    ),
    *(Call("moe", "triton", {"experts": experts, "tokens": 8}) for experts in (60, 512)),
    Call("paged_attention", "triton", {"width": 256, "target": AMPERE}),
    Call("paged_attention", "triton", {"width": 256, "target": HOPPER}),
    Call("decode_attention", "triton", {"width": 256, "target": AMPERE}),
    Call("decode_attention", "triton", {"width": 256, "target": HOPPER}),
    Call("paged_attention", "mosaic_gpu", {}),
    *(Call("delta_rule", "triton", {"key_width": width, "value_width": 256}) for width in (16, 256)),
    Call("delta_rule", "triton", {"key_width": 256, "value_width": 32, "target": AMPERE}),
    # Contexts of up to 1,024, 8,192 and 131,072 tokens: in 4, 32 and 128 parts.
    *(Call("paged_attention", "triton", {"table_width": width}) for width in (64, 512, 8192)),
    *(Call("decode_attention", "triton", {"table_width": width}) for width in (64, 512, 8192)),
)
CALLS = (*TAKEN, *REFUSED)


def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def trace_linear(*, rows=1, depth=256, out=384, dtype=HALF, weight_dtype=None, norm_dtype=None, target=HOPPER) -> None:
    def call(x, weight, norm, layer):
        return linear_api.linear(x, weight, layer, norm=linear_api.Norm(norm, 1e-6), target=target)

    x, weight = array(rows, depth, dtype=dtype), array(NUM_LAYERS, out, depth, dtype=weight_dtype or dtype)
    jax.eval_shape(call, x, weight, array(NUM_LAYERS, depth, dtype=norm_dtype or dtype), array())


def trace_moe(
    *, tokens=8, experts=16, dtype=HALF, weight_dtype=None, norm_dtype=None, target=HOPPER, depth=256, width=192
) -> None:
    def call(x, router, gate_up, down, norm, layer):
        how = {"norm": linear_api.Norm(norm, 1e-6), "top_k": 2, "renormalise": True, "target": target}
        return moe_api.moe(x, moe_api.Experts(router, gate_up, down), layer, **how)

    weight_dtype = weight_dtype or dtype
    jax.eval_shape(
        call,
        array(tokens, depth, dtype=dtype),
        array(NUM_LAYERS, experts, depth, dtype=dtype),
        array(NUM_LAYERS, experts, 2, width, depth, dtype=weight_dtype),
        array(NUM_LAYERS, experts, depth, width, dtype=weight_dtype),
        array(NUM_LAYERS, depth, dtype=norm_dtype or dtype),
        array(),
    )


def trace_kv_write(*, tokens=3, width=64, dtype=HALF, pool_dtype=None, norm_dtype=None, target=HOPPER) -> None:
    def call(qkv, cos, pool, norm, token, layer):
        pools, norms = (jax.new_ref(pool), jax.new_ref(pool)), kv_write_api.HeadNorms(norm, norm, 1e-6)
        return kv_write_api.kv_write(qkv, (cos, cos), pools, layer, (token, token), norms=norms, target=target)

    jax.eval_shape(
        call,
        array(tokens, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS + 2, width, dtype=dtype),
        array(tokens, width // 2, dtype=FULL),
        array(NUM_LAYERS, NUM_PAGES, 16, NUM_KV_HEADS, width, dtype=pool_dtype or dtype),
        array(NUM_LAYERS, width, dtype=norm_dtype or dtype),
        array(tokens),
        array(),
    )


def trace_paged_attention(
    *,
    tokens=64,
    width=64,
    page_size=16,
    dtype=HALF,
    pool_dtype=None,
    window=None,
    sinks=False,
    table_width=4,
    **how: Any,
) -> None:
    def call(q, pool, rows, layer):
        options = {"scale": 0.125, "max_query_len": tokens, "target": HOPPER, **how}
        options["counters"] = jax.new_ref(jnp.zeros(64, jnp.int32))
        options["window"] = None if window is None else jnp.asarray(window, jnp.int32)
        options["sinks"] = jnp.zeros(NUM_HEADS) if sinks else None
        return attention_api.paged_attention(q, (jax.new_ref(pool), jax.new_ref(pool)), layer, rows, **options)

    rows = PagedRows(array(NUM_ROWS, table_width), *[array(NUM_ROWS)] * 3, *[array(tokens)] * 3)
    pool = array(NUM_LAYERS, NUM_PAGES, page_size, NUM_KV_HEADS, width, dtype=pool_dtype or dtype)
    jax.eval_shape(call, array(tokens, NUM_HEADS, width, dtype=dtype), pool, rows, array())


def trace_decode_attention(
    *, width=64, dtype=HALF, pool_dtype=None, norm_dtype=None, table_width=4, target=HOPPER
) -> None:
    def call(qkv, cos, pool, norm, rows, layer):
        pools, norms = (jax.new_ref(pool), jax.new_ref(pool)), kv_write_api.HeadNorms(norm, norm, 1e-6)
        how = {"norms": norms, "scale": 0.125, "target": target, "counters": jax.new_ref(jnp.zeros(64, jnp.int32))}
        return decode_api.decode_attention(qkv, (cos, cos), pools, layer, rows, **how)

    jax.eval_shape(
        call,
        array(NUM_ROWS, NUM_KV_HEADS, NUM_HEADS // NUM_KV_HEADS + 2, width, dtype=dtype),
        array(NUM_ROWS, width // 2, dtype=FULL),
        array(NUM_LAYERS, NUM_PAGES, 16, NUM_KV_HEADS, width, dtype=pool_dtype or dtype),
        array(NUM_LAYERS, width, dtype=norm_dtype or dtype),
        PagedRows(array(NUM_ROWS, table_width), *[array(NUM_ROWS)] * 6),
        array(),
    )


def trace_delta_rule(
    *, tokens=130, group=2, key_width=128, value_width=128, max_query_len=130, dtype=HALF, target=HOPPER
) -> None:
    channels = 2 * key_width + group * value_width
    heads = NUM_KV_HEADS, group

    def call(x, weights, state, conv, rows, layer):
        pools = delta_api.DeltaPools(jax.new_ref(state), jax.new_ref(conv))
        how = {"max_query_len": max_query_len, "target": target}
        return delta_api.delta_rule(x, weights, pools, layer, rows, eps=1e-6, **how)

    jax.eval_shape(
        call,
        array(tokens, NUM_KV_HEADS, channels + group * value_width + 2 * group, dtype=dtype),
        delta_api.DeltaWeights(
            array(NUM_LAYERS, NUM_KV_HEADS, channels, delta_api.TAPS, dtype=dtype),
            *[array(NUM_LAYERS, *heads, dtype=FULL)] * 2,
            array(NUM_LAYERS, value_width, dtype=dtype),
        ),
        array(NUM_LAYERS, NUM_PAGES, *heads, key_width, value_width, dtype=FULL),
        array(NUM_LAYERS, NUM_PAGES, delta_api.TAPS, NUM_KV_HEADS, channels, dtype=FULL),
        delta_api.SlotRows(*[array(NUM_ROWS)] * 4, *[array(tokens)] * 2),
        array(),
    )


OPS: dict[str, tuple[Callable[..., None], Any]] = {
    "linear": (trace_linear, linear_api),
    "moe": (trace_moe, moe_api),
    "kv_write": (trace_kv_write, kv_write_api),
    "paged_attention": (trace_paged_attention, attention_api),
    "decode_attention": (trace_decode_attention, decode_api),
    "delta_rule": (trace_delta_rule, delta_api),
}


def reason(call: Call) -> str | None:
    """Why the route refuses the call; None where it takes it."""
    trace, api = OPS[call.op]
    routes = api.ROUTES
    api.ROUTES = tuple(route for route in routes if route.name == call.route)
    try:
        trace(**call.change)
    except NotImplementedError as refusal:
        return str(refusal)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:1000]}"
    finally:
        api.ROUTES = routes
    return None


def main() -> None:
    print(json.dumps({call.name: reason(call) for call in CALLS}))


if __name__ == "__main__":
    main()
