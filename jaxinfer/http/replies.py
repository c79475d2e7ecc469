"""Reply bodies of the OpenAI API, whole and as server-sent events.

A stream sends one event per token, so what does not change from event to event is encoded once per choice and only the
text is encoded each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxinfer.text.logprobs import OutputLogprob
from jaxinfer.text.message import Call, MessageParser, Part, Thought, Words
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason

DONE = b"data: [DONE]\n\n"
CALLS_REASON = "tool_calls"
"""Why a choice ended that asks for tool calls."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_encode = msgspec.json.encode


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all parts of one reply share."""

    id: str
    created: int  # seconds since the epoch
    model: str
    chat: bool

    def fields(self, *, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_body(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """What a reply took. cached_tokens: of the prompt; None: the engine has no cache of prompts."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return usage if cached_tokens is None else usage | {"prompt_tokens_details": {"cached_tokens": cached_tokens}}


def error_event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


class ChunkEncoder:
    """Events of one choice of a stream."""

    def __init__(self, head: ReplyHead, index: int, *, null_usage: bool):
        self._chat = head.chat
        start = b"data: " + _encode(head.fields(stream=True))[:-1] + b',"choices":[{"index":%d,' % index
        self._before = start + (b'"delta":{"content":' if head.chat else b'"text":')
        self._delta_end = b"}" if head.chat else b""
        # With include_usage, OpenAI puts a null usage on every chunk but the last.
        self._end = b',"usage":null}\n\n' if null_usage else b"}\n\n"
        self._after = self._delta_end + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + self._end
        self._start = start
        self._empty_delta = start + b'"delta":{}'
        self.role = (
            start + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' + self._end
        )

    def text(self, text: str) -> bytes:
        """A delta of nothing but text: nearly every event of a stream."""
        return self._before + _encode(text) + self._after

    def full(self, text: str, delta: OutputDelta, usage: dict[str, Any] | None = None) -> bytes:
        """Any delta. `text` is its text, after an echoed prompt; `usage`, if given, is the running count."""
        last_without_text = self._chat and delta.finish_reason is not None and not text
        start = self._empty_delta if last_without_text else self._before + _encode(text) + self._delta_end
        return self._chunk(start, delta, delta.finish_reason, usage)

    def message(
        self, fields: dict[str, Any], delta: OutputDelta, reason: str | None, usage: dict[str, Any] | None
    ) -> bytes:
        """A delta of a chat message with these fields and this finish reason; the text of `delta` is not read."""
        return self._chunk(self._start + b'"delta":' + _encode(fields), delta, reason, usage)

    def _chunk(self, start: bytes, delta: OutputDelta, reason: str | None, usage: dict[str, Any] | None) -> bytes:
        parts = [
            start,
            b',"logprobs":',
            _encode(logprobs_body(delta.logprobs, chat=self._chat)),
            b',"finish_reason":',
            _encode(reason),
            b',"stop_reason":',
            _encode(delta.stop_reason),
            b"}]",
            self._end if usage is None else b',"usage":' + _encode(usage) + b"}\n\n",
        ]
        return b"".join(parts)


def usage_event(head: ReplyHead, usage: dict[str, Any]) -> bytes:
    """The event after all finishes, with no choices."""
    return b"data: " + _encode(head.fields(stream=True) | {"choices": [], "usage": usage}) + b"\n\n"


@dataclasses.dataclass(slots=True)
class WholeChoice:
    """One choice of a reply that is not streamed: what its deltas add up to."""

    texts: list[str]
    logprobs: list[OutputLogprob]
    parser: MessageParser | None = None  # of a chat message that is more than its words
    parts: list[Part] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        self.finish_reason = delta.finish_reason
        if self.parser is None:
            self.texts.append(delta.text)
        else:
            parts, self.finish_reason = read_message(self.parser, delta)
            self.parts += parts
        self.logprobs.extend(delta.logprobs or ())
        self.stop_reason = delta.stop_reason

    def body(self, index: int, *, chat: bool, logprobs: bool) -> dict[str, Any]:
        text = "".join(self.texts)
        return {
            "index": index,
            **({"message": self._message(text)} if chat else {"text": text}),
            "logprobs": logprobs_body(self.logprobs if logprobs else None, chat=chat),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }

    def _message(self, text: str) -> dict[str, Any]:
        if self.parser is None:
            return {"role": "assistant", "content": text}
        words = "".join(part.text for part in self.parts if isinstance(part, Words))
        thought = "".join(part.text for part in self.parts if isinstance(part, Thought))
        calls = [part for part in self.parts if isinstance(part, Call)]
        # Where there is something else, no words are null, as OpenAI has it.
        message: dict[str, Any] = {"role": "assistant", "content": words or (None if thought or calls else "")}
        if thought:
            message |= _reasoning(thought)
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message


