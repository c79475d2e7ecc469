"""Reply bodies of the OpenAI API, whole and as server-sent events.

A stream sends one event per token, so what does not change from event to event is encoded once per choice and only the
text is encoded each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxinfer.text.output import OutputDelta, OutputLogprob

DONE = b"data: [DONE]\n\n"
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
        parts = [
            self._empty_delta if last_without_text else self._before + _encode(text) + self._delta_end,
            b',"logprobs":',
            _encode(logprobs_body(delta.logprobs, chat=self._chat)),
            b',"finish_reason":',
            _encode(delta.finish_reason),
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
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs or ())
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    def body(self, index: int, *, chat: bool, logprobs: bool) -> dict[str, Any]:
        text = "".join(self.texts)
        return {
            "index": index,
            **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
            "logprobs": logprobs_body(self.logprobs if logprobs else None, chat=chat),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }


def whole_body(head: ReplyHead, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> bytes:
    return _encode(head.fields(stream=False) | {"choices": choices, "usage": usage})


def logprobs_body(logprobs: Sequence[OutputLogprob] | None, *, chat: bool) -> dict[str, Any] | None:
    """The `logprobs` of a choice: natural logarithms from the raw logits, before penalties and temperature."""
    if logprobs is None:
        return None
    if chat:
        return {"content": [_chat_logprob(entry) for entry in logprobs]}
    return {
        "tokens": [entry.token for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [_top_by_text(entry) for entry in logprobs],
        "text_offset": [entry.text_offset for entry in logprobs],
    }


def _chat_logprob(entry: OutputLogprob) -> dict[str, Any]:
    return {
        "token": entry.token,
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.bytes),
        "top_logprobs": [
            {"token": top.text, "logprob": _finite(top.logprob), "bytes": list(top.bytes)} for top in entry.top
        ],
    }


def _top_by_text(entry: OutputLogprob) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Of two ids with one text the likelier counts."""
    by_text: dict[str, float] = {}
    for text, logprob in (*((top.text, top.logprob) for top in entry.top), (entry.token, entry.logprob)):
        by_text[text] = max(_finite(logprob), by_text.get(text, LEAST_LOGPROB))
    return by_text


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also of NaN, which compares false
