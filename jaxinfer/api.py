"""The face for Python: LLM. Joins engine and text; `serving.py` does the same for a server."""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import numbers
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp

from checkpoints import orbax_store
from checkpoints.resolve import resolve
from jaxinfer.build import REFUSALS as REFUSALS
from jaxinfer.build import Progress, build_engine, build_follower, load_params, tensor_names
from jaxinfer.config import DEFAULT_MODEL, ConfigError, EngineConfig
from jaxinfer.engine.local import LocalEngine
from jaxinfer.found import find_model
from jaxinfer.models import registry
from jaxinfer.sharding import rules
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.control_tokens import ControlTokens
from jaxinfer.text.logprobs import OutputLogprob
from jaxinfer.text.output import OutputDelta, OutputStream
from jaxinfer.text.requests import lower
from jaxinfer.types import (
    EngineInfo,
    EngineStats,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
    SessionAction,
    SessionInfo,
)

Prompt = str | Sequence[int]
"""Text, or token ids."""
Message = Mapping[str, Any]
"""A chat message: role and content."""


@dataclasses.dataclass(slots=True)
class Completion:
    """One of the n outputs of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[OutputLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: OutputDelta) -> None:
        """Takes in what is new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """What a prompt gave."""

    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0  # of the prompt, that were in the cache when the first of its outputs began
    prompt_logprobs: list[OutputLogprob] | None = None  # of the prompt's tokens, if asked for


