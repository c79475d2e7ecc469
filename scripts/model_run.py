"""A model by itself, as the engine's steps run it: over a paged cache, through the kernels of its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.models import registry
from jaxinfer.models.model import Memory, Placement
from jaxinfer.params import Params
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.step_memory import paged_attend, slot_recur
from jaxinfer.sharding import rules
from pallas_kernels.delta_rule.api import DeltaPools, SlotRows
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.api import PagedRows

PAGE = 16
"""Tokens of a page."""


def sharding(device: jax.Device) -> NamedSharding:
    """All on one device."""
    return NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())


class Placed(NamedTuple):
    """Tokens of some sequences, and where they are."""

    tokens: np.ndarray  # [T] int32
    rows: PagedRows
    slots: np.ndarray  # [R] int32


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
        width = -(-max_len // PAGE)
        shape = StateShape(
            cache=self.model.cache,
            recurrent=self.model.recurrent,
            num_pages=num_sequences * width,
            page_size=PAGE,
            num_slots=num_sequences,
            max_model_len=max_len,
            vocab_rows=self.model.vocab_rows,
            dtype=dtype,
        )
        found = shape.abstract(place.mesh, rules.TENSOR_PARALLEL)
        pools = {"k": found.k_pages, "v": found.v_pages}
        if self.model.recurrent is not None:
            pools |= {"recurrent": found.recurrent, "conv": found.conv}
        self.pools = {name: jnp.zeros(a.shape, a.dtype, device=place) for name, a in pools.items()}
        self.target = Target.of(device)
        self.step = jax.jit(self._step, static_argnames="max_query_len", donate_argnums=1)
        self.trial = jax.jit(self._step, static_argnames="max_query_len")
        rng = np.random.default_rng(1)
        pages = rng.permutation(num_sequences * width) + 1
        self.tables = pages.reshape(num_sequences, width).astype(np.int32)

    def hidden(self, params: Params, refs: Mapping[str, jax.Ref], placed: Placed, max_query_len: int) -> jax.Array:
        """Hidden states [T, D] of tokens in a step."""
        counters = None if self.target.platform == "cpu" else jax.new_ref(jnp.zeros(2**14, jnp.int32))
        rows, place = placed.rows, Placement(self.target, counters=counters)
        kv, heads = (refs["k"], refs["v"]), self.model.num_heads
        attend = paged_attend(kv, rows, place, num_heads=heads, max_query_len=max_query_len)
        memory = Memory(attend, rows.token_page > 0)
        if self.model.recurrent is not None:
            states, of_slots = DeltaPools(refs["recurrent"], refs["conv"]), SlotRows(placed.slots, *rows[1:-1])
            memory = memory._replace(recur=slot_recur(states, of_slots, place, max_query_len=max_query_len))
        return self.model.forward(params, placed.tokens, rows.token_position, memory, place)

    def _step(self, params, pools, placed, *, max_query_len):
        refs = {name: jax.new_ref(pool) for name, pool in pools.items()}
        hidden = self.hidden(params, refs, placed, max_query_len)
        logits = self.model.logits(params, hidden, Placement(self.target))
        pools = {name: jax.freeze(ref) for name, ref in refs.items()}
        return pools, jax.nn.log_softmax(logits.astype(jnp.float32))

    def place(self, sequences: Sequence[int], tokens: np.ndarray, start: int) -> tuple[Placed, int]:
        """Where tokens [number of sequences, new] are, the first of them at position `start`; and the longest row."""
        rows, new = tokens.shape
        index = np.repeat(np.arange(rows, dtype=np.int32), new)
        position = np.tile(start + np.arange(new, dtype=np.int32), rows)
        table = self.tables[list(sequences)]
        page = table[index, position // PAGE]
        ones = np.ones(rows, np.int32)
        first = np.arange(rows, dtype=np.int32) * new
        placed = PagedRows(table, first, ones * new, ones * start, index, position, page)
        slots = np.asarray(list(sequences), np.int32)
        return Placed(tokens.reshape(-1).astype(np.int32), placed, slots), 1 if new == 1 else rows * new

    def __call__(
        self, sequences: Sequence[int], tokens: np.ndarray, start: int, *, is_trial: bool = False
    ) -> np.ndarray:
        """Log-probabilities [T, V] after tokens [number of sequences, new], the first of them at position `start`.

        is_trial: as if the call had not been, afterwards.
        """
        placed, query_len = self.place(sequences, tokens, start)
        pools, out = (self.trial if is_trial else self.step)(self.params, self.pools, placed, max_query_len=query_len)
        if not is_trial:
            self.pools = pools
        return np.asarray(out)
