"""A model by itself, as the engine's steps run it: over a paged cache, through the kernels of its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.models import registry
from jaxinfer.models.model import Memory, Placement
from jaxinfer.params import Params
from jaxinfer.runner.step import paged_attend
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.api import PagedRows

PAGE = 16
"""Tokens of a page."""


def sharding(device: jax.Device) -> NamedSharding:
    """All on one device."""
    return NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())


class ModelRun:
    """A model on one device, with a cache for `num_sequences` of `max_len` tokens each."""

    def __init__(
        self,
        config: Mapping[str, Any],
        device: jax.Device,
        params: Params,
        dtype: jnp.dtype,
        *,
        num_sequences: int,
        max_len: int,
    ):
        self.model = registry.from_config(config)
        place = sharding(device)
        self.params = {name: jax.device_put(array.astype(dtype), place) for name, array in params.items()}
        c, width = self.model.cache, -(-max_len // PAGE)
        pool = (c.num_layers, num_sequences * width + 1, PAGE, c.num_kv_heads, c.head_width)
        self.pools = tuple(jax.device_put(jnp.zeros(pool, dtype), place) for _ in range(2))
        self.target = Target.of(device)
        self.step = jax.jit(self._step, static_argnames="max_query_len", donate_argnums=1)
        rng = np.random.default_rng(1)
        pages = rng.permutation(num_sequences * width) + 1
        self.tables = pages.reshape(num_sequences, width).astype(np.int32)

    def _step(self, params, pools, tokens, rows, *, max_query_len):
        counters = None if self.target.platform == "cpu" else jax.new_ref(jnp.zeros(2**14, jnp.int32))
        refs, place = tuple(map(jax.new_ref, pools)), Placement(self.target, None, counters)
        heads = self.model.num_heads
        attend = paged_attend(refs, rows, place, num_heads=heads, max_query_len=max_query_len)
        memory = Memory(attend, rows.token_page > 0)
        hidden = self.model.forward(params, tokens, rows.token_position, memory, place)
        logits = self.model.logits(params, hidden, place)
        return tuple(map(jax.freeze, refs)), jax.nn.log_softmax(logits.astype(jnp.float32))

    def __call__(self, sequences: Sequence[int], tokens: np.ndarray, start: int) -> np.ndarray:
        """Log-probabilities [T, V] after tokens [number of sequences, new], the first of them at position `start`."""
        rows, new = tokens.shape
        index = np.repeat(np.arange(rows, dtype=np.int32), new)
        position = np.tile(start + np.arange(new, dtype=np.int32), rows)
        table = self.tables[list(sequences)]
        page = table[index, position // PAGE]
        ones = np.ones(rows, np.int32)
        first = np.arange(rows, dtype=np.int32) * new
        placed = PagedRows(table, first, ones * new, ones * start, index, position, page)
        query_len = 1 if new == 1 else rows * new
        flat = tokens.reshape(-1).astype(np.int32)
        self.pools, out = self.step(self.params, self.pools, flat, placed, max_query_len=query_len)
        return np.asarray(out)
