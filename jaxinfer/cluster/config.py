"""What a user may say of a cluster: frozen, checked when made."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, Self

from jaxinfer.config import ConfigError

MAX_WORKERS = 4096
"""Most engines of a job, or of a server."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayConfig:
    """A cluster, and what an engine gets of it."""

    address: str | None = None
    """Of the cluster, as `ray.init` takes it. None: the one that this program is connected to, or that $RAY_ADDRESS
    names, or one of this machine alone that ends with the program."""
    num_workers: int | None = None
    """Engines. None: one for every group of GPUs that the cluster has; without GPUs, one for every machine of it."""
    num_gpus: float | None = None
    """GPUs of an engine. None: as many as its mesh has devices, where the cluster has any; below 1 they are shared."""
    num_cpus: float = 1.0
    """Cores that an engine takes of its machine's, in Ray's books."""
    rows_per_task: int = 32
    """Of a job: rows that are given to an engine at once, and again to another one if it dies."""
    max_restarts: int = 8
    """Of a job: how often each of its engines is started anew, until the job ends with an error."""

    def __post_init__(self) -> None:
        count = self.num_workers
        _check(
            count is None or 1 <= count <= MAX_WORKERS, f"num_workers is {count}; it must be from 1 to {MAX_WORKERS}"
        )
        gpus = self.num_gpus
        _check(gpus is None or gpus >= 0, f"num_gpus is {gpus}; it must be at least 0")
        _check(gpus is None or gpus <= 1 or gpus == int(gpus), f"num_gpus is {gpus}; above 1 it must be a whole number")
        _check(self.num_cpus >= 0, f"num_cpus is {self.num_cpus}; it must be at least 0")
        _check(self.rows_per_task >= 1, f"rows_per_task is {self.rows_per_task}; it must be at least 1")
        _check(self.max_restarts >= 0, f"max_restarts is {self.max_restarts}; it must be at least 0")
        _check(self.address != "", "address is empty; give one, or leave it out")

    @classmethod
    def of(cls, fields: Mapping[str, Any], *, num_processes: int) -> Self:
        """From its fields. ConfigError where Ray is not installed, too, and for an engine of several processes: before
        anything slow."""
        _check(num_processes == 1, f"num_processes is {num_processes}; an engine of a Ray cluster is one process")
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("engines are asked for on a cluster, and Ray is not installed: pip install jaxinfer[ray]")
        return cls(**fields)
