"""Runs the choices of one request side by side and writes what they produce, streamed or whole."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxinfer.http.errors import Problem, RequestFailed
from jaxinfer.http.guard import Send
from jaxinfer.http.metrics import SequenceTimer
from jaxinfer.http.replies import (
    DONE,
    ChunkEncoder,
    ReplyHead,
    WholeChoice,
    echoed_logprobs,
    error_event,
    message_deltas,
    prompt_logprobs_body,
    read_message,
    usage_body,
    usage_event,
    whole_body,
)
from jaxinfer.text.message import MessageParser
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
    message: MessageParser | None = None  # of a chat whose replies are more than words
    echo_logprobs: int | None = None  # alternatives of each token of the prompt, shown with the echo; None: not those
    prompt_only: bool = False  # whether the one token that it generates is not shown


@dataclasses.dataclass(slots=True, kw_only=True)
class Generation:
    """All that one HTTP request asked for."""

    head: ReplyHead
    choices: Sequence[Choice]  # by index
    n: int  # choices of each prompt
    prompt_tokens: int  # each prompt once
    shows_cached: bool  # whether usage says how many of these were in the cache
    logprobs: bool
    prompt_logprobs: int | None = None  # alternatives of each token of the prompt, in a field of their own; None: none
    stream: bool
    include_usage: bool
    continuous_usage: bool

    def usage(self) -> dict[str, Any]:
        """So far. Of a prompt's choices the first says what was cached, so that a prompt counts once here too."""
        cached = sum(choice.output.num_cached_tokens for choice in self.choices[:: self.n])
        completed = sum(choice.output.num_tokens for choice in self.choices)
        return usage_body(self.prompt_tokens, completed, cached if self.shows_cached else None)


class Sink(Protocol):
    """Takes what a choice produces, and returns at once. `delta` is None where a step gave nothing to show."""

    def emit(self, delta: OutputDelta | None) -> None: ...


class _Run:
    """One choice on its way through the engine: an EventReceiver. Its `end` is called once, when it has ended."""

    def __init__(self, engine: EngineHandle, choice: Choice, end: Callable[[Exception | None], None]):
        self._engine = engine
        self._choice = choice
        self._request = choice.request
        self._output = choice.output
        self._echo_logprobs = choice.echo_logprobs  # until they are told
        self._timer = choice.timer
        self._end = end

    def start(self) -> None:
        if self._request is not None:
            self._engine.submit(self._request, self)

    def show(self, sink: Sink) -> None:
        """Says who takes what it produces, before the engine's first event."""
        self._sink = sink
        if self._request is not None:
            return self._output.begin()
        sink.emit(OutputDelta(finish_reason=FinishReason.LENGTH))
        self._timer.finish(FinishReason.LENGTH, time.monotonic())
        self._end(None)

    def push(self, event: TokenEvent) -> None:
        now_s = time.monotonic()
        if event.token_ids:
            self._timer.tokens(len(event.token_ids), now_s)
        if event.finish_reason is FinishReason.ERROR:
            return self.fail(_failure(event))
        delta = self._prompt_only(event) if self._choice.prompt_only else self._output.push(event)
        if delta is not None and self._echo_logprobs is not None:
            prompt = echoed_logprobs(self._output.prompt_logprobs or (), self._echo_logprobs)
            delta, self._echo_logprobs = delta._replace(logprobs=(*prompt, *(delta.logprobs or ()))), None
        if delta is None or delta.finish_reason is None:
            return self._sink.emit(delta)
        self._timer.finish(FinishReason(delta.finish_reason), now_s)
        if event.finish_reason is None:  # a stop string ends the output while the engine still runs
            self.cancel()
        self._sink.emit(delta)
        self._end(None)

    def _prompt_only(self, event: TokenEvent) -> OutputDelta | None:
        return OutputDelta(finish_reason=FinishReason.LENGTH) if self._output.read_prompt(event) else None

    def fail(self, error: Exception) -> None:
        self._timer.finish(FinishReason.ERROR, time.monotonic())
        self._end(error)

    def cancel(self) -> None:
        """Does nothing if it has ended."""
        self._timer.finish(FinishReason.ABORT, time.monotonic())
        if self._request is not None:
            self._engine.cancel(self._request.request_id)


async def run_choices(
    engine: EngineHandle, choices: Sequence[Choice], make_sinks: Callable[[], Sequence[Sink]]
) -> None:
    """Runs every choice to its end. The first that fails cancels the rest, and its error is raised.

    make_sinks: of one for each choice, called while the engine computes already.
    No task waits for a token: the engine's events go straight to the sinks, and only the end of all wakes this one.
    """
    all_ended = asyncio.get_running_loop().create_future()
    num_left = len(choices)

    def end(error: Exception | None) -> None:
        nonlocal num_left
        num_left -= 1
        if error is not None:
            cancel_all()  # before another one's event can start a reply whose status is to be that of the error
        if all_ended.done():
            return
        if error is not None:
            all_ended.set_exception(error)
        elif num_left == 0:
            all_ended.set_result(None)

    runs = [_Run(engine, choice, end) for choice in choices]

    def cancel_all() -> None:
        for run in runs:
            run.cancel()

    try:
        for run in runs:
            try:
                run.start()
            except Exception as error:
                run.fail(error)
                break
        else:
            for run, sink in zip(runs, make_sinks(), strict=True):
                run.show(sink)
        await all_ended
    finally:
        cancel_all()


