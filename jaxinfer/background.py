"""One thing in a thread of its own, while this thread does another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self


class Stopped(Exception):
    """What is done in the background is not needed any more. Only its thread sees this."""


class Background[Result]:
    """Runs `function` from when it is made. As a context it has ended when the context has, whatever happened there.

    function: gets one to call now and then, which raises Stopped once nobody waits for the result.
    """

    def __init__(self, function: Callable[[Callable[[], None]], Result]):
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._future = self._pool.submit(function, self._raise_if_stopped)

    def check(self) -> None:
        """Raises the error that ended it, if one did."""
        if self._future.done():
            self._future.result()

    def result(self) -> Result:
        """What it returns, waited for; or its error."""
        return self._future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped
