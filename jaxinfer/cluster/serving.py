"""Starts replicas on a Ray cluster, and waits for the end."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
from typing import Any, Self

import ray
from ray import serve
from ray.exceptions import RayError

from jaxinfer.cluster.config import RayConfig
from jaxinfer.cluster.connection import connected, share
from jaxinfer.cluster.replicas import application
from jaxinfer.config import ConfigError, EngineConfig, ServerConfig
from jaxinfer.found import find_checkpoint
from jaxinfer.http import run as http_run
from jaxinfer.http.exposure import refuse_public_without_key
from jaxinfer.types import EngineDead

APPLICATION = "jaxinfer"
"""Its name among the applications of the cluster's Serve."""


class ReplicaServer:
    """Replicas that serve, until it is shut down."""

    def __init__(self, url: str, connection: contextlib.ExitStack):
        self.url = url
        """Base address; the OpenAI API is under `url + "/v1"`."""
        self._connection = connection

    def shutdown(self) -> None:
        """Ends the replicas, and Serve. Once they have ended, does nothing."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def serve_replicas(
    config: EngineConfig, server_config: ServerConfig, ray_config: RayConfig, *, block: bool
) -> ReplicaServer | None:
    """Serves a model by replicas behind one address; see `jaxinfer.serve`."""
    _refuse(server_config)
    sock = http_run.bind(server_config.host, server_config.port)
    try:
        refuse_public_without_key(sock, server_config)
        url, port = http_run.url_of(sock), sock.getsockname()[1]
    finally:
        sock.close()  # Serve's proxies bind it themselves
    find_checkpoint(config)  # before anything slow: a name that stands for nothing is known at once
    with contextlib.ExitStack() as stack:
        stack.enter_context(connected(ray_config))
        workers = share(ray_config, config)
        stack.callback(serve.shutdown)
        try:
            serve.start(http_options={"host": server_config.host, "port": port, "request_timeout_s": None})
            serve.run(application(config, dataclasses.replace(server_config, api_server_count=None), workers),
                      name=APPLICATION, route_prefix="/")  # fmt: skip
        except (RayError, RuntimeError, TimeoutError) as error:
            raise EngineDead(f"the replicas did not start: {error}") from error
        running = ReplicaServer(url, stack.pop_all())
    if not block:
        return running
    print(f"jaxinfer serves {config.model} by {workers.num_workers} replicas at {url}", flush=True)
    with running:
        _wait_for_signal()
    return None


def _refuse(config: ServerConfig) -> None:
    """ConfigError for what replicas behind Ray's proxies cannot do."""
    for name, why in (
        ("ssl_certfile", "Ray's proxies speak HTTP; put what speaks HTTPS in front of them"),
        ("batch_dir", "a folder belongs to one server; run jobs on the cluster by jaxinfer batch --ray"),
        ("api_server_count", "each replica has one front end; the number of replicas is --ray-workers"),
    ):
        value: Any = getattr(config, name)
        if value is not None:
            raise ConfigError(f"{name} is {value!r} and replicas are asked for: {why}")


def _wait_for_signal() -> None:
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stop.wait(1.0):
            if not ray.is_initialized():
                raise EngineDead("the connection to the cluster is lost")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
