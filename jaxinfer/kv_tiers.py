"""The tiers behind the device's KV cache, from an EngineConfig: how large they are, and the files of the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from checkpoints.fingerprint import fingerprint
from checkpoints.resolve import Checkpoint
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.runner import cache
from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.runner.step import StepBuilder

FRAME_BYTES = 2**25
"""About what a frame has: see `runner/host_pages.py`."""
MAX_FRAME_PAGES = 64
POOL_SHARE = 8
"""A frame is at most this part of the pool: the pages of a frame leave the device at once."""


class TierSizes(NamedTuple):
    """Of the tiers behind the device."""

    frame_pages: int  # 0: there is no host tier
    num_frames: int
    num_disk_pages: int  # 0: there is no disk tier
    page_bytes: int

    @property
    def host_bytes(self) -> int:
        """Of pinned memory."""
        return self.num_frames * self.frame_pages * self.page_bytes


def tier_sizes(config: EngineConfig, builder: StepBuilder) -> TierSizes:
    """What the configured sizes hold. ConfigError for less than one frame, and for more memory than is there."""
    shape = builder.shape
    page_bytes = cache.token_bytes(shape.cache, shape.dtype) * shape.page_size
    if not config.kv_host_gib:
        return TierSizes(0, 0, 0, page_bytes)
    host_bytes = int(config.kv_host_gib * 2**30)
    wanted = min(max(FRAME_BYTES // page_bytes, 1), MAX_FRAME_PAGES, max(shape.num_pages // POOL_SHARE, 1))
    frame_pages = 2 ** (wanted.bit_length() - 1)
    num_frames = host_bytes // (frame_pages * page_bytes)
    if num_frames < 1:
        raise ConfigError(
            f"kv_host_gib is {config.kv_host_gib}; it must be at least {frame_pages * page_bytes / 2**30:.3g}, "
            f"which is {frame_pages} pages of {page_bytes:,} bytes"
        )
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if host_bytes > available:
        raise ConfigError(
            f"kv_host_gib is {config.kv_host_gib}, but {available / 2**30:.1f} GiB of memory are free on this machine"
        )
    num_disk_pages = 0
    if config.kv_disk_dir is not None:
        num_disk_pages = int(config.kv_disk_gib * 2**30) // page_bytes
        if num_disk_pages < 1:
            raise ConfigError(f"kv_disk_gib is {config.kv_disk_gib}, less than a page of {page_bytes:,} bytes")
    return TierSizes(frame_pages, num_frames, num_disk_pages, page_bytes)


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
        limit_bytes=int(config.kv_disk_gib * 2**30),
    )
