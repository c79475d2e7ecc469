"""A device without arrays: pages hold token ids, and a "model" hashes the context that it reads back through them.

Beside each token lies a hash of the salt and of all tokens before it, as keys and values depend on these. A row that is
told a wrong page, position or start, or shares a page that it should not, reads another context than its own: found out
at once, whatever it would sample from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from jaxinfer.types import FinishReason, Request, TokenLogprobs

VOCAB = 13  # few ids, so that stop ids are drawn often
TOP = tuple((token, -1.0 - token) for token in range(8))


def make_limits(**changes: Any) -> SchedulerLimits:
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

    slot: int
    request: Request
    prompt_len: int
    history: list[int]  # tokens told or sampled
    table: list[int] = dataclasses.field(default_factory=list)
    num_written: int = 0
    last_token: int | None = None


Page = dict[int, tuple[int, int]]
"""By offset, what FakeDevice.cells has of a page."""


class SavedList(NamedTuple):
    """Where the list of a session's pages goes."""

    session_id: str
    keys: Sequence[str]


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
        self.unwritten: set[str] = set()  # keys of pages whose writing failed
        self.behind: dict[int, tuple[int, int]] = {}  # position -> what cells has, of the context that outgrew the pool
        self.recurrent: dict[int, tuple[int, int]] = {}  # by slot: tokens that its recurrent state has seen, their hash
        self.copies: dict[int, tuple[int, int]] = {}  # of these, by place
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
                        self.unwritten.discard(page.key)
                        self.disk[page.key] = page, self.frames[frame][index]
                    assert len(self.disk) <= self.limits.num_disk_pages
                case SaveSession(ticket, session_id, manifest, keys):
                    assert {*keys} <= {*self.disk}
                    self.pending[ticket] = [(SavedList(session_id, keys), manifest)]
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
        self.recurrent.clear()
        self.copies.clear()
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
                if fails and i:
                    failed.add(target)
                    self.unwritten.add(target)
                continue
            if isinstance(target, SavedList):
                if fails or not {*target.keys} <= {*self.disk} - self.unwritten:
                    failed.add(target.session_id)
                else:
                    self.manifests[target.session_id] = content
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
            assert (prefix.state is not None) == bool(self.limits.state_tokens)
            if prefix.state is not None:
                self.recurrent[prefix.slot] = self.copies[prefix.state]
            if (last := prefix.last) is not None:
                assert (prefix.slot, last.token_id) == (last.slot, last.history[-1])
                state = SlotState(last.slot, last.request, last.prompt_len, list(last.history), list(prefix.pages))
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
        assert len({place for _, place in plan.kept_states}) == len(plan.kept_states)
        for slot, place in plan.kept_states:
            assert 0 <= place < self.limits.num_states and self.recurrent[slot][0] % self.limits.state_tokens == 0
            self.copies[place] = self.recurrent[slot]
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
        if self.limits.state_tokens:
            found = self.recurrent[state.slot] if position else (0, before)
            assert found == (position, before), f"position {position} is computed with the state {found}"
            self.recurrent[state.slot] = position + 1, cell[1]
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
            self.slots[chunk.slot] = SlotState(chunk.slot, chunk.request, chunk.prompt_len, history, [*prefix.pages])
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
            history = list(chunk.history)
            state = SlotState(chunk.slot, chunk.request, chunk.prompt_len, history, pages, chunk.start)
            self.slots[chunk.slot] = state
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
