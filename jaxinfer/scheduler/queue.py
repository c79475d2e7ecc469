"""WaitingQueue: who is looked at first, and how often others may go before those who came earlier."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import islice

from jaxinfer.scheduler.sequence import Sequence

MAX_OVERTAKEN = 32
"""Admissions of requests that came later, while one waits. After these it is looked at first, and none passes it."""


class WaitingQueue:
    """Sequences that wait: by priority, then first come, first served.

    A request may be overtaken by later ones, for a better priority or because it needs more pages than are free now:
    by MAX_OVERTAKEN of them. So a stream of light or urgent requests cannot hold up a heavy or patient one for ever,
    and until then the heavy one holds up nobody.
    """

    def __init__(self) -> None:
        self._order: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)

    def first(self, num: int) -> list[Sequence]:
        """The first `num`."""
        return list(islice(self._order, num))

    def add(self, seq: Sequence) -> None:
        """Puts it in its place: one that was preempted has that of its arrival."""
        bisect.insort(self._order, seq, key=order_key)

    def remove(self, seq: Sequence) -> None:
        """It waits no more, and was not admitted."""
        del self._order[self._index(seq)]

    def admit(self, seq: Sequence) -> None:
        """It waits no more: those that came before it and wait on are overtaken."""
        i = self._index(seq)
        del self._order[i]
        if not i and self._order and order_key(self._order[-1])[:2] == order_key(seq)[:2]:
            return  # all are of its kind, and came later
        changed = False
        for other in self._order:
            if other.arrival < seq.arrival:
                other.num_overtaken += 1
                changed |= is_overtaken(other)
        if changed:
            self._order.sort(key=order_key)

    def _index(self, seq: Sequence) -> int:
        if self._order[0] is seq:  # nearly always
            return 0
        i = bisect.bisect_left(self._order, order_key(seq), key=order_key)
        assert self._order[i] is seq
        return i


def is_overtaken(seq: Sequence) -> bool:
    """Whether nobody that came later may be admitted before it any more."""
    return seq.num_overtaken >= MAX_OVERTAKEN


def order_key(seq: Sequence) -> tuple[bool, int, int]:
    """Who goes first: the lower. It gets lower while a sequence waits, and stays as it is while it runs."""
    if is_overtaken(seq):
        return False, 0, seq.arrival
    return True, seq.request.priority, seq.arrival
