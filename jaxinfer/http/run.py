"""Runs the server: on a socket, in the foreground or in a thread, until it is stopped or the engine is dead.

With one front end HTTP is served in this process (`in_this_process`), with several in processes of their own
(`supervisor.py`). Both are a `Main`, which `run` and `ServerThread` run.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import uvicorn
import uvloop

from jaxinfer.config import ConfigError, ServerConfig
from jaxinfer.http.protocol import Protocol
from jaxinfer.http.server import App, Frontend

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""How often a dead engine and a wish to stop are looked for."""
GRACE_S = ServerConfig.drain_timeout_s
"""What requests in progress get to finish once the server is told to stop."""
FAILURE_GRACE_S = 5.0
"""How long /health answers 503 after the engine died, so that whoever watches it learns the reason."""
FORCE_S = 2.0
"""What connections get after that, before they are dropped: a client that reads nothing holds its own open."""
BACKLOG = 2048
"""Connections that the kernel may hold before they are accepted: a benchmark opens all of its own at once."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until `serve`, clients are refused. Raises ConfigError.

    The port is claimed for good, also from another server that is about to start; port 0 takes any free one.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"cannot resolve host {host!r} ({error.strerror}); 127.0.0.1 serves this machine alone, "
            "0.0.0.0 every interface"
        ) from error
    # With SO_REUSEADDR two sockets can be bound to one port until one of them listens, so the first try is without.
    # Connections that ended a moment ago make that one fail, and only that one.
    for reuse in (0, 1):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise ConfigError(
        f"cannot listen on {host} port {port} ({failure.strerror}); give another port, or 0 for any free one"
    ) from failure


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """Where this machine reaches the server that is bound to `sock`."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    scheme = "https" if tls else "http"
    return f"{scheme}://{address}:{port}" if address.version == 4 else f"{scheme}://[{address}]:{port}"


class Stop:
    """A wish to stop, from any thread or from a signal handler. The second wish means: now."""

    def __init__(self) -> None:
        self.wishes = 0

    def wish(self, *_: object) -> None:
        self.wishes += 1


Main = Callable[[Stop, threading.Event], str | None]
"""Serves until it is told to stop or cannot go on: returns why, or None. Sets the event once it accepts."""


class _Server(uvicorn.Server):
    """uvicorn's server, without signal handlers of its own; while it serves, the app's batches are run."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        batches = app.batches if isinstance(app, App) else None
        async with contextlib.nullcontext() if batches is None else batches.running():
            await super().serve(sockets)

    @contextlib.contextmanager
    def capturesignals(self) -> Iterator[None]:
        yield


def make_server(app: App) -> uvicorn.Server:
    """uvicorn as every front end runs it."""
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http=Protocol,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=75,
            ssl_certfile=app.config.ssl_certfile,
            ssl_keyfile=app.config.ssl_keyfile,
        )
    )


def in_this_process(
    app: App, sock: socket.socket, *, grace_s: float = GRACE_S, failure_grace_s: float = FAILURE_GRACE_S
) -> Main:
    """Serves `app` on `sock`, which it closes, until it is told to stop or the engine is dead."""

    def main(stop: Stop, started: threading.Event) -> str | None:
        serving = _serve(app, sock, stop, started, grace_s, failure_grace_s)
        return asyncio.run(serving, loop_factory=uvloop.new_event_loop)

    return main


async def _serve(
    app: App, sock: socket.socket, stop: Stop, started: threading.Event, grace_s: float, failure_grace_s: float
) -> str | None:
    engine = app.frontend.engine
    # Only now: see `bind`. Accepted sockets inherit it, and so do not keep a restart from binding.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server = make_server(app)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not stop.wishes and not running.done() and engine.failure is None:
            if server.started:
                started.set()
            await asyncio.sleep(POLL_S)
        failure = engine.failure
        if failure is not None:
            logger.error("the engine stopped: %s", failure)
            await _wait(lambda: bool(stop.wishes), failure_grace_s)
        await wind_down(server, running, app.frontend, stop, grace_s)
    finally:
        running.cancel()
    return failure


async def wind_down(
    server: uvicorn.Server, running: asyncio.Task[None], frontend: Frontend, stop: Stop, grace_s: float
) -> None:
    """Accepts nothing new, lets requests in progress finish for `grace_s` seconds, then ends them with an error."""
    wishes = stop.wishes
    frontend.drain()
    server.should_exit = True
    await _wait(lambda: not len(frontend.open_requests) or stop.wishes > wishes, grace_s)
    frontend.open_requests.end("the server is shutting down")
    await _wait(running.done, FORCE_S)
    if not running.done():
        server.force_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
    await running


async def _wait(condition: Callable[[], bool], limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not condition():
                await asyncio.sleep(POLL_S)


def run(main: Main) -> str | None:
    """Serves in this thread until SIGINT or SIGTERM, or until the engine is dead: returns why, or None.

    A second signal ends requests in progress at once. In a thread other than the main one there are no signals.
    """
    stop = Stop()
    with signals(stop):
        return main(stop, threading.Event())


@contextlib.contextmanager
def signals(stop: Stop) -> Iterator[None]:
    """SIGINT and SIGTERM are wishes to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, stop.wish) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class ServerThread:
    """A server in a thread of its own. As a context it is shut down at the end."""

    def __init__(self, url: str, main: Main):
        self.url = url
        self.failure: str | None = None
        """Why the server stopped by itself, once it has: the engine is dead, or a front end."""
        self._main = main
        self._stop = Stop()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxinfer-http", daemon=True)

    def start(self) -> Self:
        """Returns once connections are accepted; raises what kept the server from starting."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def _run(self) -> None:
        try:
            self.failure = self._main(self._stop, self._started)
        except BaseException as error:  # the thread that waits for it raises it
            self._error = error
        finally:
            self._started.set()

    def shutdown(self) -> None:
        """Stops the server and waits for it. Once it has stopped, does nothing."""
        self._stop.wish()
        self.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the server to stop by itself; whether it has. Raises the error that it stopped with, if any."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
