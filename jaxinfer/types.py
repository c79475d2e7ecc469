"""The words that every layer shares: what a client asks for, what the engine runs, what the client is told.

Standard library only, so that the HTTP front end and the scheduler never load JAX.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxinfer.structured import StructuredOutputs

MAX_LOGPROBS = 20
"""Most alternatives per token that a request may ask for (the limit of the OpenAI API and of vLLM's default)."""
MAX_STOP_IDS = 32
"""Most token ids that may end one request: the model's EOS ids and `stop_token_ids`. Device state, hence bounded."""
MAX_LOGIT_BIAS = 1024
"""Most entries of one request's `logit_bias` (the OpenAI API allows 300)."""
MAX_STOP_STRINGS = 128
"""Most stop strings of one request (the OpenAI API allows 4): each is followed through the text, for every choice."""
MAX_SALT_CHARS = 256
"""Most characters of a `cache_salt`: room for any digest or token, and it is kept with the pages of the cache."""
MAX_SESSION_CHARS = 128
"""Most characters of a session's id, which may name files: most file systems take names of 255 bytes."""
PRIORITIES = (-(2**31), 2**31 - 1)
"""First and last to be admitted: 32 bits."""
MAX_TEMPERATURE = 1e30
"""Highest temperature: far beyond it float32 has none, and logits of minus infinity would not stay so."""
REPETITION_PENALTIES = (1e-6, 1e6)
"""Lowest and highest: with these a penalised logit, divided by the lowest temperature, is finite in float32."""


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


class UnknownSession(LookupError):
    """There is no session of that id, neither in memory nor on disk."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the end of the usable context
    ABORT = "abort"  # cancelled by the client
    ERROR = "error"  # the engine failed this request; `TokenEvent.error` says why


class SessionAction(enum.StrEnum):
    """What can be done with a session."""

    SAVE = "save"  # writes its pages to disk
    LOAD = "load"  # brings its pages back from there
    MANIFEST = "manifest"  # says what it is
    DELETE = "delete"  # forgets it, in memory and on disk


def _check(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise InvalidRequest(message, param=param)


_SESSION_ID = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{MAX_SESSION_CHARS}}}")


def check_session_id(session_id: object) -> None:
    """InvalidRequest for what cannot be the id of a session: it may become the name of a file."""
    ok = isinstance(session_id, str) and _SESSION_ID.fullmatch(session_id) is not None
    allowed = f"1 to {MAX_SESSION_CHARS} characters of A-Z a-z 0-9 . _ -, the first of them no dot"
    _check(ok, "session_id", f"session_id is {session_id!r}; it must have {allowed}")


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
    """Over tokens of prompt and output: positive logits are divided by it, negative ones multiplied; 1e-6..1e6."""
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
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens but the first; the engine needs `enable_prompt_logprobs`. None: not those."""
    include_stop_str_in_output: bool = False
    """Show the stop string that matched (nothing after it)."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    cache_salt: str | None = None
    """Keys and values of earlier requests are used again only where the salt is the same. None: that of no salt."""
    priority: int = 0
    """Of the requests that wait, those with a lower number are admitted first; 32 bits."""
    session_id: str | None = None
    """The conversation that this goes on with, whose pages can be saved; see `check_session_id`. None: none."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the output has to have; it ends once nothing may follow, `min_tokens` or not. None: any."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", self.logit_bias or {})
        self._check_numbers()
        others = (self.stop, self.stop_token_ids, self.logit_bias, self.cache_salt, self.session_id)
        if others != ((), (), {}, None, None) or self.structured_outputs is not None:
            self._check_collections()

    def _check_numbers(self) -> None:
        for name, is_kind, kind, is_within, limits in _NUMBERS:  # messages only where needed: 6 us for all of them
            if (value := getattr(self, name)) is _DEFAULTS[name]:
                continue  # nearly always: where no cache has them, the calls below take 30 us
            if not is_kind(value):
                raise InvalidRequest(f"{name} is {value!r}; it must be {kind}", param=name)
            if not is_within(value):
                raise InvalidRequest(f"{name} is {value}; it must be {limits}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}"
            raise InvalidRequest(message, param="min_tokens")

    def _check_collections(self) -> None:
        _check(
            isinstance(self.logit_bias, Mapping) and len(self.logit_bias) <= MAX_LOGIT_BIAS,
            "logit_bias",
            f"logit_bias must be a mapping with at most {MAX_LOGIT_BIAS} entries",
        )
        for token, bias in self.logit_bias.items():
            _check(_is_whole(token), "logit_bias", f"logit_bias has the key {token!r}; keys are token ids")
            _check(
                _is_number(bias) and -100 <= bias <= 100,
                "logit_bias",
                f"logit_bias of token {token} is {bias!r}; it must be from -100 to 100",
            )
        for token in self.stop_token_ids:
            _check(_is_whole(token), "stop_token_ids", f"stop_token_ids has {token!r}; it must hold token ids")
        salt = self.cache_salt
        _check(salt is None or isinstance(salt, str), "cache_salt", f"cache_salt is {salt!r}; it must be a string")
        _check(
            salt is None or 1 <= len(salt) <= MAX_SALT_CHARS,
            "cache_salt",
            f"cache_salt has {len(salt or '')} characters; it must have 1 to {MAX_SALT_CHARS}, or be left out",
        )
        if self.session_id is not None:
            check_session_id(self.session_id)
            _check(
                self.n == 1,
                "session_id",
                f"session_id is {self.session_id!r} and n is {self.n}; a session is one sequence, so n must be 1",
            )
        for string in self.stop:
            _check(isinstance(string, str), "stop", f"stop has {string!r}; it must hold strings")
        _check(
            len(self.stop) <= MAX_STOP_STRINGS,
            "stop",
            f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are supported",
        )
        _check(all(self.stop), "stop", "stop contains an empty string; give at least one character")
        if (form := self.structured_outputs) is not None:
            _check(
                isinstance(form, StructuredOutputs), "structured_outputs", "structured_outputs is no StructuredOutputs"
            )
            _check((problem := form.problem()) is None, form.param, problem or "")


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _is_whole(value: object) -> bool:
    # Nearly always: an abstract class takes 0.4 us to ask, ten times for every request.
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def _is_number(value: object) -> bool:
    return type(value) in (int, float) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


_WHOLE, _REAL = (_is_whole, "an integer"), (_is_number, "a number")
_LOW, _HIGH = REPETITION_PENALTIES
_NUMBERS: Sequence[tuple[str, Callable[[Any], bool], str, Callable[[Any], bool], str]] = (
    ("n", *_WHOLE, lambda n: n >= 1, "at least 1"),
    ("max_tokens", *_WHOLE, lambda n: n >= 0, "at least 0"),
    ("min_tokens", *_WHOLE, lambda n: n >= 0, "at least 0"),
    ("temperature", *_REAL, lambda t: 0 <= t <= MAX_TEMPERATURE, f"0 or more, and at most {MAX_TEMPERATURE:g}"),
    ("top_k", *_WHOLE, lambda k: k >= -1, "at least 1, or 0 or -1 for no limit"),
    ("top_p", *_REAL, lambda p: 0 < p <= 1, "above 0 and at most 1 (temperature 0 is greedy)"),
    ("min_p", *_REAL, lambda p: 0 <= p <= 1, "from 0 to 1"),
    (
        "repetition_penalty",
        *_REAL,
        lambda r: _LOW <= r <= _HIGH,
        "above 0, from {:g} to {:g}".format(*REPETITION_PENALTIES),
    ),
    ("frequency_penalty", *_REAL, lambda f: -2 <= f <= 2, "from -2 to 2"),
    ("presence_penalty", *_REAL, lambda f: -2 <= f <= 2, "from -2 to 2"),
    ("seed", *_WHOLE, lambda seed: -(2**63) <= seed < 2**64, "of 64 bits"),
    ("logprobs", *_WHOLE, lambda k: 0 <= k <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", *_WHOLE, lambda k: 0 <= k <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    ("priority", *_WHOLE, lambda p: PRIORITIES[0] <= p <= PRIORITIES[1], "from {} to {}".format(*PRIORITIES)),
)
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence for the engine: nothing left to default, token ids only. A user's n completions are n requests."""

    request_id: str
    prompt_ids: Sequence[int]  # from a front end an array("I"): list() makes 32,768 Python integers of it in 0.4 ms
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
    prompt_logprobs: int | None = None  # then all of the prompt is computed, whatever of it is in the cache
    cache_salt: str = ""  # keys and values of earlier requests are used again only where the salt is the same
    priority: int = 0  # of those that wait, lower numbers are admitted first
    session_id: str = ""  # the conversation that it goes on with; empty: none
    grammar: str = ""  # what the output has to match, as `text.grammar` writes it; empty: anything goes

    @property
    def has_penalties(self) -> bool:
        """Whether its tokens must be counted."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_plain(self) -> bool:
        """Whether the argmax of the raw logits is all it asks for."""
        greedy = self.temperature == 0 and not self.has_penalties and not self.logit_bias and not self.grammar
        return greedy and self.min_tokens == 0 and self.logprobs is None


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of one token, from the raw logits (before penalties and temperature)."""

    logprob: float
    top: Sequence[tuple[int, float]]  # the k likeliest (id, logprob), likeliest first
    rank: int = 0  # of a token of the prompt: 1 if none is likelier; 0: it is generated, and nobody asks


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
    cached_tokens: int = 0  # with the first token: of the prompt, whose keys and values were in the cache already
    prompt_logprobs: Sequence[TokenLogprobs] | None = None  # with the first, if asked for: of the prompt's from 1 on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a front end needs to know of the engine, fixed once it is ready."""

    model: str  # the name or path that was loaded
    max_model_len: int  # usable context in tokens, prompt and output together: min(model, --max-model-len, pool)
    vocab_size: int  # token ids below this may be sampled and may be in a prompt
    eos_ids: Sequence[int]
    # From generation_config: temperature, top_k, top_p, min_p, repetition_penalty.
    sampling_defaults: Mapping[str, float]
    page_size: int  # tokens
    num_pages: int
    max_num_seqs: int
    prefix_caching: bool = False  # whether keys and values of earlier requests are used again
    num_host_pages: int = 0  # pages of the host's memory that take what leaves the device
    has_disk_tier: bool = False  # whether pages and sessions are kept on disk
    has_prompt_logprobs: bool = False  # whether log-probabilities of prompts can be asked for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine; counters never decrease."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages_used: int = 0  # held by sequences
    num_pages_cached: int = 0  # held by none, and kept for requests that begin alike
    num_pages: int = 0
    num_host_pages_used: int = 0
    num_host_pages: int = 0
    num_disk_pages_used: int = 0
    num_restoring: int = 0  # sequences that wait for pages from the host or the disk
    num_sessions: int = 0  # known, in memory or on disk
    prompt_tokens: int = 0  # of admitted requests, each counted once
    cached_prompt_tokens: int = 0  # of these, not computed
    num_evictions: int = 0  # cached pages that were given to others
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0  # whose requests ended with an error
    num_offloaded_pages: int = 0  # copied from the device to the host
    num_restored_pages: int = 0  # copied from the host to the device
    num_disk_writes: int = 0  # pages written to disk
    num_disk_reads: int = 0  # pages read from it
    compilations_after_ready: int = 0
    num_stuck_steps: int = 0  # steps, or waits without any progress, that took longer than step_timeout_s
    num_nan_requests: int = 0  # ended because the model's logits for them were not numbers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """What is known of a session."""

    session_id: str
    model: str
    num_tokens: int
    num_pages: int
    num_bytes: int  # on disk
    saved: bool  # on disk
    saved_at_s: int | None  # seconds since the epoch; None: it is not saved
    num_cached_tokens: int  # of num_tokens, whose keys and values are in the cache now, on whatever tier


class EventReceiver(Protocol):
    """Takes what the engine does for one request, in the event loop, and returns at once."""

    def push(self, event: TokenEvent) -> None:
        """Takes the next event; after one with a finish reason there is none."""
        ...

    def fail(self, error: Exception) -> None:
        """There will be no more events: the engine stopped (EngineDead), or `push` raised `error`."""
        ...


class EngineHandle(Protocol):
    """What the front end talks to: the engine in this process or in its own.

    Events are pushed rather than awaited: a front end streams tens of thousands of tokens in a second, and a task that
    is woken for each costs more than all that is done with it.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def failure(self) -> str | None:
        """Why the engine stopped; None while it lives."""
        ...

    def submit(self, request: Request, receiver: EventReceiver) -> None:
        """Runs a request. Raises QueueFull, InvalidRequest or EngineDead, and then nothing runs.

        Events come in later turns of the loop; an engine in another process refuses by one: see `TokenEvent.refused`.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request without a further event. Does nothing if it has ended."""
        ...

    async def stats(self) -> EngineStats: ...

    async def session(self, action: SessionAction, session_id: str) -> SessionInfo:
        """Does something with a session, and says what it is then; once deleted, what it was.

        Raises UnknownSession, InvalidRequest (there is no disk tier, for one), EngineDead, TimeoutError, or
        RuntimeError with the reason where the disk failed. It goes on in the engine when nobody waits for it.
        """
        ...
