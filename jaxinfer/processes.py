"""An engine over several processes, one on each host: what has to be the same in all, and what JAX is told of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from checkpoints.fingerprint import fingerprint
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.engine.group import Group, Place, ProcessLost, meet
from jaxinfer.engine.leading import leave
from jaxinfer.found import Found
from jaxinfer.runner.executables import SOURCE_ROOT, source_digest

OWN = ("model", "revision", "process_id", "coordinator", "initialization_timeout_s", "compile_cache_dir")
OWN += ("max_waiting", "max_step_ms")
"""Fields of EngineConfig that may differ: where a process finds the model, which counts by its content, and such; and
what the first alone goes by, which schedules."""
SETTINGS = ("jax_platforms", "jax_enable_x64", "jax_default_matmul_precision", "jax_cpu_collectives_implementation")
SHUTDOWN_TIMEOUT_S = 10


def join(config: EngineConfig, found: Found, on_lost: Callable[[str], None] | None) -> Group | None:
    """Waits for the other processes, and joins their devices; None where there are none. ConfigError if it cannot be.

    on_lost: see Group.
    """
    if config.num_processes == 1:
        return None
    assert config.coordinator is not None
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    place = Place.of(config.coordinator, config.process_id, config.num_processes, config.initialization_timeout_s)
    met = meet(place, _facts(config, found))
    group = Group(place, met.channels, on_lost)
    host = f"[{place.host}]" if ":" in place.host else place.host
    with leaving(group), group.working():
        try:
            jax.distributed.initialize(
                f"{host}:{met.port}",
                config.num_processes,
                config.process_id,
                cluster_detection_method="deactivate",
                coordinator_bind_address=f"{host}:{met.port}",
                shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"JAX cannot join {config.num_processes} processes: {error}; an engine of several processes is the "
                "first that a program does with JAX, and the only one that it makes"
            ) from error
    return group


@contextlib.contextmanager
def leaving(group: Group | None) -> Iterator[None]:
    """Tells the other processes of an error that ends this one."""
    try:
        yield
    except ProcessLost:
        raise
    except BaseException as error:
        if group is not None:
            leave(group, f"{error}" if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}")
        raise


def check_devices(mesh: Mesh, num_processes: int) -> None:
    """ConfigError for a mesh without any device of some process."""
    idle = sorted(set(range(num_processes)) - {device.process_index for device in mesh.devices.flat})
    if idle:
        counts = ", ".join(str(len(jax.local_devices(process_index=i))) for i in range(num_processes))
        raise ConfigError(
            f"mesh {','.join(f'{name}={size}' for name, size in mesh.shape.items())} has no device of process "
            f"{', '.join(map(str, idle))}; the processes have {counts} devices, which a mesh takes in this order: "
            "give a larger one, or let each process see fewer (CUDA_VISIBLE_DEVICES)"
        )


def _facts(config: EngineConfig, found: Found) -> dict[str, str]:
    """By name: what has to be the same, for programs to be the same and to be run in the same order."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    fields = {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}
    settings = {name: repr(getattr(jax.config, name)) for name in SETTINGS}
    tokenizer = found.checkpoint.tokenizer_json or ""
    return {
        **packages,
        "Python": platform.python_version(),
        "the source of jaxinfer": source_digest(SOURCE_ROOT)[:12],
        **{name: value for name, value in fields.items() if name not in OWN},
        **settings,
        "the model's content": fingerprint(found.checkpoint, dtype=config.dtype, seed=config.seed)[:12],
        "the tokenizer's": hashlib.sha256(tokenizer.encode()).hexdigest()[:12],
    }
