"""Groups: schedulers of groups of devices that have sequences, slots and pages of their own, and run steps together.

Each group is planned by a Scheduler that knows nothing of the others. A request goes to a group when it comes, and
stays there, where its pages are.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable

from jaxinfer.config import SchedulerLimits
from jaxinfer.scheduler.constraints import Masks, Prepare
from jaxinfer.scheduler.matching import Matcher
from jaxinfer.scheduler.plan import StepPlan, StepResult, Transferred
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.types import InvalidRequest, QueueFull, Request, TokenEvent

MAX_LEAD = 4
"""Requests by which a group may be ahead of the least busy one and still get those that begin alike. Without a limit a
prompt that all share would bring all requests to the group that computed it first."""
NO_ROWS = StepPlan(0, (), ())
"""Of a group that has nothing to compute while others do."""


def group_of(session_id: str, num_groups: int) -> int:
    """The group that has a session's pages."""
    return zlib.crc32(session_id.encode()) % num_groups


class Groups:
    """Does for several groups what a Scheduler does for one."""

    def __init__(self, limits: SchedulerLimits, num_groups: int):
        """limits: of each group, but for `max_waiting`, which is that of all."""
        self.limits = limits
        self.schedulers = tuple(Scheduler(limits) for _ in range(num_groups))
        self._owners: dict[str, Scheduler] = {}  # of unfinished requests, by id
        self._in_flight: deque[tuple[bool, ...]] = deque()  # of plans not applied, which groups have rows
        self.num_steps = 0  # planned so far, of all groups together

    @property
    def num_waiting(self) -> int:
        """In all groups."""
        return sum(scheduler.num_waiting for scheduler in self.schedulers)

    @property
    def has_work(self) -> bool:
        """Whether any group has."""
        return any(scheduler.has_work for scheduler in self.schedulers)

    def submit(self, request: Request) -> None:
        """Gives a request to a group. InvalidRequest if it can never run; QueueFull if too many wait, of all groups."""
        if request.request_id in self._owners:
            raise InvalidRequest(
                f"a request with id {request.request_id!r} is unfinished; ids must differ", param="request_id"
            )
        if (num_waiting := self.num_waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{num_waiting} requests wait already; the limit is {self.limits.max_waiting}")
        scheduler = self._choose(request)
        scheduler.submit(request)
        self._owners[request.request_id] = scheduler

    def _choose(self, request: Request) -> Scheduler:
        """A session's group follows from its name. Others: where the longest beginning of the prompt is cached, of the
        groups that are not too busy; then the least busy; then the first."""
        if request.session_id:
            return self.schedulers[group_of(request.session_id, len(self.schedulers))]
        self.tidy()
        loads = [scheduler.num_running + scheduler.num_waiting for scheduler in self.schedulers]
        free = [i for i, load in enumerate(loads) if load <= min(loads) + MAX_LEAD]
        return self.schedulers[min(free, key=lambda i: (-self._num_cached(i, request), loads[i], i))]

    def _num_cached(self, group: int, request: Request) -> int:
        """Tokens of the prompt, in whole pages: a part of one is no reason to wait."""
        scheduler = self.schedulers[group]
        num_tokens = scheduler.cache.find(request.cache_salt, request.prompt_ids, scheduler.num_steps).num_tokens
        return num_tokens // self.limits.page_size

    def constrain(self, request_id: str, matcher: Matcher) -> None:
        """See Scheduler."""
        if (scheduler := self._owners.get(request_id)) is not None:
            scheduler.constrain(request_id, matcher)

    def refuse(self, request_id: str, reason: str) -> list[TokenEvent]:
        """See Scheduler."""
        scheduler = self._owners.get(request_id)
        return [] if scheduler is None else self._told(scheduler.refuse(request_id, reason))

    def abort(self, request_id: str) -> TokenEvent | None:
        """See Scheduler."""
        scheduler = self._owners.pop(request_id, None)
        return None if scheduler is None else scheduler.abort(request_id)

    def next_plan(self) -> StepPlan | None:
        """The plans of all groups, as one; None if no group has one."""
        plans = [scheduler.next_plan() for scheduler in self.schedulers]
        if not any(plans):
            return None
        parts = tuple(plan or NO_ROWS for plan in plans)
        constrained = any(part.constrained for part in parts)
        step, self.num_steps = self.num_steps, self.num_steps + 1
        if any(part.num_rows for part in parts):
            self._in_flight.append(tuple(part.num_rows > 0 for part in parts))
        return StepPlan(step, (), (), constrained=constrained, groups=parts)

    def masks(self, prepare: Prepare = lambda _: None) -> Masks:
        """See Scheduler."""
        found = Masks([], [])
        for group, (scheduler, has_rows) in enumerate(zip(self.schedulers, self._in_flight[-1], strict=True)):
            if has_rows:
                masks = scheduler.masks(prepare)
                found.rows.extend(row._replace(group=group) for row in masks.rows)
                found.events.extend(self._told(masks.events))
        return found

    def apply(self, result: StepResult) -> list[TokenEvent]:
        """Takes in what a step sampled; see Scheduler."""
        had_rows = self._in_flight.popleft()
        events: list[TokenEvent] = []
        for scheduler, of_group, has_rows in zip(self.schedulers, result.groups, had_rows, strict=True):
            events += scheduler.apply(of_group) if has_rows else ()
        return self._told(events)

    def fail(self, reason: str, *, waiting_too: bool = False) -> list[TokenEvent]:
        """See Scheduler: what was on the devices is lost, of all groups."""
        self._in_flight.clear()
        events = [scheduler.fail(reason, waiting_too=waiting_too) for scheduler in self.schedulers]
        return self._told(event for of_group in events for event in of_group)

    def lose_state(self, result: StepResult, reason: str) -> list[TokenEvent]:
        """See Scheduler: the state of all groups is given up, whichever gave no token."""
        had_rows, events = self._in_flight[0], []
        for scheduler, of_group, has_rows in zip(self.schedulers, result.groups, had_rows, strict=True):
            events += scheduler.lose_state(of_group if has_rows else None, reason)
        self._in_flight.clear()
        return self._told(events)

    def _told(self, events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """These events; who has ended by them is forgotten."""
        events = list(events)
        for event in events:
            if event.finish_reason is not None:
                self._owners.pop(event.request_id, None)
        return events

    def transferred(self, done: Transferred) -> None:
        """Groups have no tiers behind them."""
        raise RuntimeError(f"transfer {done.ticket} has ended, but groups of devices have no host tier")

    def clear_prefix_cache(self) -> None:
        """See Scheduler."""
        for scheduler in self.schedulers:
            scheduler.clear_prefix_cache()

    def describe(self) -> str:
        """What the groups hold, in some lines for a log."""
        return "\n".join(f"group {i}: {scheduler.describe()}" for i, scheduler in enumerate(self.schedulers))

    def tidy(self) -> None:
        """See Scheduler."""
        for scheduler in self.schedulers:
            scheduler.tidy()

    def check_integrity(self) -> None:
        """Raises PageError or RuntimeError unless all agrees within each group."""
        for scheduler in self.schedulers:
            scheduler.check_integrity()
