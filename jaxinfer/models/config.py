"""The sizes of a decoder, by the axis letters of the shape comments, and what sets the family members apart."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxinfer.models import rope

ATTENTION, DELTA = "attention", "delta"
"""How a layer mixes tokens: softmax attention over the KV cache, or the gated delta rule over a state of its own."""
DENSE, SPARSE = "dense", "sparse"
"""What follows: one MLP, or a choice of experts."""


class Layer(NamedTuple):
    """What a layer is made of."""

    mixer: str = ATTENTION
    mlp: str = DENSE


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A sparse MLP: every token goes to `top_k` of X experts and, where there is one, to the shared expert."""

    num_experts: int  # X
    top_k: int
    width: int  # I, of an expert
    renormalise: bool  # whether the weights of the chosen experts are divided by their sum
    shared_width: int = 0  # of the expert that sees every token, under a sigmoid gate; 0: there is none
    block: str = "mlp"  # name of the part in checkpoints
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert, in checkpoints
    fused: bool = False  # whether the checkpoint holds a layer's experts as one tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A gated delta rule: a state matrix [key_width, value_width] per value head."""

    num_key_heads: int
    group: int  # value heads per key head
    key_width: int
    value_width: int
    by_head: bool  # whether the checkpoint's projections lie together per key head, in two tensors instead of four

    @property
    def channels(self) -> int:
        """Of a key head, what the convolution sees: its query, key and values."""
        return 2 * self.key_width + self.group * self.value_width

    @property
    def rows(self) -> int:
        """Of a key head, what the projection makes: these, the output gates, and two numbers per value head."""
        return self.channels + self.group * (self.value_width + 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder around residual RMSNorms; every layer mixes tokens, then applies an MLP."""

    num_layers: int  # L
    hidden: int  # D
    num_heads: int  # H
    num_kv_heads: int  # K
    head_width: int  # E
    mlp_width: int  # F, of dense layers
    vocab_rows: int  # V
    max_model_len: int  # tokens
    norm_eps: float
    rope: rope.Rope
    tied_head: bool  # the head is the embedding table
    norm_offset: float = 0.0  # added to the weights of all norms but the delta rule's
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of every query and key head, before RoPE
    output_gate: bool = False  # the attention of every head under a sigmoid gate, from the query projection
    windows: tuple[int | None, ...] | None = None  # tokens that each layer sees, itself included; None: all
    moe: MoeConfig | None = None
    delta: DeltaConfig | None = None
    layers: tuple[Layer, ...] | None = None  # None: attention and a dense MLP in every layer
    kv_copies: int = 1  # devices that share a KV head: each has a copy of it, and a part of its queries
    prefix: str = "model."  # of the decoder's tensors in the checkpoint; the head's has none

    @property
    def group(self) -> int:
        """Query heads per KV head, or per copy of one, G."""
        return self.num_heads // self.pool_heads

    @property
    def pool_heads(self) -> int:
        """KV heads in arrays, copies included: K there."""
        return self.num_kv_heads * self.kv_copies

    def layers_with(self, kind: str) -> tuple[int, ...]:
        """Numbers of the layers that have this mixer or this MLP."""
        kinds = self.layers or (Layer(),) * self.num_layers
        return tuple(i for i, layer in enumerate(kinds) if kind in layer)


class Pattern(NamedTuple):
    """The shortest run of layers of which the whole model is a repetition."""

    layers: tuple[Layer, ...]
    repeats: int

    def count(self, kind: str, before: int | None = None) -> int:
        """Layers of the run that have this part, of all or of the first `before`."""
        return sum(kind in layer for layer in self.layers[:before])


def pattern(config: DecoderConfig) -> Pattern:
    """At worst the whole model once. Windows are data of a layer, and of no account."""
    layers = config.layers or (Layer(),) * config.num_layers
    for period in range(1, len(layers) + 1):
        if len(layers) % period == 0 and layers == layers[:period] * (len(layers) // period):
            return Pattern(layers[:period], len(layers) // period)
    raise ValueError("a model has at least one layer")
