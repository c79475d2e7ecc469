"""The engine in a process of its own, so that HTTP and text never hold up a step."""

from __future__ import annotations

import select
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence

from jaxinfer.engine.channel import Channel, Failed, Following, Ready, decode_to_owner
from jaxinfer.engine.client import EngineClient
from jaxinfer.types import EngineDead, EngineInfo

CLOSE_TIMEOUT_S = 10.0
"""The engine's process may take this long to end before it is killed."""
CHECK_EVERY_S = 0.1
"""How often whoever waits for the engine looks at what else may fail."""


class EngineProcess:
    """The process, for whoever started it and decides when it ends: its owner.

    The owner's channel carries no requests. Its end, also that of an owner who was killed, ends the engine. Each front
    end has a channel of its own, whose end cancels that front end's requests.
    """

    def __init__(self, command: Sequence[str], num_front_ends: int = 1):
        """Starts `command`, a program that calls `engine_main` with its last argument.

        A program of its own, because multiprocessing would run the caller's script again.
        """
        pairs = [socket.socketpair() for _ in range(1 + num_front_ends)]
        (ours, *self._front_ends), theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        fds = [sock.fileno() for sock in theirs]
        self._process = subprocess.Popen([*command, ",".join(map(str, fds))], pass_fds=fds, stdin=subprocess.DEVNULL)
        for sock in theirs:
            sock.close()
        self._owner = Channel(ours)
        self._clients: list[EngineClient] = []
        self._looking = threading.Lock()
        self._failure: str | None = None
        self._closing = False
        self._is_ready = False
        self._info: EngineInfo | None = None

    def wait_until_ready(self, check: Callable[[], None] = lambda: None) -> None:
        """Waits until the engine is built. EngineDead, with the reason, if it is not going to be.

        check: called now and then meanwhile; what it raises ends the waiting.
        """
        first = self._first_message(check)
        if first is None or isinstance(first, Failed):
            self.close()
            raise EngineDead(first.reason if first else f"the engine's process ended (exit code {self.exit_code})")
        self._is_ready = True
        if isinstance(first, Ready):
            self._info = first.info

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself once it is ready."""
        assert self._info is not None, "the engine is not ready"
        return self._info

    @property
    def failure(self) -> str | None:
        """Why the engine stopped; None while it lives. Never waits."""
        with self._looking:
            if self._failure is None:
                self._failure = self._look()
            return self._failure

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def take_channels(self) -> list[socket.socket]:
        """The channel of each front end. Whoever takes them closes them here once the front ends hold them."""
        taken, self._front_ends = self._front_ends, []
        return taken

    def client(self) -> EngineClient:
        """The engine for a front end in this process."""
        client = EngineClient(self._front_ends.pop(), self.info, lambda: self.failure)
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Ends the engine's process. Requests still running raise EngineDead."""
        self._closing = True
        if not self._is_ready:  # it has nothing to finish, and hears nothing before JAX is loaded
            self._process.kill()
        self._owner.end()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _ = self.failure  # while the owner's channel can still tell it
        self._close_channels()

    def _close_channels(self) -> None:
        self._owner.close()
        for client in self._clients:
            client.close()
        for sock in self._front_ends:
            sock.close()

    def _first_message(self, check: Callable[[], None]) -> Ready | Following | Failed | None:
        """Waits for it; None if the process ends without one."""
        readable = select.poll()
        readable.register(self._owner, select.POLLIN)
        while True:
            readable.poll(CHECK_EVERY_S * 1000)
            check()
            try:
                for data in self._owner.receive():
                    return decode_to_owner(data)
            except EOFError:
                return None

    def _look(self) -> str | None:
        try:
            for data in self._owner.receive():
                if isinstance(message := decode_to_owner(data), Failed):
                    return message.reason
        except EOFError:
            code = self._process.poll()
            stopped = "the engine was shut down" if self._closing else "the engine's process ended"
            return None if code is None else f"{stopped} (exit code {code})"
        return None
