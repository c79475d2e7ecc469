"""The linear-attention block: a gated delta rule over a state per sequence, behind a norm.

Source: Yang et al. 2024 (Gated Delta Networks), as published with Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxinfer.models import layers
from jaxinfer.models.config import DELTA, DecoderConfig
from jaxinfer.models.model import Placement, Recur
from jaxinfer.params import Params, ParamSpec, Source, Specs, norm_spec
from pallas_kernels.delta_rule.api import TAPS, DeltaWeights
from pallas_kernels.linear.api import Norm, linear


def specs(c: DecoderConfig) -> Specs:
    """What belongs to a key head lies together, so that a shard of key heads is a whole mixer.

    The projection makes, of each key head: query, key, values, output gates, and two numbers per value head.
    """
    d = c.delta
    assert d is not None
    numbers = c.layers_with(DELTA)
    stacked = functools.partial(ParamSpec, layers=numbers)
    part = c.prefix + "layers.{layer}.linear_attn."
    heads, keys, values = d.num_key_heads, d.key_width, d.group * d.value_width  # values: of a key head
    num_values = heads * d.group

    def by_key_head(tensors: Sequence[np.ndarray]) -> np.ndarray:
        """[Hk, rows, D]: each tensor holds its rows of all key heads in their order."""
        return np.concatenate([t.reshape(heads, -1, c.hidden) for t in tensors], axis=1)

    def apart(tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The same where the first tensor holds all queries, all keys, then all values."""
        return by_key_head([*_split(tensors[0], heads * keys), *tensors[1:]])

    def pack_conv(tensors: Sequence[np.ndarray]) -> np.ndarray:
        parts = _split(tensors[0], heads * keys)
        return np.concatenate([p.reshape(heads, -1, TAPS) for p in parts], axis=1)

    if d.by_head:
        rows = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * d.group}
    else:
        rows = {"in_proj_qkv": d.channels, "in_proj_z": values, "in_proj_b": d.group, "in_proj_a": d.group}
    conv = Source(part + "conv1d.weight", (heads * d.channels, 1, TAPS))
    found = {
        "delta_norm": norm_spec(
            c.prefix + "layers.{layer}.input_layernorm.weight", c.hidden, numbers, offset=c.norm_offset
        ),
        "delta_in": stacked(
            shape=(heads, d.rows, c.hidden),
            axes=("delta_heads", None, None),
            sources=tuple(Source(f"{part}{n}.weight", (heads * size, c.hidden)) for n, size in rows.items()),
            pack=by_key_head if d.by_head else apart,
        ),
        "delta_conv": stacked(
            shape=(heads, d.channels, TAPS), axes=("delta_heads", None, None), sources=(conv,), pack=pack_conv
        ),
        "delta_out": stacked(
            shape=(c.hidden, heads, d.group, d.value_width),
            axes=(None, "delta_heads", None, None),
            sources=(Source(part + "out_proj.weight", (c.hidden, heads * values)),),
            pack=lambda tensors: tensors[0].reshape(c.hidden, heads, d.group, d.value_width),
        ),
        "delta_out_norm": norm_spec(part + "norm.weight", d.value_width, numbers),
    }
    for name, tensor in {"delta_a_log": "A_log", "delta_dt_bias": "dt_bias"}.items():
        found[name] = stacked(
            shape=(heads, d.group),
            axes=("delta_heads", None),
            sources=(Source(part + tensor, (num_values,)),),
            pack=lambda tensors: tensors[0].reshape(heads, d.group),
        )
    return found


def _split(rows: np.ndarray, width: int) -> list[np.ndarray]:
    """Rows of queries, of keys, both `width` of them, and of values."""
    return [rows[:width], rows[width : 2 * width], rows[2 * width :]]


def block(
    c: DecoderConfig, params: Params, recur: Recur, place: Placement
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of x [T, D] and the number of a delta layer among its like: x plus what its states say."""
    num_layers, num_key_heads = params["delta_in"].shape[:2]
    in_weight = params["delta_in"].reshape(num_layers, -1, c.hidden)
    out_weight = params["delta_out"].reshape(num_layers, c.hidden, -1)
    weights = DeltaWeights(
        params["delta_conv"], params["delta_a_log"], params["delta_dt_bias"], params["delta_out_norm"]
    )
    norm = Norm(params["delta_norm"], c.norm_eps, c.norm_offset)

    def run(x: jax.Array, layer: jax.Array) -> jax.Array:
        projected = linear(x, in_weight, layer, norm=norm, target=place.target, counters=place.counters)
        o = recur(projected.reshape(x.shape[0], num_key_heads, -1), weights, layer, eps=c.norm_eps)
        return layers.add_product(x, o.reshape(x.shape[0], -1), out_weight, None, layer, place, "delta_heads")

    return run
