"""The decoder: layers of a mixer and an MLP around residual RMSNorms, an embedding before them and a head behind.

Llama, SmolLM2, Qwen2 and Qwen3 are this with attention and dense MLPs; the MoE families with experts in place of
these; Qwen3-Next and Qwen3.5 with a gated delta rule in three layers of four.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfer.models import attention, delta, experts, layers, mlp, rope
from jaxinfer.models.config import ATTENTION, DELTA, DENSE, SPARSE, DecoderConfig, pattern
from jaxinfer.models.model import CacheShape, Memory, Model, Placement, RecurrentShape
from jaxinfer.params import Params, ParamSpec, Source, Specs, norm_spec
from pallas_kernels.linear.api import Norm

PARTS = {ATTENTION: attention.specs, DELTA: delta.specs, DENSE: mlp.specs, SPARSE: experts.specs}
OTHER_MODELS = ("visual.", "model.visual.", "mtp.", "model.mtp.")
"""Beginnings of the names of tensors that belong to an image encoder, or to heads that guess further tokens."""


def build(architecture: str, config: DecoderConfig) -> Model:
    """The model of a config."""
    d = config.delta
    num_attention = len(config.layers_with(ATTENTION))
    recurrent = None
    if d is not None:
        sizes = (d.num_key_heads, d.group, d.key_width, d.value_width)
        recurrent = RecurrentShape(len(config.layers_with(DELTA)), *sizes)
    parts = _parts(config)
    return Model(
        architecture=architecture,
        specs={name: spec for specs in parts.values() for name, spec in specs.items()},
        cache=CacheShape(num_attention, config.pool_heads, config.head_width),
        recurrent=recurrent,
        num_heads=config.num_heads,
        num_repeats=pattern(config).repeats,
        parts={part: tuple(specs) for part, specs in parts.items()},
        top_k=config.moe.top_k if config.moe else 0,
        vocab_rows=config.vocab_rows,
        max_model_len=config.max_model_len,
        forward=functools.partial(_forward, config),
        logits=functools.partial(_logits, config),
        ignored=functools.partial(_ignored, config),
    )


def _parts(c: DecoderConfig) -> dict[str, Specs]:
    """The parameters of each part."""
    table = (c.vocab_rows, c.hidden)
    found: dict[str, Specs] = {
        "embedding": {
            "embed": ParamSpec(
                shape=table, axes=("vocab", None), sources=(Source(c.prefix + "embed_tokens.weight", table),)
            )
        },
        "final norm": {"final_norm": norm_spec(c.prefix + "norm.weight", c.hidden, offset=c.norm_offset)},
    }
    found |= {kind: specs(c) for kind, specs in PARTS.items() if c.layers_with(kind)}
    if not c.tied_head:
        head = ParamSpec(shape=table, axes=("vocab", None), sources=(Source("lm_head.weight", table),))
        found["head"] = {"head": head}
    return found


def _ignored(c: DecoderConfig, name: str) -> bool:
    """RoPE tables that old checkpoints carry, a head that is stored although it is tied, and parts of other models."""
    return (
        name.endswith("rotary_emb.inv_freq")
        or (c.tied_head and name == "lm_head.weight")
        or name.startswith(OTHER_MODELS)
    )


def _forward(
    c: DecoderConfig, params: Params, tokens: jax.Array, positions: jax.Array, memory: Memory, place: Placement
) -> jax.Array:
    rotary = rope.angles(c.rope, positions, c.head_width)
    x = layers.embed(tokens, params["embed"], place)
    axes = place.over("layers")
    if not axes:
        return _layers(c, params, x, rotary, memory, place, repeats=pattern(c).repeats)
    # Every device runs its own layers once for each stage, and on padding where it is not its turn.
    assert memory.only is not None
    num_stages, stage = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    for turn in range(num_stages):
        mine = memory.only(stage == turn)
        x = _layers(c, params, x, rotary, mine, place, repeats=pattern(c).repeats // num_stages)
        if turn < num_stages - 1:
            x = jax.lax.ppermute(x, axes, [(turn, turn + 1)])
    return place.sum(jnp.where(stage == num_stages - 1, x, 0), axes)


def _layers(
    c: DecoderConfig,
    params: Params,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    memory: Memory,
    place: Placement,
    *,
    repeats: int,
) -> jax.Array:
    """x [T, D] after all layers that this device has."""
    blocks: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {}
    if c.layers_with(ATTENTION):
        blocks[ATTENTION] = attention.block(c, params, memory.attend, rotary, place)
    if c.layers_with(DELTA):
        assert memory.recur is not None
        blocks[DELTA] = delta.block(c, params, memory.recur, place)
    if c.layers_with(DENSE):
        blocks[DENSE] = mlp.block(c, params, place)
    if c.layers_with(SPARSE):
        blocks[SPARSE] = experts.block(c, params, memory.real, place)
    run = pattern(c)

    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        turn, x = state
        for number, layer in enumerate(run.layers):
            for kind in layer:
                # Among its like. Where that is the loop's own counter, XLA folds a layer's slice into what reads it.
                index = turn * run.count(kind) + run.count(kind, before=number)
                x = blocks[kind](x, index)
        return turn + 1, x

    return jax.lax.while_loop(lambda state: state[0] < repeats, body, (jnp.zeros((), jnp.int32), x))[1]


def _logits(c: DecoderConfig, params: Params, x: jax.Array, place: Placement) -> jax.Array:
    table = params["embed" if c.tied_head else "head"]
    return layers.unembed(x, Norm(params["final_norm"][None], c.norm_eps, c.norm_offset), table, place)
