"""PrefixCache: which page holds which tokens, so that what requests begin alike with is computed once.

A radix tree with a page per node: the path from a root, one per salt, spells the tokens that the keys and values of the
last page were computed from. Tokens are compared, never hashes of them. Siblings are sorted by their tokens, so that
the one which agrees longest with given tokens is a neighbour of the place where these belong.

A page is on the device, in host memory, on disk, or in several of these. What the device needs the room of is copied
to the host first, if there is a host tier, a frame of pages at a time; what the host needs the room of, to disk.

A full page is shared by all that hit it. A page that agrees in part, or is filled in part, is copied by whoever hits
it: nobody writes to a page that others read. Five things hold, and all of this file keeps to them:

1. Whoever holds the page of a node holds those of all nodes above. So below a page that none holds there is none that
   is held, and all pages that none holds can be evicted, leaves first.
2. Among the nodes whose pages none holds, in the order of their last use, a node comes after all nodes below it. So the
   first is a leaf among those on the device, and it is the one to evict.
3. No node's tokens are the beginning of a sibling's: the longer serves whoever hits the shorter.
4. A node that is not full is a leaf, and no sequence holds its page.
5. Above a node on the device all are on the device. Below, host and disk may alternate, and no node is nowhere.

Sessions pin what they would like to find: pinned pages are evicted after all others. As a session pins whole paths, the
second rule holds for the pinned and for the others alike, and what is not pinned has nothing pinned below it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from jaxinfer.scheduler.disk_tier import DiskTier
from jaxinfer.scheduler.host_tier import HostTier
from jaxinfer.scheduler.pages import PageError, PagePool
from jaxinfer.scheduler.plan import Delete, Fetch, Offload, Restore, Save, Transfer, Transferred
from jaxinfer.scheduler.tree import Frame, Node, Tokens, check_below


class Hit(NamedTuple):
    """What the cache has of a sequence's first tokens."""

    num_tokens: int
    pages: Sequence[int]  # full ones on the device, to share
    source: int | None  # page that holds the tokens behind those, to copy; None: there are none
    num_unheld: int  # of `pages`: held by no sequence, so that a hit makes them fewer that are free
    restored: Sequence[Node] = ()  # full ones on the host, behind those on the device
    tail: Node | None = None  # on the host, with the tokens behind those: for a page of the sequence alone
    fetched: Sequence[Node] = ()  # full ones behind all that, of which at least the first is on disk alone


MISS = Hit(0, (), None, 0)


class Grant(NamedTuple):
    """What a sequence got for its hit."""

    pages: list[int]  # those that it shares, then its own
    tickets: set[int]  # of the transfers that must be done before it runs


