"""A front end in a process of its own: serves the connections that the supervisor deals to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket

import uvicorn

from jaxinfer.http.control import Closed, Connection, Control, EngineEnded, EngineReady, Started, StopWish
from jaxinfer.http.protocol import Protocol
from jaxinfer.http.run import POLL_S, Stop, make_server, wind_down
from jaxinfer.http.server import App
from jaxinfer.types import EngineInfo


class Worker:
    """What the supervisor says, carried out."""

    def __init__(self, control: Control):
        self.engine_failure: str | None = None
        """Why the engine stopped, as the supervisor has it."""
        self._control = control
        self._stop = Stop()
        self._num_taken = 0
        self._num_closed = 0
        self._opening: set[asyncio.Task[None]] = set()

    def wait_for_engine(self) -> EngineInfo:
        """What the engine says of itself, once it is ready. The process ends at once if the supervisor is gone."""
        readable = select.poll()
        readable.register(self._control, select.POLLIN)
        while True:
            readable.poll()
            try:
                received = self._control.receive()
            except EOFError:
                os._exit(1)  # as in `_listen`
            if received is not None and isinstance(received.message, EngineReady):
                return received.message.info

    async def serve(self, app: App, grace_s: float) -> None:
        """Until the supervisor wishes it to stop. The process ends at once if the supervisor is gone."""
        server = make_server(app)
        running = asyncio.create_task(server.serve(sockets=[]))
        try:
            while not server.started and not running.done():
                await asyncio.sleep(0)
            asyncio.get_running_loop().add_reader(self._control.fileno(), self._listen, server)
            self._control.send(Started())
            while not self._stop.wishes and not running.done():
                await asyncio.sleep(POLL_S)
                self._report(server)
            await wind_down(server, running, app.frontend, self._stop, grace_s)
        finally:
            running.cancel()

    def _listen(self, server: uvicorn.Server) -> None:
        try:
            while received := self._control.receive():
                match received.message:
                    case Connection():
                        assert received.fd is not None
                        self._take(socket.socket(fileno=received.fd), server)
                    case StopWish():
                        self._stop.wish()
                    case EngineEnded(reason):
                        self.engine_failure = reason
        except EOFError:
            os._exit(1)  # whoever started this process was killed; nobody else would end it

    def _take(self, sock: socket.socket, server: uvicorn.Server) -> None:
        self._num_taken += 1
        opening = asyncio.create_task(_open(sock, server))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def _report(self, server: uvicorn.Server) -> None:
        """Connections that have ended, for the supervisor to deal the next ones by."""
        num_closed = self._num_taken - len(self._opening) - len(server.server_state.connections)
        if num_closed != self._num_closed and self._control.send(Closed(num_closed)):
            self._num_closed = num_closed


async def _open(sock: socket.socket, server: uvicorn.Server) -> None:
    def make_protocol() -> Protocol:  # as uvicorn does for a connection that it accepts itself
        return Protocol(server.config, server.server_state, server.lifespan.state)

    if server.should_exit:
        return sock.close()
    with contextlib.suppress(OSError):  # the client has left already
        await asyncio.get_running_loop().connect_accepted_socket(make_protocol, sock, ssl=server.config.ssl)
