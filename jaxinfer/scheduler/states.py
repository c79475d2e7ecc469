"""Copies of recurrent states, kept with the pages at whose end they were: without one a prefix is of no use.

A model with a recurrent state goes on from a page only if it has the state behind the page's last token. A copy takes
as much memory as thousands of tokens of the KV cache, so there is a fixed number of places for them, and they are made
at multiples of an interval only: where a prompt begins to differ from what is cached, at the end of a prompt, and as a
sequence grows. What a sequence keeps as it grows is its own until it ends; then it belongs to the page.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from jaxinfer.scheduler.pages import PageError
from jaxinfer.scheduler.tree import Node


class States:
    """Owner of the places, by number. A place is free, a node's, or a sequence's."""

    def __init__(self, num: int, interval: int):
        """num: places; interval: tokens, a multiple of the page size. With 0 of both, sequences have no states."""
        self.interval = interval
        self._num = num
        self._free = list(range(num - 1, -1, -1))
        self._nodes: OrderedDict[int, Node] = OrderedDict()  # by place, used last at the end

    def take(self) -> int | None:
        """A place for a copy: a free one, or that of the node used least recently. None if sequences have all."""
        if self._free:
            return self._free.pop()
        if not self._nodes:
            return None
        place, node = self._nodes.popitem(last=False)
        node.state = None
        return place

    def give_back(self, place: int) -> None:
        """Nobody wants what is in it."""
        self._free.append(place)

    def attach(self, place: int, node: Node, step: int) -> None:
        """What plan `step` copies there is the state behind a full page. A copy that the node has already stays."""
        if node.state is not None:
            self._free.append(place)
            return
        node.state, node.state_step = place, step
        self._nodes[place] = node

    def touch(self, node: Node) -> None:
        """It is used."""
        if node.state is not None:
            self._nodes.move_to_end(node.state)

    def drop(self, node: Node) -> None:
        """Its page goes, and so does its state."""
        if node.state is not None:
            del self._nodes[node.state]
            self._free.append(node.state)
            node.state = None

    def clear(self) -> None:
        """Takes back what nodes have."""
        for node in list(self._nodes.values()):
            self.drop(node)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises PageError unless every place is free, a node's or a sequence's, and only one of these."""
        held = list(held)
        if sorted([*self._free, *self._nodes, *held]) != list(range(self._num)):
            raise PageError(f"states {self._free} are free, {[*self._nodes]} of pages and {held} of sequences")
        for place, node in self._nodes.items():
            if node.state != place or not node.page:
                raise PageError(f"state {place} is of a page that has state {node.state}, or is gone")
