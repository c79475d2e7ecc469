"""The process of a follower: it holds a runner and nothing else, and does what process 0 does until that ends."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import NamedTuple

from jaxinfer.engine.channel import Channel, Following
from jaxinfer.engine.group import Group, ProcessLost
from jaxinfer.engine.leading import follow
from jaxinfer.engine.loop import end_when_lost, end_with
from jaxinfer.runner.runner import ModelRunner


class Follower(NamedTuple):
    """What a process other than the first has."""

    runner: ModelRunner
    group: Group

    def follow(self) -> None:
        """Returns when process 0 ends as it should. Raises ProcessLost."""
        follow(self.runner, self.group)


def follower_main(
    fds: str, build: Callable[[], Follower], refusals: tuple[type[Exception], ...], lost: queue.SimpleQueue[str]
) -> None:
    """Builds it, then follows, until process 0 ends or the owner's channel closes. See `engine_main`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    owner = Channel(socket.socket(fileno=int(fds)))
    built: list[Follower] = []
    threading.Thread(target=_end_with_owner, args=(owner, built), daemon=True).start()
    threading.Thread(target=end_when_lost, args=(owner, lost), daemon=True).start()
    try:
        built.append(build())
        owner.put(Following())
        built[0].follow()
    except (*refusals, ProcessLost) as error:
        end_with(owner, str(error))
    except Exception as error:
        traceback.print_exc()
        end_with(owner, f"{type(error).__name__}: {error}")
    os._exit(0)


def _end_with_owner(owner: Channel, built: list[Follower]) -> None:
    """Ends the process when its owner does, and says so to the others."""
    with selectors.DefaultSelector() as selector, contextlib.suppress(EOFError):
        selector.register(owner, selectors.EVENT_READ)
        while selector.select():
            owner.receive()
    for follower in built:
        follower.group.leave("it was shut down")
    os._exit(1)
