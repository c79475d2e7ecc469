"""The sparse MLP block: a router, the experts that it chooses, and an expert that every token has in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import layers, mlp
from jaxinfer.models.config import SPARSE, DecoderConfig, MoeConfig
from jaxinfer.models.model import Placement
from jaxinfer.params import Params, ParamSpec, Source, Specs, norm_spec
from pallas_kernels.linear.api import Norm, linear
from pallas_kernels.moe.api import Experts, moe


def specs(c: DecoderConfig) -> Specs:
    """The experts of a layer are one array, whether the checkpoint holds them as one tensor or one by one."""
    m = c.moe
    assert m is not None
    numbers = c.layers_with(SPARSE)
    part = c.prefix + "layers.{layer}." + m.block + "."
    stacked = functools.partial(ParamSpec, layers=numbers)
    gate_up, pack_gate_up = _gate_up_sources(m, part, c.hidden)
    down, pack_down = _down_sources(m, part, c.hidden)
    found = {
        "sparse_norm": norm_spec(
            c.prefix + "layers.{layer}.post_attention_layernorm.weight", c.hidden, numbers, offset=c.norm_offset
        ),
        "router": stacked(
            shape=(m.num_experts, c.hidden),
            axes=(None, None),
            sources=(Source(part + "gate.weight", (m.num_experts, c.hidden)),),
        ),
        "expert_gate_up": stacked(
            shape=(m.num_experts, 2, m.width, c.hidden),
            axes=("experts", None, "expert_mlp", None),
            sources=gate_up,
            pack=pack_gate_up,
        ),
        "expert_down": stacked(
            shape=(m.num_experts, c.hidden, m.width),
            axes=("experts", None, "expert_mlp"),
            sources=down,
            pack=pack_down,
        ),
    }
    if m.shared_width:
        shared = part + "shared_expert."
        found |= mlp.swiglu(shared, c.hidden, m.shared_width, numbers, ("shared_gate_up", "shared_down"))
        found["shared_gate"] = stacked(
            shape=(1, c.hidden),
            axes=(None, None),
            sources=(Source(part + "shared_expert_gate.weight", (1, c.hidden)),),
        )
    return found


def _gate_up_sources(m: MoeConfig, part: str, hidden: int) -> tuple[tuple[Source, ...], Callable]:
    """The tensors of a layer's gates and ups, and what makes [X, 2, I, D] of them."""
    shape = (m.num_experts, 2, m.width, hidden)
    if m.fused:
        source = Source(part + "experts.gate_up_proj", (m.num_experts, 2 * m.width, hidden))
        return (source,), lambda tensors: tensors[0].reshape(shape)
    names = [f"{part}experts.{e}.{n}.weight" for e in range(m.num_experts) for n in m.parts[:2]]
    return tuple(Source(name, (m.width, hidden)) for name in names), lambda tensors: np.stack(tensors).reshape(shape)


def _down_sources(m: MoeConfig, part: str, hidden: int) -> tuple[tuple[Source, ...], Callable[[Sequence], np.ndarray]]:
    """The tensors of a layer's downs, and what makes [X, D, I] of them."""
    if m.fused:
        return (Source(part + "experts.down_proj", (m.num_experts, hidden, m.width)),), lambda tensors: tensors[0]
    names = [f"{part}experts.{e}.{m.parts[2]}.weight" for e in range(m.num_experts)]
    return tuple(Source(name, (hidden, m.width)) for name in names), np.stack


def block(
    c: DecoderConfig, params: Params, real: jax.Array, place: Placement
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of x [T, D] and the number of a sparse layer among its like: x plus its experts.

    real [T] bool: tokens that are not padding. On several devices each has a slice of every expert, all of some,
    or slices of some. Along an axis that splits tokens, too, each computes its experts for the tokens of all, which are
    gathered, and gets back the sums of its own.
    """
    m = c.moe
    assert m is not None
    norm = Norm(params["sparse_norm"], c.norm_eps, c.norm_offset)
    experts = Experts(params["router"], params["expert_gate_up"], params["expert_down"])
    num_local, axes = experts.gate_up.shape[1], (*place.over("experts"), *place.over("expert_mlp"))
    how = {"target": place.target, "counters": place.counters}
    choice = {"norm": norm, "top_k": m.top_k, "renormalise": m.renormalise, "valid": real}
    gathered = tuple(axis for axis in axes if axis in (*place.over("rows"), *place.over("tokens")))
    if gathered:
        choice["valid"] = place.gather(real[:, None], gathered)[:, 0]
    if num_local < m.num_experts:
        choice["first_expert"] = jax.lax.axis_index(place.over("experts")) * num_local

    def shared(x: jax.Array, layer: jax.Array) -> jax.Array:
        """What the shared expert passes on, under its gate [T, F]."""
        h = linear(x, params["shared_gate_up"], layer, norm=norm, gated=True, **how)
        gate = linear(x, params["shared_gate"], layer, norm=norm, out_dtype=jnp.float32, **how)
        return (h * jax.nn.sigmoid(gate)).astype(h.dtype)

    def run(x: jax.Array, layer: jax.Array) -> jax.Array:
        h = shared(x, layer) if m.shared_width else None
        if not axes:
            residual = x if h is None else layers.add_product(x, h, params["shared_down"], None, layer, place, "mlp")
            return moe(x, experts, layer, residual=residual, **choice, **how)
        if gathered:
            y = moe(place.gather(x, gathered), experts, layer, **choice, **how)
            y = place.scatter(y, gathered)
        else:
            y = moe(x, experts, layer, **choice, **how)
        parts = [(y, tuple(axis for axis in axes if axis not in gathered))]
        if h is not None:
            parts.append((linear(h, params["shared_down"], layer, **how), place.over("mlp")))
        return layers.add_parts(x, parts, place)

    return run
