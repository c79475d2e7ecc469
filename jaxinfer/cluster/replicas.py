"""Replicas of the server behind one address: deployments of Ray Serve.

A replica is the plain server, its engine in a process of its own, without a socket: it is called with HTTP requests and
gives the messages of its reply. In front of all is one deployment that reads a request, has `routing.py` choose the
replica, and passes the reply on as it comes. A client that leaves is told to the replica; a request whose replica dies
before it said anything goes to another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from jaxinfer.cluster.calls import REPLICA_HEADER, Call, no_home, reply, without_state
from jaxinfer.cluster.connection import Share
from jaxinfer.cluster.prefixes import prompt_keys
from jaxinfer.cluster.routing import PrefixRouter
from jaxinfer.config import EngineConfig, ServerConfig
from jaxinfer.engine.process import EngineProcess
from jaxinfer.found import find_checkpoint, load_tokenizer
from jaxinfer.http.bodies import read_body, send_problem
from jaxinfer.http.errors import ClientGone, HttpError, problem, problem_at
from jaxinfer.http.guard import Message, Receive, Send
from jaxinfer.http.metrics import CONTENT_TYPE
from jaxinfer.http.replies import error_event
from jaxinfer.http.server import Scope, create_app
from jaxinfer.serving import engine_command
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import EngineDead

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Replicas that a request is given to, one after the other, while they die."""
MAX_OPEN = 4096
"""Requests that a replica takes at a time: what its engine has no room for waits in the engine, or is refused there."""
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0
"""How often Serve asks whether a replica's engine lives, and how long it waits for the reply."""
METRICS_TIMEOUT_S = 10.0
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
"""Of Serve. The server's own access log is that of the plain one."""
ROOMLESS = ("/v1/sessions", "/v1/files", "/v1/batches")
"""What would be on the disk of one replica."""


class ReplicaFailed(Exception):
    """The engine of a replica has died."""

    def __init__(self, replica: str, reason: str):
        super().__init__(replica, reason)
        self.replica = replica
        self.reason = reason


