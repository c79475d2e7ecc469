"""What a scheduler holds: as text for a log, read when a step hangs or nothing can be planned; and whether it fits."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

from jaxinfer.config import SchedulerLimits
from jaxinfer.scheduler.admission import Admission
from jaxinfer.scheduler.pages import PagePool
from jaxinfer.scheduler.queue import order_key
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


def check(
    limits: SchedulerLimits,
    sequences: Mapping[str, Sequence],
    running: list[Sequence],
    prefilling: Sequence | None,
    admission: Admission,
    samplers: Iterable[Mapping[int, Sequence]],
) -> None:
    """Raises RuntimeError unless slots, queues and counts agree. samplers: of each plan in flight, by slot."""
    admitted, samplers = [*running, *admission], list(samplers)
    held = [seq.slot for seq in admitted]
    if sorted([*admission.free_slots, *(-1 if slot is None else slot for slot in held)]) != [
        *range(limits.max_num_seqs)
    ]:
        raise RuntimeError(f"slots {held} are held and {admission.free_slots} free; each must be there once")
    if {id(seq) for seq in sequences.values()} != {id(seq) for seq in (*admitted, *admission.waiting)}:
        raise RuntimeError("the sequences by id are not those that run or wait")
    for order in (running, list(admission.waiting)):
        if order != sorted(order, key=order_key):
            raise RuntimeError(f"sequences {[seq.request_id for seq in order]} are not in order")
    for seq in sequences.values():
        seq.check_integrity(sum(other is seq for rows in samplers for other in rows.values()))
    for seq in running:
        if seq.num_computed < seq.prefill_end and seq is not prefilling:
            raise RuntimeError(f"{seq.request_id!r} is in prefill, and is not the one whose turn it is")
    for seq in admitted:
        if bool(seq.tickets) != (seq in admission.restoring):
            raise RuntimeError(f"{seq.request_id!r} waits for transfers {seq.tickets}, and is in another list")
