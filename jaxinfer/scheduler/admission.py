"""Admission: who waits, for a place or for pages to arrive, and who may run next."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

from jaxinfer.config import SchedulerLimits
from jaxinfer.scheduler.kv_cache import KvCache
from jaxinfer.scheduler.plan import CachedPrefix, Transferred
from jaxinfer.scheduler.prefix import MISS, Hit
from jaxinfer.scheduler.queue import WaitingQueue, is_overtaken
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.scheduler.step_limit import cut_limit, mixed_limit, prompt_limit

MAX_REFUSED = 8
"""Sequences that wait on, having been looked at, before no more are looked at for a plan."""


class Admission:
    """Owner of the queue, of the free slots, and of the sequences that have been given both slot and pages but do not
    run yet. A sequence whose pages come from the host holds up nobody: others are admitted meanwhile.
    """

    def __init__(self, limits: SchedulerLimits, cache: KvCache):
        self.limits = limits
        self.waiting = WaitingQueue()
        self.restoring: list[Sequence] = []  # wait for pages to arrive
        self.ready: deque[Sequence] = deque()  # their pages have arrived
        self.free_slots = list(range(limits.max_num_seqs - 1, -1, -1))  # a stack: slot 0 is given out first
        self.prompt_tokens = 0  # of admitted requests, each counted once
        self.cached_prompt_tokens = 0  # of these, in the cache already
        self._cache = cache

    def __iter__(self) -> Iterator[Sequence]:
        """Those that have slot and pages."""
        return chain(self.ready, self.restoring)

    def __len__(self) -> int:
        return len(self.ready) + len(self.restoring)

    def transferred(self, done: Transferred) -> None:
        """A transfer has ended."""
        for seq in tuple(self.restoring):
            seq.tickets.discard(done.ticket)
            if not seq.tickets:
                self.restoring.remove(seq)
                self.ready.append(seq)
        for seq in self.waiting:
            seq.fetching.discard(done.ticket)

    def step_limit(self, num_decodes: int, begun: Sequence | None) -> int:
        """Tokens of a step, its `num_decodes` decode rows included. begun: who is in the middle of its prompt."""
        limits = self.limits
        num_waiting = len(self.waiting) + len(self.ready) + (begun is not None)
        limit = mixed_limit(limits, num_decodes, num_waiting) if num_decodes else prompt_limit(limits, num_waiting)
        if not limits.mixed_ms or not num_waiting:
            return limit
        num_begun = 0 if begun is None else begun.chunk_end - begun.num_computed
        total, most = num_begun, limit - num_decodes
        if begun is None or begun.chunk_end == begun.prefill_end:  # else nobody has tokens in this step behind it
            total += self._count_tokens(most - total)
        return cut_limit(limits, limit, num_decodes, total, num_begun)

    def _count_tokens(self, most: int) -> int:
        """Tokens of prompts of those who may run next; no more are looked at once they have `most`.

        Those that wait count whole, whatever the cache has for them, and whether there are pages or not unless they
        were refused for that.
        """
        total = sum(seq.chunk_end - seq.num_computed for seq in self.ready)
        for seq in islice(self.waiting, len(self.free_slots)):
            if total >= most:
                break
            if self._must_wait(seq):
                if is_overtaken(seq) or seq.was_admitted:
                    break
                continue
            total += len(seq.tokens)
        return total

    def next(self, running: list[Sequence], per_step: int, step: int, prefixes: list[CachedPrefix]) -> Sequence | None:
        """A sequence that can run, with slot and pages; None if there is none.

        running: those that hold pages besides, of whose prompts a step computes at least `per_step` tokens; step: the
        plan's number. Adds to `prefixes` what of the newly admitted is in the cache. If nothing runs and nothing is to
        arrive, every page is free and nothing is kept for others, so the first of the queue is admitted.
        """
        if self.ready:
            return self.ready.popleft()
        num_refused = 0
        for seq in self.waiting.first(len(self.free_slots) + MAX_REFUSED):
            if not self.free_slots or num_refused == MAX_REFUSED:
                break
            if (hit := self._admits(seq, running, per_step, step)) is None:
                if is_overtaken(seq) or seq.was_admitted:
                    break  # one that was preempted is not passed: its pages would go to the others
                num_refused += 1
                continue
            self._give(seq, hit, prefixes)
            if not seq.tickets:
                return seq
            self.restoring.append(seq)
        return None

    def take_back(self, seq: Sequence) -> array[int]:
        """Takes the slot of a sequence that runs or is to run. Returns the tokens that are in its pages."""
        assert seq.slot is not None
        self.free_slots.append(seq.slot)
        tokens = seq.known_in_cache()
        for waits in (self.restoring, self.ready):
            if seq in waits:
                waits.remove(seq)
                # It has computed nothing: of what it was given, the full pages are the cache's anyway.
                return tokens[: len(tokens) // self.limits.page_size * self.limits.page_size]
        return tokens

    def _admits(self, seq: Sequence, running: list[Sequence], per_step: int, step: int) -> Hit | None:
        """What the cache has for a sequence that waits; None if there is no room for it now."""
        pool = self._cache.pool
        fills_pool = len(seq.tokens) >= seq.num_device  # then it has to be alone, even if it shares all pages
        if self._must_wait(seq) or (fills_pool and pool.num_used):
            return None
        now = self._cache.state
        hit = self._find(seq, step)
        if hit.fetched and not seq.was_fetched:
            seq.was_fetched = True
            seq.fetching = self._cache.fetch(hit.fetched)
            if seq.fetching:
                return None
            hit = self._find(seq, step)  # to make room for what is not fetched may have cost some of it
        known = len(seq.tokens)
        num_needed = seq.num_pages(min(known + 1, seq.max_computed)) - len(hit.pages)
        num_spare = pool.num_free - hit.num_unheld - num_needed
        if num_spare < 0 or num_spare < self._num_pages_until_decode(known - hit.num_tokens, running, per_step):
            seq.refused = now
            return None
        return hit

    def _must_wait(self, seq: Sequence) -> bool:
        """Whether it cannot be admitted now, as far as is known without looking into the cache."""
        if seq.num_in_flight or seq.fetching:
            return True
        # To match 100,000 tokens takes milliseconds: not in every step in which nothing has changed for the better.
        now, before = self._cache.state, seq.refused
        return self.limits.prefix_caching and before is not None and before[0] >= now[0] and before[1:] == now[1:]

    def _find(self, seq: Sequence, step: int) -> Hit:
        """What the cache has of its known tokens but the last: that one is computed, as a token is sampled from it."""
        if not self.limits.prefix_caching or seq.is_suspect or seq.is_to_score:
            return MISS
        return self._cache.find(seq.request.cache_salt, seq.tokens[: min(len(seq.tokens) - 1, seq.num_device)], step)

    def _give(self, seq: Sequence, hit: Hit, prefixes: list[CachedPrefix]) -> None:
        """Gives a sequence a slot and the pages of its known tokens."""
        self.waiting.admit(seq)
        if not seq.was_admitted:
            self.prompt_tokens += seq.prompt_len
            self.cached_prompt_tokens += hit.num_tokens
        slot = self.free_slots.pop()
        grant = self._cache.take(hit, seq.num_pages(len(seq.tokens)) - len(hit.pages))
        seq.admit(slot, grant.pages, hit.num_tokens, grant.tickets)
        if interval := self._cache.states.interval:
            ends = {end // interval * interval for end in (hit.num_alike, len(seq.tokens) - 1)}
            seq.cuts = tuple(end for end in ends if end > hit.num_tokens and seq.is_cacheable)
        if hit.num_tokens:
            state = None if hit.last is None else hit.last.state
            last = seq.last_token() if seq.has_last_token_only else None
            prefixes.append(CachedPrefix(slot, grant.pages[: seq.num_pages(hit.num_tokens)], hit.source, state, last))

    def _num_pages_until_decode(self, num_tokens: int, running: list[Sequence], per_step: int) -> int:
        """Most pages that the others take before a newcomer has computed its `num_tokens` and decodes.

        With these kept free, no admission is undone before it gave a token and had a decode row, but for those that
        have to wait for pages to arrive. Keeping fewer would compute prompts for nothing; keeping a page for each
        running sequence would leave memory idle, since only one in `page_size` takes a page in a step. The first chunk
        has at least 1 token, later ones what the decode rows leave; nobody else is admitted before the prompt is done.
        Sequences that end meanwhile only free pages.
        """
        num_steps = -(-(num_tokens - 1) // per_step) + 1
        total = 0
        for seq in chain(running, self):
            end = min(max(seq.num_computed, seq.prefill_end) + num_steps, seq.max_computed)
            total += seq.num_pages(end) - len(seq.pages)
        return total
