"""Rotary position embeddings: the frequencies that a config asks for, and the angles at given positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rope:
    """Channel pair i turns by p * inverse_frequencies[i] at position p; cos and sin are multiplied by `magnitude`."""

    inverse_frequencies: tuple[float, ...]  # E / 2 of them or, where not all channels turn, fewer; radians per token
    magnitude: float = 1.0


def from_config(width: int, theta: float, scaling: Mapping[str, Any], max_positions: int) -> Rope:
    """The table for heads of `width` channels. `scaling` is the published dictionary, {} for plain RoPE.

    Formulas: Su et al. 2021 (default), linear interpolation (linear), Peng et al. 2023 (yarn), the Llama 3.1 release
    (llama3). ValueError for a kind that is not one of these.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    # In float32, as published models were trained and as transformers computes it.
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    frequencies = (np.float32(1.0) / np.power(np.float32(theta), exponents)).astype(np.float64)
    magnitude = 1.0
    if kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, theta, scaling, max_positions)
    elif kind != "default":
        raise ValueError(f"RoPE type {kind!r} is not supported; known: default, linear, llama3, yarn")
    return Rope(tuple(frequencies.tolist()), magnitude)


def _llama3(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Short wavelengths as they are, long ones divided by `factor`, a ramp between."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)  # within the original context
    ramp = (turns - low) / (high - low) if high != low else np.zeros_like(turns)
    blended = (1 - ramp) * frequencies / factor + ramp * frequencies
    return np.where(turns < low, frequencies / factor, np.where(turns > high, frequencies, blended))


def _yarn(
    frequencies: np.ndarray, theta: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[np.ndarray, float]:
    """Interpolates channels that turn less than beta_slow times in the original context, keeps those over beta_fast."""
    factor, width = scaling["factor"], 2 * len(frequencies)
    original = scaling.get("original_max_position_embeddings") or max_positions

    def channel(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    keep = 1 - np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        both = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = mscale(both[0]) / mscale(both[1]) if all(both) else mscale(1.0)
    return frequencies / factor * (1 - keep) + frequencies * keep, magnitude


def angles(rope: Rope, positions: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of heads of `width` channels, float32 [T, E / 2] each; 1 and 0 for pairs that do not turn."""
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(rope.inverse_frequencies, jnp.float32)
    still = ((0, 0), (0, width // 2 - angle.shape[1]))
    cos = jnp.pad(jnp.cos(angle) * rope.magnitude, still, constant_values=1.0)
    return cos, jnp.pad(jnp.sin(angle) * rope.magnitude, still)