class LLM:
    """A model in this process.

    `options` are the fields of EngineConfig. Threads may share an LLM: their requests run in one batch.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, show_progress: bool = True, **options: Any):
        config = EngineConfig(model=model, **options)
        if config.process_id:
            raise ConfigError(
                f"process_id is {config.process_id}; LLM is for process 0, jaxinfer.follow for the others"
            )
        found = find_model(config)
        self.tokenizer = found.tokenizer
        self._template = ChatTemplate.from_config(found.checkpoint.tokenizer_config)
        self._control_tokens = None
        if self.tokenizer is not None and self._template is not None:
            self._control_tokens = ControlTokens(self.tokenizer, self._template.source)
        self._engine = LocalEngine(build_engine(config, found, show_progress=show_progress))
        # Also when it is never closed: see LocalEngine.close. Registered after JAX's own, it runs before.
        atexit.register(weakref.finalize(self, self._engine.close))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's own; None where it has none."""
        return self._template

    @property
    def info(self) -> EngineInfo:
        """Context, vocabulary, pages and defaults of the engine."""
        return self._engine.info

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, as many at once as fit, and returns their outputs in the order of the prompts.

        One SamplingParams for all prompts, or one for each. Raises InvalidRequest before anything runs.
        """
        many = [prompts] if isinstance(prompts, str | bytes) or _is_ids(prompts) else list(_sequence(prompts))
        params = self._one_each(sampling_params, len(many))
        _refuse_shared_sessions(params)
        jobs = [self._job(prompt, sampling) for prompt, sampling in zip(many, params, strict=True)]
        self._run(jobs)
        for job in jobs:
            first = job.streams[0]
            job.output.num_cached_tokens, job.output.prompt_logprobs = first.num_cached_tokens, first.prompt_logprobs
        return [job.output for job in jobs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several through the chat template, whose variables `template_options` are."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        prompts = [self.chat_prompt(conversation, **template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params)

    def chat_prompt(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's turn.

        Control tokens are those of the template; the same strings inside a message are plain text.
        """
        if self._template is None:
            raise InvalidRequest(f"{self.info.model} has no chat template; use generate", param="messages")
        if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest(
                f"messages is {_shown(messages)}; a list of messages with role and content is needed", param="messages"
            )
        if self._control_tokens is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer; use generate", param="messages")
        guarded, mark = self._control_tokens.guard(messages)
        return self._control_tokens.encode(self._template.render(guarded, **template_options), mark)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Completes one prompt and yields what is new as it comes. Closing the iterator early cancels the request."""
        if sampling_params is not None and sampling_params.prompt_logprobs is not None:
            raise InvalidRequest(
                f"prompt_logprobs is {sampling_params.prompt_logprobs}; a stream does not tell them, generate does",
                param="prompt_logprobs",
            )
        return self.start(prompt, sampling_params)[1]

    def start(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, always_shown: Collection[int] = ()
    ) -> tuple[OutputStream, Iterator[OutputDelta]]:
        """As `stream`, with the output that counts its tokens and those of the prompt that were cached.

        always_shown: special tokens that are in the text although the others are left out.
        """
        sampling = sampling_params or SamplingParams()
        if sampling.n != 1:
            raise InvalidRequest(f"n is {sampling.n}; a stream has one output, use generate for several", param="n")
        job = self._job(prompt, sampling, always_shown)
        return job.streams[0], self._stream(job)

    def save_session(self, session_id: str) -> SessionInfo:
        """Writes the pages of a session to `kv_disk_dir`, and waits for that.

        A session is the conversation of the requests whose SamplingParams have this `session_id`. This and the three
        methods below raise UnknownSession where there is none, InvalidRequest for what is no id or without
        `kv_disk_dir`, and RuntimeError with the reason where the disk failed.
        """
        return self._engine.session(SessionAction.SAVE, session_id)

    def load_session(self, session_id: str) -> SessionInfo:
        """Brings the pages of a saved session back into the cache, also one that was saved before a restart."""
        return self._engine.session(SessionAction.LOAD, session_id)

    def session_manifest(self, session_id: str) -> SessionInfo:
        """What is known of a session: its tokens, pages and bytes, and whether it is saved."""
        return self._engine.session(SessionAction.MANIFEST, session_id)

    def delete_session(self, session_id: str) -> SessionInfo:
        """Forgets a session, in memory and on disk; returns what it was."""
        return self._engine.session(SessionAction.DELETE, session_id)

    def close(self) -> None:
        """Gives up the device's memory."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(self, prompt: Prompt, sampling: SamplingParams, always_shown: Collection[int] = ()) -> _Job:
        text = prompt if isinstance(prompt, str) else None
        ids = _token_ids(prompt) if text is None else self._tokenizer().encode(text, add_special_tokens=True)
        requests = lower(ids, sampling, self.info, self.tokenizer, uuid.uuid4().hex)
        streams = [OutputStream(self.tokenizer, ids, sampling, always_shown=always_shown) for _ in requests]
        outputs = [Completion(index) for index in range(len(requests))]
        return _Job(requests, streams, RequestOutput(text, ids, outputs))

    def _run(self, jobs: list[_Job]) -> None:
        streams = {r.request_id: s for job in jobs for r, s in zip(job.requests, job.streams, strict=True)}
        outputs = {r.request_id: o for job in jobs for r, o in zip(job.requests, job.output.outputs, strict=True)}
        requests = itertools.chain.from_iterable(job.requests for job in jobs)
        for request_id, delta in self._deltas(requests, streams):
            outputs[request_id].add(delta)

    def _stream(self, job: _Job) -> Iterator[OutputDelta]:
        (request,), (stream,) = job.requests, job.streams
        for _, delta in self._deltas([request], {request.request_id: stream}):
            yield delta

    def _deltas(
        self, requests: Iterable[Request], streams: Mapping[str, OutputStream]
    ) -> Iterator[tuple[str, OutputDelta]]:
        """What is new, by request. A stop string is seen here: then the engine is told to end the request."""
        with contextlib.closing(self._engine.run(requests)) as events:
            for event in events:
                stream = streams[event.request_id]
                delta = stream.push(event)
                if stream.finished and event.finish_reason is None:
                    self._engine.cancel(event.request_id)
                if delta is not None:
                    yield event.request_id, delta

    def _tokenizer(self):
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer; give token ids", param="prompt")
        return self.tokenizer

    @staticmethod
    def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidRequest(f"sampling_params is {_shown(params)}; a SamplingParams, or a list of them, is needed")
        if len(params) != count:
            raise InvalidRequest(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
        return list(params)


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A prompt on its way through the engine."""

    requests: list[Request]
    streams: list[OutputStream]
    output: RequestOutput


def _refuse_shared_sessions(params: Sequence[SamplingParams]) -> None:
    ids = collections.Counter(one.session_id for one in params if one.session_id is not None)
    for session_id, count in ids.items():
        if count > 1:
            raise InvalidRequest(
                f"session_id is {session_id!r} with {count} prompts; a session is one sequence: give one",
                param="session_id",
            )


def _is_ids(prompts: Any) -> bool:
    """Whether it is one prompt of token ids, as a sequence or as an array [T]."""
    return not isinstance(prompts, Mapping) and len(_sequence(prompts)) > 0 and isinstance(prompts[0], numbers.Integral)


def _sequence(prompts: Any) -> Any:
    """Prompts as they are given, if they are in an order; a dictionary or a lone number is refused."""
    if isinstance(prompts, Mapping) or not (hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")):
        raise InvalidRequest(
            f"prompts is {_shown(prompts)}; text, token ids or a list of them is needed", param="prompt"
        )
    return prompts


def _token_ids(prompt: Any) -> list[int]:
    """The ids of a prompt that is no text. InvalidRequest for anything else: bytes are no ids."""
    if not isinstance(prompt, bytes | bytearray | Mapping) and hasattr(prompt, "__iter__"):
        ids = list(prompt)
        if all(isinstance(token, numbers.Integral) and not isinstance(token, bool) for token in ids):
            return [int(token) for token in ids]
    raise InvalidRequest(f"prompt is {_shown(prompt)}; text or token ids are needed", param="prompt")


def _shown(value: Any) -> str:
    """Its kind and the start of it."""
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def follow(model: str = DEFAULT_MODEL, *, show_progress: bool = True, **options: Any) -> None:
    """Follows the LLM, server or job of process 0 from another process, until that is closed.

    `options` are the same fields of EngineConfig as in process 0, but for process_id. EngineDead, with the reason, if
    any of the processes ends otherwise; where JAX waits for that one in a call, which nothing can interrupt, this
    process ends within seconds with the reason on standard error.
    """
    build_follower(EngineConfig(model=model, **options), show_progress=show_progress).follow()


def convert(model: str, out: str, *, revision: str | None = None, dtype: str = "auto") -> None:
    """Writes a checkpoint as an Orbax store in the new folder `out`, which loads straight into any sharding.

    dtype: of the stored weights; auto: the checkpoint's own, float32 for a GGUF file.
    """
    config = EngineConfig(model=model, revision=revision, dtype=dtype)
    checkpoint = resolve(config.model, revision=config.revision)
    described = registry.from_config(checkpoint.config, tensor_names(checkpoint))
    if dtype == "auto":
        text = checkpoint.config.get("text_config") or {}
        named = (source.get(key) for source in (text, checkpoint.config) for key in ("dtype", "torch_dtype"))
        dtype = str(next(filter(None, named), "float32"))
    shardings = rules.shardings(described.specs, rules.make_mesh(1))
    with contextlib.closing(Progress()) as progress:
        params = load_params(checkpoint, described, jnp.dtype(dtype), shardings, seed=config.seed, progress=progress)
    orbax_store.save(out, params, described.specs, checkpoint)
