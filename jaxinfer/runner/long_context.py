"""Contexts that the device's pages do not hold: their ends lie in host memory, and attention reads them from there.

A sequence's first D positions, a multiple of the page size, lie in pages like any other's. Keys and values of the
positions behind them lie in one array each in pinned host memory, row p - D for position p. A long step runs a chunk of
that sequence alone. In every layer it attends in parts that it merges by the maximum and the sum of their scores: the
pages, then the host's rows, both in blocks of a fixed number of tokens, then the chunk's own tokens. What the step
computed goes to the host in a program of its own, since XLA copies an array that one program both reads in a loop and
changes.

No step can be faster than the bytes that it reads take over the bus: with M = 2 * L * K * E * (bytes of a number) per
token, M * (start - D) / bandwidth seconds per long step, whether of one token or of a chunk. So n tokens of prompt
behind the pages, in chunks of C, take M * n * n / (2 * C) / bandwidth, and every token of output M * n / bandwidth.
An H200 read pinned memory at 40 GB/s so, in blocks of 4 MB: 0.37 s a token for 100,000 tokens of Qwen3-4B behind the
pages (M = 147,456), and 18 s to prefill them. On two cores of a CPU, where the rows are memory like any other, a token
of a 135M model in float32 (M = 46,080) takes 62 ms within the pages, 186 ms with 8,192 tokens behind them, 335 ms with
16,384 and 829 ms with 32,000: 2 GB/s, the time of the reference attention itself.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.models.model import Attend, CacheShape
from jaxinfer.runner.pinned import memory_kinds
from pallas_kernels.kv_write import reference as kv_write
from pallas_kernels.paged_attention import reference as online

CHUNK = {"cpu": 256, "gpu": 1024}
"""Most tokens of a long step. Every chunk reads the whole context over the bus."""
BLOCK = {"cpu": 256, "gpu": 2048}
"""Tokens of the context that are read at a time."""
QUERIES = 256
"""Tokens of a step whose scores with a block are made at a time: of Qwen3-4B 67 MB instead of 268."""
NEVER = 2**30
"""Position of a key that nobody sees: later than any query's."""


