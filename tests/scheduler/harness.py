"""Scheduler and fake device joined as the engine joins them."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Container
from itertools import accumulate
from typing import Any

from jaxinfer.scheduler.plan import StepPlan, StepResult, Transferred
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.scheduler.sessions import Outcome
from jaxinfer.types import FinishReason, InvalidRequest, Request, TokenEvent, UnknownSession
from tests.scheduler.fake_device import VOCAB, FakeDevice, make_limits, run_alone


def random_times(rng: random.Random, num_seqs: int, num_tokens: int) -> dict[str, dict[int, float]]:
    """Of a scheduler's limits: times of steps of some sizes, up to those that hold so much. A larger takes no less."""

    def times(most: int) -> dict[int, float]:
        sizes = sorted({most, *(rng.randint(1, most) for _ in range(rng.randint(0, 6)))})
        steps_ms = (rng.choice([0.0, 0.3, 1.0, 4.0]) * rng.random() for _ in sizes)
        return dict(zip(sizes, accumulate(steps_ms, initial=3.0), strict=False))

    return {"mixed_ms": times(num_tokens), "decode_ms": times(num_seqs)}


class Harness:
    """Scheduler and device joined as the engine joins them: plan n+1 is made before result n is applied.

    Transfers end some turns later, in any order.
    """

    def __init__(self, *, seed: int = 0, damaged_share: float = 0.0, **changes: Any):
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
