"""What a compute warpgroup of the Hopper route does with its tiles: the softmax, and the order of its products."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COMPUTE_WARPGROUPS = 2
WARPGROUP_ROWS = 64
"""Rows of the left operand of one wgmma."""


class Tuning(NamedTuple):
    """What changes the time and not the result."""

    block_kv: int = 128
    """Positions per tile of keys and values."""
    stages: int = 2
    """Tiles in flight, each of K and of V."""
    share_tokens: bool = True
    """Whether both warpgroups take the same 64 tokens, each for a query head of its own of one KV head; else they take
    128 tokens of one head. An odd group H // K allows the latter only."""
    take_turns: bool = True
    """Whether the warpgroups issue their products in turn, so that each one's softmax runs beside the other's."""

    programs: int = 132
    """That share the blocks: one per multiprocessor of an H100 or H200, which shared memory allows no second."""

    @property
    def heads_per_program(self) -> int:
        return COMPUTE_WARPGROUPS if self.share_tokens else 1

    @property
    def block_tokens(self) -> int:
        return WARPGROUP_ROWS * COMPUTE_WARPGROUPS // self.heads_per_program


class Settings(NamedTuple):
    """Static numbers of a call."""

    num_pages: int  # P
    page_size: int  # S
    width: int  # E
    group: int  # H // K
    score_scale: float  # from q . k to the exponent of 2
    dtype: Any
    tuning: Tuning
    interpret: bool


class Work(NamedTuple):
    """A block of queries, for the heads of one program. Scalars but for the first two."""

    settings: Settings
    shared: dict[str, jax.Ref]
    heads: jax.Array  # which pair of query heads, or which head
    row: jax.Array
    token: jax.Array  # index in T of the block's first place, a multiple of ROW_ALIGNMENT
    position: jax.Array  # of the first place; negative where tokens of the row before lead
    low: jax.Array  # first place with a token of the row
    high: jax.Array  # past the last
    steps: jax.Array  # tiles of keys that hold what the block may see
    base: jax.Array  # tiles of the program's blocks before

    @property
    def end(self) -> jax.Array:
        """Positions that the block may see."""
        return self.position + self.high

    def part(self, warpgroup: int | jax.Array) -> tuple[int | jax.Array, jax.Array]:
        """The offset of a warpgroup's places in the block, and its query head."""
        if self.settings.tuning.share_tokens:
            return 0, self.heads * COMPUTE_WARPGROUPS + warpgroup
        return warpgroup * WARPGROUP_ROWS, self.heads

    def at(self, name: str, step: jax.Array) -> jax.Ref:
        """The part of shared memory, or the barrier, of a step."""
        return self.shared[name].at[lax.rem(self.base + step, self.settings.tuning.stages)]


class State(NamedTuple):
    """Of 64 queries over the tiles so far."""

    best: jax.Array  # [64] greatest score
    total: jax.Array  # [64] sum of weights
    acc: jax.Array  # [64, E] weighted values


class Warpgroup(NamedTuple):
    """A compute warpgroup, whose first query has this position."""

    work: Work
    index: jax.Array
    position: jax.Array

    @property
    def score_shape(self) -> tuple[int, int]:
        return WARPGROUP_ROWS, self.work.settings.tuning.block_kv

    def take_turn(self) -> None:
        if self.work.settings.tuning.take_turns:
            plgpu.barrier_wait(self.work.shared["turn"].at[self.index])

    def pass_turn(self) -> None:
        if self.work.settings.tuning.take_turns:
            plgpu.barrier_arrive(self.work.shared["turn"].at[1 - self.index])


def attend_tiles(me: Warpgroup, whole: jax.Array) -> State:
    """All tiles of a block, one at least. The first `whole` of them, never the last, need no mask.

    The weights of a tile meet its values in the same turn as the queries meet the next keys: the tensor cores get both
    at once, and work for this warpgroup while the other one has its softmax.
    """
    last = me.work.steps - 1
    per_row = plgpu.Layout.WGMMA.reduce(1)
    best = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), -jnp.inf, jnp.float32), per_row)
    total = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS,), jnp.float32), per_row)
    acc = plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, me.work.settings.width), jnp.float32), plgpu.Layout.WGMMA)

    def tile(step, carry, *, masked):
        state, weights = _weigh(me, *carry, step, masked=masked)
        acc, scores = _multiply(me, state.acc, weights, step)
        return state._replace(acc=acc), scores

    pl.when((me.index == 1) & (me.work.base == 0))(me.pass_turn)  # Warpgroup 0 goes first.
    carry = State(best, total, acc), _multiply_first_keys(me)
    carry = lax.fori_loop(0, whole, functools.partial(tile, masked=False), carry)
    carry = lax.fori_loop(whole, last, functools.partial(tile, masked=True), carry)
    plgpu.barrier_arrive(me.work.shared["q_read"].at[me.index])
    state, weights = _weigh(me, *carry, last, masked=True)
    acc = _multiply_last_values(me, state.acc, weights, last)
    return state._replace(acc=acc)


