"""An HTTP request on its way to a replica, and its reply on the way back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from jaxinfer.http.errors import HttpError
from jaxinfer.http.gate import Application
from jaxinfer.http.guard import Message

SCOPE_FIELDS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
"""Of an ASGI scope, what is sent on besides headers and the client's address."""
REPLICA_HEADER = b"x-jaxinfer-replica"
"""Of a reply: who made it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An HTTP request, its body read."""

    scope: dict[str, Any]
    body: bytes
    keys: Sequence[int] = ()  # see `prefixes.prompt_keys`
    avoid: Sequence[str] = ()  # replicas that have failed it

    @classmethod
    def of(cls, scope: Any, body: bytes, keys: array[int]) -> Call:
        """From an ASGI scope."""
        kept = {name: scope[name] for name in SCOPE_FIELDS if name in scope}
        kept |= {"headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]]}
        return cls(scope=kept | {"client": scope.get("client")}, body=body, keys=keys)


async def reply(app: Application, call: Call) -> AsyncIterator[list[Message]]:
    """The ASGI messages of an application, those together that are there at a time. Closed early, the application is
    told that the client has gone, and waited for."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    unread = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    task = asyncio.create_task(app(call.scope | {"state": {}, "extensions": {}}, receive, send))  # pyright: ignore
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while True:
            batch = [await messages.get()]
            while not messages.empty():
                batch.append(messages.get_nowait())
            if sent := [message for message in batch if message is not None]:
                yield sent
            if None in batch:
                task.result()  # raises what the application did
                return
    finally:
        gone.set()
        with contextlib.suppress(Exception):
            await asyncio.shield(task)


def no_home(what: str, why: str) -> HttpError:
    """The refusal of what one replica would keep."""
    return HttpError(400, f"{what} is not served by replicas: {why}", code="not_on_replicas")


class _State(msgspec.Struct):
    session_id: Any = None
    previous_response_id: Any = None
    store: Any = None


_decode_state = msgspec.json.Decoder(_State).decode


def without_state(path: str, body: bytes) -> bytes:
    """The body of a request that leaves nothing where it is computed: a response is not stored where it does not say.
    HttpError for one that has to find something there, or asks for it to be stored."""
    try:
        state = _decode_state(body)
    except (msgspec.DecodeError, RecursionError):
        return body  # the replica says what is wrong with it
    if state.session_id:
        raise no_home("session_id", "a session is on the disk of one; the prompt's beginning finds its replica anyway")
    if path != "/v1/responses":
        return body
    if state.previous_response_id or state.store:
        raise no_home("a stored response", "it is in the memory of one; send whole conversations with store false")
    if state.store is None:
        return msgspec.json.encode(msgspec.json.decode(body) | {"store": False})
    return body
