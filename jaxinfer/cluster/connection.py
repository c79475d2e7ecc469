"""Ray, for the time of a job or of a server."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import ray

from jaxinfer.cluster.config import MAX_WORKERS, RayConfig
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.sharding.mesh import ShardingError, check_sizes, parse

logger = logging.getLogger(__name__)

MAX_STARTS = 3
"""Tries of a cluster of this machine: Ray gives its own processes 30 s, which a busy machine may not."""


class Share(NamedTuple):
    """What the engines of a cluster are."""

    num_workers: int
    num_gpus: float  # of each
    num_cpus: float


@contextlib.contextmanager
def connected(config: RayConfig) -> Iterator[None]:
    """A cluster for the length of the block: what was connected before stays so. ConfigError where there is none."""
    if ray.is_initialized():
        yield
        return
    for attempt in range(1, MAX_STARTS + 1):
        try:
            # Of a cluster that is started here, the dashboard is left out: it would take a port and a second.
            has_dashboard = None if config.address else False
            ray.init(address=config.address, include_dashboard=has_dashboard, logging_level=logging.WARNING)
            break
        except Exception as error:  # of no class in common, and of none where a part of Ray was not there in time
            if attempt == MAX_STARTS or "timed out during startup" not in str(error):
                raise ConfigError(f"no Ray cluster at {config.address or 'this machine'}: {error}") from error
            logger.warning("Ray did not start (%s); trying again", error)
    try:
        yield
    finally:
        ray.shutdown()


def share(config: RayConfig, engine: EngineConfig) -> Share:
    """How many engines, and what each gets. ConfigError where the cluster has no room for one, or not for as many."""
    resources = ray.cluster_resources()
    cluster_gpus, cluster_cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    num_gpus = config.num_gpus
    if num_gpus is None:
        num_gpus = float(num_devices(engine)) if cluster_gpus else 0.0
    limits = [cluster_gpus // num_gpus] if num_gpus else []
    limits += [cluster_cpus // config.num_cpus] if config.num_cpus else []
    room = int(min(limits, default=MAX_WORKERS))
    num_machines = sum(node["Alive"] for node in ray.nodes())
    wanted = config.num_workers or (room if num_gpus else min(room, num_machines))
    if not 1 <= wanted <= room:
        raise ConfigError(
            f"{wanted or 1} engines of {num_gpus:g} GPUs and {config.num_cpus:g} cores each do not fit into a cluster "
            f"of {cluster_gpus:g} GPUs and {cluster_cpus:g} cores; it holds {room}"
        )
    return Share(wanted, num_gpus, config.num_cpus)


def num_devices(engine: EngineConfig) -> int:
    """Of an engine's mesh."""
    mesh = engine.mesh
    if mesh is None:
        return engine.tensor_parallel_size
    try:
        if isinstance(mesh, str):
            return math.prod(check_sizes(parse(mesh)).values())
        if isinstance(mesh, Mapping):
            return math.prod(check_sizes(mesh).values())
    except ShardingError as error:
        raise ConfigError(str(error)) from error
    raise ConfigError("mesh is a jax.sharding.Mesh, which other machines do not have; give the sizes of its axes")
