"""The words that every layer shares: what a client asks for, what the engine runs, what the client is told.

Standard library only, so that the HTTP front end and the scheduler never load JAX.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, Protocol

MAX_LOGPROBS = 20
"""Most alternatives per token that a request may ask for (the limit of the OpenAI API and of vLLM's default)."""
MAX_STOP_IDS = 32
"""Most token ids that may end one request: the model's EOS ids and `stop_token_ids`. Device state, hence bounded."""
MAX_LOGIT_BIAS = 1024
"""Most entries of one request's `logit_bias` (the OpenAI API allows 300)."""


class InvalidRequest(ValueError):
    """The request itself is at fault; nothing ran. `param` names the parameter, `code` is a short slug for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFull(RuntimeError):
    """The waiting queue is at its limit; the same request may succeed later."""


class EngineDead(RuntimeError):
    """The engine stopped; no request can succeed any more. The message is the reason."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the usable context
    ABORT = "abort"  # cancelled by the client
    ERROR = "error"  # the engine failed this request; `TokenEvent.error` says why


def _check(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidRequest(message, param=param)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a user asks of one generation. Every field is honoured or refused with `InvalidRequest`.

    Where the default is None, the model's `generation_config` decides, and where that is silent: temperature 1.0,
    no top_k, top_p 1.0, no min_p, repetition_penalty 1.0.
    """

    n: int = 1
    """Independent completions of the prompt."""
    max_tokens: int | None = None
    """Cap on new tokens; None: up to the end of the usable context. Never an error when the context is shorter."""
    min_tokens: int = 0
    """No EOS, stop id or stop string ends the output before this many new tokens."""
    temperature: float | None = None
    """0 is exact argmax, whatever the filters below say; otherwise logits are divided by it."""
    top_k: int | None = None
    """Keep the k likeliest tokens; 0 and -1 keep all."""
    top_p: float | None = None
    """Keep the smallest set of likeliest tokens whose probabilities reach p; 0 < p <= 1."""
    min_p: float | None = None
    """Drop tokens with less than min_p times the likeliest token's probability; 0 <= p <= 1."""
    repetition_penalty: float | None = None
    """Over tokens of prompt and output: positive logits are divided by it, negative ones multiplied; > 0."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output; -2..2."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it occurs in the output; -2..2."""
    seed: int | None = None
    """The same request with the same seed gives the same tokens, whatever shares its batch. None: a fresh seed."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of these token ids; -100..100 each."""
    stop: str | Sequence[str] = ()
    """Strings that end the output; the match and what follows are not shown."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, besides the model's EOS ids; not shown."""
    ignore_eos: bool = False
    """Run past every EOS id of the model."""
    logprobs: int | None = None
    """None: no log-probabilities. k: those of the chosen token and of the k likeliest, from the raw logits."""
    include_stop_str_in_output: bool = False
    """Show the stop string that matched (nothing after it)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        def finite(value: float) -> bool:
            return math.isfinite(value)

        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        t, k, p, m, r = self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        _check(self.n >= 1, "n", f"n is {self.n}; it must be at least 1")
        _check(
            self.max_tokens is None or self.max_tokens >= 0,
            "max_tokens",
            f"max_tokens is {self.max_tokens}; it must be at least 0",
        )
        _check(self.min_tokens >= 0, "min_tokens", f"min_tokens is {self.min_tokens}; it must be at least 0")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
        )
        _check(t is None or (finite(t) and t >= 0), "temperature", f"temperature is {t}; it must be 0 or more")
        _check(k is None or k >= -1, "top_k", f"top_k is {k}; it must be at least 1, or 0 or -1 for no limit")
        _check(
            p is None or 0 < p <= 1,
            "top_p",
            f"top_p is {p}; it must be above 0 and at most 1 (temperature 0 is greedy)",
        )
        _check(m is None or 0 <= m <= 1, "min_p", f"min_p is {m}; it must be from 0 to 1")
        _check(
            r is None or (finite(r) and r > 0), "repetition_penalty", f"repetition_penalty is {r}; it must be above 0"
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _check(-2 <= value <= 2, name, f"{name} is {value}; it must be from -2 to 2")
        _check(
            self.seed is None or -(2**63) <= self.seed < 2**64, "seed", f"seed is {self.seed}; it must fit in 64 bits"
        )
        _check(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are supported",
        )
        for token, bias in self.logit_bias.items():
            _check(
                -100 <= bias <= 100, "logit_bias", f"logit_bias of token {token} is {bias}; it must be from -100 to 100"
            )
        _check(all(self.stop), "stop", "stop contains an empty string; give at least one character")
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"logprobs is {self.logprobs}; it must be from 0 to {MAX_LOGPROBS}",
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence for the engine: nothing left to default, token ids only. A user's n completions are n requests."""

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int  # at least 1, and len(prompt_ids) + max_tokens fits in the usable context
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0  # 64 bits; the draw at a position is a function of (seed, position) alone
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop_ids: Sequence[int] = ()  # the output ends with the first of these, once it has min_tokens
    logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether its tokens must be counted."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether the argmax of the raw logits is all it asks for."""
        greedy = self.temperature == 0 and not self.has_penalties and not self.logit_bias
        return greedy and self.min_tokens == 0 and self.logprobs is None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of one generated token, from the raw logits (before penalties and temperature)."""

    logprob: float
    top: Sequence[tuple[int, float]]  # the k likeliest (id, logprob), likeliest first


class TokenEvent(NamedTuple):
    """What one step did for one request. Every request's last event has a `finish_reason`, and no other has.

    A NamedTuple, as one is made for every token: a frozen dataclass takes several times as long to make.
    """

    request_id: str
    token_ids: Sequence[int] = ()  # new tokens, a stop id that ended the output included
    logprobs: Sequence[TokenLogprobs] | None = None  # one per new token, if asked for
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the stop id that ended the output: the last of token_ids
    error: str | None = None  # with FinishReason.ERROR
    refused: bool = False  # with FinishReason.ERROR: the waiting queue was full, nothing ran


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a front end needs to know of the engine, fixed once it is ready."""

    model: str  # the name or path that was loaded
    max_model_len: int  # usable context in tokens, prompt and output together: min(model, --max-model-len, pool)
    vocab_size: int  # token ids below this may be sampled and may be in a prompt
    eos_ids: Sequence[int]
    sampling_defaults: Mapping[
        str, float
    ]  # from generation_config: temperature, top_k, top_p, min_p, repetition_penalty
    page_size: int  # tokens
    num_pages: int
    max_num_seqs: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine; counters never decrease."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages_used: int = 0
    num_pages: int = 0
    prompt_tokens: int = 0  # of admitted requests, each counted once
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    compilations_after_ready: int = 0


class EngineHandle(Protocol):
    """What the front end talks to: the engine in this process or in its own."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def failure(self) -> str | None:
        """Why the engine stopped; None while it lives."""
        ...

    def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        """Runs a request; the iterator ends after the event with a finish reason. Closing it early cancels the request.

        Raises QueueFull before the first event, and EngineDead whenever the engine stops.
        """
        ...

    async def stats(self) -> EngineStats: ...