def _weigh(me: Warpgroup, state: State, scores: jax.Array, step: jax.Array, *, masked: bool) -> tuple[State, jax.Array]:
    """The softmax of a tile. Returns the state but for the tile's values, and the tile's weights [64, block_kv]."""
    scale, dtype = me.work.settings.score_scale, me.work.settings.dtype
    if masked:
        query, key = (
            plgpu.broadcasted_iota(jnp.int32, me.score_shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
        )
        scores = jnp.where(query + me.position >= key + step * me.score_shape[1], scores, -jnp.inf)
    best = jnp.maximum(state.best, scores.max(axis=1))
    factor = jnp.exp2((state.best - best) * scale)
    weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(best * scale, scores.shape, [0]))
    total = state.total * factor + weights.sum(axis=1)
    acc = state.acc * lax.broadcast_in_dim(factor, state.acc.shape, [0])
    # All of it before the turn, which is for products.
    return _fence(me, (State(best, total, acc), weights.astype(dtype)))


def _multiply_first_keys(me: Warpgroup) -> jax.Array:
    """Returns the scores [64, block_kv] of the first tile."""
    step = jnp.int32(0)
    plgpu.barrier_wait(me.work.at("k_loaded", step))
    me.take_turn()

    def multiply(score_ref):
        _issue_keys(me, score_ref, step)
        me.pass_turn()
        return score_ref[...]

    scores = _fence(me, pl.run_scoped(multiply, plgpu.ACC(me.score_shape, jnp.float32)))
    plgpu.barrier_arrive(me.work.at("k_read", step))
    return scores


def _multiply(me: Warpgroup, acc: jax.Array, weights: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns acc plus the weighted values of a tile, and the scores of the next."""
    plgpu.barrier_wait(me.work.at("v_loaded", step))
    plgpu.barrier_wait(me.work.at("k_loaded", step + 1))
    me.take_turn()
    shapes = plgpu.ACC(me.score_shape, jnp.float32), plgpu.ACC(acc.shape, jnp.float32)

    def multiply(score_ref, acc_ref):
        acc_ref[...] = acc
        plgpu.wgmma(acc_ref, weights, me.work.at("v", step))
        _issue_keys(me, score_ref, step + 1)
        me.pass_turn()
        return acc_ref[...], score_ref[...]

    def multiply_keys_alone(score_ref):
        _issue_keys(me, score_ref, step + 1)
        return score_ref[...]

    if me.work.settings.interpret:
        acc = _multiply_values_interpreted(me, acc, weights, step)
        scores = pl.run_scoped(multiply_keys_alone, shapes[0])
        me.pass_turn()
    else:
        acc, scores = _fence(me, pl.run_scoped(multiply, *shapes))
    plgpu.barrier_arrive(me.work.at("v_read", step))
    plgpu.barrier_arrive(me.work.at("k_read", step + 1))
    return acc, scores


def _multiply_last_values(me: Warpgroup, acc: jax.Array, weights: jax.Array, step: jax.Array) -> jax.Array:
    plgpu.barrier_wait(me.work.at("v_loaded", step))
    me.take_turn()

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, weights, me.work.at("v", step))
        me.pass_turn()

    if me.work.settings.interpret:
        acc = _multiply_values_interpreted(me, acc, weights, step)
        me.pass_turn()
    else:
        acc = pl.run_state(multiply)(plgpu.ACC.init(acc))
    plgpu.barrier_arrive(me.work.at("v_read", step))
    return acc


def _issue_keys(me: Warpgroup, score_ref: jax.Ref, step: jax.Array) -> None:
    plgpu.wgmma(score_ref, me.work.shared["q"].at[me.index], me.work.at("k", step).transpose((1, 0)))


def _multiply_values_interpreted(me: Warpgroup, acc: jax.Array, weights: jax.Array, step: jax.Array) -> jax.Array:
    """The interpreter takes the weights from shared memory only, and no sum to begin with."""
    p_smem = me.work.shared["p"].at[me.index]
    p_smem[...] = weights
    plgpu.commit_smem()

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, p_smem, me.work.at("v", step))
        return acc_ref[...]

    return acc + pl.run_scoped(multiply, plgpu.ACC(acc.shape, jnp.float32))


def _fence(me: Warpgroup, values: Any) -> Any:
    """Keeps the compiler from moving what makes, or what uses, the values across. The interpreter has no need of it."""
    return values if me.work.settings.interpret else lax.optimization_barrier(values)
