"""The tiers behind the device's KV cache, from an EngineConfig: how large they are, and the files of the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from checkpoints.fingerprint import fingerprint
from checkpoints.resolve import Checkpoint
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.models.model import Model
from jaxinfer.params import shard_bytes
from jaxinfer.runner import cache, peers
from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.runner.long_context import LongContext
from jaxinfer.runner.page_file import BLOCK_BYTES
from jaxinfer.runner.step import StepBuilder

FRAME_BYTES = 2**27
"""Most that a frame has. The host spends 0.9 ms on each frame that comes back, and a copy of 75 MB takes 1.4 (H200):
with frames of 38 MB it was the host that one waited for."""
MAX_FRAME_PAGES = 64
CGROUP = Path("/sys/fs/cgroup")
POOL_SHARE = 8
"""A frame is at most this part of the pool: the pages of a frame leave the device at once."""


class TierSizes(NamedTuple):
    """Of the tiers behind the device."""

    page_bytes: int
    frame_pages: int = 0  # 0: there is no host tier
    num_frames: int = 0
    num_disk_pages: int = 0  # 0: there is no disk tier
    long_bytes: int = 0  # of host memory, for the end of a context that the pool does not hold

    @property
    def frame_bytes(self) -> int:
        """Of pinned memory, for all frames."""
        return self.num_frames * self.frame_pages * self.page_bytes


def check_tiers(config: EngineConfig, model: Model, num_groups: int) -> None:
    """ConfigError for a host tier with what it does not keep: the state at a prefix's end, without which its pages are
    of no use, and the pages of more than one group of devices."""
    if config.kv_host_gib and model.recurrent is not None:
        raise ConfigError(
            f"kv_host_gib is {config.kv_host_gib}; {model.architecture} has a recurrent state, whose copies are kept "
            "on the device alone, and without one the pages of a prefix are of no use: 0 would work"
        )
    if config.kv_host_gib and num_groups > 1:
        raise ConfigError(
            f"kv_host_gib is {config.kv_host_gib}, and {num_groups} groups of devices have sequences of their own; a "
            "frame of the host tier has pages of one pool, and here each group has its own: 0 would work, or a mesh "
            "that splits no rows"
        )


def size_memory(
    config: EngineConfig, builder: StepBuilder, temp_bytes: Callable[[StepBuilder], int]
) -> tuple[StepBuilder, TierSizes]:
    """The builder with the pages that fit, the tiers behind them, and a context that all of it can hold.

    temp_bytes: of the largest step, which is asked for on a GPU alone and may take as long as compiling it. ConfigError
    or PoolError for sizes that hold too little, or more than there is.
    """
    sized = _size_pool(config, builder, temp_bytes)
    shape = sized.shape
    tiers = _host_sizes(config, sized)
    missing = shape.max_model_len - shape.num_pages * shape.page_size
    if missing > 0 and tiers.num_frames and builder.mesh.size == 1:
        sized, tiers = _with_long_context(sized, tiers, missing)
        if config.num_pages is None:  # its steps need memory, too
            sized = _size_pool(config, sized, temp_bytes)
    room = sized.shape.num_pages * shape.page_size + (sized.long.num_tokens if sized.long else 0)
    shape = dataclasses.replace(sized.shape, max_model_len=min(shape.max_model_len, room))
    return dataclasses.replace(sized, shape=shape, frame_pages=tiers.frame_pages), tiers


def _size_pool(config: EngineConfig, builder: StepBuilder, temp_bytes: Callable[[StepBuilder], int]) -> StepBuilder:
    """The builder with the pages that fit."""
    if config.num_pages is not None:
        return builder
    shape, mesh = builder.shape, builder.mesh
    temp = temp_bytes(builder) if builder.platform == "gpu" else 0
    state = builder.abstract_state
    used = cache.slot_bytes(state) + shard_bytes(builder.abstract_params)
    used += peers.inbox_bytes(mesh) if builder.writes_to_peers else 0
    pages = cache.pool_pages(shape, mesh, cache.page_bytes(state), used_bytes=used, temp_bytes=temp)
    return dataclasses.replace(builder, shape=dataclasses.replace(shape, num_pages=pages))


def with_pages(builder: StepBuilder, num_pages: int) -> StepBuilder:
    """The builder with at most so many pages on each device, as the other processes have, and a context that fits."""
    shape = builder.shape
    most = min(shape.max_model_len, num_pages * shape.page_size)
    return dataclasses.replace(builder, shape=dataclasses.replace(shape, num_pages=num_pages, max_model_len=most))


def _with_long_context(builder: StepBuilder, tiers: TierSizes, missing: int) -> tuple[StepBuilder, TierSizes]:
    """With host memory for up to `missing` tokens, of which the frames keep one."""
    shape, frame_bytes = builder.shape, tiers.frame_pages * tiers.page_bytes
    most_bytes = (tiers.num_frames - 1) * frame_bytes
    num_tokens = min(missing, most_bytes // (tiers.page_bytes // shape.page_size))
    while num_tokens > 0:
        long = LongContext.of(builder.platform, num_tokens)
        over = long.num_bytes(shape.cache, shape.dtype) - most_bytes
        if over <= 0:
            left = (most_bytes + frame_bytes - long.num_bytes(shape.cache, shape.dtype)) // frame_bytes
            sizes = tiers._replace(num_frames=left, long_bytes=long.num_bytes(shape.cache, shape.dtype))
            return dataclasses.replace(builder, long=long), sizes
        num_tokens -= -(-over // (tiers.page_bytes // shape.page_size))
    return builder, tiers


def _host_sizes(config: EngineConfig, builder: StepBuilder) -> TierSizes:
    """What the configured sizes hold. ConfigError for less than one frame, and for more memory than is there."""
    shape = builder.shape
    # On the host each device has its own part, whether others have the same or not.
    page_bytes = cache.page_bytes(builder.abstract_state) * builder.mesh.size
    if not config.kv_host_gib:
        return TierSizes(page_bytes)
    host_bytes = int(config.kv_host_gib * 2**30)
    wanted = min(max(FRAME_BYTES // page_bytes, 1), MAX_FRAME_PAGES, max(shape.num_pages // POOL_SHARE, 1))
    frame_pages = 2 ** (wanted.bit_length() - 1)
    num_frames = host_bytes // (frame_pages * page_bytes)
    if num_frames < 1:
        raise ConfigError(
            f"kv_host_gib is {config.kv_host_gib}; it must be at least {frame_pages * page_bytes / 2**30:.3g}, "
            f"which is {frame_pages} pages of {page_bytes:,} bytes"
        )
    available = _available_bytes()
    if host_bytes > available:
        raise ConfigError(
            f"kv_host_gib is {config.kv_host_gib}, but {available / 2**30:.1f} GiB of memory are free on this machine"
        )
    num_disk_pages = 0
    if config.kv_disk_dir is not None:
        file_bytes = cache.token_bytes(shape.cache, shape.dtype) * shape.page_size + BLOCK_BYTES
        num_disk_pages = int(config.kv_disk_gib * 2**30) // file_bytes
        if num_disk_pages < 1:
            raise ConfigError(f"kv_disk_gib is {config.kv_disk_gib}, less than a page of {file_bytes:,} bytes")
    return TierSizes(page_bytes, frame_pages, num_frames, num_disk_pages)


def _available_bytes() -> int:
    """Memory that can be had without swapping: what files are cached in counts, and a container's limit, too."""
    with open("/proc/meminfo") as file:
        found = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in file)}
    available = found.get("MemAvailable", found["MemFree"])
    try:
        limit = int(CGROUP.joinpath("memory.max").read_text())
        used = int(CGROUP.joinpath("memory.current").read_text())
    except (OSError, ValueError):  # no such limit, or "max"
        return available
    return min(available, limit - used)


def open_disk(config: EngineConfig, checkpoint: Checkpoint, builder: StepBuilder) -> DiskPages | None:
    """The disk tier's files; None where there is none. ConfigError if the folder cannot be used."""
    if config.kv_disk_dir is None:
        return None
    _, num_layers, _, *page = builder.abstract_frame.shape
    dtype = builder.shape.dtype.name
    return DiskPages.open(
        Path(config.kv_disk_dir),
        fingerprint=fingerprint(checkpoint, dtype=dtype, seed=config.seed),
        page_shape=(2, num_layers, *page),
        dtype=dtype,
    )
