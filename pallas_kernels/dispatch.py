"""The one place that picks how an op runs on a device, and says why the other ways did not."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

log = logging.getLogger(__name__)


class Target(NamedTuple):
    """The device that a program is compiled for, which need not be one of this process."""

    platform: str  # "cpu" or "gpu"
    compute_capability: int = 0  # of an NVIDIA GPU, ten times the version: 90 for Hopper

    @classmethod
    def of(cls, device: jax.Device) -> Target:
        """Of a device, or of one that only a target description knows."""
        if device.platform == "cpu":
            return CPU
        return cls("gpu", int(float(device.compute_capability) * 10 + 0.5))


CPU = Target("cpu")
HOPPER = 90
"""Compute capability, ten times, of the GPUs that have wgmma, and for which there are kernels of Mosaic's."""


class Route(NamedTuple):
    """A way to run an op. `run` raises NotImplementedError, with the reason, for what it cannot do."""

    name: str
    run: Callable[..., Any]
    plan: Callable[..., Any] | None = None
    """Computes what many calls of a step have in common; raises as `run` does."""


def gpu_route(name: str, module: str, run: str = "run") -> Route:
    """A route for NVIDIA GPUs: the functions `run`, or what is named in its place, and `plan` of a module that needs
    packages which others lack."""

    def call(function: str, *args: Any, target: Target, **kwargs: Any) -> Any:
        if target.platform != "gpu":
            raise NotImplementedError(f"the target is a {target.platform}")
        try:
            route = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise NotImplementedError(f"the package {error.name} is not installed") from error
        return getattr(route, function)(*args, target=target, **kwargs)

    return Route(name, functools.partial(call, run), functools.partial(call, "plan"))


def plan(routes: tuple[Route, ...], *args: Any, target: Target, **kwargs: Any) -> dict[str, Any]:
    """What each of `routes` that can prepares for the calls of a step, by its name. XLA drops what no call uses."""
    plans = {}
    for route in routes:
        if route.plan is not None:
            with contextlib.suppress(NotImplementedError):
                plans[route.name] = route.plan(*args, target=target, **kwargs)
    return plans


def dispatch(op: str, routes: tuple[Route, ...], *args: Any, target: Target, **kwargs: Any) -> Any:
    """Runs the first of `routes` that can; NotImplementedError lists every reason when none can."""
    refusals = []
    for route in routes:
        try:
            result = route.run(*args, target=target, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(f"{route.name}: {refusal}")
            continue
        slow = target.platform == "gpu" and route.name == "reference"
        _log_once(logging.WARNING if slow else logging.INFO, op, route.name, "; ".join(refusals))
        return result
    raise NotImplementedError(f"no route for {op}: " + "; ".join(refusals))


@functools.cache
def _log_once(level: int, op: str, route: str, refusals: str) -> None:
    log.log(level, "%s runs on the %s route%s", op, route, f" ({refusals})" if refusals else "")
