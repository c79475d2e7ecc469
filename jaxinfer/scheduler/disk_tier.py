"""DiskTier: which pages of the prefix cache are on disk, and which is deleted next. The runner has the files."""

from __future__ import annotations

from collections import OrderedDict

from jaxinfer.scheduler.pages import PageError
from jaxinfer.scheduler.tree import Node


class DiskTier:
    """Up to `num_pages` pages. The page used least recently goes first; those of saved sessions stay."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._used: OrderedDict[int, Node] = OrderedDict()  # by id of the node; used last at the end

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def num_free(self) -> int:
        return max(self.num_pages - len(self._used), 0)

    def oldest(self) -> Node | None:
        """The page to be deleted next; None if saved sessions have all."""
        return next((node for node in self._used.values() if not node.num_saves), None)

    def add(self, node: Node) -> None:
        """It is on disk from now on."""
        self._used[id(node)] = node

    def touch(self, node: Node) -> None:
        """It was used just now."""
        self._used.move_to_end(id(node))

    def drop(self, node: Node) -> None:
        """It is on disk no more."""
        del self._used[id(node)]

    def check_integrity(self, nodes: list[Node]) -> None:
        """Raises PageError unless just these nodes are on disk."""
        if {*self._used} != {id(node) for node in nodes}:
            raise PageError(f"{len(self._used)} pages are on disk, but {len(nodes)} nodes of the tree say so")