class PrefixCache:
    """The tree, and the order in which its pages are given up. Its pages are of `pool`, which counts their holders."""

    def __init__(self, pool: PagePool, page_size: int, host: HostTier | None = None, disk: DiskTier | None = None):
        """`page_size`: tokens."""
        self.pool = pool
        self.page_size = page_size
        self.host = host or HostTier(0, 1)
        self.disk = disk or DiskTier(0)
        self.num_evictions = 0  # pages of the device that were given to others
        self.num_added = 0  # pages that ever entered the tree or came nearer: while it is the same, no hit gets better
        self.num_offloaded = 0  # pages, to the host
        self.num_restored = 0  # pages, from the host
        self._roots: dict[str, Node] = {}  # by salt; those with children
        self._nodes: dict[int, Node] = {}  # by page of the device
        self._unheld: OrderedDict[int, None] = OrderedDict()  # pages of nodes that none holds, last used last
        self._unheld_pinned: OrderedDict[int, None] = OrderedDict()  # likewise, of those that sessions pin
        self._transfers: list[Transfer] = []  # for the plan that is being made
        self._arriving: dict[int, tuple[list[Node], list[int]]] = {}  # by ticket: nodes, and the pages that it holds
        self._fetching: dict[int, tuple[Frame, list[Node]]] = {}  # by ticket
        self._saving: dict[int, list[Node]] = {}  # by ticket
        self._num_tickets = 0

    @property
    def has_work(self) -> bool:
        """Whether a transfer waits to be planned, or its end to be told."""
        return bool(self._transfers or self._arriving or self._fetching or self._saving)

    def take_transfers(self) -> list[Transfer]:
        """What has to be done before the rows of the plan that is being made, in this order."""
        transfers, self._transfers = self._transfers, []
        return transfers

    # What sequences ask for

    def match(self, salt: str, tokens: Sequence[int], step: int) -> Hit:
        """The longest beginning of `tokens` that the cache has for a sequence admitted in plan `step`.

        The copy of a page is made before the step runs, so only a page that an earlier plan fills can be copied.
        """
        node, child, size, start, common = self._roots.get(salt), None, self.page_size, 0, 0
        found: list[Node] = []
        while node is not None:
            child, common = node.closest(tuple(tokens[start : start + size]))
            if child is None or common < size:
                break
            found.append(child)
            node, start = child, start + size
        num_here = next((i for i, node in enumerate(found) if not node.page), len(found))
        pages = [node.page for node in found[:num_here]]
        num_unheld = sum(not self.pool.is_held(page) for page in pages)
        below = found[num_here:]
        num_near = next((i for i, node in enumerate(below) if node.frame is None or node.frame.num_locks), len(below))
        if num_near < len(below):
            return Hit((num_here + num_near) * size, pages, None, num_unheld, below[:num_near], None, below[num_near:])
        hit = Hit(start, pages, None, num_unheld, below)
        if child is None:
            return hit
        if child.page:
            known = child.step < step and child.ticket is None
            return hit._replace(num_tokens=start + common, source=child.page) if known else hit
        if child.frame is not None and not child.frame.num_locks:
            return hit._replace(num_tokens=start + common, tail=child)
        return hit

    def take(self, hit: Hit, num: int) -> Grant:
        """Pages for a sequence with that hit: those it shares, then `num` others, of which the first are restored.

        What it copies is evicted last. Raises PageError when fewer than `num` are free.
        """
        self.pool.share(hit.pages)
        for page in hit.pages:
            self._unheld.pop(page, None)
            self._unheld_pinned.pop(page, None)
        if hit.source is not None:
            for order in (self._unheld, self._unheld_pinned):
                if hit.source in order:
                    order.move_to_end(hit.source)
        tickets = {ticket for page in hit.pages if (ticket := self._nodes[page].ticket) is not None}
        near = [*hit.restored, *([hit.tail] if hit.tail else [])]
        if not near:
            return Grant([*hit.pages, *self.alloc(num)], tickets)
        frames = {node.frame.number: node.frame for node in near if node.frame}
        for frame in reversed(frames.values()):
            frame.num_locks += 1  # so that `alloc` does not give it up
            self.host.touch(frame)
        own = self.alloc(num)
        ticket = self._restore(near, own, len(hit.restored), hit.pages)
        for frame in frames.values():
            frame.num_locks -= 1
        return Grant([*hit.pages, *own], {*tickets, ticket})

    def _restore(self, near: Sequence[Node], pages: Sequence[int], num_shared: int, above: Sequence[int]) -> int:
        """Has what is on the host copied to `pages`. The first `num_shared` nodes are there from now on.

        The transfer holds them until it ends, and by rule 1 those `above` them: the sequence may end before.
        """
        ticket = self._ticket()
        places: dict[int, list[tuple[int, int]]] = {}
        for node, page in zip(near, pages, strict=False):
            assert node.frame is not None
            places.setdefault(node.frame.number, []).append((node.index, page))
        for node, page in zip(near[:num_shared], pages, strict=False):
            node.page, node.ticket = page, ticket
            self._nodes[page] = node
        self._transfers += (Restore(ticket, number, found) for number, found in places.items())
        held = [*above, *pages[: len(near)]]
        self.pool.share(held)
        self._arriving[ticket] = list(near[:num_shared]), held
        self.num_restored += len(near)
        return ticket

    def alloc(self, num: int) -> list[int]:
        """Pages for a sequence, whose content nobody wants or which is evicted: least recently used first.

        Raises PageError when fewer are free: callers look at `pool.num_free` first.
        """
        while self.pool.num_empty < num and (self._unheld or self._unheld_pinned):
            self._evict()
        return self.pool.alloc(num)

    def insert(self, salt: str, tokens: Sequence[int], pages: Sequence[int], filled: range, step: int) -> None:
        """Adds the pages of a sequence that runs, of the indices `filled`, which plan `step` fills to the end.

        It ends where the tree has another page with the same tokens: the sequence does not hold that one, so by
        rule 1 none of its own can be below. They are added once it lets go of them.
        """
        if not filled:
            return
        node = self._nodes.get(pages[filled.start - 1]) if filled.start else self._root(salt)
        for i in filled:
            if node is None:
                return
            child = self._add(node, self._page_tokens(tokens, i), pages[i], step)
            node = child if child.page == pages[i] else None

    def release(self, salt: str, tokens: Sequence[int], pages: Sequence[int], step: int) -> None:
        """Takes back the pages of a sequence and keeps those that hold `tokens`, which plans up to `step` compute.

        What the tree has already, or what is not wanted (no tokens), is emptied.
        """
        path: list[Node] = []
        for i in range(-(-len(tokens) // self.page_size)):
            node = self._nodes.get(pages[i])
            if node is None:
                parent = path[-1] if path else self._root(salt)
                node = self._add(parent, self._page_tokens(tokens, i), pages[i], step)
            path.append(node)
        self.pool.empty(page for page in self.pool.release(pages) if page not in self._nodes)
        for node in reversed(path):
            self._let_go(node)

    def _let_go(self, node: Node) -> None:
        """If none holds its page, it is the last to be evicted. Whoever calls this goes on with the node above it."""
        if node.page and not self.pool.is_held(node.page):
            order, other = self._unheld, self._unheld_pinned
            if node.num_pins:
                order, other = other, order
            other.pop(node.page, None)
            order[node.page] = None
            order.move_to_end(node.page)

    # From the device to the host and to disk

    def _evict(self) -> None:
        """Empties the page used least recently; with a host tier, a frame of them, copied there first."""
        frame_pages = self.host.frame_pages if self.host.num_frames else 1
        pages = islice(chain(self._unheld, self._unheld_pinned), frame_pages)
        victims = [self._nodes[page] for page in pages]
        if not all(node.frame or node.on_disk for node in victims) and (frame := self._make_frame()):
            lost = [node for node in victims if node.frame is None]
            self._offload(lost, frame)
        for node in victims:
            self._leave_device(node)
        self.num_evictions += len(victims)

    def _offload(self, nodes: Sequence[Node], frame: Frame) -> None:
        for node in nodes:
            self.host.put(frame, node)
        self.num_offloaded += len(nodes)
        self._transfers.append(Offload(frame.number, [node.page for node in nodes]))

    def _leave_device(self, node: Node) -> None:
        page, node.page = node.page, 0
        del self._nodes[page]
        (self._unheld_pinned if page in self._unheld_pinned else self._unheld).pop(page)
        self.pool.empty([page])
        if not node.is_anywhere:
            self._remove(node)

    def _make_frame(self) -> Frame | None:
        """A frame to fill. What the oldest one has goes to disk, if there is room, or is forgotten."""
        if not self.host.has_free:
            oldest = self.host.oldest()
            if oldest is None:
                return None
            self.give_up_frame(oldest)
        return self.host.take() if self.host.has_free else None

    def give_up_frame(self, frame: Frame) -> None:
        """Frees a frame of the host."""
        nodes = [node for node in frame.nodes if node is not None]
        self.save([node for node in nodes if not node.page])
        for node in nodes:
            if node.frame is not None:  # what is below a lost one is lost with it
                self.host.drop(node)
                if not node.is_anywhere:
                    self._remove(node)

    def save(self, nodes: Sequence[Node]) -> int | None:
        """Has those of `nodes` that are not on disk written there, as far as there is room; all are in one frame.

        Returns the ticket; None if there is nothing to write.
        """
        frame = next((node.frame for node in nodes), None)
        wanted = [node for node in nodes if not node.on_disk]
        self._make_room_on_disk(len(wanted))
        wanted = [node for node in wanted if node.frame is frame][: self.disk.num_free]
        if frame is None or not wanted:
            return None
        ticket = self._ticket()
        for node in wanted:
            node.on_disk = True
            self.disk.add(node)
        self._transfers.append(Save(ticket, frame.number, [(node.index, node.disk_page()) for node in wanted]))
        self._saving[ticket] = wanted
        return ticket

    def _make_room_on_disk(self, num: int) -> None:
        while self.disk.num_free < num and (node := self.disk.oldest()) is not None:
            self._leave_disk(node)

    def _leave_disk(self, node: Node) -> None:
        self._transfers.append(Delete([node.disk_page()]))
        node.on_disk = False
        self.disk.drop(node)
        if not node.is_anywhere:
            self._remove(node)

    def fetch(self, nodes: Sequence[Node]) -> int | None:
        """Has pages read from disk to the host: a frame of the first of `nodes`. None if that cannot be now."""
        wanted = list(nodes[: self.host.frame_pages])
        wanted = wanted[: next((i for i, node in enumerate(wanted) if node.frame or not node.on_disk), len(wanted))]
        for node in wanted:
            self.disk.touch(node)
        if not wanted or not (frame := self._make_frame()):
            return None
        wanted = [node for node in wanted if node.on_disk]
        if not wanted:
            self.host.free_if_empty(frame)
            return None
        ticket = self._ticket()
        frame.num_locks += 1
        for node in wanted:
            self.host.put(frame, node)
            node.ticket = ticket
        self._transfers.append(Fetch(ticket, frame.number, [node.disk_page() for node in wanted]))
        self._fetching[ticket] = frame, wanted
        return ticket

    def transferred(self, done: Transferred) -> None:
        """A transfer with a ticket has ended."""
        if done.ticket in self._arriving:
            nodes, pages = self._arriving.pop(done.ticket)
            for node in nodes:
                node.ticket = None
            held = [node for page in reversed(pages) if (node := self._nodes.get(page))]
            self.pool.empty(page for page in self.pool.release(pages) if page not in self._nodes)
            for node in held:
                self._let_go(node)
        elif done.ticket in self._saving:
            for node in self._saving.pop(done.ticket):
                if node.key in done.failed and node.on_disk:
                    self._leave_disk(node)
        elif done.ticket in self._fetching:
            frame, nodes = self._fetching.pop(done.ticket)
            frame.num_locks -= 1
            for node in nodes:
                if node.ticket == done.ticket:
                    node.ticket = None
                if node.key in done.failed and node.frame is frame:
                    self.host.drop(node)
                    if node.on_disk:
                        self._leave_disk(node)
                    elif not node.is_anywhere:
                        self._remove(node)
            self.host.free_if_empty(frame)
            self.num_added += 1

    # What is forgotten

    def clear(self) -> None:
        """Forgets what is on the device and on the host. Sequences keep their pages, alone from now on.

        What is on disk, with all above it, is kept. Pages that transfers fill are given to nobody before these end.
        """
        for ticket, (_, pages) in self._arriving.items():
            self._arriving[ticket] = [], pages
        unheld = [page for page in self._nodes if not self.pool.is_held(page)]
        for root in list(self._roots.values()):
            for node in root.subtree()[1:]:
                node.page, node.ticket = 0, None
                if node.frame is not None and not node.frame.num_locks:
                    self.host.drop(node)
            for node in root.subtree()[1:]:
                if not node.is_anywhere and node.parent is not None:
                    self._remove(node)
        self._nodes.clear()
        self._unheld.clear()
        self._unheld_pinned.clear()
        self.pool.empty(unheld)

    def _remove(self, node: Node) -> None:
        """Takes a node that is nowhere out of the tree, and all below it, none of which is on the device."""
        parent = node.parent
        assert parent is not None
        for below in reversed(node.subtree()):
            assert not below.page
            if below.frame is not None:
                self.host.drop(below)
            if below.on_disk:
                below.on_disk = False
                self.disk.drop(below)
                self._transfers.append(Delete([below.disk_page()]))
            below.parent = None if below is not node else parent
        del parent.children[parent.place(node.tokens)]
        node.parent = None
        if parent.parent is None and not parent.children and self._roots.get(parent.salt) is parent:
            del self._roots[parent.salt]

    # The tree

    def _page_tokens(self, tokens: Sequence[int], index: int) -> Tokens:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(salt, None, ())
        return root

    def _add(self, parent: Node, tokens: Tokens, page: int, step: int) -> Node:
        """The child with these tokens, or more: one that is there, or a new one with `page`.

        One with just these that is not on the device takes the page.
        """
        child, common = parent.closest(tokens)
        if child is not None and common == len(tokens) and (child.page or len(child.tokens) > common):
            return child
        self.num_added += 1
        if child is not None and common == len(tokens):
            child.page, child.step, child.ticket = page, step, None
            self._nodes[page] = child
            return child
        new = self._nodes[page] = Node(parent.salt, parent, tokens)
        new.page, new.step = page, step
        parent.children.insert(parent.place(tokens), new)
        if child is not None and common == len(child.tokens):
            self._forget_leaf(child)  # the beginning of the new one: by rule 3 there is no other
        return new

    def _forget_leaf(self, node: Node) -> None:
        """Takes a leaf that none holds from wherever it is."""
        if node.frame is not None:
            self.host.drop(node)
        if node.on_disk:
            self._transfers.append(Delete([node.disk_page()]))
            node.on_disk = False
            self.disk.drop(node)
        if node.page:
            self._leave_device(node)
        else:
            self._remove(node)

    def _ticket(self) -> int:
        self._num_tickets += 1
        return self._num_tickets

    def check_integrity(self, holders: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Raises PageError unless pool, tree, tiers and order agree. holders: of each sequence its salt, the known
        tokens that it has computed, and its pages.

        O(pages * page_size).
        """
        holders = list(holders)
        held = [page for _, _, pages in holders for page in pages]
        held += (page for _, pages in self._arriving.values() for page in pages)
        self.pool.check_integrity(held, [*self._unheld, *self._unheld_pinned])
        nodes: list[Node] = []
        for salt, root in self._roots.items():
            if not root.children:
                raise PageError(f"salt {salt!r} has no page")
            nodes += root.subtree()[1:]
            check_below(root, self.page_size, self.pool)
        found = {node.page: node for node in nodes if node.page}
        if found != self._nodes:
            raise PageError(f"the tree has pages {sorted(found)}, but those by number are {sorted(self._nodes)}")
        for order, pinned in ((self._unheld, False), (self._unheld_pinned, True)):
            if {page for page, n in found.items() if not self.pool.is_held(page) and bool(n.num_pins) == pinned} != {
                *order
            }:
                raise PageError(f"pages {[*order]} wait for eviction, which are not those that none holds")
        place = {page: i for i, page in enumerate(chain(self._unheld, self._unheld_pinned))}
        for page, node in found.items():
            if node.parent and place.get(page, -1) > place.get(node.parent.page, len(place)):
                raise PageError(f"page {page} would be evicted after page {node.parent.page} above it")
        self.host.check_integrity([node for node in nodes if node.frame])
        self.disk.check_integrity([node for node in nodes if node.on_disk])
        for salt, tokens, pages in holders:
            self._check_holder(salt, tokens, pages)

    def _check_holder(self, salt: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """The pages of a sequence that are in the tree are its first ones, and one is below the other."""
        node = self._roots.get(salt)
        for i, page in enumerate(pages):
            child = self._nodes.get(page)
            if child is not None and (child.parent is not node or child.tokens != self._page_tokens(tokens, i)):
                raise PageError(f"page {page} is page {i} of a sequence, but has another place or tokens in the tree")
            node = child
