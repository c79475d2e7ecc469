"""Device state: KV pages, and a row of everything else for each slot. All of it is donated to a step and returned."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxinfer.models.model import CacheShape, RecurrentShape
from jaxinfer.params import shard_bytes
from jaxinfer.runner import inputs
from jaxinfer.runner.peers import Inboxes, PeerState
from jaxinfer.runner.sampling import num_top
from jaxinfer.sharding import rules
from pallas_kernels.delta_rule.api import TAPS

CPU_POOL_BYTES = 2**30
"""Largest KV cache on a CPU unless told otherwise: 23,000 tokens of SmolLM2-135M in float32."""
GPU_RESERVE_BYTES = 2**30
"""Left free in XLA's pool for fragmentation and results. Captured graphs live outside that pool."""


MAX_PAGES = 2**18
"""Most pages of a GPU unless its slots need more: of each that is full the host keeps the tokens."""
NUM_HOLES = 16
"""More than the small arrays that a step and the one ahead of it hold."""
HOLE_BYTES = 2**18
"""Least size of a hole for these, and the size of what is kept between holes."""


class PoolError(ValueError):
    """The memory does not hold a KV cache that could serve a single request."""


@flax.struct.dataclass
class DeviceState:
    """N slots, and slot N for rows that pad a bucket; page 0 likewise takes writes of padding. V vocabulary rows.

    Shapes are those that a group of devices has. Where sequences are split over several, arrays hold these one behind
    the other, along slots, rows or pages; numbers of slots and pages are those within a group.
    """

    k_pages: jax.Array  # [L, P, S, K, E]
    v_pages: jax.Array  # [L, P, S, K, E]
    # Of the layers that have a state; None: none has. Behind slot N come the places of M copies.
    recurrent: jax.Array | None  # [L, N + 1 + M, Hk, G, dk, dv] float32
    conv: jax.Array | None  # [L, N + 1 + M, taps, Hk, C] float32: their last inputs, position p's in row p % taps
    page_table: jax.Array  # [N + 1, W] int32
    logits: jax.Array  # [R, V] float32: of the last step's rows, R = N; -inf: never sampled
    sampled_slot: jax.Array  # [R] int32: slot of each of these rows; N where the row does not sample
    sampled_position: jax.Array  # [R] int32: position of the token that the row samples
    last_token: jax.Array  # [N + 1] int32: the token sampled last, to be computed next, or sampling.NO_TOKEN
    logprobs: jax.Array  # [N + 1, 1 + 2k] int32: sampling.Logprobs of that token, packed
    sampling: jax.Array  # [N + 1, inputs.SAMPLING_FIELDS] int32: a request's parameters, floats by their bits
    output_counts: jax.Array  # [N + 1, V] int32: occurrences in the output, for slots with penalties
    in_prompt: jax.Array  # [N + 1, V] bool: whether the prompt holds the token, for slots with penalties
    logit_bias: jax.Array  # [N + 1, V] float32, for slots with a bias
    peers: PeerState | None = None  # None: devices do not write into each other's memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateShape:
    """The sizes that fix every array of DeviceState, within a group of devices that has sequences of its own."""

    cache: CacheShape
    recurrent: RecurrentShape | None = None
    num_states: int = 0  # M, copies of a slot's recurrent state
    num_pages: int  # that sequences may own; the pool has one more
    page_size: int
    num_slots: int
    max_model_len: int
    vocab_rows: int
    dtype: jnp.dtype

    @property
    def table_width(self) -> int:
        return -(-self.max_model_len // self.page_size)

    def abstract(self, mesh: rules.AnyMesh, axis_rules: rules.Rules) -> DeviceState:
        """Shapes, dtypes and shardings, with no memory behind them."""
        c, rows = self.cache, self.num_slots + 1
        pool_axes = ("layers", rules.ROWS, None, "kv_heads", None)
        pool = (c.num_layers, self.num_pages + 1, self.page_size, c.num_kv_heads, c.head_width)
        num_groups = rules.num_shards(rules.ROWS, mesh, axis_rules)

        def array(shape, dtype, axes=(rules.ROWS,)) -> jax.ShapeDtypeStruct:
            spec = rules.partition(axes, mesh, axis_rules) if len(axes) > 1 else rules.by_rows(mesh, axis_rules)
            sharding = NamedSharding(mesh, spec)
            of_all = list(shape)
            of_all[axes.index(rules.ROWS)] *= num_groups
            return jax.ShapeDtypeStruct(tuple(of_all), dtype, sharding=sharding)

        recurrent = conv = None
        if (r := self.recurrent) is not None:
            heads, slots = ("delta_heads", None), ("layers", rules.ROWS)
            places = rows + self.num_states
            matrices = (r.num_layers, places, r.num_key_heads, r.group, r.key_width, r.value_width)
            recurrent = array(matrices, jnp.float32, (*slots, *heads, None, None))
            conv = array((r.num_layers, places, TAPS, r.num_key_heads, r.channels), jnp.float32, (*slots, None, *heads))
        return DeviceState(
            k_pages=array(pool, self.dtype, pool_axes),
            v_pages=array(pool, self.dtype, pool_axes),
            recurrent=recurrent,
            conv=conv,
            page_table=array((rows, self.table_width), jnp.int32),
            logits=array((self.num_slots, self.vocab_rows), jnp.float32),
            sampled_slot=array((self.num_slots,), jnp.int32),
            sampled_position=array((self.num_slots,), jnp.int32),
            last_token=array((rows,), jnp.int32),
            logprobs=array((rows, 1 + 2 * num_top(self.vocab_rows)), jnp.int32),
            sampling=array((rows, inputs.SAMPLING_FIELDS), jnp.int32),
            output_counts=array((rows, self.vocab_rows), jnp.int32),
            in_prompt=array((rows, self.vocab_rows), jnp.bool_),
            logit_bias=array((rows, self.vocab_rows), jnp.float32),
        )


def zeros(abstract: DeviceState, inboxes: Inboxes | None = None) -> DeviceState:
    """The state of an engine that has run nothing, made on the devices.

    inboxes: where devices write into each other's memory, which they do as long as the state is used. ValueError where
    the state has no place for them, or lacks them: kernels would write to address 0.
    """
    if (inboxes is None) != (abstract.peers is None):
        missing = "no inboxes were given" if inboxes is None else "the state given inboxes has no place for them"
        raise ValueError(f"{missing}: devices write into each other's memory if, and only if, StepBuilder says so")
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), abstract.replace(peers=None))
    return state if inboxes is None else state.replace(peers=inboxes.new_state())