class Replica:
    """The plain server without a socket."""

    def __init__(self, config: EngineConfig, server_config: ServerConfig):
        self.name = serve.get_replica_context().replica_id.unique_id
        checkpoint = find_checkpoint(config)
        self._engine = EngineProcess(engine_command(config, show_progress=False))
        try:
            tokenizer = load_tokenizer(checkpoint)
            template = ChatTemplate.from_config(checkpoint.tokenizer_config, server_config.chat_template)
            self._engine.wait_until_ready()
            self._app = create_app(self._engine.client(), tokenizer, template, server_config)
        except BaseException:
            self._engine.close()
            raise

    async def answer(self, call: Call) -> AsyncIterator[list[Message]]:
        """The messages of the reply. ReplicaFailed where the engine died before there was any."""
        begun = False
        self._check(begun)
        async for messages in reply(self._app, call):
            if not begun and messages[0]["type"] == "http.response.start":
                if messages[0]["status"] >= 500:
                    self._check(begun)
                messages[0]["headers"] = [*messages[0]["headers"], (REPLICA_HEADER, self.name.encode())]
                begun = True
            yield messages

    def _check(self, begun: bool) -> None:
        if not begun and (reason := self._engine.failure) is not None:
            raise ReplicaFailed(self.name, reason)

    async def metrics(self) -> tuple[str, str]:
        """This replica's name and its metrics."""
        scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
        body = [
            message.get("body", b"")
            async for messages in reply(self._app, Call(scope=scope, body=b""))
            for message in messages
        ]
        return self.name, b"".join(body).decode()

    async def engine_stats(self) -> tuple[str, dict[str, Any]]:
        """This replica's name and its engine's counters, and the process ids of both."""
        stats = dataclasses.asdict(await self._app.frontend.engine.stats())
        return self.name, stats | {"pid": os.getpid(), "engine_pid": self._engine.pid}

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica that raises."""
        if (reason := self._engine.failure) is not None:
            raise EngineDead(reason)

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            engine.close()


@serve.ingress()
class FrontDoor:
    """Reads requests, and passes on what replicas say."""

    def __init__(self, replicas: DeploymentHandle):
        self._replicas = replicas
        self._answer = replicas.options(method_name="answer", stream=True)

    def __serve_build_asgi_app__(self) -> Any:
        async def app(
            scope: Scope, receive: Receive, send: Send
        ) -> None:  # a function: of a method uvicorn thinks less
            await self._serve(scope, receive, send)

        return app

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1000})
        try:
            await self._pass(scope, receive, send)
        except ClientGone:
            return
        except HttpError as error:
            await send_problem(send, problem_at(scope["path"], error))

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/metrics" and scope["method"] == "GET":
            text = await self._metrics()
            return await Response(text, headers={"Content-Type": CONTENT_TYPE})(scope, receive, send)
        if path.startswith(ROOMLESS) or (path.startswith("/v1/responses/")):
            raise no_home(path, "it is kept by one replica, and the next request may reach another")
        body = await read_body(scope, receive) if scope["method"] == "POST" else b""
        body = without_state(path, body)
        call = Call.of(scope, body, prompt_keys(body))
        watch = asyncio.create_task(_gone(receive))
        passing = asyncio.create_task(self._try(call, send))
        try:
            await asyncio.wait((watch, passing), return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                raise ClientGone
            passing.result()
        finally:
            for task in (watch, passing):
                task.cancel()
            await asyncio.gather(watch, passing, return_exceptions=True)

    async def _try(self, call: Call, send: Send) -> None:
        """Gives a request to replicas until one begins to reply, and passes its reply on."""
        is_stream = False
        for attempt in range(1, MAX_ATTEMPTS + 1):
            begun = False
            replies = self._answer.remote(call)
            try:
                async for messages in replies:
                    for message in messages:
                        if message["type"] == "http.response.start":
                            is_stream = any(b"event-stream" in value for _, value in message["headers"])
                            # Of what the replica took from the request Ray's proxy tells the client itself.
                            message["headers"] = [one for one in message["headers"] if one[0] != b"x-request-id"]
                        begun = True
                        await send(message)
                return
            except (RayActorError, ReplicaUnavailableError, ReplicaFailed) as error:
                logger.warning("a replica failed (%s), %s", error, "in a reply" if begun else f"attempt {attempt}")
                if begun and is_stream:
                    message = "the replica that computed the reply died"
                    await send({"type": "http.response.body", "body": error_event(problem(EngineDead(message)))})
                    return
                if begun:
                    raise
                replica = getattr(error, "replica", None) or getattr(getattr(error, "cause", None), "replica", None)
                call = dataclasses.replace(call, avoid=[*call.avoid, *([replica] if replica else [])])
            finally:
                replies.cancel()  # does nothing to one that has ended
        raise HttpError(503, f"{MAX_ATTEMPTS} replicas died with this request", code="engine_dead")

    async def _metrics(self) -> str:
        replies = await self._replicas.broadcast("metrics").results_async(
            timeout_s=METRICS_TIMEOUT_S, return_exceptions=True
        )
        return "\n".join(_joined([one for one in replies if not isinstance(one, BaseException)])) + "\n"


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while (kind := (await receive())["type"]) in ("lifespan.startup", "lifespan.shutdown"):
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.*)$")


def _joined(metrics: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The metrics of several replicas as one, each with a label `replica`."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in sorted(metrics):
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                known = comments.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif found := _SAMPLE.match(line):
                labels = ",".join(filter(None, (found[2], f'replica="{replica}"')))
                samples.setdefault(family, []).append(f"{found[1]}{{{labels}}} {found[3]}")
    for family in comments:
        yield from comments[family]
        yield from samples.get(family, ())


def application(config: EngineConfig, server_config: ServerConfig, share: Share) -> serve.Application:
    """What `serve.run` takes: `share.num_workers` replicas behind a front door."""
    options = {"num_cpus": share.num_cpus, "num_gpus": share.num_gpus}
    replicas = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=share.num_workers,
        ray_actor_options=options,
        max_ongoing_requests=MAX_OPEN,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=server_config.drain_timeout_s + HEALTH_PERIOD_S,
        logging_config=LOGGING,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )
    door = serve.deployment(
        FrontDoor,
        name="FrontDoor",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MAX_OPEN * share.num_workers,
        logging_config=LOGGING,
        health_check_period_s=HEALTH_PERIOD_S,
    )
    return door.bind(replicas.bind(config, server_config))
