"""What the layers of a step have of its sequences: pages and states, and which of the tokens this device computes."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from jaxinfer.models.model import Attend, Placement, Recur
from jaxinfer.runner.cache import DeviceState
from jaxinfer.runner.inputs import StepInputs
from pallas_kernels.delta_rule.api import DeltaPools, SlotRows, delta_rule
from pallas_kernels.delta_rule.api import plan as plan_delta
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paged_attention.api import PagedRows, paged_attention
from pallas_kernels.paged_attention.api import plan as plan_attention
from pallas_kernels.paged_attention.decode import decode_attention


class TokenPart(NamedTuple):
    """The run of a step's T tokens that a device computes: as many as each of the others."""

    axes: tuple[str, ...]  # mesh axes that tokens are split over; none: every device computes all
    num_tokens: int  # of the run

    @classmethod
    def of(cls, axes: tuple[str, ...], num_tokens: int) -> Self:
        """Of as many tokens of a step, inside the shard_map of the mesh."""
        return cls(axes, num_tokens // jax.lax.axis_size(axes) if axes else num_tokens)

    @property
    def first(self) -> jax.Array:
        """Index in T of its first token."""
        return jax.lax.axis_index(self.axes) * self.num_tokens

    def take(self, array: jax.Array) -> jax.Array:
        """Its rows of [T, ...]."""
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.num_tokens) if self.axes else array

    def gather(self, array: jax.Array) -> jax.Array:
        """[T, ...] of what every device has for its own tokens."""
        return jax.lax.all_gather(array, self.axes, tiled=True) if self.axes else array

    def find(self, array: jax.Array, index: jax.Array, place: Placement) -> jax.Array:
        """Rows `index` [R], of T, of what every device has for its own tokens."""
        if not self.axes:
            return array[index]
        local = index - self.first
        mine = (local >= 0) & (local < self.num_tokens)
        found = array[jnp.clip(local, 0, self.num_tokens - 1)]
        return place.sum(jnp.where(mine[:, None], found, 0), self.axes)

    def rows(self, rows: PagedRows) -> PagedRows:
        """Of the rows of a step what lies in this run; what comes before it is context by then."""
        if not self.axes:
            return rows
        ends = rows.query_start + rows.query_len
        start, end = (jnp.clip(at - self.first, 0, self.num_tokens) for at in (rows.query_start, ends))
        before = jnp.clip(self.first - rows.query_start, 0, rows.query_len)
        tokens = map(self.take, (rows.token_row, rows.token_position, rows.token_page))
        return PagedRows(rows.page_table, start, end - start, rows.context_len + before, *tokens)


def paged_rows(state: DeviceState, step: StepInputs, page_size: int) -> PagedRows:
    """The rows of a step, with the pages that its tokens are written to: page 0 for padding."""
    ends = jnp.cumsum(step.query_len)
    start = ends - step.query_len
    if step.tokens is None:
        start = row = jnp.arange(step.slot.shape[0])
        real = step.query_len > 0
    else:
        token = jnp.arange(step.tokens.shape[0])
        row = jnp.minimum(jnp.searchsorted(ends, token, side="right", method="compare_all"), step.slot.shape[0] - 1)
        real = token < ends[-1]
    position = jnp.where(real, step.context_len[row] + (jnp.arange(row.shape[0]) - start[row]), 0)
    table = state.page_table[step.slot]
    page = jnp.where(real, table[row, position // page_size], 0)
    return PagedRows(table, start, step.query_len, step.context_len, row, position, page)


def paged_attend(
    pools: tuple[jax.Ref, jax.Ref],
    rows: PagedRows,
    place: Placement,
    *,
    num_heads: int,
    max_query_len: int,
    part: TokenPart | None = None,
) -> Attend:
    """Attention of `num_heads` query heads over pools of [L, P, S, K, E] for the rows of a step.

    part: where tokens are split over devices, each computes the queries of its own, and keys and values of all are
    gathered before RoPE, [T, K, 2, E], for every device to write: all pools stay the same. None: of all tokens.
    """
    part = part or TokenPart((), rows.token_row.shape[0])
    own = part.rows(rows)
    # 1 would mean that token t is row t.
    longest = max(min(max_query_len, part.num_tokens), 2) if part.axes else max_query_len
    plan = plan_attention(own, pools, num_heads=num_heads, max_query_len=longest, target=place.target)

    def attend(qkv, rotary, layer, *, norms, scale, window):
        how = {"scale": scale, "window": window, "counters": place.counters, "target": place.target}
        if longest == 1:
            return decode_attention(qkv, rotary, pools, layer, own, norms=norms, **how)
        if part.axes:
            new, places = part.gather(qkv[:, :, -2:]), (rows.token_page, rows.token_position)
            # In place of queries, of which the kernel wants one, a key.
            new = jnp.concatenate([new[:, :, :1], new], axis=2)
            kv_write(new, rotary, pools, layer, places, norms=norms, target=place.target)
            rotary = part.take(rotary[0]), part.take(rotary[1])
        places = own.token_page, own.token_position
        q = kv_write(qkv, rotary, pools, layer, places, norms=norms, target=place.target)
        return paged_attention(q, pools, layer, own, max_query_len=longest, plan=plan, **how)

    return attend


def slot_recur(
    pools: DeltaPools, rows: SlotRows, place: Placement, *, max_query_len: int, part: TokenPart | None = None
) -> Recur:
    """The gated delta rule over the states of slots for the rows of a step.

    part: where tokens are split over devices, what the layer's projection makes of them is gathered, and every device
    takes its states past all of them: a token's state is made from that of the token before. None: of all tokens.
    """
    part = part or TokenPart((), rows.token_row.shape[0])
    plan = plan_delta(rows, max_query_len=max_query_len, target=place.target)

    def recur(x, weights, layer, *, eps):
        how = {"eps": eps, "max_query_len": max_query_len, "plan": plan, "target": place.target}
        return part.take(delta_rule(part.gather(x), weights, pools, layer, rows, **how))

    return recur
