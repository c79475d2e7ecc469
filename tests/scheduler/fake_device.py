"""A device without arrays: pages hold token ids, and a "model" hashes the context that it reads back through them.

Beside each token lies a hash of the salt and of all tokens before it, as keys and values depend on these. A row that is
told a wrong page, position or start, or shares a page that it should not, reads another context than its own: found out
at once, whatever it would sample from it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Container, Mapping
from typing import Any

from jaxinfer.config import SchedulerLimits
from jaxinfer.scheduler.plan import (
    CachedPrefix,
    DecodeRow,
    Delete,
    DeleteSession,
    DiskPage,
    Fetch,
    LongChunk,
    Offload,
    PrefillChunk,
    Restore,
    Save,
    SaveSession,
    StepPlan,
    StepResult,
    Transferred,
)
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sessions import Outcome
from jaxinfer.types import FinishReason, InvalidRequest, Request, TokenEvent, TokenLogprobs, UnknownSession

VOCAB = 13  # few ids, so that stop ids are drawn often
TOP = tuple((token, -1.0 - token) for token in range(8))


def make_limits(**changes: int | None) -> SchedulerLimits:
    """Small limits: 4 slots, 40 pages of 4 tokens, steps of 16 tokens, or 8 beside decode rows."""
    limits = SchedulerLimits(
        max_model_len=64,
        page_size=4,
        num_pages=40,
        max_num_seqs=4,
        max_step_tokens=16,
        max_mixed_tokens=8,
        max_waiting=1000,
    )
    return dataclasses.replace(limits, **changes)


def sample(context: list[int], request: Request, prompt_len: int) -> int:
    """The next token: a function of the context alone, stop ids masked before min_tokens as a device does."""
    token = hash(tuple(context)) % VOCAB
    while len(context) - prompt_len < request.min_tokens and token in request.stop_ids:
        token = (token + 1) % VOCAB
    return token


def run_alone(request: Request, max_model_len: int) -> tuple[list[int], FinishReason, int | None]:
    """Output tokens, finish reason and stop id of a request that shares nothing with anyone."""
    context, prompt_len = list(request.prompt_ids), len(request.prompt_ids)
    while True:
        token = sample(context, request, prompt_len)
        context.append(token)
        output = context[prompt_len:]
        if token in request.stop_ids and len(output) > request.min_tokens:
            return output, FinishReason.STOP, token
        if len(output) == request.max_tokens or len(context) == max_model_len:
            return output, FinishReason.LENGTH, None


@dataclasses.dataclass
class SlotState:
    """What a device keeps by slot between steps."""

    request: Request
    prompt_len: int
    history: list[int]  # tokens told or sampled
    table: list[int] = dataclasses.field(default_factory=list)
    num_written: int = 0
    last_token: int | None = None


Page = dict[int, tuple[int, int]]
"""By offset, what FakeDevice.cells has of a page."""


class FakeDevice:
    """Runs plans in order. The prefixes of a plan come before its step, in which all rows write before any reads.

    Transfers with a ticket end when `finish` is called; until then nothing of what they bring is there.
    """

    def __init__(self, limits: SchedulerLimits):
        self.limits = limits
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> token id, hash of all up to it
        self.slots: dict[int, SlotState] = {}
        self.tables: dict[int, CachedPrefix] = {}  # by slot, of those whose first chunk is still to come
        self.frames: dict[int, list[Page]] = {}
        self.disk: dict[str, tuple[DiskPage, Page]] = {}
        self.manifests: dict[str, Mapping[str, Any]] = {}  # by session
        self.behind: dict[int, tuple[int, int]] = {}  # position -> what cells has, of the context that outgrew the pool
        self.pending: dict[int, list[tuple[object, object]]] = {}  # by ticket: what is still to be done

    def _page(self, page: int) -> Page:
        return {i: cell for i in range(self.limits.page_size) if (cell := self.cells.get((page, i))) is not None}

    def _begin_transfers(self, plan: StepPlan) -> list[int]:
        """Returns the pages that restored ones will be written to."""
        targets: list[int] = []
        for transfer in plan.transfers:
            match transfer:
                case Offload(frame, pages, ticket):
                    if ticket is not None:
                        self.pending[ticket] = []
                    assert 1 <= len(pages) <= self.limits.frame_pages and 0 <= frame < self.limits.num_frames
                    assert len(set(pages)) == len(pages) and 0 not in pages
                    self.frames[frame] = [self._page(page) for page in pages]
                case Restore(ticket, frame, places):
                    found = [(page, self.frames[frame][index]) for index, page in places]
                    self.pending.setdefault(ticket, []).extend(found)
                    targets += (page for _, page in places)
                case Save(ticket, frame, pages):
                    self.pending[ticket] = [(page.key, {}) for _, page in pages]
                    for index, page in pages:
                        self.disk[page.key] = page, self.frames[frame][index]
                    assert len(self.disk) <= self.limits.num_disk_pages
                case SaveSession(ticket, session_id, manifest):
                    self.pending[ticket] = [(session_id, {})]
                    self.manifests[session_id] = manifest
                case DeleteSession(session_id):
                    self.manifests.pop(session_id, None)
                case Fetch(ticket, frame, pages):
                    assert len(pages) <= self.limits.frame_pages
                    self.frames[frame] = [{} for _ in pages]
                    found = []
                    for i, page in enumerate(pages):
                        stored, content = self.disk[page.key]
                        assert stored == page
                        found.append(((frame, i, page.key), content))
                    self.pending.setdefault(ticket, []).extend(found)
                case Delete(pages):
                    for page in pages:
                        del self.disk[page.key]
        return targets

    def reset(self) -> list[int]:
        """Loses what is on the device; returns the transfers that had to bring something there."""
        lost = [ticket for ticket, parts in self.pending.items() if any(isinstance(to, int) for to, _ in parts)]
        for ticket in lost:
            del self.pending[ticket]
        self.cells.clear()
        self.behind.clear()
        self.slots.clear()
        self.tables.clear()
        return lost

    def finish(self, ticket: int, *, fails: bool = False) -> Transferred:
        """Ends a transfer. fails: what it reads from disk is damaged, or not written, from the second page on."""
        failed: set[str] = set()
        for i, (target, content) in enumerate(self.pending.pop(ticket)):
            assert isinstance(content, dict)
            if isinstance(target, int):
                for offset, cell in content.items():
                    self.cells[target, offset] = cell
                continue
            if isinstance(target, str):
                if fails and (i or target in self.manifests):
                    failed.add(target)
                continue
            assert isinstance(target, tuple)
            frame, index, key = target
            if fails and i:
                failed.add(key)
            else:
                self.frames[frame][index] = content
        return Transferred(ticket, frozenset(failed))

    def run(self, plan: StepPlan) -> StepResult:
        arriving = self._begin_transfers(plan)
        asked = {row.slot for row in plan.decodes if row.logprobs}
        asked |= {chunk.slot for chunk in plan.chunks if chunk.request.logprobs is not None}
        targets: set[int] = set()
        for prefix in plan.prefixes:
            if prefix.copied_from is not None:
                assert prefix.copied_from not in targets, f"step {plan.step} copies page {prefix.copied_from} on"
                targets.add(prefix.pages[-1])
                self._copy(prefix.copied_from, prefix.pages[-1])
            self.tables[prefix.slot] = prefix
            if (last := prefix.last) is not None:
                assert (prefix.slot, last.token_id) == (last.slot, last.history[-1])
                state = SlotState(last.request, last.prompt_len, list(last.history), list(prefix.pages))
                state.num_written, state.last_token = len(last.history) - 1, last.token_id
                self.slots[prefix.slot] = state
                assert len(state.table) == -(-state.num_written // self.limits.page_size)
        for page in arriving:
            for offset in range(self.limits.page_size):
                self.cells.pop((page, offset), None)
        # Decode rows last: the first of a sequence may follow pages that a chunk of this step fills.
        rows = [self._write_chunk(chunk) for chunk in plan.prefills]
        rows += [self._write_decode(row) for row in plan.decodes]
        if plan.long is not None:
            rows.append(self._write_long(plan.long))
        self._check_written_pages(plan)
        tokens = {}
        for slot, samples in rows:
            state = self.slots[slot]
            context = self._read(state)
            if samples:
                tokens[slot] = state.last_token = sample(context, state.request, state.prompt_len)
                state.history.append(state.last_token)
        return StepResult(plan.step, tokens, {slot: TokenLogprobs(-0.5, TOP) for slot in tokens if slot in asked})

    def _copy(self, source: int, target: int) -> None:
        for offset in range(self.limits.page_size):
            cell = self.cells.get((source, offset))
            if cell is not None:
                self.cells[target, offset] = cell

    def _check_written_pages(self, plan: StepPlan) -> None:
        """A page that a row writes to is nobody else's, unless they have all of it before their own tokens."""
        size = self.limits.page_size
        starts = [(row.slot, row.position) for row in plan.decodes] + [(c.slot, c.start) for c in plan.chunks]
        uses = [(page, i, slot, start) for slot, start in starts for i, page in enumerate(self.slots[slot].table)]
        writers = {page: slot for page, i, slot, start in uses if (i + 1) * size > start}
        for page, i, slot, start in uses:
            assert writers.get(page, slot) == slot or (i + 1) * size <= start, (
                f"step {plan.step} has two owners of {page}"
            )

    def _read(self, state: SlotState) -> list[int]:
        """All tokens of a slot, each computed from just those before it."""
        context, expected = [], hash(state.request.cache_salt)
        for position in range(state.num_written):
            token, found = self._cell(state, position)
            expected = hash((expected, token))
            assert found == expected, f"position {position} of {state.request.request_id} is of another context"
            context.append(token)
        assert context == state.history[: state.num_written]
        return context

    def _write(self, state: SlotState, position: int, token: int) -> None:
        assert position == state.num_written, f"position {position} written after {state.num_written} others"
        size = self.limits.page_size
        before = self._cell(state, position - 1)[1] if position else hash(state.request.cache_salt)
        cell = token, hash((before, token))
        if position < self.limits.num_pages * size:
            page = state.table[position // size]
            assert 1 <= page <= self.limits.num_pages
            self.cells[page, position % size] = cell
        else:
            assert position < self.limits.num_pages * size + self.limits.long_tokens
            self.behind[position] = cell
        state.num_written += 1

    def _cell(self, state: SlotState, position: int) -> tuple[int, int]:
        size = self.limits.page_size
        if position >= self.limits.num_pages * size:
            return self.behind[position]
        return self.cells[state.table[position // size], position % size]

    def _write_long(self, chunk: LongChunk) -> tuple[int, bool]:
        if chunk.history is not None:
            prefix = self.tables.pop(chunk.slot)
            assert chunk.start == len(prefix.pages) * self.limits.page_size
            history = list(chunk.history)
            self.slots[chunk.slot] = SlotState(chunk.request, chunk.prompt_len, history, [*prefix.pages])
            self.slots[chunk.slot].num_written = chunk.start
        state = self.slots[chunk.slot]
        assert chunk.num_device_tokens == self.limits.num_pages * self.limits.page_size <= chunk.start
        assert chunk.num_tokens <= self.limits.long_chunk
        known = list(chunk.token_ids)
        assert known == state.history[chunk.start : chunk.start + len(known)] and (
            known or state.last_token is not None
        )
        for i, token in enumerate(known or [state.last_token or 0]):
            self._write(state, chunk.start + i, token)
        assert chunk.samples == (state.num_written == len(state.history))
        return chunk.slot, chunk.samples

    def _write_decode(self, row: DecodeRow) -> tuple[int, bool]:
        state = self.slots[row.slot]
        if row.new_page is not None:
            assert row.position == len(state.table) * self.limits.page_size
            state.table.append(row.new_page)
        assert state.last_token is not None, f"slot {row.slot} decodes, but nothing was sampled in it"
        self._write(state, row.position, state.last_token)
        return row.slot, True

    def _write_chunk(self, chunk: PrefillChunk) -> tuple[int, bool]:
        size = self.limits.page_size
        if chunk.history is not None:
            prefix = self.tables.pop(chunk.slot, None) if chunk.start else None
            pages = [] if prefix is None else list(prefix.pages)
            assert len(pages) == -(-chunk.start // size)
            assert prefix is None or prefix.copied_from is None or chunk.start % size
            self.slots[chunk.slot] = SlotState(
                chunk.request, chunk.prompt_len, list(chunk.history), pages, num_written=chunk.start
            )
        state = self.slots[chunk.slot]
        assert (state.request, state.prompt_len) == (chunk.request, chunk.prompt_len)
        assert chunk.first_new_page == len(state.table)
        state.table.extend(chunk.new_pages)
        assert chunk.token_ids, "a chunk has tokens"
        assert list(chunk.token_ids) == state.history[chunk.start : chunk.start + len(chunk.token_ids)]
        for i, token in enumerate(chunk.token_ids):
            self._write(state, chunk.start + i, token)
        assert chunk.samples == (state.num_written == len(state.history))
        return chunk.slot, chunk.samples


class Harness:
    """Scheduler and device joined as the engine joins them: plan n+1 is made before result n is applied.

    Transfers end some turns later, in any order.
    """

    def __init__(self, *, seed: int = 0, damaged_share: float = 0.0, **changes: int):
        self.rng = random.Random(seed)
        self.damaged_share = damaged_share  # of reads from disk
        self.limits = make_limits(**changes)
        self.scheduler = Scheduler(self.limits)
        self.device = FakeDevice(self.limits)
        self.results: deque[StepResult] = deque()
        self.requests: dict[str, Request] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self.plans: list[StepPlan] = []
        self.refused: Counter[str] = Counter()  # commands for sessions
        self.outcomes: list[Outcome] = []  # of saves
        self.begun: set[int] = set()  # slots whose sequences have had a row

    def submit(self, name: str, prompt_len: int = 5, **fields: object) -> Request:
        """A request whose prompt depends on its name and length alone; 4 tokens of output unless told."""
        prompt = [hash((*name.encode(), i)) % VOCAB for i in range(prompt_len)]
        request = Request(**{"request_id": name, "prompt_ids": prompt, "max_tokens": 4} | fields)  # pyright: ignore
        self.scheduler.submit(request)
        self.requests[name] = request
        self.events[name] = []
        return request

    def plan(self) -> StepPlan | None:
        """Makes a plan and launches it, if there is anything to plan."""
        plan = self.scheduler.next_plan()
        if plan is not None:
            fresh = {prefix.slot for prefix in plan.prefixes}
            decoding = ({row.slot for row in plan.decodes} & self.begun) - fresh
            limit = self.limits.max_mixed_tokens if decoding else self.limits.max_step_tokens
            limit = self.limits.long_chunk if plan.long else max(limit, len(plan.decodes))
            assert plan.num_tokens <= limit, f"step {plan.step} is over its token limit"
            self.begun -= fresh
            self.begun |= {row.slot for row in (*plan.decodes, *plan.chunks)}
            assert plan.long is None or not (plan.decodes or plan.prefills)
            slots = [row.slot for row in (*plan.decodes, *plan.chunks)]
            assert len(slots) == len(set(slots)) and set(slots) <= set(range(self.limits.max_num_seqs))
            assert plan.step == len(self.plans)
            self.plans.append(plan)
            result = self.device.run(plan)
            if plan.num_rows:
                self.results.append(result)
        self.scheduler.check_integrity()
        return plan

    def apply(self) -> list[TokenEvent]:
        events = self.scheduler.apply(self.results.popleft())
        self.scheduler.tidy()
        for event in events:
            self._record(event)
        self.scheduler.check_integrity()
        return events

    def finish(self, ticket: int) -> None:
        """Ends a transfer."""
        self.scheduler.transferred(self.device.finish(ticket, fails=self.rng.random() < self.damaged_share))
        self.scheduler.check_integrity()

    def lose_state(self, slots: Container[int]) -> list[TokenEvent]:
        """Reads a step that gave no token for these slots, where it sampled for them; all on the device is lost."""
        result = self.results.popleft()
        tokens = {slot: -1 if slot in slots else token for slot, token in result.token_ids.items()}
        self.results.clear()
        lost = self.device.reset()
        events = self.scheduler.lose_state(dataclasses.replace(result, token_ids=tokens), "lost")
        for event in events:
            self._record(event)
        for ticket in lost:
            self.scheduler.transferred(Transferred(ticket))
        self.scheduler.check_integrity()
        assert not self.scheduler.num_running and not self.scheduler.num_in_flight
        assert self.scheduler.cache.pool.num_empty == self.limits.num_pages
        return events

    def session(self, action: str, session_id: str) -> None:
        """Does something with a session: save, load or delete. What is not known or cannot be is no fault."""
        sessions = self.scheduler.cache.sessions
        try:
            {"save": sessions.save, "load": sessions.load, "delete": sessions.delete}[action](session_id)
        except (UnknownSession, InvalidRequest) as error:
            self.refused[str(error).split(";")[0]] += 1
        self.scheduler.check_integrity()

    def abort(self, name: str) -> TokenEvent | None:
        event = self.scheduler.abort(name)
        if event is not None:
            self._record(event)
        self.scheduler.check_integrity()
        return event

    def step(self) -> StepPlan | None:
        """One turn of the engine: launch a step, then read the one before it."""
        self.outcomes += self.scheduler.cache.sessions.take_outcomes()
        if len(self.results) == 2:
            self.apply()
        for ticket in [*self.device.pending]:
            if self.rng.random() < 0.4:
                self.finish(ticket)
        plan = self.plan()
        if plan is None and not self.results and self.device.pending:
            self.finish(self.rng.choice([*self.device.pending]))
            plan = self.plan()
        outcomes = self.scheduler.cache.sessions.take_outcomes()  # a save may fail as the plan is made
        self.outcomes += outcomes
        waits = self.results or self.device.pending or outcomes or not self.scheduler.has_work
        assert plan is not None or waits, "work is left, but nothing moves"
        if len(self.results) == 2 or (plan is None and self.results):
            self.apply()
        return plan

    def drain(self) -> None:
        """Runs until nothing is left, then checks what must hold of every request and of the pool."""
        for _ in range(10_000):
            if not self.scheduler.has_work and not self.results:
                break
            self.step()
        assert not self.scheduler.has_work
        assert self.scheduler.cache.pool.num_free == self.limits.num_pages
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        cache = self.scheduler.cache
        assert {node.key for node in cache._tree.nodes() if node.on_disk} == {*self.device.disk}
        saved = {one for one in self.session_ids if self._is_saved(one)}
        assert saved == {*self.device.manifests}
        for name in self.requests:
            self.check_output(name)

    def _is_saved(self, session_id: str) -> bool:
        try:
            return self.scheduler.cache.sessions.info(session_id).saved
        except UnknownSession:
            return False

    @property
    def session_ids(self) -> set[str]:
        return {request.session_id for request in self.requests.values()} - {""}

    def output(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.token_ids]

    def check_output(self, name: str) -> None:
        """The request ended once, with the tokens of a run alone (a prefix of them if it was aborted, or failed)."""
        *others, last = self.events[name]
        assert all(event.finish_reason is None for event in others)
        tokens, reason, stop_id = run_alone(self.requests[name], self.limits.max_model_len)
        if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert self.output(name) == tokens[: len(self.output(name))]
        else:
            assert (self.output(name), last.finish_reason, last.stop_id) == (tokens, reason, stop_id)

    def _record(self, event: TokenEvent) -> None:
        events = self.events[event.request_id]
        assert not events or events[-1].finish_reason is None, f"{event.request_id} has an event after its last"
        assert (event.logprobs is None) == (self.requests[event.request_id].logprobs is None or not event.token_ids)
        events.append(event)
