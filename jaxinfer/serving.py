"""serve(): a model over HTTP, its engine in a process of its own. Never loads JAX, which would hold up the start."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import msgspec

from checkpoints.resolve import Checkpoint
from checkpoints.source import CheckpointError
from jaxinfer import frontend
from jaxinfer.cluster.config import RayConfig
from jaxinfer.config import DEFAULT_MODEL, ConfigError, EngineConfig, ServerConfig
from jaxinfer.engine.process import EngineProcess
from jaxinfer.found import find_checkpoint, load_tokenizer
from jaxinfer.http import run as http_run
from jaxinfer.http.control import Setup
from jaxinfer.http.exposure import check_certificate, refuse_public_without_key
from jaxinfer.http.server import create_app
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import EngineDead, EngineInfo

if TYPE_CHECKING:
    from jaxinfer.cluster.serving import ReplicaServer

REFUSALS = (ConfigError, CheckpointError)
"""What whoever calls `serve` can put right; what the engine refuses comes as EngineDead with its message."""


class Server:
    """A running server: the engine in its own process, HTTP in a thread of this one or in processes of its own."""

    def __init__(self, engine: EngineProcess, thread: http_run.ServerThread):
        self._engine = engine
        self._thread = thread
        self.url = thread.url
        """Base address; the OpenAI API is under `url + "/v1"`."""

    @property
    def info(self) -> EngineInfo:
        """Context, vocabulary, pages and defaults of the engine."""
        return self._engine.info

    def shutdown(self) -> None:
        """Ends requests in progress, the server and the engine's process. Once it has ended, does nothing."""
        try:
            self._thread.shutdown()
        finally:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def serve(
    model: str = DEFAULT_MODEL,
    host: str = ServerConfig.host,
    port: int = ServerConfig.port,
    *,
    block: bool = True,
    server: Mapping[str, Any] | None = None,
    ray: Mapping[str, Any] | None = None,
    show_progress: bool = True,
    **options: Any,
) -> Server | ReplicaServer | None:
    """Serves a model over HTTP, as OpenAI's API.

    block: serve until a signal comes, then return None; EngineDead if the engine failed. Otherwise return at once a
    Server that accepts connections. `options` are the fields of EngineConfig, `server` those of ServerConfig besides
    host and port; port 0 takes a free one. ray: the fields of RayConfig; engines of a Ray cluster then serve behind one
    address, each request by the one that has the longest beginning of its prompt in its cache, and what is returned is
    a ReplicaServer.
    """
    config = EngineConfig(model=model, **options)
    server_config = ServerConfig(host=host, port=port, **(server or {}))
    if ray is not None:
        ray_config = RayConfig.of(ray, num_processes=config.num_processes)
        from jaxinfer.cluster import serving as cluster_serving

        return cluster_serving.serve_replicas(config, server_config, ray_config, block=block)
    if config.process_id:
        if not block:
            raise ConfigError(f"process_id is {config.process_id} and block is {block}; process 0 alone has a server")
        return follow(config, show_progress=show_progress)
    num_front_ends = server_config.api_server_count or _front_ends_for(len(os.sched_getaffinity(0)))
    check_certificate(server_config)
    sock = http_run.bind(server_config.host, server_config.port)  # before anything slow: a port in use is known at once
    tls, drain_s = server_config.ssl_certfile is not None, server_config.drain_timeout_s
    with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as start:
        start.enter_context(_termination_raised())
        on_failure.callback(sock.close)
        refuse_public_without_key(sock, server_config)
        checkpoint = find_checkpoint(config)  # before the engine looks for it, too: a Hub's is fetched once
        template = ChatTemplate.from_config(checkpoint.tokenizer_config, server_config.chat_template)
        with _interrupts_held():
            engine = EngineProcess(engine_command(config, show_progress=show_progress), num_front_ends)
            on_failure.callback(engine.close)
        # All the rest goes on while the engine is built.
        tokenizer = load_tokenizer(checkpoint)
        if num_front_ends == 1:
            engine.wait_until_ready()
            app = create_app(engine.client(), tokenizer, template, server_config)
            main = http_run.in_this_process(app, sock, grace_s=drain_s)
        else:
            with _interrupts_held():
                front_ends = frontend.start(_setup(checkpoint, server_config), engine.take_channels())
                on_failure.callback(front_ends.kill)
            engine.wait_until_ready(front_ends.check)
            main = front_ends.main(sock, engine.info, lambda: engine.failure, grace_s=drain_s)
        start.close()
        if not block:
            running = Server(engine, http_run.ServerThread(http_run.url_of(sock, tls=tls), main).start())
            on_failure.pop_all()
            return running
        print(f"jaxinfer serves {config.model} at {http_run.url_of(sock, tls=tls)}", flush=True)
        failure = http_run.run(main)
    if failure is not None:
        raise EngineDead(failure)
    return None


def follow(config: EngineConfig, *, show_progress: bool = True) -> None:
    """Runs the process of a follower until process 0 ends. EngineDead, with the reason, if it ends otherwise.

    A signal ends it, and so the engine: none of its processes can go on without the others.
    """
    stop = http_run.Stop()
    with _termination_raised(), contextlib.ExitStack() as at_end:
        with _interrupts_held():
            engine = EngineProcess(engine_command(config, show_progress=show_progress), 0)
            at_end.callback(engine.close)
        engine.wait_until_ready()
        with http_run.signals(stop):
            print(f"jaxinfer: process {config.process_id} of {config.num_processes} follows", flush=True)
            while not stop.wishes and engine.exit_code is None and engine.failure is None:
                time.sleep(http_run.POLL_S)
        if not stop.wishes and engine.exit_code != 0:
            raise EngineDead(engine.failure or f"the process ended (exit code {engine.exit_code})")


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Interrupts come at the end, and to no process that is started meanwhile.

    A terminal sends them to all. One that has just started, and does not ignore them yet, would end with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _termination_raised() -> Iterator[None]:
    """SIGTERM ends the program as an exception does, so that the processes it has started end with it, and at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        print("jaxinfer: terminated while it started", file=sys.stderr)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def engine_command(config: EngineConfig, *, show_progress: bool) -> list[str]:
    """The program that `EngineProcess` runs: engine_process.py, in an interpreter of its own."""
    config = dataclasses.replace(config, mesh=_portable(config.mesh))
    return [
        sys.executable,
        "-m",
        "jaxinfer.engine_process",
        msgspec.json.encode(config).decode(),
        str(int(show_progress)),
    ]


def _portable(mesh: Any) -> Any:
    """A mesh as another process can have it: by the sizes of its axes. ConfigError if it has not the first devices."""
    if mesh is None or isinstance(mesh, str | Mapping):
        return mesh
    ids = [device.id for device in mesh.devices.flat]
    if ids != list(range(len(ids))):
        raise ConfigError(
            f"mesh has the devices {ids}; the engine of a server has a process of its own, which takes the first "
            "devices in their order: CUDA_VISIBLE_DEVICES says which these are, or LLM takes the mesh as it is"
        )
    return dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))


def _front_ends_for(num_cores: int) -> int:
    """Front-end processes where nobody says: see ServerConfig.api_server_count."""
    return 4 if num_cores >= 16 else 2 if num_cores >= 8 else 1


def _setup(checkpoint: Checkpoint, config: ServerConfig) -> Setup:
    """What a front-end process is told when it starts."""
    return Setup(
        server=config,
        tokenizer_json=checkpoint.tokenizer_json,
        tokenizer_config=dict(checkpoint.tokenizer_config),
        created_s=int(time.time()),
        grace_s=config.drain_timeout_s,
    )
