"""What a scheduler holds: as text for a log, read when a step hangs or nothing can be planned; and whether it fits."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from jaxinfer.scheduler.pages import PagePool
from jaxinfer.scheduler.sequence import Sequence

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


def _line(seq: Sequence) -> str:
    num_output = len(seq.tokens) - seq.prompt_len
    return (
        f"{seq.request_id!r}, slot {seq.slot}, {len(seq.pages)} pages; {seq.prompt_len} tokens of prompt, {num_output} "
        f"of {seq.max_output} of output; {seq.num_computed} positions planned, {seq.num_in_flight} tokens in flight"
    )