def _failure(event: TokenEvent) -> Exception:
    message = event.error or "the engine gave no reason"
    return QueueFull(message) if event.refused else RequestFailed(f"the engine failed the request: {message}")


class EventStream:
    """A reply as server-sent events. Nothing is sent before the first: a failure until then has its own status.

    `write` returns at once. What the connection does not take is kept, which is bounded by what the request may still
    produce, and goes out in one piece once the client has read enough.
    """

    def __init__(self, send: Send):
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._kept = bytearray()
        self.started = False

    def write(self, data: bytes) -> None:
        """Sends events; the first call sends the response head too. Empty `data` sends nothing else."""
        if self._sending is not None:
            self._kept += data
            return
        # Run at once, up to where it has to wait for the client: a token then costs no turn of the event loop.
        task = asyncio.Task(self._send_events(data), loop=self._loop, eager_start=True)
        if task.done():
            return task.result()
        self._sending = task
        task.add_done_callback(self._send_kept)

    async def _send_events(self, data: bytes) -> None:
        if not self.started:
            await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            self.started = True
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _send_kept(self, sent: asyncio.Task[None]) -> None:
        self._sending = None
        data = bytes(self._kept)
        self._kept.clear()
        if data and not sent.cancelled():
            self.write(data)

    async def end(self, data: bytes = b"") -> None:
        """Sends the last events and DONE, after all that was kept."""
        while self._sending is not None:
            await self._sending
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
        self._message = choice.message
        self._has_text = choice.output.has_text

    def emit(self, delta: OutputDelta | None) -> None:
        if self._start or self._echo:
            data = self._first(delta)
        else:
            data = self._event(delta.text, delta) if delta is not None else b""
        if data or not self._stream.started:
            self._stream.write(data)

    def _first(self, delta: OutputDelta | None) -> bytes:
        data, self._start = self._start, b""
        if delta is not None:
            text, self._echo = self._echo + delta.text, ""
            data += self._event(text, delta)
        return data

    def _event(self, text: str, delta: OutputDelta) -> bytes:
        if self._message is not None:
            return self._message_events(self._message, delta)
        if not text and self._has_text and delta.finish_reason is None and delta.logprobs is None:
            return b""  # the text of these tokens is withheld for now
        if self._continuous:
            return self._encoder.full(text, delta, self._generation.usage())
        if delta.finish_reason is None and delta.logprobs is None:
            return self._encoder.text(text)
        return self._encoder.full(text, delta)

    def _message_events(self, message: MessageParser, delta: OutputDelta) -> bytes:
        """One for each delta of the message. The first has the log-probabilities, the last the reason of the end."""
        parts, reason = read_message(message, delta)
        deltas = message_deltas(parts)
        usage = self._generation.usage() if self._continuous else None
        if reason is not None and (not deltas or "tool_calls" in deltas[-1]):
            deltas.append({})
        elif not deltas and delta.logprobs is not None:
            deltas.append({"content": ""})  # the text of these tokens is withheld for now
        events = []
        for i, fields in enumerate(deltas):
            last = i == len(deltas) - 1
            told = delta._replace(
                logprobs=None if i else delta.logprobs, stop_reason=delta.stop_reason if last else None
            )
            events.append(self._encoder.message(fields, told, reason if last else None, usage))
        return b"".join(events)


class _WholeSink:
    def __init__(self, whole: WholeChoice):
        self._whole = whole

    def emit(self, delta: OutputDelta | None) -> None:
        if delta is not None:
            self._whole.add(delta)


async def stream_reply(engine: EngineHandle, generation: Generation, stream: EventStream) -> None:
    choices = generation.choices
    await run_choices(engine, choices, lambda: [_ChoiceStream(stream, generation, choice) for choice in choices])
    await stream.end(usage_event(generation.head, generation.usage()) if generation.include_usage else b"")


async def whole_reply(engine: EngineHandle, generation: Generation) -> bytes:
    """The body of a reply that is not streamed."""
    head = generation.head
    wholes = [WholeChoice([choice.echo], [], choice.message) for choice in generation.choices]
    await run_choices(engine, generation.choices, lambda: [_WholeSink(whole) for whole in wholes])
    bodies = [
        whole.body(choice.index, chat=head.chat, logprobs=generation.logprobs)
        for choice, whole in zip(generation.choices, wholes, strict=True)
    ]
    if (top := generation.prompt_logprobs) is None:
        return whole_body(head, bodies, generation.usage())
    prompts = [prompt_logprobs_body(choice.output.prompt_logprobs or (), top) for choice in generation.choices]
    if head.chat:  # all choices have one prompt
        return whole_body(head, bodies, generation.usage(), {"prompt_logprobs": prompts[0]})
    bodies = [body | {"prompt_logprobs": prompt} for body, prompt in zip(bodies, prompts, strict=True)]
    return whole_body(head, bodies, generation.usage())
