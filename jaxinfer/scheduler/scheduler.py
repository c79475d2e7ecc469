"""Decides what each step computes, ahead of the device (what follows from that, the package lists). Host integers only;
it never pads and never waits.
"""

from __future__ import annotations

import bisect
from array import array
from collections import deque
from typing import NamedTuple

from jaxinfer.config import SchedulerLimits
from jaxinfer.scheduler import integrity, report, scoring
from jaxinfer.scheduler.admission import Admission
from jaxinfer.scheduler.constraints import Constraints, Masks, Prepare
from jaxinfer.scheduler.kv_cache import KvCache
from jaxinfer.scheduler.matching import Matcher
from jaxinfer.scheduler.plan import (
    CachedPrefix,
    DecodeRow,
    KeptState,
    LongChunk,
    PrefillChunk,
    StepPlan,
    StepResult,
    Transferred,
)
from jaxinfer.scheduler.queue import order_key
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.scheduler.step_limit import mixed_limit
from jaxinfer.types import InvalidRequest, QueueFull, Request, TokenEvent

MAX_IN_FLIGHT = 2
"""Plans whose results are not read yet: the step that runs and the one queued behind it."""


class _Flight(NamedTuple):
    """A plan whose result is not read yet."""

    step: int
    samplers: dict[int, Sequence]  # slot -> sequence that held it when the plan was made; rows that sample only
    scored: list[scoring.Scored]