def read_message(parser: MessageParser, delta: OutputDelta) -> tuple[list[Part], str | None]:
    """The parts that a delta adds to a message, and why the message ends with it, if it does.

    That is "tool_calls" where the model ended its turn and there is a call that it chose itself; where the client named
    the function it is "stop", as OpenAI has it. A message that was cut keeps "length", though it may have calls, as
    another one could be missing.
    """
    parts = parser.push(delta.text)
    if delta.finish_reason is not None:
        parts += parser.flush()
        if delta.finish_reason == FinishReason.STOP and parser.has_calls and not parser.is_named:
            return parts, CALLS_REASON
    return parts, delta.finish_reason


def message_deltas(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The deltas of a stream that say the same. A call has two, one that names it and one with its arguments."""
    deltas: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Thought(text):
                deltas.append(_reasoning(text))
            case Words(text) if deltas and "content" in deltas[-1]:
                deltas[-1]["content"] += text
            case Words(text) if deltas and "reasoning" in deltas[-1]:
                deltas[-1]["content"] = text
            case Words(text):
                deltas.append({"content": text})
            case Call(number, id, name, arguments):
                named = {"index": number, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
                deltas.append({"tool_calls": [named]})
                deltas.append({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
    return deltas


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients read it by."""
    return {"reasoning_content": text, "reasoning": text}


def whole_body(
    head: ReplyHead, choices: Sequence[dict[str, Any]], usage: dict[str, Any], more: Mapping[str, Any] | None = None
) -> bytes:
    """A reply that is not streamed. more: further fields of it."""
    return _encode(head.fields(stream=False) | {"choices": choices, "usage": usage} | dict(more or {}))


def logprobs_body(logprobs: Sequence[OutputLogprob] | None, *, chat: bool) -> dict[str, Any] | None:
    """The `logprobs` of a choice: natural logarithms from the raw logits, before penalties and temperature."""
    if logprobs is None:
        return None
    if chat:
        return {"content": [_chat_logprob(entry) for entry in logprobs]}
    return {
        "tokens": [entry.token for entry in logprobs],
        "token_logprobs": [None if entry.logprob is None else _finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_top_by_text(entry) for entry in logprobs],
        "text_offset": [entry.text_offset for entry in logprobs],
    }


def _chat_logprob(entry: OutputLogprob) -> dict[str, Any]:
    return {
        "token": entry.token,
        "logprob": LEAST_LOGPROB if entry.logprob is None else _finite(entry.logprob),
        "bytes": list(entry.bytes),
        "top_logprobs": [
            {"token": top.text, "logprob": _finite(top.logprob), "bytes": list(top.bytes)} for top in entry.top
        ],
    }


def echoed_logprobs(prompt: Sequence[OutputLogprob], num_top: int) -> list[OutputLogprob]:
    """Those of a prompt with so many alternatives."""
    return [dataclasses.replace(entry, top=entry.top[:num_top]) for entry in prompt]


def prompt_logprobs_body(prompt: Sequence[OutputLogprob], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: the tokens at each place of a prompt by their ids, its own first; None at the first."""
    return [None if entry.logprob is None else _ranked(entry, num_top) for entry in prompt]


def _ranked(entry: OutputLogprob, num_top: int) -> dict[str, Any]:
    assert entry.logprob is not None
    own = (entry.token_id, entry.token, entry.logprob, entry.rank)
    top = ((one.token_id, one.text, one.logprob, rank) for rank, one in enumerate(entry.top[:num_top], 1))
    ranked: dict[str, Any] = {}
    for id, text, logprob, rank in (own, *top):
        ranked.setdefault(str(id), {"logprob": _finite(logprob), "rank": rank, "decoded_token": text})
    return ranked


def _top_by_text(entry: OutputLogprob) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one. Of two ids with one text the likelier counts. None before all."""
    if entry.logprob is None:
        return None
    by_text: dict[str, float] = {}
    for text, logprob in (*((top.text, top.logprob) for top in entry.top), (entry.token, entry.logprob)):
        by_text[text] = max(_finite(logprob), by_text.get(text, LEAST_LOGPROB))
    return by_text


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also of NaN, which compares false
