"""DiskTier: which pages of the prefix cache are on disk, and which is deleted next. The runner has the files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from jaxinfer.scheduler.pages import PageError
from jaxinfer.scheduler.plan import DiskPage, page_key
from jaxinfer.scheduler.tree import Node


class DiskTier:
    """Up to `num_pages` pages. The page used least recently goes first; those of saved sessions stay."""

    def __init__(self, num_pages: int, fingerprint: str = ""):
        """fingerprint: of the model that computed them."""
        self.num_pages = num_pages
        self._fingerprint = fingerprint
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

    def page_of(self, node: Node) -> DiskPage:
        """What names a node's page here."""
        for one in reversed([one for one in node.upwards() if not one.key]):
            assert one.parent is not None
            one.key = page_key(self._fingerprint, one.salt, one.parent.key or None, one.tokens)
        assert node.parent is not None
        return DiskPage(node.key, node.parent.key or None, node.salt, node.tokens)

    def add(self, node: Node) -> None:
        """It is on disk from now on, or on its way there."""
        node.on_disk = True
        self._used[id(node)] = node

    def touch(self, node: Node) -> None:
        """It was used just now, and so were those above it: what is below goes first, as nothing finds it alone."""
        for one in node.upwards():
            if one.on_disk:
                self._used.move_to_end(id(one))

    def put_in_order(self, nodes: Iterable[Node]) -> None:
        """The first of all nodes on disk is the next to be deleted."""
        for node in nodes:
            self._used.move_to_end(id(node))

    def drop(self, node: Node) -> None:
        """It is on disk no more."""
        node.on_disk = False
        del self._used[id(node)]

    def check_integrity(self, nodes: list[Node]) -> None:
        """Raises PageError unless just these nodes are on disk."""
        if {*self._used} != {id(node) for node in nodes}:
            raise PageError(f"{len(self._used)} pages are on disk, but {len(nodes)} nodes of the tree say so")