class LongContext(NamedTuple):
    """Sizes of the long steps, in tokens."""

    num_tokens: int  # that the host holds of a sequence
    chunk: int  # most tokens of a step
    block: int  # that are read at a time

    @classmethod
    def of(cls, platform: str, num_tokens: int) -> LongContext:
        """With the sizes that suit a platform, "cpu" or "gpu"."""
        return cls(num_tokens, CHUNK[platform], BLOCK[platform])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of the steps that are compiled, smallest first."""
        return (1, self.chunk) if self.chunk > 1 else (1,)

    @property
    def num_rows(self) -> int:
        """Rows of the host's arrays: whole blocks that hold every token and the padding of a chunk behind it.

        An index that reached past the end would be moved, by JAX's rules, instead of refused.
        """
        return -(-(self.num_tokens + self.chunk) // self.block) * self.block

    def num_bytes(self, cache: CacheShape, dtype: jnp.dtype) -> int:
        """Of host memory, for keys and values of all layers."""
        return 2 * self.num_rows * cache.num_layers * cache.num_kv_heads * cache.head_width * jnp.dtype(dtype).itemsize


@flax.struct.dataclass
class HostContext:
    """Keys and values of one sequence, or of a chunk of it, that are not in pages. T rows."""

    k: jax.Array  # [L, T, K, E]
    v: jax.Array  # [L, T, K, E]


def abstract(cache: CacheShape, num_rows: int, dtype: jnp.dtype, mesh: Mesh, *, on_host: bool) -> HostContext:
    """Shapes, dtypes and shardings. A CPU's own memory is the host's, and so is that of a device known by name only."""
    kinds = memory_kinds(mesh) if on_host and mesh.devices.flat[0].platform != "cpu" else set()
    kind = "pinned_host" if "pinned_host" in kinds else None
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    shape = cache.num_layers, num_rows, cache.num_kv_heads, cache.head_width
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return HostContext(array, array)


def zeros(shapes: HostContext) -> HostContext:
    """The arrays, for as long as a runner lives, as pinning a GiB takes a second. Only rows once written are read."""

    def make(array: jax.ShapeDtypeStruct) -> jax.Array:
        if array.sharding.memory_kind != "pinned_host":
            return jnp.zeros(array.shape, array.dtype, device=array.sharding)
        return jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)

    return jax.tree.map(make, shapes)


def is_whole(host: HostContext) -> bool:
    """Whether the arrays can be used. Does not wait: those of a step that hangs cannot."""
    arrays = jax.tree.leaves(host)
    if any(array.is_deleted() or not array.is_ready() for array in arrays):
        return False
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError:
        return False
    return True


class LongRow(NamedTuple):
    """Where the tokens of a long step lie."""

    position: jax.Array  # [T] int32; -1 for padding
    start: jax.Array  # scalar int32: position of the first token
    num_device_tokens: jax.Array  # scalar int32: positions below it lie in pages
    page_table: jax.Array  # [W] int32


def attend_long(
    pools: tuple[jax.Array, jax.Array],
    host: HostContext,
    new: tuple[jax.Ref, jax.Ref],
    row: LongRow,
    block: int,
) -> Attend:
    """Attention over pools of [L, P, S, K, E], the host's rows and the step's own tokens.

    new: Refs of [L, T, K, E] each, which take the keys and values of the step.
    """
    page_size, num_kv_heads, width = pools[0].shape[2:]
    pages = max(1, block // page_size)
    table = jnp.pad(row.page_table, (0, -row.page_table.shape[0] % pages))
    num_tokens = row.position.shape[0]
    parts = num_tokens // QUERIES if num_tokens % QUERIES == 0 else 1
    position = row.position.reshape(parts, -1)
    own = jnp.where(row.position < 0, NEVER, row.position)

    def from_pages(layer: jax.Array, i: jax.Array) -> list[jax.Array]:
        ids = jax.lax.dynamic_slice_in_dim(table, i * pages, pages)
        return [pool[layer, ids].reshape(-1, num_kv_heads, width) for pool in pools]

    def from_host(layer: jax.Array, i: jax.Array) -> list[jax.Array]:
        return [_fetch(rows, layer, i, block) for rows in (host.k, host.v)]

    def attend(qkv, rotary, layer, *, norms, scale, window):
        q, *computed = kv_write.heads(qkv, rotary, layer, norms)
        k, v = (rows.astype(ref.dtype) for ref, rows in zip(new, computed, strict=True))
        new[0][layer], new[1][layer] = k, v
        scorer = online.Scorer(scale, window, None, None)
        queries = online.by_kv_head(q.reshape(parts, -1, *q.shape[1:]), num_kv_heads)
        # The first position that any query sees: what is older need not be read.
        oldest = jnp.zeros_like(row.start) if window is None else jnp.maximum(row.start - window + 1, 0)

        def add(seen, k, v, key_position):
            """Folds keys and values [C, K, E] at positions [C] into all parts of the queries, one after the other."""

            def one(part):
                seen, queries, position = jax.tree.map(lambda a: a[None], part)
                seen = online.fold(seen, queries, k[None], v[None], key_position, position, scorer)
                return jax.tree.map(lambda a: a[0], seen)

            return jax.lax.map(one, (seen, queries, position))

        def over(seen, fetch, span, first, end):
            """Adds the positions from `first` to `end`, in blocks of `span`."""

            def fold(i, seen):
                at = first + i * span + jnp.arange(span)
                return add(seen, *fetch(layer, i), jnp.where(at < end, at, NEVER))

            return jax.lax.fori_loop(jnp.maximum(oldest - first, 0) // span, -(-(end - first) // span), fold, seen)

        seen = online.nothing_seen(queries)
        seen = over(seen, from_pages, pages * page_size, jnp.zeros_like(row.start), row.num_device_tokens)
        seen = over(seen, from_host, block, row.num_device_tokens, row.start)
        seen = add(seen, k, v, own)
        return online.attended(seen, scorer).reshape(q.shape).astype(q.dtype)

    return attend


def _fetch(rows: jax.Array, layer: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Block i of a layer of the host's rows [L, T, K, E], on the device: [block, K, E]."""
    start = (layer, i * block, 0, 0)
    found = jax.lax.dynamic_slice(rows, start, (1, block, *rows.shape[2:]))
    return (jax.device_put(found, jax.memory.Space.Device) if _is_on_host(rows) else found)[0]


def store(host: HostContext, new: HostContext, first: jax.Array) -> HostContext:
    """Writes rows [L, T, K, E] from row `first` on. `host` is donated, and nothing else of it is touched."""

    def put(rows: jax.Array, chunk: jax.Array) -> jax.Array:
        chunk = jax.device_put(chunk, jax.memory.Space.Host) if _is_on_host(rows) else chunk
        return jax.lax.dynamic_update_slice(rows, chunk, (0, first, 0, 0))

    return jax.tree.map(put, host, new)


def _is_on_host(array: jax.Array) -> bool:
    return jax.typeof(array).memory_space == jax.memory.Space.Host
