"""Flags of commands that may run on a Ray cluster."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer.config import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    """--ray, and what it needs."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--ray", action="store_true", help="run several engines, on a Ray cluster")
    group.add_argument("--ray-address", help="of the cluster (default: $RAY_ADDRESS, or one of this machine alone)")
    group.add_argument(
        "--ray-workers", type=int, help="engines (default: one for each group of GPUs; without any, for each machine)"
    )
    group.add_argument("--ray-gpus", type=float, help="GPUs of an engine (default: as many as its mesh has devices)")
    group.add_argument("--ray-cpus", type=float, help="cores of an engine (default 1)")


def given(args: argparse.Namespace) -> dict[str, Any] | None:
    """The fields of RayConfig that were given; None without --ray. ConfigError for others of these flags alone."""
    names = {"ray_address": "address", "ray_workers": "num_workers", "ray_gpus": "num_gpus", "ray_cpus": "num_cpus"}
    fields = {names[flag]: value for flag in names if (value := getattr(args, flag)) is not None}
    if args.ray:
        return fields
    if fields:
        flag = next(flag for flag in names if getattr(args, flag) is not None).replace("_", "-")
        raise ConfigError(f"--{flag} is given without --ray, and so without a cluster; give both or neither")
    return None
