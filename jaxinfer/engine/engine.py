"""The step loop: plan, launch, then read the step before. Owns the scheduler and the runner, and joins nothing else."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, NamedTuple, Protocol

from jaxinfer.engine.group import ProcessLost
from jaxinfer.engine.leading import LeadingRunner
from jaxinfer.runner.runner import InFlight, ModelRunner, StuckStep, Unsampled
from jaxinfer.scheduler import report
from jaxinfer.scheduler.groups import Groups, group_of
from jaxinfer.scheduler.matching import Matcher
from jaxinfer.scheduler.plan import StepResult
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.types import (
    EngineInfo,
    EngineStats,
    FinishReason,
    InvalidRequest,
    Request,
    SessionAction,
    SessionInfo,
    TokenEvent,
    UnknownSession,
)

MAX_FAILURES = 3
"""Steps that may fail one after the other; the next ends the engine."""
IDLE_S = 1e-3
"""Sleep of a step that has nothing to plan and nothing to read: a thousandth of a core, and late by 1 ms at most."""
NOT_NUMBERS = (
    "the model's logits for it were not numbers (NaN, or minus infinity for every token), so no token could be chosen"
)
GRAMMAR_TIMEOUT_S = 20.0
"""How long a grammar may take to compile, waiting for others included: the longest takes half a second alone."""
log = logging.getLogger(__name__)


class Compiled(Protocol):
    """A grammar that can be matched any number of times."""

    def matcher(self) -> Matcher:
        """For an output that begins."""
        ...


class Grammars(Protocol):
    """Compiles grammars in threads of its own."""

    def compile(self, grammar: str) -> Future[Compiled]:
        """The grammar, once it is compiled, or the error that says why it cannot be."""
        ...

    def prepare(self, matchers: Sequence[Any]) -> None:
        """Told which of its matchers will be asked for masks."""
        ...

    def close(self) -> None: ...


class _Compiling(NamedTuple):
    """A request that waits for its grammar."""

    request_id: str
    compiled: Future[Compiled]
    limit_s: float  # on the monotonic clock


class Engine:
    """A model that runs requests. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        runner: ModelRunner | LeadingRunner,
        scheduler: Scheduler | Groups,
        info: EngineInfo,
        *,
        step_timeout_s: float,
        grammars: Grammars | None = None,
    ):
        """step_timeout_s: see EngineConfig. grammars: None: without a tokenizer no output is constrained."""
        self.info = info
        self._grammars = grammars
        self._compiling: list[_Compiling] = []
        self._unsampled: Unsampled | None = None
        self._runner = runner
        self._scheduler = scheduler
        self._groups = scheduler.schedulers if isinstance(scheduler, Groups) else (scheduler,)
        self._step_timeout_s = step_timeout_s
        self._in_flight: InFlight | None = None
        self._idle_since_s: float | None = None  # on the monotonic clock; None: the last step did something
        self._num_failed_steps = 0
        self._num_stuck_steps = 0
        self._num_nan_requests = 0
        self._failures = 0  # since a step last succeeded
        self._lost: ProcessLost | None = None
        self._saves: dict[str, list[Future[SessionInfo]]] = {}  # of sessions, by their ids

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self._lost is not None:
            return False
        return self._in_flight is not None or self._unsampled is not None or self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFull, or InvalidRequest for one that can never run.

        One whose grammar is not compiled yet is queued in a later `step`, and holds up nobody until then.
        """
        if request.grammar and self._grammars is None:
            raise InvalidRequest(
                "the output cannot be constrained: the model has no tokenizer", param="structured_outputs"
            )
        self._scheduler.submit(request)
        if request.grammar and self._grammars is not None:
            compiled, limit_s = self._grammars.compile(request.grammar), time.monotonic() + GRAMMAR_TIMEOUT_S
            self._compiling.append(_Compiling(request.request_id, compiled, limit_s))

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request and frees its pages at once. None if it is not running or waiting."""
        return self._scheduler.abort(request_id)

    def session(self, action: SessionAction, session_id: str) -> Future[SessionInfo]:
        """Does something with a session. The future is resolved in this thread, in this call or in a later `step`.

        Its error is UnknownSession, InvalidRequest, or RuntimeError where the disk failed.
        """
        self._scheduler.tidy()
        group = self._groups[group_of(session_id, len(self._groups))]
        sessions, done = group.cache.sessions, Future[SessionInfo]()
        try:
            match action:
                case SessionAction.SAVE:
                    sessions.save(session_id)
                    self._saves.setdefault(session_id, []).append(done)
                case SessionAction.LOAD:
                    done.set_result(self._told(sessions.load(session_id)))
                case SessionAction.MANIFEST:
                    done.set_result(self._told(sessions.info(session_id)))
                case SessionAction.DELETE:
                    done.set_result(self._told(sessions.delete(session_id)))
        except (UnknownSession, InvalidRequest) as error:
            done.set_exception(error)
        return done

    def _told(self, info: SessionInfo) -> SessionInfo:
        """With what the scheduler does not know."""
        return dataclasses.replace(info, model=self.info.model, num_bytes=info.num_bytes * self._runner.page_file_bytes)

    def _resolve_saves(self) -> None:
        for session_id, outcome in chain.from_iterable(g.cache.sessions.take_outcomes() for g in self._groups):
            for done in self._saves.pop(session_id, ()):
                if isinstance(outcome, Exception):
                    done.set_exception(outcome)
                else:
                    done.set_result(self._told(outcome))

    def step(self) -> list[TokenEvent]:
        """Launches the next step, then waits for the one before it and returns what that one did.

        A step with constrained rows is sampled at the beginning of the next call: its masks follow from the tokens of
        the one before. The device computes it meanwhile, and clients have these tokens first.

        A step that fails, or takes longer than step_timeout_s, ends the requests that run with its error, and serving
        goes on with the device's state made anew; the one after MAX_FAILURES in a row raises its error. A step whose
        logits are not numbers ends the requests that are at fault, and the others are computed again. Where another
        process of the engine is gone, this and every further call raises ProcessLost.
        """
        if self._lost is not None:
            raise self._lost
        events: list[TokenEvent] = []
        try:
            for done in self._runner.transferred():
                self._scheduler.transferred(done)
                self._idle_since_s = None
            self._resolve_saves()
            if self._compiling:
                self._take_grammars(events)
            if self._unsampled is not None:
                self._sample(self._unsampled, events)
        except Exception as error:
            return events + self._recover(error)
        plan = self._scheduler.next_plan()
        finished, self._in_flight = self._in_flight, None
        if plan is None and finished is None:
            return events + self._idle()
        self._idle_since_s = None
        try:
            launched = None if plan is None else self._runner.launch(plan)
            if isinstance(launched, Unsampled):
                self._unsampled = launched
            else:
                self._in_flight = launched
            result = None if finished is None else self._runner.collect(finished, self._step_timeout_s)
        except Exception as error:
            return events + self._recover(error)
        if result is None:
            return events
        self._failures = 0
        if result.has_bad_logits:
            return events + self._recover_from_nan(result)
        return events + self._scheduler.apply(result) if events else self._scheduler.apply(result)

    def _take_grammars(self, events: list[TokenEvent]) -> None:
        """Queues the requests whose grammars are compiled, and ends those that have none."""
        now_s, self._idle_since_s = time.monotonic(), None
        waiting, self._compiling = self._compiling, []
        for one in waiting:
            if one.compiled.done():
                error = one.compiled.exception()
                if error is None:
                    self._scheduler.constrain(one.request_id, one.compiled.result().matcher())
                else:
                    events += self._scheduler.refuse(one.request_id, str(error))
            elif now_s > one.limit_s:
                reason = f"its grammar was not compiled within {GRAMMAR_TIMEOUT_S:g} s"
                events += self._scheduler.refuse(one.request_id, reason)
            else:
                self._compiling.append(one)

    def _sample(self, launched: Unsampled, events: list[TokenEvent]) -> None:
        assert self._grammars is not None
        masks = self._scheduler.masks(self._grammars.prepare)
        events += masks.events
        self._in_flight, self._unsampled = self._runner.sample(launched, masks.rows), None

    def _recover(self, error: Exception) -> list[TokenEvent]:
        if isinstance(error, ProcessLost):
            self._lost = error
            raise error
        self._num_failed_steps += 1
        self._failures += 1
        if isinstance(error, StuckStep):
            self._num_stuck_steps += 1
            log.error("%s; what there was:\n%s", error, self._scheduler.describe())
        if self._failures > MAX_FAILURES:
            raise error
        log.error("a step failed; the requests that ran end with its error, and the state is made anew", exc_info=error)
        self._reset()
        lines = str(error).splitlines() or [""]
        return self._scheduler.fail(f"the step that computed it failed: {type(error).__name__}: {lines[0]}")

    def _recover_from_nan(self, result: StepResult) -> list[TokenEvent]:
        """The pools may hold NaN, and the step behind this one may have read it: all is made anew."""
        self._reset()
        events = self._scheduler.lose_state(result, NOT_NUMBERS)
        failed = [event.request_id for event in events if event.finish_reason is FinishReason.ERROR]
        self._num_nan_requests += len(failed)
        log.error("logits were not numbers; the state is made anew, and these requests end with an error: %s", failed)
        return events

    def _idle(self) -> list[TokenEvent]:
        """Nothing can be planned and nothing is in flight. Work that stays so fails after step_timeout_s."""
        if not self._scheduler.has_work:
            return []
        now_s = time.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if now_s - self._idle_since_s <= self._step_timeout_s:
            self._runner.wait_for_transfer(IDLE_S)
            return []
        self._idle_since_s = None
        self._num_stuck_steps += 1
        reason = f"nothing could be computed for {self._step_timeout_s:g} s (step_timeout_s)"
        log.error("%s; all requests end with this error. What there was:\n%s", reason, self._scheduler.describe())
        self._failures += 1
        if self._failures > MAX_FAILURES:
            raise RuntimeError(reason)
        self._reset()
        return self._scheduler.fail(reason, waiting_too=True)

    def _reset(self) -> None:
        self._in_flight = self._unsampled = None
        self._runner.reset()

    def stats(self) -> EngineStats:
        """A snapshot. When nothing runs, it also checks that every page came back; the cache may keep any of them."""
        self._scheduler.tidy()
        found = report.stats(self._groups, self._scheduler.num_steps)
        if self._lost is None and not self.has_work and found.num_pages_used:
            raise RuntimeError(f"nothing runs, but {found.num_pages_used} pages are held")
        return dataclasses.replace(
            found,
            num_disk_writes=self._runner.num_disk_writes,
            num_disk_reads=self._runner.num_disk_reads,
            num_failed_steps=self._num_failed_steps,
            compilations_after_ready=self._runner.compilations_after_ready,
            num_stuck_steps=self._num_stuck_steps,
            num_nan_requests=self._num_nan_requests,
        )

    def dismiss(self) -> None:
        """Ends the other processes of the engine, if there are any; this one is about to end."""
        if isinstance(self._runner, LeadingRunner):
            self._runner.dismiss()

    def close(self) -> None:
        """Gives up the device's memory."""
        self._in_flight = self._unsampled = None
        if self._grammars is not None:
            self._grammars.close()
        self._runner.close()
