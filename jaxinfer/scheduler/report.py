"""What a scheduler holds: as text for a log, read when a step hangs or nothing can be planned; and whether it fits."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from jaxinfer.scheduler.pages import PagePool
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.types import EngineStats

if TYPE_CHECKING:
    from jaxinfer.scheduler.scheduler import Scheduler

MAX_WAITING = 16
"""Sequences of the queue that are named; those that run are all named."""


def describe(
    pool: PagePool,
    running: Collection[Sequence],
    waiting: Collection[Sequence],
    flights: Mapping[int, Collection[int]],
) -> str:
    """A line for the whole, one for each plan in flight (its step, and the slots that it samples for), one for each
    sequence that runs, and one for each of the first that wait.
    """
    lines = [
        f"{len(running)} sequences run, {len(waiting)} wait; {pool.num_used} of {pool.num_pages} pages are held, "
        f"{pool.num_cached} cached"
    ]
    lines += [f"step {step} is in flight, and samples for slots {[*slots]}" for step, slots in flights.items()]
    lines += [f"runs: {_line(seq)}" for seq in running]
    lines += [f"waits: {_line(seq)}" for seq in itertools.islice(waiting, MAX_WAITING)]
    if len(waiting) > MAX_WAITING:
        lines.append(f"{len(waiting) - MAX_WAITING} more wait")
    return "\n".join(lines)


def stats(schedulers: Iterable[Scheduler], num_steps: int) -> EngineStats:
    """What the schedulers of an engine know of its counters, of all groups together but for its steps."""
    found = [dataclasses.asdict(_stats(scheduler)) for scheduler in schedulers]
    total = {name: sum(each[name] for each in found) for name in found[0]}
    return EngineStats(**total | {"num_steps": num_steps})


def _stats(s: Scheduler) -> EngineStats:
    cache = s.cache
    return EngineStats(
        num_running=s.num_running,
        num_waiting=s.num_waiting,
        num_pages_used=cache.pool.num_used,
        num_pages_cached=cache.pool.num_cached,
        num_pages=cache.pool.num_pages,
        num_host_pages_used=cache.host.num_pages_used,
        num_host_pages=cache.host.num_pages,
        num_disk_pages_used=cache.disk.num_used,
        num_restoring=s.num_restoring,
        num_sessions=len(cache.sessions),
        num_offloaded_pages=cache.tiers.num_offloaded,
        num_restored_pages=cache.prefix.num_restored,
        prompt_tokens=s.prompt_tokens,
        cached_prompt_tokens=s.cached_prompt_tokens,
        num_evictions=cache.prefix.num_evictions,
        generation_tokens=s.generation_tokens,
        num_preemptions=s.num_preemptions,
    )


def _line(seq: Sequence) -> str:
    num_output = len(seq.tokens) - seq.prompt_len
    return (
        f"{seq.request_id!r}, slot {seq.slot}, {len(seq.pages)} pages; {seq.prompt_len} tokens of prompt, {num_output} "
        f"of {seq.max_output} of output; {seq.num_computed} positions planned, {seq.num_in_flight} tokens in flight"
    )
