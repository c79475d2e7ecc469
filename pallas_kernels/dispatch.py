"""The one place that picks how an op runs on this device, and says why the other ways did not."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Route(NamedTuple):
    """A way to run an op. `run` raises NotImplementedError, with the reason, for what it cannot do."""

    name: str
    run: Callable[..., Any]


def dispatch(op: str, routes: tuple[Route, ...], *args: Any, **kwargs: Any) -> Any:
    """Runs the first of `routes` that can; NotImplementedError lists every reason when none can."""
    refusals = []
    for route in routes:
        try:
            result = route.run(*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(f"{route.name}: {refusal}")
            continue
        _log_once(op, route.name, "; ".join(refusals))
        return result
    raise NotImplementedError(f"no route for {op}: " + "; ".join(refusals))


@functools.cache
def _log_once(op: str, route: str, refusals: str) -> None:
    log.info("%s runs on the %s route%s", op, route, f" ({refusals})" if refusals else "")