class Scheduler:
    """Owns the sequences, the slots and the pages. First come, first served; see `next_plan` for the policy."""

    def __init__(self, limits: SchedulerLimits, cache: KvCache | None = None):
        """cache: None: an empty one."""
        self.limits = limits
        self.cache = cache or KvCache(limits)
        self.generation_tokens = 0  # read from the device and told to clients
        self.num_preemptions = 0
        self.num_steps = 0  # planned so far; the next plan's number
        self._sequences: dict[str, Sequence] = {}  # by request id; running and waiting
        self._running: list[Sequence] = []  # in the order of `order_key`: the last is the first to give way
        self._prefilling: Sequence | None = None  # of these, the only one that may be in the middle of its prompt
        self._admission = Admission(limits, self.cache)
        self._constraints = Constraints(self._admission.waiting)
        self._in_flight: deque[_Flight] = deque()
        self._num_arrived = 0
        self._ended: list[Sequence] = []  # with a last event, and not forgotten yet

    @property
    def num_running(self) -> int:
        """Those that wait for pages to arrive included."""
        return len(self._running) + len(self._admission)

    @property
    def prompt_tokens(self) -> int:
        """Of admitted requests, each counted once."""
        return self._admission.prompt_tokens

    @property
    def cached_prompt_tokens(self) -> int:
        """Of these, in the cache already."""
        return self._admission.cached_prompt_tokens

    @property
    def num_restoring(self) -> int:
        """Admitted sequences that wait for pages to arrive."""
        return len(self._admission.restoring)

    @property
    def num_waiting(self) -> int:
        return len(self._admission.waiting) + len(self._constraints.uncompiled)

    @property
    def num_in_flight(self) -> int:
        """Plans made and not applied; the engine applies them all, even when no sequence is left."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a transfer."""
        return bool(self._sequences) or self.cache.has_work

    def submit(self, request: Request) -> None:
        """Queues a request; `constrain` one with a grammar. InvalidRequest if it can never run; QueueFull."""
        self.tidy()
        limits = self.limits
        if request.request_id in self._sequences:
            raise InvalidRequest(
                f"a request with id {request.request_id!r} is unfinished; ids must differ", param="request_id"
            )
        seq = Sequence(request, limits, self._num_arrived)
        seq.check_fits(limits)
        if self.num_waiting >= limits.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests wait already; the limit is {limits.max_waiting}")
        self._num_arrived += 1
        self._sequences[request.request_id] = seq
        if request.grammar:
            self._constraints.add(seq)
        else:
            self._admission.waiting.add(seq)

    def constrain(self, request_id: str, matcher: Matcher) -> None:
        """Queues a request that waits for its grammar. Does nothing for any other: it may have been aborted."""
        self._constraints.compiled(request_id, matcher)

    def refuse(self, request_id: str, reason: str) -> list[TokenEvent]:
        """Ends a request that waits for its grammar with an error, if it is one."""
        seq = self._constraints.uncompiled.get(request_id)
        if seq is None:
            return []
        event = seq.fail(reason)
        self._remove(seq)
        return [event]

    def masks(self, prepare: Prepare = lambda _: None) -> Masks:
        """Of the newest plan, to be asked for once the result of the one before is applied."""
        return self._constraints.masks(self._in_flight[-1].samplers.values(), prepare, self._ended)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request now and frees what it holds. None, and nothing happens, if it is unknown or has finished."""
        self.tidy()
        seq = self._sequences.get(request_id)
        if seq is None:
            return None
        event = seq.cancel()
        self._remove(seq)
        return event

    def clear_prefix_cache(self) -> None:
        """Forgets every cached page but those on disk. Those that run go on, and leave nothing of it to others.

        Those whose pages were to arrive wait again.
        """
        self.tidy()
        for seq in tuple(self._admission):
            self._preempt(seq)
        self.cache.prefix.clear()
        for seq in self._running:
            seq.is_cacheable = False

    def fail(self, reason: str, *, waiting_too: bool = False) -> list[TokenEvent]:
        """After a step that failed: what was on the device is lost, and the plans in flight have no result.

        Ends every sequence that runs, since a row of each was in them, with an error. Others wait on if they may.
        """
        self._drop_plans()
        events: list[TokenEvent] = []
        waiting = (*self._admission.waiting, *self._constraints.uncompiled.values()) if waiting_too else ()
        for seq in (*self._running, *waiting):
            events.append(seq.fail(reason))
            self._remove(seq)
        return events

    def lose_state(self, result: StepResult | None, reason: str) -> list[TokenEvent]:
        """Takes in a step that gave no token, but -1, for some slots (None: it had no row): all that is kept is lost.

        Ends the sequences of these slots with an error, but not one that had begun with pages of others, which may be
        at fault: it is computed once more, from nothing. The others' tokens count, so that such a step advances
        somebody, too. All that run go back to the queue, to be computed again from their known tokens.
        """
        samplers = self._in_flight[0].samplers if result else {}
        bad = [samplers.pop(slot) for slot, token in result.token_ids.items() if token < 0] if result else []
        events = self.apply(result) if result else []
        self._drop_plans()
        for seq in bad:
            if seq.prefix_len and not seq.is_suspect:
                seq.is_suspect = True
                self.cache.forget(seq.request.cache_salt, seq.tokens)
            elif not seq.finished:
                events.append(seq.fail(reason))
                self._remove(seq)
        while self._running:
            self._preempt(self._running[-1])
        return events

    def _drop_plans(self) -> None:
        """Forgets the plans in flight, whose tokens are to be sampled anew, and all that is cached."""
        self._in_flight.clear()
        self.clear_prefix_cache()
        for seq in self._sequences.values():
            seq.num_in_flight = 0

    def describe(self) -> str:
        """What it holds, in some lines for a log."""
        admitted = [*self._running, *self._admission]
        flights = {flight.step: flight.samplers for flight in self._in_flight}
        return report.describe(self.cache.pool, admitted, [*self._admission.waiting], flights)

    def next_plan(self) -> StepPlan | None:
        """Plans one step, or returns None when there is nothing that can be planned before another `apply`.

        Every sequence that decodes gets a row in every step. What is left of the token limit (`max_mixed_tokens` beside
        decode rows, else `max_step_tokens`) goes to prompts, in the order of admission, cut wherever the limit falls.
        So only one of the running sequences can be in the middle of its prompt.
        """
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise RuntimeError(f"{len(self._in_flight)} plans are in flight; apply one first")
        self.tidy()
        samplers: dict[int, Sequence] = {}
        kept: list[KeptState] = []
        prefixes: list[CachedPrefix] = []
        decodes = self._plan_decodes(samplers, kept)
        prefills = self._plan_prefills(decodes, samplers, prefixes, kept)
        long = None if decodes or prefills else self._plan_long(samplers)
        transfers = self.cache.take_transfers(self.num_steps, is_awaited=bool(prefixes))
        if not (decodes or prefills or prefixes or transfers or long):
            return None
        constrained = self._constraints.concern(samplers.values())
        plan = StepPlan(self.num_steps, decodes, prefills, prefixes, transfers, long, kept, constrained)
        if plan.num_rows:
            self._in_flight.append(_Flight(self.num_steps, samplers, scoring.scored_chunks(prefills, self._running)))
        self.num_steps += 1
        return plan

    def transferred(self, done: Transferred) -> None:
        """Takes in the end of a transfer between the tiers."""
        self.cache.transferred(done)
        self._admission.transferred(done)

    def apply(self, result: StepResult) -> list[TokenEvent]:
        """Takes in what a step sampled: one event for every sequence that got a token and had not ended before.

        What the ended ones held is taken back by `tidy`. Results come in the order of the plans; raises RuntimeError
        for any other, or if a token is missing.
        """
        if not self._in_flight or self._in_flight[0].step != result.step:
            expected = self._in_flight[0].step if self._in_flight else None
            raise RuntimeError(f"the result is of step {result.step}, but the oldest plan in flight is {expected}")
        token_ids, logprobs = result.token_ids, result.logprobs
        events: list[TokenEvent] = []
        flight = self._in_flight.popleft()
        scoring.tell(flight.scored, result)
        for slot, seq in flight.samplers.items():
            if seq.finished:
                continue  # a wasted row: it ended after this step was planned
            try:
                token = token_ids[slot]
            except KeyError:
                raise RuntimeError(f"the result of step {result.step} has no token for slot {slot}") from None
            events.append(seq.receive(token, logprobs.get(slot)))
            if seq.finished:
                self._ended.append(seq)
        self.generation_tokens += len(events)
        return events

    def tidy(self) -> None:
        """Takes back what sequences hold that have ended. Everything that asks the scheduler for something does so.

        `apply` leaves it undone, so that clients learn of a last token before: to release 32,768 tokens takes 1 ms.
        """
        while self._ended:
            self._remove(self._ended.pop())

    def check_integrity(self) -> None:
        """Tidies; raises PageError or RuntimeError unless pages, slots, queues and counts agree. O(pages + tokens)."""
        self.tidy()
        held = integrity.Held(self._running, self._admission, self._constraints.uncompiled.values(), self._prefilling)
        integrity.check(self.cache, held, self._sequences, [flight.samplers for flight in self._in_flight])

    def _plan_decodes(self, samplers: dict[int, Sequence], kept: list[KeptState]) -> list[DecodeRow]:
        """A row for every running sequence that has its prompt behind it and its length limit ahead."""
        page_size = self.limits.page_size
        rows: list[DecodeRow] = []
        # In this order, so that a preempted sequence, always the last, has no row in this plan yet.
        for seq in tuple(self._running):
            if not seq.prefill_end <= seq.num_computed < min(seq.max_computed, seq.num_device):
                continue
            slot = seq.slot
            if slot is None:
                break  # preempted for an earlier one, and so are all that follow
            new_page = None
            if seq.num_computed % page_size == 0:
                new_page = self._take_page(seq)
                if new_page is None:
                    break
            rows.append(seq.take_decode(new_page))
            samplers[slot] = seq
            if (interval := self.limits.state_tokens) and seq.is_cacheable and seq.num_computed % interval == 0:
                self._keep_state(seq, kept)
        return rows

    def _keep_state(self, seq: Sequence, kept: list[KeptState]) -> None:
        """Copies the state of a sequence that decodes, over the copy that it has."""
        if seq.state is None:
            seq.state = self.cache.states.take()
        if seq.state is not None:
            kept.append(seq.keep_state(self.num_steps))

    def _plan_long(self, samplers: dict[int, Sequence]) -> LongChunk | None:
        """The next tokens of a sequence that has filled all pages: as it holds them, it is alone."""
        ends = (seq for seq in self._running if seq.num_device <= seq.num_computed < seq.max_computed)
        if (seq := next(ends, None)) is None:
            return None
        chunk = seq.take_long(self.limits.long_chunk)
        if chunk.samples:
            samplers[chunk.slot] = seq
        self._prefilling = seq if seq.num_computed < seq.prefill_end else None
        return chunk

    def _take_page(self, seq: Sequence) -> int | None:
        """A page for a decode row of `seq`. None: there was none, and `seq` itself was the last and gave way.

        The first sequence never gives way while another runs, and alone it fits (`submit` saw to that) once no page is
        to arrive any more: so the first always advances, and every sequence becomes the first in the end.
        """
        while not self.cache.pool.num_free:
            ready = self._admission.ready
            last = ready[-1] if ready else self._running[-1]
            self._preempt(last)
            if last is seq:
                return None
        return self.cache.prefix.alloc(1)[0]

    def _preempt(self, seq: Sequence) -> None:
        """Sends an admitted sequence back to its place in the queue. The cache keeps its pages while it can."""
        self._release(seq)
        self._admission.waiting.add(seq)
        self.num_preemptions += 1

    def _plan_prefills(
        self,
        decodes: list[DecodeRow],
        samplers: dict[int, Sequence],
        prefixes: list[CachedPrefix],
        kept: list[KeptState],
    ) -> list[PrefillChunk]:
        """Chunks of known tokens: of the sequence in prefill, then of those newly admitted, while tokens are left.

        Sequences of which a single token is left have a row more in `decodes`.
        """
        limits, num_decodes = self.limits, len(decodes)
        chunks: list[PrefillChunk] = []
        seq = self._prefilling
        if seq is not None and seq.num_computed >= seq.num_device:
            return chunks  # it has steps of its own
        num_waiting = len(self._admission.waiting) + len(self._admission.ready) + (seq is not None)
        limit = mixed_limit(limits, num_decodes, num_waiting) if num_decodes else limits.max_step_tokens
        num_left = limit - num_decodes
        if seq is None:
            seq = self._admit(prefixes)
        # There is a token left for it: it has no decode row, so there are fewer of these than max_mixed_tokens.
        while seq is not None:
            if seq.num_computed >= seq.num_device:
                self._prefilling = seq
                break
            if seq.has_last_token_only:
                decodes.append(seq.take_last_token())
                samplers[decodes[-1].slot] = seq
                num_left -= 1
                seq = self._admit(prefixes) if num_left else None
                continue
            chunk = seq.take_chunk(num_left)
            chunks.append(chunk)
            if chunk.samples:
                samplers[chunk.slot] = seq
            self._prefilling = seq if seq.num_computed < seq.prefill_end else None
            if limits.prefix_caching and seq.is_cacheable:
                salt, end = seq.request.cache_salt, seq.num_computed
                filled = range(chunk.start // limits.page_size, end // limits.page_size)
                self.cache.prefix.insert(salt, seq.tokens, seq.pages, filled, self.num_steps)
                if end in seq.cuts:
                    place = self.cache.prefix.keep_state(salt, seq.tokens[:end], self.num_steps)
                    kept += [] if place is None else [KeptState(chunk.slot, place)]
            num_left -= len(chunk.token_ids)
            seq = self._admit(prefixes) if num_left and self._prefilling is None else None
        return chunks

    def _admit(self, prefixes: list[CachedPrefix]) -> Sequence | None:
        """A sequence that now runs, if there is one and room for it."""
        num_held = self.num_running
        per_step = min(self.limits.max_step_tokens, mixed_limit(self.limits, num_held, 0) - num_held)
        seq = self._admission.next(self._running, per_step, self.num_steps, prefixes)
        if seq is not None:
            bisect.insort(self._running, seq, key=order_key)
        return seq

    def _release(self, seq: Sequence) -> array[int]:
        """Frees slot and pages of an admitted sequence; safe while steps that use them are in flight (see the package).

        Returns the tokens that it leaves to the cache.
        """
        tokens = self._admission.take_back(seq)
        if seq in self._running:
            self._running.remove(seq)
        if seq is self._prefilling:
            self._prefilling = None
        if not (self.limits.prefix_caching and seq.is_cacheable):
            tokens = tokens[:0]
        self.cache.prefix.release(seq.request.cache_salt, tokens, seq.release(), self.num_steps - 1)
        if (place := seq.state) is not None:  # with a token that the host does not know it is of no use
            known, seq.state = tokens[: seq.state_end * (seq.state_end <= len(tokens))], None
            self.cache.prefix.leave_state(seq.request.cache_salt, known, place, seq.state_step)
        return tokens

    def _remove(self, seq: Sequence) -> None:
        """Forgets a sequence that has ended, be it running or waiting."""
        del self._sequences[seq.request_id]
        was_uncompiled = self._constraints.remove(seq)
        if seq.slot is None:
            if not was_uncompiled:
                self._admission.waiting.remove(seq)
            return
        tokens = self._release(seq)
        if seq.request.session_id and tokens:
            self.cache.sessions.update(seq.request.session_id, seq.request.cache_salt, tokens)
