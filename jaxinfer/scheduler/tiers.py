"""Tiers: what of the prefix cache is in host memory and on disk, and the transfers that bring it there and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from jaxinfer.scheduler.disk_tier import DiskTier
from jaxinfer.scheduler.host_tier import HostTier
from jaxinfer.scheduler.plan import Delete, DiskPage, Fetch, Offload, Save, Transfer, Transferred
from jaxinfer.scheduler.tree import Frame, Node, Tree, pack

MAX_SAVING = 4
"""Frames that wait for the disk at once, each with its memory. What comes faster than a disk takes it is forgotten."""


class Tiers:
    """Behind the device: frames of host memory, then disk. With neither, what leaves the device is forgotten."""

    def __init__(self, tree: Tree, host: HostTier, disk: DiskTier):
        self.host = host
        self.disk = disk
        self.num_offloaded = 0  # pages, from the device to the host
        self.num_fetched = 0  # pages that came from disk
        self.transfers: list[Transfer] = []  # for the plan that is being made, in this order
        self._tree = tree
        self._fetching: dict[int, tuple[Frame, list[Node]]] = {}  # by ticket
        self._saving: dict[int, list[Node]] = {}  # by ticket
        self._to_complete: deque[Node] = deque()  # with nodes below them on disk, and not there themselves
        self._num_tickets = 0

    @property
    def has_work(self) -> bool:
        """Whether a transfer waits to be planned, or its end to be told."""
        return bool(self.transfers or self._fetching or self._saving or self._to_complete)

    @property
    def may_save(self) -> bool:
        """Whether the disk has so little to do that a frame more can wait for it."""
        return len(self._saving) < MAX_SAVING

    def ticket(self) -> int:
        """A new one."""
        self._num_tickets += 1
        return self._num_tickets

    def make_frame(self) -> Frame | None:
        """A frame to fill. What the oldest one has goes to disk, if there is room, or is forgotten."""
        if not self.host.has_free and (oldest := self.host.oldest()) is not None:
            self.give_up(oldest)
        return self.host.take() if self.host.has_free else None

    def offload(self, nodes: Sequence[Node], frame: Frame, ticket: int | None = None) -> None:
        """Copies pages of the device to a new frame."""
        for node in nodes:
            self.host.put(frame, node)
        self.num_offloaded += len(nodes)
        self.transfers.append(Offload(frame.number, [node.page for node in nodes], ticket))

    def give_up(self, frame: Frame) -> None:
        """Frees a frame. What is nowhere else goes to disk, if there is room, or is forgotten."""
        nodes = [node for node in frame.nodes if node is not None]
        if self.may_save:
            self.save([node for node in nodes if not node.page], frame)
        for node in nodes:
            if node.frame is not None:  # what is below a lost one is lost with it
                self.host.drop(node)
                self.remove_if_lost(node)

    def save(self, nodes: Sequence[Node], frame: Frame) -> int | None:
        """Has those of `nodes`, all in one frame, that are not on disk written there, as far as there is room.

        Returns the ticket; None if there is nothing to write.
        """
        wanted = [node for node in nodes if not node.on_disk]
        while self.disk.num_free < len(wanted) and (oldest := self.disk.oldest()) is not None:
            self.leave_disk(oldest)
        wanted = [node for node in wanted if node.frame is frame][: self.disk.num_free]
        if not wanted:
            return None
        ticket = self.ticket()
        for node in wanted:
            self.disk.add(node)
        for node in wanted:
            if not any(child.on_disk for child in node.children):
                self.disk.touch(node)
            above = node.parent
            if above is not None and above.parent is not None and not above.on_disk:
                self._to_complete.append(above)
        self.transfers.append(Save(ticket, frame.number, [(node.index, self.disk.page_of(node)) for node in wanted]))
        self._saving[ticket] = wanted
        return ticket

    def complete_paths(self, step: int) -> None:
        """Has pages written that others on disk hang from, and could not be found without after a restart.

        step: the plan that is being made: what it fills is not there yet.
        """
        while self._to_complete and self.may_save:
            node = self._to_complete[0]
            if node.parent is None or node.on_disk or not (node.page or node.frame):
                self._to_complete.popleft()
                continue
            chain = [one for one in islice(node.upwards(), self.host.frame_pages) if not one.on_disk]
            if node.frame is None and not self._copy(node, chain, step):
                return  # later
            assert node.frame is not None
            if node.frame.num_locks:
                return
            if self.save([one for one in chain if one.frame is node.frame], node.frame) is None:
                self._to_complete.popleft()  # the disk is full

    def _copy(self, node: Node, chain: Sequence[Node], step: int) -> bool:
        """Copies those of `chain` that are on the device alone to a frame, the first of them being `node`."""
        wanted = [one for one in chain if one.page and not one.frame and one.ticket is None and one.step < step]
        if not wanted or wanted[0] is not node or not (frame := self.make_frame()):
            return False
        self.offload([one for one in wanted if one.page and not one.frame], frame)
        return node.frame is not None

    def fetch(self, nodes: Sequence[Node]) -> int | None:
        """Has pages read from disk to the host: a frame of the first of `nodes`. None if that cannot be now."""
        wanted = list(nodes[: self.host.frame_pages])
        wanted = wanted[: next((i for i, node in enumerate(wanted) if node.frame or not node.on_disk), len(wanted))]
        if wanted:
            self.disk.touch(wanted[-1])
        if not wanted or not (frame := self.make_frame()):
            return None
        wanted = [node for node in wanted if node.on_disk]  # to make room may have cost some
        if not wanted:
            self.host.free_if_empty(frame)
            return None
        ticket = self.ticket()
        frame.num_locks += 1
        for node in wanted:
            self.host.put(frame, node)
            node.ticket = ticket
        self.transfers.append(Fetch(ticket, frame.number, [self.disk.page_of(node) for node in wanted]))
        self._fetching[ticket] = frame, wanted
        return ticket

    def transferred(self, done: Transferred) -> None:
        """A transfer to or from disk has ended; others do not concern it."""
        if done.ticket in self._saving:
            for node in self._saving.pop(done.ticket):
                if node.key in done.failed and node.on_disk:
                    self.leave_disk(node)
        elif done.ticket in self._fetching:
            frame, nodes = self._fetching.pop(done.ticket)
            frame.num_locks -= 1
            for node in nodes:
                if node.ticket == done.ticket:
                    node.ticket = None
                if node.key in done.failed and node.frame is frame:
                    self.forget_copies(node)
                    self.remove_if_lost(node)
            self.num_fetched += len(nodes) - len(done.failed)
            self.host.free_if_empty(frame)

    def add_from_disk(self, page: DiskPage, parent: Node | None) -> Node | None:
        """Adds a page that a former server left, be there room or not. None if the tree cannot have it."""
        above = parent or self._tree.find_root(page.salt)
        packed = pack(page.tokens)
        child, common = above.closest(packed) if above else (None, 0)
        if child is not None and common == min(len(page.tokens), child.num_tokens):
            self.transfers.append(Delete([page]))  # the beginning of another one, or the other way round
            return None
        node = self._tree.add(parent or self._tree.root(page.salt), packed)
        node.key = page.key
        self.disk.add(node)
        return node

    def keep_to_limit(self) -> None:
        """Deletes what is on disk beyond its limit, but for what saved sessions need: leaves first."""
        self.disk.put_in_order(node for node in reversed(self._tree.nodes()) if node.on_disk)
        while self.disk.num_used > self.disk.num_pages and (oldest := self.disk.oldest()) is not None:
            self.leave_disk(oldest)

    def leave_disk(self, node: Node) -> None:
        """Deletes a page from disk."""
        self.transfers.append(Delete([self.disk.page_of(node)]))
        self.disk.drop(node)
        self.remove_if_lost(node)

    def forget_copies(self, node: Node) -> None:
        """Deletes what the host and the disk have of a node."""
        if node.frame is not None:
            self.host.drop(node)
        if node.on_disk:
            self.transfers.append(Delete([self.disk.page_of(node)]))
            self.disk.drop(node)

    def remove_if_lost(self, node: Node) -> None:
        """Takes a node that is nowhere out of the tree, and all below it, none of which is on the device."""
        if node.is_anywhere or node.parent is None:
            return
        for below in node.subtree():
            self.forget_copies(below)
        self._tree.detach(node)

    def lose_host(self) -> None:
        """Forgets what is on the host, but for what is just being read from disk."""
        for node in self._tree.nodes():
            if node.frame is not None and not node.frame.num_locks:
                self.host.drop(node)

    def check_integrity(self) -> None:
        """Raises PageError unless frames and disk agree with the tree."""
        nodes = self._tree.nodes()
        self.host.check_integrity([node for node in nodes if node.frame])
        self.disk.check_integrity([node for node in nodes if node.on_disk])