def make_holes(sizes: Sequence[int]) -> list[jax.Array]:
    """Free blocks of `sizes`, in bytes, among the allocations, for as long as the arrays that are returned live.

    XLA's allocator takes the smallest free block that fits. Without such, the small arrays that come and go with every
    step (inputs on their way in, results on their way out) are cut from the block that the step's temporaries just
    left; these then move, and updating the captured graph takes 2 to 3 ms instead of the 0.2 ms of a replay (Qwen3-4B,
    H200). All blocks are made before any is given back, or a smaller one would be cut from a larger hole.
    """
    blocks = [jnp.zeros(num_bytes, jnp.uint8) for size in sizes for num_bytes in (size, HOLE_BYTES)]
    jax.block_until_ready(blocks)
    return blocks[1::2]


def hole_sizes(small_bytes: int, temp_bytes: Collection[int], frame_bytes: int, num_frames: int) -> list[int]:
    """Of the holes that keep the temporaries of steps in their place, in bytes of one device.

    small_bytes: of the largest array that comes and goes with a step; temp_bytes: of the temporaries of each bucket;
    frame_bytes: of one of the `num_frames` that are on their way to or from the host at once, 0 without a host tier.

    A frame, of 76 MB, would take the place of temporaries, and leave one behind that suits them better. So frames have
    places of just their size, and what is smaller has one that is smaller: all temporaries that a frame's place could
    hold, a step at a time.
    """
    small = [max(small_bytes, HOLE_BYTES)] * NUM_HOLES
    if not frame_bytes:
        return small
    fitting = [size for size in temp_bytes if size < frame_bytes]
    return [*small, *[frame_bytes] * num_frames, *([max(fitting)] if fitting else [])]


def token_bytes(cache: CacheShape, dtype: jnp.dtype) -> int:
    """Bytes of KV cache that one token takes over all layers and devices."""
    return 2 * cache.num_layers * cache.num_kv_heads * cache.head_width * jnp.dtype(dtype).itemsize


def slot_bytes(state: DeviceState) -> int:
    """Bytes of everything but the KV pages, of one device. `state`: arrays or their abstract values."""
    return shard_bytes(state.replace(k_pages=None, v_pages=None))


def page_bytes(state: DeviceState) -> int:
    """Bytes that a page takes on each device. `state`: arrays or their abstract values."""
    return shard_bytes((state.k_pages, state.v_pages)) // state.k_pages.sharding.shard_shape(state.k_pages.shape)[1]


def pool_pages(shape: StateShape, mesh: Mesh, page_bytes: int, *, used_bytes: int, temp_bytes: int) -> int:
    """Pages that fit beside the weights and the temporaries of the largest step; all in bytes of one device.

    A GPU's memory is taken whole, for what requests leave to those that begin alike; a CPU's is for others, too.
    page_bytes: of a page; used_bytes: weights and slot state. PoolError if not even one page fits.
    """
    device = mesh.local_devices[0]
    enough = shape.num_slots * shape.table_width  # every slot at its full length
    if device.platform == "cpu":
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
        budget = min(CPU_POOL_BYTES, available / 2)
    else:
        limit = device.memory_stats()["bytes_limit"]
        budget = limit - GPU_RESERVE_BYTES - used_bytes - temp_bytes
        enough = max(enough, MAX_PAGES)
    pages = min(enough, int(budget // page_bytes) - 1)
    if pages < 1:
        raise PoolError(
            f"no room for a KV cache: {budget / 2**20:.0f} MiB are left beside {used_bytes / 2**20:.0f} MiB of weights "
            f"and {temp_bytes / 2**20:.0f} MiB of temporaries, and a page takes {page_bytes / 2**20:.2f} MiB"
        )
    return pages
