"""An engine without a model: deterministic, and as slow, full or broken as a test wants it."""

import asyncio
import threading
from dataclasses import dataclass, field

from jaxinfer.types import (
    EngineDead,
    EngineInfo,
    EngineStats,
    FinishReason,
    QueueFull,
    SessionAction,
    SessionInfo,
    TokenEvent,
    TokenLogprobs,
    UnknownSession,
)

MAX_MODEL_LEN = 64


@dataclass
class FakeEngine:
    """Answers every prompt with the ids of `reply`, rotated by the seed unless greedy, over and over."""

    tokenizer: object
    reply: str = "the cat sat on the mat"
    tokens_per_event: int = 1
    step_s: float = 0.0
    empty_first_event: bool = False
    end_with_eos: bool = False
    refuse: bool = False
    """submit() raises QueueFull."""
    refuse_by_event: bool = False
    fail_after: int | None = None
    """Tokens after which the request fails."""
    die_after: int | None = None
    fail_only: str | None = None
    """The request id suffix that fail_after and refuse are limited to."""
    failure: str | None = None
    max_model_len: int = MAX_MODEL_LEN
    logprob: float = -0.5
    prefix_caching: bool = False
    cached_tokens: dict = field(default_factory=dict)
    """By the end of a request's id: what its first token event says. Others say 0."""
    requests: list = field(default_factory=list)
    cancelled: list = field(default_factory=list)
    running: set = field(default_factory=set)
    tasks: dict = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    """Closed: nothing is generated yet, and nothing done with sessions."""
    session_error: Exception | None = None
    session_calls: list = field(default_factory=list)
    sessions: dict = field(default_factory=dict)
    """Whether it is saved, by id."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0

    def __post_init__(self):
        self.gate.set()
        self.info = EngineInfo(
            model="models/fake",
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_ids=self.tokenizer.eos_ids,
            sampling_defaults={},
            page_size=16,
            num_pages=8,
            max_num_seqs=8,
            prefix_caching=self.prefix_caching,
            has_prompt_logprobs=True,
        )

    def ids_for(self, request):
        """The ids that the request gets, without end."""
        ids = self.tokenizer.encode(self.reply, add_special_tokens=False)
        turn = 0 if request.temperature == 0 else request.seed % len(ids)
        ids = ids[turn:] + ids[:turn]
        if self.end_with_eos:
            ids = [*ids, request.stop_ids[0]]
        while True:
            yield from ids

    def submit(self, request, receiver):
        self._admit(request)
        self.tasks[request.request_id] = asyncio.create_task(self._run(request, receiver))

    def cancel(self, request_id):
        if task := self.tasks.pop(request_id, None):
            self.cancelled.append(request_id)
            self.running.discard(request_id)
            task.cancel()

    async def _run(self, request, receiver):
        try:
            async for event in self._generate(request):
                if event.finish_reason is not None:
                    self.tasks.pop(request.request_id, None)  # its receiver may cancel what has ended
                receiver.push(event)
        except EngineDead as error:
            receiver.fail(error)

    async def _generate(self, request):
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.002)
            if self.empty_first_event:
                yield TokenEvent(request_id=request.request_id)
            async for event in self._events(request):
                yield event
        finally:
            self.running.discard(request.request_id)

    def _admit(self, request):
        self.requests.append(request)
        if self.refuse and self._concerned(request):
            raise QueueFull("1024 requests wait already")
        self.num_prompt_tokens += len(request.prompt_ids)
        self.running.add(request.request_id)

    def _concerned(self, request):
        return self.fail_only is None or request.request_id.endswith(self.fail_only)

    async def _events(self, request):
        name, source, sent = request.request_id, self.ids_for(request), 0
        if self.refuse_by_event:
            yield TokenEvent(request_id=name, finish_reason=FinishReason.ERROR, error="full", refused=True)
            return
        while True:
            if self.die_after is not None and sent >= self.die_after:
                self.failure = "CUDA error 700"
                raise EngineDead(self.failure)
            if self.fail_after is not None and sent >= self.fail_after and self._concerned(request):
                yield TokenEvent(request_id=name, finish_reason=FinishReason.ERROR, error="NaN in the logits")
                return
            await asyncio.sleep(self.step_s)
            ids, stop_id = [], None
            while len(ids) < min(self.tokens_per_event, request.max_tokens - sent) and stop_id is None:
                ids.append(next(source))
                if ids[-1] in request.stop_ids and sent + len(ids) > request.min_tokens:
                    stop_id = ids[-1]
            cached = 0 if sent else next((n for end, n in self.cached_tokens.items() if name.endswith(end)), 0)
            sent += len(ids)
            self.num_tokens += len(ids)
            self.num_cached_tokens += cached
            reason = FinishReason.STOP if stop_id is not None else None
            if reason is None and sent >= request.max_tokens:
                reason = FinishReason.LENGTH
            yield TokenEvent(
                request_id=name,
                token_ids=tuple(ids),
                logprobs=self._logprobs(request, ids),
                finish_reason=reason,
                stop_id=stop_id,
                cached_tokens=cached,
                prompt_logprobs=self._prompt_logprobs(request) if sent == len(ids) else None,
            )
            if reason is not None:
                return

    def _logprobs(self, request, ids):
        if request.logprobs is None:
            return None
        return [
            TokenLogprobs(self.logprob, [((id + k) % self.info.vocab_size, -k - 0.5) for k in range(request.logprobs)])
            for id in ids
        ]

    def _prompt_logprobs(self, request):
        """Every token is the second likeliest."""
        if request.prompt_logprobs is None:
            return None
        tops = [(k + 1) % 2 + k // 2 * 2 for k in range(request.prompt_logprobs)]  # 1, 0, 3, 2, ...
        return [
            TokenLogprobs(-1.5, [((id + k) % self.info.vocab_size, -i - 0.5) for i, k in enumerate(tops)], 2)
            for id in request.prompt_ids[1:]
        ]

    async def session(self, action, session_id):
        self.session_calls.append((action, session_id))
        while not self.gate.is_set():
            await asyncio.sleep(0.002)
        if self.session_error is not None:
            raise self.session_error
        if session_id not in self.sessions:
            raise UnknownSession(f"there is no session {session_id!r}")
        if action is SessionAction.SAVE:
            self.sessions[session_id] = True
        saved = self.sessions[session_id]
        if action is SessionAction.DELETE:
            del self.sessions[session_id]
        return SessionInfo(
            session_id=session_id,
            model=self.info.model,
            num_tokens=40,
            num_pages=3,
            num_bytes=3000 if saved else 0,
            saved=saved,
            saved_at_s=1_700_000_000 if saved else None,
            num_cached_tokens=32,
        )

    async def stats(self):
        return EngineStats(
            num_running=len(self.running),
            num_pages_used=len(self.running),
            num_pages=8,
            prompt_tokens=self.num_prompt_tokens,
            cached_prompt_tokens=self.num_cached_tokens,
            num_pages_cached=3,
            num_evictions=2,
            generation_tokens=self.num_tokens,
            num_host_pages_used=11,
            num_host_pages=12,
            num_disk_pages_used=13,
            num_restoring=14,
            num_sessions=15,
            num_offloaded_pages=16,
            num_restored_pages=17,
            num_disk_writes=18,
            num_disk_reads=19,
            num_stuck_steps=20,
            num_nan_requests=21,
        )
