"""Several front-end processes behind one port: started, dealt connections, watched and stopped from here.

They load what they need while the engine is built, and are dealt nothing before it is ready.

The supervisor accepts and hands each connection to the front end that has the fewest. With a listening socket in every
process (SO_REUSEPORT) the kernel would choose by a hash: of 256 connections on 4 front ends the fullest has about 75,
and streams on it are 17% slower. With one shared socket whoever wakes first takes all that wait. Here each gets 64.
"""

from __future__ import annotations

import dataclasses
import logging
import selectors
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from jaxinfer.http.control import (
    MAX_REASON_CHARS,
    Closed,
    Connection,
    Control,
    EngineEnded,
    EngineReady,
    Started,
    StopWish,
)
from jaxinfer.http.run import BACKLOG, FAILURE_GRACE_S, FORCE_S, GRACE_S, POLL_S, Main, Stop
from jaxinfer.types import EngineDead, EngineInfo

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""How long a front end may take to start once the engine is ready."""
END_S = 1.0
"""What a front end gets to end after all its connections have, before it is killed."""


@dataclasses.dataclass(slots=True, eq=False)
class _FrontEnd:
    """A process, and what it said last."""

    name: str
    process: subprocess.Popen[bytes]
    control: Control
    started: bool = False
    gone: bool = False
    num_dealt: int = 0
    num_closed: int = 0

    @property
    def num_open(self) -> int:
        return self.num_dealt - self.num_closed

    @property
    def end(self) -> str | None:
        """That it has ended, in words; None while it runs."""
        code = self.process.poll()
        return None if code is None else f"{self.name} (pid {self.process.pid}) ended (exit code {code})"


class FrontEnds:
    """The processes. A front end that ends takes its own requests with it, and then the whole server stops."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        fds: Sequence[Sequence[int]],
        scratch: tempfile.TemporaryDirectory[str] | None = None,
    ):
        """Starts a process for each of `commands`, whose last argument is its control socket.

        fds: what else each inherits. scratch: with files that all of them open while they start; it is deleted once
        they have, so that nothing of it stays whichever way the server ends.
        """
        self._scratch = scratch
        self._front_ends: list[_FrontEnd] = []
        self._selector = selectors.DefaultSelector()
        try:
            for i, (command, inherited) in enumerate(zip(commands, fds, strict=True), 1):
                control, theirs = Control.make_pair()
                with theirs:
                    fd = theirs.fileno()
                    process = subprocess.Popen([*command, str(fd)], pass_fds=[*inherited, fd], stdin=subprocess.DEVNULL)
                front_end = _FrontEnd(f"front end {i} of {len(commands)}", process, control)
                self._front_ends.append(front_end)
                self._selector.register(control, selectors.EVENT_READ, front_end)
        except BaseException:
            self.kill()
            raise

    def main(
        self,
        sock: socket.socket,
        engine: EngineInfo,
        engine_failure: Callable[[], str | None],
        *,
        grace_s: float = GRACE_S,
        failure_grace_s: float = FAILURE_GRACE_S,
    ) -> Main:
        """A `Main` of `run.py` on `sock`, which it closes, for an engine that is ready.

        engine_failure: why the engine stopped; None while it runs.
        """

        def serve(stop: Stop, started: threading.Event) -> str | None:
            try:
                self._tell(EngineReady(engine))
                return self._serve(sock, engine_failure, stop, started, grace_s, failure_grace_s)
            finally:
                sock.close()
                self.kill()

        return serve

    def check(self) -> None:
        """EngineDead if one of them has ended."""
        if (end := self._first_end()) is not None:
            raise EngineDead(end)

    def kill(self) -> None:
        """Ends at once what still runs."""
        for front_end in self._front_ends:
            front_end.process.kill()
        for front_end in self._front_ends:
            front_end.process.wait()
            front_end.control.close()
        self._selector.close()
        self._clear_scratch()

    def _clear_scratch(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.cleanup()

    def _serve(
        self,
        sock: socket.socket,
        engine_failure: Callable[[], str | None],
        stop: Stop,
        started: threading.Event,
        grace_s: float,
        failure_grace_s: float,
    ) -> str | None:
        failure = None
        self._wait_until_started(stop)
        self._clear_scratch()
        if not stop.wishes:
            # Only now: see `bind`. Accepted sockets inherit it, and so do not keep a restart from binding.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.listen(BACKLOG)
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ, sock)
            started.set()
            failure = self._deal_until(lambda: engine_failure() or self._first_end(), stop)
            if (reason := engine_failure()) is not None:
                failure = reason
                logger.error("the engine stopped: %s", reason)
                self._tell(EngineEnded(reason[:MAX_REASON_CHARS]))
                self._deal_until(lambda: None, stop, failure_grace_s)
            elif failure is not None:
                logger.error("%s; its requests are lost, and the server stops", failure)
            self._selector.unregister(sock)
        sock.close()
        self._wind_down(stop, grace_s)
        return failure

    def _wait_until_started(self, stop: Stop) -> None:
        """EngineDead, for whoever started the server, if one of them does not start."""
        limit_s = time.monotonic() + START_TIMEOUT_S
        while not all(front_end.started for front_end in self._front_ends) and not stop.wishes:
            self._listen()
            self.check()
            if time.monotonic() > limit_s:
                raise EngineDead(f"the front ends did not start within {START_TIMEOUT_S:g} s")

    def _deal_until(self, failure: Callable[[], str | None], stop: Stop, limit_s: float | None = None) -> str | None:
        """Deals connections until there is a failure, which is returned, a further wish to stop or the time is over."""
        wishes = stop.wishes
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while stop.wishes == wishes and (end_s is None or time.monotonic() < end_s):
            if (reason := failure()) is not None:
                return reason
            self._listen()
        return None

    def _listen(self) -> None:
        """Waits POLL_S at most for what the front ends and clients want."""
        for key, _ in self._selector.select(POLL_S):
            if isinstance(key.data, _FrontEnd):
                self._hear(key.data)
            else:
                self._accept(key.data)

    def _hear(self, front_end: _FrontEnd) -> None:
        try:
            while received := front_end.control.receive():
                match received.message:
                    case Started():
                        front_end.started = True
                    case Closed(total):
                        front_end.num_closed = total
        except EOFError:
            front_end.gone = True
            self._selector.unregister(front_end.control)

    def _accept(self, sock: socket.socket) -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the client left, or there are no descriptors for a moment
                logger.warning("a connection could not be accepted: %s", error)
                time.sleep(POLL_S)
                return
            with connection:
                for front_end in sorted(self._front_ends, key=lambda front_end: front_end.num_open):
                    if not front_end.gone and front_end.control.send(Connection(), connection.fileno()):
                        front_end.num_dealt += 1
                        break

    def _first_end(self) -> str | None:
        return next((end for front_end in self._front_ends if (end := front_end.end) is not None), None)

    def _tell(self, message: EngineReady | StopWish | EngineEnded) -> None:
        for front_end in self._front_ends:
            front_end.control.send(message)

    def _wind_down(self, stop: Stop, grace_s: float) -> None:
        """Waits until all have ended, which they do within `grace_s` and FORCE_S; a further wish is passed on."""
        wishes = stop.wishes
        self._tell(StopWish())
        limit_s = time.monotonic() + grace_s + FORCE_S + END_S
        while time.monotonic() < limit_s and any(front_end.end is None for front_end in self._front_ends):
            if stop.wishes > wishes:
                wishes = stop.wishes
                self._tell(StopWish())
            self._listen()
            if all(front_end.gone for front_end in self._front_ends):
                time.sleep(POLL_S / 10)  # nothing is left to wait on but the processes
