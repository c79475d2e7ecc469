"""What JAX is told before it starts, and that it has started."""

from __future__ import annotations

import math
import os
from pathlib import Path

import jax

from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.runner.disk_cache import DiskCache, is_private

CACHE_DIR = Path.home() / ".cache" / "jaxinfer" / "xla"
HOST_RESERVE_GIB, DEFAULT_HOST_GIB = 4, 64
"""Of pinned host memory: for what comes and goes beside the KV cache; XLA's own limit."""


def set_up_jax(config: EngineConfig) -> None:
    """Process-wide settings, made before the first array: memory share and the cache of compiled steps."""
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))
    host_gib = math.ceil(config.kv_host_gib) + HOST_RESERVE_GIB
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(host_gib, DEFAULT_HOST_GIB)))
    directory = _cache_dir(config)
    if config.num_processes > 1:  # XLA's processes tune together what they compile, and one with a hit would not
        jax.config.update("jax_enable_compilation_cache", False)
    elif directory and not is_private(directory):  # JAX, too, runs what is in it
        jax.config.update("jax_compilation_cache_dir", None)
    elif directory:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cache_dir(config: EngineConfig) -> Path | None:
    if config.compile_cache_dir is None:
        return CACHE_DIR
    return Path(config.compile_cache_dir) if config.compile_cache_dir else None


def open_executables(config: EngineConfig) -> DiskCache | None:
    """Where whole steps are kept: beside JAX's own cache, and none where the user switched that off."""
    directory = _cache_dir(config)
    used = directory is not None and jax.config.jax_compilation_cache_dir == str(directory)
    return DiskCache.open(directory / "steps") if used and jax.config.jax_enable_compilation_cache else None


def find_devices() -> list[jax.Device]:
    """JAX's devices. ConfigError, with what JAX says, where its backend does not start."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a word, for a platform without its plugin
        reason = str(error) or "the package of that platform is not installed"
        raise ConfigError(f"JAX cannot start on JAX_PLATFORMS {jax.config.jax_platforms!r}: {reason}") from error
