"""Whether pages, slots, queues and counts of a scheduler agree. Tests ask after every step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxinfer.scheduler import sequence
from jaxinfer.scheduler.admission import Admission
from jaxinfer.scheduler.kv_cache import KvCache
from jaxinfer.scheduler.queue import order_key


class Held(NamedTuple):
    """Every sequence, by where it is."""

    running: Sequence[sequence.Sequence]
    admission: Admission
    uncompiled: Collection[sequence.Sequence]
    prefilling: sequence.Sequence | None


def check(
    cache: KvCache,
    held: Held,
    by_id: Mapping[str, sequence.Sequence],
    in_flight: Sequence[Mapping[int, sequence.Sequence]],
) -> None:
    """Raises PageError or RuntimeError unless all agree. in_flight: of each plan, the sequences by slot.

    O(pages + tokens).
    """
    admission = held.admission
    admitted = [*held.running, *admission]
    cache.check_integrity((seq.request.cache_salt, seq.known_in_cache(), seq.pages) for seq in admitted)
    cache.states.check_integrity(seq.state for seq in admitted if seq.state is not None)
    slots = [seq.slot for seq in admitted]
    if sorted([*admission.free_slots, *(-1 if slot is None else slot for slot in slots)]) != list(
        range(admission.limits.max_num_seqs)
    ):
        raise RuntimeError(f"slots {slots} are held and {admission.free_slots} free; each must be there once")
    if {id(seq) for seq in by_id.values()} != {id(seq) for seq in (*admitted, *admission.waiting, *held.uncompiled)}:
        raise RuntimeError("the sequences by id are not those that run or wait")
    for order in (held.running, list(admission.waiting)):
        if order != sorted(order, key=order_key):
            raise RuntimeError(f"sequences {[seq.request_id for seq in order]} are not in order")
    for seq in by_id.values():
        seq.check_integrity(sum(other is seq for samplers in in_flight for other in samplers.values()))
    for seq in held.running:
        if seq.num_computed < seq.prefill_end and seq is not held.prefilling:
            raise RuntimeError(f"{seq.request_id!r} is in prefill, and is not the one whose turn it is")
    for seq in admitted:
        if bool(seq.tickets) != (seq in admission.restoring):
            raise RuntimeError(f"{seq.request_id!r} waits for transfers {seq.tickets}, and is in another list")
        if bool(seq.request.grammar) != (seq.matcher is not None):
            raise RuntimeError(f"{seq.request_id!r} runs without its grammar, or with one that it did not ask for")
