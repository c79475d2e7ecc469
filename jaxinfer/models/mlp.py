"""The dense MLP block: SwiGLU behind a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from jaxinfer.models import layers
from jaxinfer.models.config import DENSE, DecoderConfig
from jaxinfer.models.model import Placement
from jaxinfer.params import Params, ParamSpec, Source, Specs, norm_spec
from pallas_kernels.linear.api import Norm, linear


def specs(c: DecoderConfig) -> Specs:
    """Gate and up rows apart, so that a shard of F has both."""
    numbers = c.layers_with(DENSE)
    part = c.prefix + "layers.{layer}.mlp."
    bias = functools.partial(ParamSpec, layers=numbers, init="zeros")
    found = {
        "mlp_norm": norm_spec(
            c.prefix + "layers.{layer}.post_attention_layernorm.weight", c.hidden, numbers, offset=c.norm_offset
        ),
        **swiglu(part, c.hidden, c.mlp_width, numbers, ("gate_up", "down")),
    }
    if c.mlp_bias:
        sources = tuple(Source(f"{part}{n}_proj.bias", (c.mlp_width,)) for n in ("gate", "up"))
        found["gate_up_bias"] = bias(shape=(2, c.mlp_width), axes=(None, "mlp"), sources=sources, pack=np.stack)
        down = (Source(part + "down_proj.bias", (c.hidden,)),)
        found["down_bias"] = bias(shape=(c.hidden,), axes=(None,), sources=down)
    return found


def swiglu(part: str, hidden: int, width: int, numbers: tuple[int, ...], names: tuple[str, str]) -> Specs:
    """The two weights of a SwiGLU, under `names`; `part` begins the names of its tensors."""
    stacked = functools.partial(ParamSpec, layers=numbers)
    return {
        names[0]: stacked(
            shape=(2, width, hidden),
            axes=(None, "mlp", None),
            sources=tuple(Source(f"{part}{n}_proj.weight", (width, hidden)) for n in ("gate", "up")),
            pack=np.stack,
        ),
        names[1]: stacked(
            shape=(hidden, width),
            axes=(None, "mlp"),
            sources=(Source(part + "down_proj.weight", (hidden, width)),),
        ),
    }


def block(c: DecoderConfig, params: Params, place: Placement) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of x [T, D] and the number of a dense layer among its like: x plus its MLP."""
    norm = Norm(params["mlp_norm"], c.norm_eps, c.norm_offset)
    gate_up, down = params["gate_up"], params["down"]

    def run(x: jax.Array, layer: jax.Array) -> jax.Array:
        bias, how = params.get("gate_up_bias"), {"target": place.target, "counters": place.counters}
        h = linear(x, gate_up, layer, norm=norm, bias=bias, gated=True, **how)
        return layers.add_product(x, h, down, params.get("down_bias"), layer, place, "mlp")

    return run
