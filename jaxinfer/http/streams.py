"""Runs the choices of one request side by side and writes what they produce, streamed or whole."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from jaxinfer.http.errors import Problem, RequestFailed
from jaxinfer.http.guard import Send
from jaxinfer.http.metrics import SequenceTimer
from jaxinfer.http.replies import (
    DONE,
    ChunkEncoder,
    ReplyHead,
    WholeChoice,
    error_event,
    usage_body,
    usage_event,
    whole_body,
)
from jaxinfer.text.output import OutputDelta, OutputStream
from jaxinfer.types import EngineHandle, FinishReason, QueueFull, Request, TokenEvent

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclasses.dataclass(slots=True)
class Choice:
    """One sequence of a reply."""

    index: int
    request: Request | None  # None: only the prompt is echoed, nothing runs
    output: OutputStream
    timer: SequenceTimer
    echo: str  # the prompt's text, shown before the output; empty: not shown


@dataclasses.dataclass(slots=True, kw_only=True)
class Generation:
    """All that one HTTP request asked for."""

    head: ReplyHead
    choices: Sequence[Choice]  # by index
    prompt_tokens: int  # each prompt once
    logprobs: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool

    def usage(self) -> dict[str, int]:
        return usage_body(self.prompt_tokens, sum(choice.output.num_tokens for choice in self.choices))


class Sink(Protocol):
    """Takes what a choice produces. `delta` is None where a step of the engine gave nothing to show."""

    async def emit(self, delta: OutputDelta | None) -> None: ...


async def run_choices(engine: EngineHandle, choices: Sequence[Choice], sinks: Sequence[Sink]) -> None:
    """Runs every choice to its end. The first that fails cancels the rest, and its error is raised."""
    if len(choices) == 1:
        return await _run_choice(engine, choices[0], sinks[0])
    try:
        async with asyncio.TaskGroup() as group:
            for choice, sink in zip(choices, sinks, strict=True):
                group.create_task(_run_choice(engine, choice, sink))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _run_choice(engine: EngineHandle, choice: Choice, sink: Sink) -> None:
    timer = choice.timer
    if choice.request is None:
        await sink.emit(OutputDelta(text="", token_ids=(), logprobs=None, finish_reason=FinishReason.LENGTH))
        return timer.finish(FinishReason.LENGTH, time.monotonic())
    events = engine.generate(choice.request)
    try:
        async for event in events:
            now_s = time.monotonic()
            if event.token_ids:
                timer.tokens(len(event.token_ids), now_s)
            if event.finish_reason is FinishReason.ERROR:
                raise _failure(event)
            delta = choice.output.push(event)
            if delta is not None and delta.finish_reason is not None:
                timer.finish(FinishReason(delta.finish_reason), now_s)
                # A stop string ends the output while the engine still runs, and a slow client must not keep it running.
                await _close(events)
                return await sink.emit(delta)
            await sink.emit(delta)
        raise RequestFailed("the engine ended the request without a finish reason")
    except Exception:
        timer.finish(FinishReason.ERROR, time.monotonic())
        raise
    finally:
        timer.finish(FinishReason.ABORT, time.monotonic())  # does nothing where the choice has ended
        await _close(events)


def _failure(event: TokenEvent) -> Exception:
    message = event.error or "the engine gave no reason"
    return QueueFull(message) if event.refused else RequestFailed(f"the engine failed the request: {message}")


async def _close(events: AsyncIterator[TokenEvent]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


class EventStream:
    """A reply as server-sent events. Nothing is sent before the first: a failure until then has its own status."""

    def __init__(self, send: Send):
        self._send = send
        self._starting = asyncio.Lock()
        self.started = False

    async def write(self, data: bytes) -> None:
        """Sends events; the first call sends the response head too. Empty `data` sends nothing else."""
        if not self.started:
            async with self._starting:
                if not self.started:
                    await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    self.started = True
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data + DONE, "more_body": False})

    async def fail(self, problem: Problem) -> None:
        await self.end(error_event(problem.body))


class _ChoiceStream:
    """Writes one choice's deltas as events."""

    def __init__(self, stream: EventStream, generation: Generation, choice: Choice):
        self._stream = stream
        self._generation = generation
        self._encoder = ChunkEncoder(generation.head, choice.index, null_usage=generation.include_usage)
        self._continuous = generation.continuous_usage
        self._start = self._encoder.role if generation.head.chat else b""
        self._echo = choice.echo

    async def emit(self, delta: OutputDelta | None) -> None:
        if self._start or self._echo:
            data = self._first(delta)
        else:
            data = self._event(delta.text, delta) if delta is not None else b""
        await self._stream.write(data)

    def _first(self, delta: OutputDelta | None) -> bytes:
        data, self._start = self._start, b""
        if delta is not None:
            text, self._echo = self._echo + delta.text, ""
            data += self._event(text, delta)
        return data

    def _event(self, text: str, delta: OutputDelta) -> bytes:
        if not text and delta.finish_reason is None and delta.logprobs is None:
            return b""  # the text of these tokens is withheld for now
        if self._continuous:
            return self._encoder.full(text, delta, self._generation.usage())
        if delta.finish_reason is None and delta.logprobs is None:
            return self._encoder.text(text)
        return self._encoder.full(text, delta)


class _WholeSink:
    def __init__(self, whole: WholeChoice):
        self._whole = whole

    async def emit(self, delta: OutputDelta | None) -> None:
        if delta is not None:
            self._whole.add(delta)


async def stream_reply(engine: EngineHandle, generation: Generation, stream: EventStream) -> None:
    sinks = [_ChoiceStream(stream, generation, choice) for choice in generation.choices]
    await run_choices(engine, generation.choices, sinks)
    await stream.end(usage_event(generation.head, generation.usage()) if generation.include_usage else b"")


async def whole_reply(engine: EngineHandle, generation: Generation) -> bytes:
    """The body of a reply that is not streamed."""
    head = generation.head
    wholes = [WholeChoice([choice.echo], []) for choice in generation.choices]
    await run_choices(engine, generation.choices, [_WholeSink(whole) for whole in wholes])
    bodies = [
        whole.body(choice.index, chat=head.chat, logprobs=generation.logprobs)
        for choice, whole in zip(generation.choices, wholes, strict=True)
    ]
    return whole_body(head, bodies, generation.usage())
