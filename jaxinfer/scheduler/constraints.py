"""Constraints: the sequences that have to match a grammar, from its compilation to the masks of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxinfer.scheduler.matching import Matcher
from jaxinfer.scheduler.plan import TokenMask
from jaxinfer.scheduler.queue import WaitingQueue
from jaxinfer.scheduler.sequence import Sequence
from jaxinfer.types import TokenEvent

Prepare = Callable[[list[Matcher]], None]
"""Told whose masks will be asked for, so that they can be computed side by side."""


class Masks(NamedTuple):
    """Of the rows of a step that sample under a grammar."""

    rows: list[TokenMask]
    events: list[TokenEvent]  # the last ones of sequences whose grammar leaves nothing to sample


class Constraints:
    """Owner of the sequences whose grammar is not compiled yet: they are in no queue, and hold up nobody."""

    def __init__(self, waiting: WaitingQueue):
        self.uncompiled: dict[str, Sequence] = {}  # by request id
        self.num_sequences = 0  # unfinished ones with a grammar, compiled or not
        self._waiting = waiting

    def add(self, seq: Sequence) -> None:
        """Keeps one until its grammar is compiled."""
        self.uncompiled[seq.request_id] = seq
        self.num_sequences += 1

    def compiled(self, request_id: str, matcher: Matcher) -> None:
        """Queues one of those that are kept. Nothing for any other: it may have been aborted."""
        seq = self.uncompiled.pop(request_id, None)
        if seq is not None:
            seq.matcher = matcher
            self._waiting.add(seq)

    def remove(self, seq: Sequence) -> bool:
        """It has ended. Whether it was kept here."""
        self.num_sequences -= bool(seq.request.grammar)
        return self.uncompiled.pop(seq.request_id, None) is not None

    def concern(self, sequences: Iterable[Sequence]) -> bool:
        """Whether any of them has to match a grammar."""
        return self.num_sequences > 0 and any(seq.matcher is not None for seq in sequences)

    def masks(self, sequences: Iterable[Sequence], prepare: Prepare, ended: list[Sequence]) -> Masks:
        """Of those that match a grammar, every token of theirs being known. `ended` takes those that end here."""
        found = Masks([], [])
        matching = [seq for seq in sequences if seq.matcher is not None and not seq.finished]
        prepare([seq.matcher for seq in matching if seq.matcher is not None])
        for seq in matching:
            if isinstance(mask := seq.mask(), TokenMask):
                found.rows.append(mask)
            else:
                found.events.append(mask)
                ended.append(seq)
        return found
