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

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from jaxinfer.scheduler.pages import PageError, PagePool
from jaxinfer.scheduler.plan import Restore, Transferred
from jaxinfer.scheduler.states import States
from jaxinfer.scheduler.tiers import Tiers
from jaxinfer.scheduler.tree import TOKEN_BYTES, Node, Tree, pack


class Hit(NamedTuple):
    """What the cache has of a sequence's first tokens."""

    num_tokens: int
    pages: Sequence[int]  # full ones on the device, to share
    source: int | None  # page that holds the tokens behind those, to copy; None: there are none
    num_unheld: int  # of `pages`: held by no sequence, so that a hit makes them fewer that are free
    restored: Sequence[Node] = ()  # full ones on the host, behind those on the device
    tail: Node | None = None  # on the host, with the tokens behind those: for a page of the sequence alone
    fetched: Sequence[Node] = ()  # full ones behind all that, of which at least the first is on disk alone
    last: Node | None = None  # whose recurrent state the sequence begins with, the last of its pages
    num_alike: int = 0  # tokens that agree in full pages, with or without a state behind them


EARLY_SHARE = 4
"""Of the pool, the part that should be empty or copied to the host already: what can be had without waiting for a copy.
A restore of 16,384 tokens took 130 ms where as much had to leave the device first, 2.4 GB each way (H200)."""

MISS = Hit(0, (), None, 0)


class Grant(NamedTuple):
    """What a sequence got for its hit."""

    pages: list[int]  # those that it shares, then its own
    tickets: set[int]  # of the transfers that must be done before it runs


class PrefixCache:
    """The tree, and the order in which its pages are given up. Its pages are of `pool`, which counts their holders."""

    def __init__(self, pool: PagePool, tree: Tree, tiers: Tiers, states: States):
        self.pool = pool
        self.states = states
        self.page_size = tree.page_size
        self.num_evictions = 0  # pages of the device that were given to others
        self.num_added = 0  # pages that ever entered the tree: while it is the same, no hit becomes longer
        self.num_restored = 0  # pages, from the host to the device
        self._tree = tree
        self._tiers = tiers
        self._nodes: dict[int, Node] = {}  # by page of the device
        # Pages of nodes that none holds, last used last; and of some that are held again: see `_evict`.
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self._unheld_pinned: OrderedDict[int, None] = OrderedDict()  # likewise, of those that sessions pin
        self._arriving: dict[int, tuple[list[Node], list[int]]] = {}  # by ticket: nodes, and the pages that it holds
        self._to_copy: deque[Node] = deque()  # in the order in which they were let go, some of them held again
        self._copying: int | None = None  # ticket of the early copy under way

    @property
    def has_work(self) -> bool:
        """Whether pages are on their way from the host, or to be copied there early."""
        return bool(self._arriving) or self._copying is not None or self._wants_copy

    @property
    def _wants_copy(self) -> bool:
        num_clean = self.pool.num_free - len(self._to_copy)
        return bool(self._to_copy) and num_clean < self.pool.num_pages // EARLY_SHARE

    def match(self, salt: str, tokens: Sequence[int], step: int) -> Hit:
        """The longest beginning of `tokens` that the cache has for a sequence admitted in plan `step`.

        The copy of a page is made before the step runs, so only a page that an earlier plan fills can be copied.
        """
        found, child, common = self._tree.walk(salt, tokens)
        pages = [node.page for node in found]
        num_here = pages.index(0) if 0 in pages else len(pages)
        if self.states.interval:
            return self._match_state(found[:num_here], step)
        pages, below = pages[:num_here], found[num_here:]
        num_unheld = self.pool.num_unheld(pages)
        num_near = next((i for i, node in enumerate(below) if node.frame is None or node.frame.num_locks), len(below))
        hit = Hit((num_here + num_near) * self.page_size, pages, None, num_unheld, below[:num_near])
        if num_near < len(below):
            return hit._replace(fetched=below[num_near:])
        if child is None:
            return hit
        if child.page:
            is_known = child.step < step and child.ticket is None
            return hit._replace(num_tokens=hit.num_tokens + common, source=child.page) if is_known else hit
        if child.frame is not None and not child.frame.num_locks:
            return hit._replace(num_tokens=hit.num_tokens + common, tail=child)
        return hit

    def _match_state(self, nodes: Sequence[Node], step: int) -> Hit:
        """As far as these pages have a state that an earlier plan has copied."""
        num_alike = len(nodes) * self.page_size
        while nodes and (nodes[-1].state is None or nodes[-1].state_step >= step):
            nodes = nodes[:-1]
        pages = [node.page for node in nodes]
        hit = Hit(len(pages) * self.page_size, pages, None, self.pool.num_unheld(pages))
        return hit._replace(last=nodes[-1] if nodes else None, num_alike=num_alike)

    def keep_state(self, salt: str, tokens: Sequence[int], step: int) -> int | None:
        """A place for the state behind `tokens`, full pages, which plan `step` copies there.

        It is the last page's, whoever computed that. None if there is no place, or such a copy already.
        """
        node = self._full_page(salt, tokens)
        if node is None or node.state is not None or (place := self.states.take()) is None:
            return None
        self.states.attach(place, node, step)
        return place

    def _full_page(self, salt: str, tokens: Sequence[int]) -> Node | None:
        """The last page of these tokens, if all of it is theirs and on the device."""
        path = self._tree.path(salt, tokens)
        is_whole = bool(path) and len(path) * self.page_size == len(tokens)
        return path[-1] if is_whole and path[-1].page else None

    def leave_state(self, salt: str, tokens: Sequence[int], place: int, step: int) -> None:
        """Gives the copy that a sequence has of its state behind `tokens`, made in plan `step`, to their last page."""
        node = self._full_page(salt, tokens)
        if node is not None:
            self.states.attach(place, node, step)
        else:
            self.states.give_back(place)

    def take(self, hit: Hit, num: int) -> Grant:
        """Pages for a sequence with that hit: those it shares, then `num` others, of which the first are restored.

        What it copies is evicted last. Raises PageError when fewer than `num` are free.
        """
        self.pool.share(hit.pages)
        if hit.last is not None:
            self.states.touch(hit.last)
        if hit.source is not None:
            for order in (self._unheld, self._unheld_pinned):
                if hit.source in order:
                    order.move_to_end(hit.source)
        pages = hit.pages if self._arriving else ()
        tickets = {ticket for page in pages if (ticket := self._nodes[page].ticket) is not None}
        near = [*hit.restored, *([hit.tail] if hit.tail else [])]
        if not near:
            return Grant([*hit.pages, *self.alloc(num)], tickets)
        frames = {node.frame.number: node.frame for node in near if node.frame}
        for frame in reversed(frames.values()):
            frame.num_locks += 1  # so that `alloc` does not give it up
            self._tiers.host.touch(frame)
        own = self.alloc(num)
        ticket = self._restore(near, own, len(hit.restored), hit.pages)
        for frame in frames.values():
            frame.num_locks -= 1
        return Grant([*hit.pages, *own], {*tickets, ticket})

    def _restore(self, near: Sequence[Node], pages: Sequence[int], num_shared: int, above: Sequence[int]) -> int:
        """Has what is on the host copied to `pages`. The first `num_shared` nodes are there from now on.

        The transfer holds them until it ends, and by rule 1 those `above` them: the sequence may end before.
        """
        ticket = self._tiers.ticket()
        places: dict[int, list[tuple[int, int]]] = {}
        for node, page in zip(near, pages, strict=False):
            assert node.frame is not None
            places.setdefault(node.frame.number, []).append((node.index, page))
        for node, page in zip(near[:num_shared], pages, strict=False):
            node.page, node.ticket = page, ticket
            self._nodes[page] = node
        self._tiers.transfers += (Restore(ticket, number, found) for number, found in places.items())
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
        node = self._nodes.get(pages[filled.start - 1]) if filled.start else self._tree.root(salt)
        for i in filled:
            if node is None:
                return
            child = self._add(node, self._packed_page(tokens, i), pages[i], step)
            node = child if child.page == pages[i] else None

    def release(self, salt: str, tokens: Sequence[int], pages: Sequence[int], step: int) -> None:
        """Takes back the pages of a sequence and keeps those that hold `tokens`, which plans up to `step` compute.

        What the tree has already, or what is not wanted (no tokens), is emptied.
        """
        path: list[Node] = []
        nodes = self._nodes
        for i in range(-(-len(tokens) // self.page_size)):
            node = nodes.get(pages[i])
            if node is None:
                parent = path[-1] if path else self._tree.root(salt)
                node = self._add(parent, self._packed_page(tokens, i), pages[i], step)
            path.append(node)
        self.pool.empty([page for page in self.pool.release(pages) if page not in nodes])
        path.reverse()
        self._let_go(path)

    def _let_go(self, path: Iterable[Node]) -> None:
        """Of these nodes, each after those below it: those whose page none holds are the last to be evicted."""
        is_held, has_host = self.pool.is_held, bool(self._tiers.host.num_frames)
        orders = self._unheld, self._unheld_pinned
        for node in path:
            page = node.page
            if not page or is_held(page):
                continue
            order, other = reversed(orders) if node.num_pins else orders
            if other:
                other.pop(page, None)
            order[page] = None
            order.move_to_end(page)
            if has_host and not (node.frame or node.on_disk or node.is_queued):
                node.is_queued = True
                self._to_copy.append(node)

    def copy_early(self) -> None:
        """Copies a frame of what would be evicted first to the host, if too few pages can be had without a copy."""
        if not self._wants_copy or self._copying is not None or self._arriving:
            return
        nodes: list[Node] = []
        while self._to_copy and len(nodes) < self._tiers.host.frame_pages:
            node = self._to_copy.popleft()
            node.is_queued = False
            if node.page and not self.pool.is_held(node.page) and not node.frame and not node.on_disk:
                nodes.append(node)
        if nodes and (frame := self._tiers.make_frame()):
            self._copying = self._tiers.ticket()
            self._tiers.offload(nodes, frame, self._copying)

    def _evict(self) -> None:
        """Empties the page used least recently; with a host tier, a frame of them, copied there first.

        Pages that are held again leave the order only here: whoever hits 1,024 of them would wait 0.1 ms for that.
        """
        tiers = self._tiers
        num = tiers.host.frame_pages if tiers.host.num_frames else 1
        victims: list[Node] = []
        for order in (self._unheld, self._unheld_pinned):
            while order and len(victims) < num:
                page, _ = order.popitem(last=False)
                if not self.pool.is_held(page):
                    victims.append(self._nodes[page])
        if not all(node.frame or node.on_disk for node in victims) and (frame := tiers.make_frame()):
            tiers.offload([node for node in victims if node.frame is None], frame)
        for node in victims:
            self._leave_device(node)
        self.num_evictions += len(victims)

    def _leave_device(self, node: Node) -> None:
        self.states.drop(node)
        page, node.page = node.page, 0
        del self._nodes[page]
        self._unheld.pop(page, None)
        self._unheld_pinned.pop(page, None)
        self.pool.empty([page])
        self._tiers.remove_if_lost(node)

    def pin(self, nodes: Sequence[Node], change: int) -> None:
        """Counts a session more (1) or less (-1) that would like to find these nodes, a path from the top."""
        for node in nodes:
            node.num_pins += change
        self._let_go(node for node in reversed(nodes) if node.parent is not None)

    def transferred(self, done: Transferred) -> None:
        """Pages have arrived, or were copied early; other transfers do not concern it."""
        if done.ticket == self._copying:
            self._copying = None
        if done.ticket not in self._arriving:
            return
        nodes, pages = self._arriving.pop(done.ticket)
        for node in nodes:
            node.ticket = None
        held = [node for page in reversed(pages) if (node := self._nodes.get(page))]
        self.pool.empty([page for page in self.pool.release(pages) if page not in self._nodes])
        self._let_go(held)

    def clear(self) -> None:
        """Forgets what is on the device and on the host. Sequences keep their pages, alone from now on.

        What is on disk, with all above it, is kept. Pages that transfers fill are given to nobody before these end.
        """
        for ticket, (_, pages) in self._arriving.items():
            self._arriving[ticket] = [], pages
        self.states.clear()
        unheld = [page for page in self._nodes if not self.pool.is_held(page)]
        for node in self._nodes.values():
            node.page, node.ticket = 0, None
        self._tiers.lose_host()
        for node in self._tree.nodes():
            self._tiers.remove_if_lost(node)
        for node in self._to_copy:
            node.is_queued = False
        self._to_copy.clear()
        self._nodes.clear()
        self._unheld.clear()
        self._unheld_pinned.clear()
        self.pool.empty(unheld)

    def _packed_page(self, tokens: Sequence[int], index: int) -> bytes:
        return pack(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _add(self, parent: Node, packed: bytes, page: int, step: int) -> Node:
        """The child with these tokens, or more: one that is there, or a new one with `page`.

        One with just these that is not on the device takes the page.
        """
        child, common = parent.closest(packed)
        is_same = child is not None and common == len(packed) // TOKEN_BYTES
        if child is not None and is_same and (child.page or child.num_tokens > common):
            return child
        self.num_added += 1
        new = child if child is not None and is_same else self._tree.add(parent, packed)
        new.page, new.step, new.ticket = page, step, None
        self._nodes[page] = new
        if child is not None and not is_same and common == child.num_tokens:
            self._forget(child)  # the beginning of the new one: by rule 3 there is no other
        return new

    def _forget(self, leaf: Node) -> None:
        """Takes a leaf that none holds from wherever it is."""
        self._tiers.forget_copies(leaf)
        if leaf.page:
            self._leave_device(leaf)
        else:
            self._tiers.remove_if_lost(leaf)

    def check_integrity(self, holders: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Raises PageError unless pool, tree, tiers and order agree. holders: of each sequence its salt, the known
        tokens that it has computed, and its pages.

        O(pages * page_size).
        """
        holders = list(holders)
        held = [page for _, _, pages in holders for page in pages]
        held += (page for _, pages in self._arriving.values() for page in pages)
        unheld, pinned = (
            [page for page in o if not self.pool.is_held(page)] for o in (self._unheld, self._unheld_pinned)
        )
        self.pool.check_integrity(held, [*unheld, *pinned])
        self._tree.check_integrity(self.pool)
        self._tiers.check_integrity()
        found = {node.page: node for node in self._tree.nodes() if node.page}
        if found != self._nodes:
            raise PageError(f"the tree has pages {sorted(found)}, but those by number are {sorted(self._nodes)}")
        for order, is_pinned in ((unheld, False), (pinned, True)):
            if {page for page, n in found.items() if not self.pool.is_held(page) and bool(n.num_pins) == is_pinned} != {
                *order
            }:
                raise PageError(f"pages {[*order]} wait for eviction, which are not those that none holds")
        place = {page: i for i, page in enumerate(chain(unheld, pinned))}
        for page, node in found.items():
            if node.parent and place.get(page, -1) > place.get(node.parent.page, len(place)):
                raise PageError(f"page {page} would be evicted after page {node.parent.page} above it")
        for salt, tokens, pages in holders:
            self._check_holder(salt, tokens, pages)

    def _check_holder(self, salt: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """The pages of a sequence that are in the tree are its first ones, and one is below the other."""
        above: Node | None = None
        for i, page in enumerate(pages):
            node = self._nodes.get(page)
            if node is not None:
                is_first = node.parent is not None and node.parent.parent is None and node.salt == salt
                is_below = is_first if not i else node.parent is above
                if not is_below or node.packed != self._packed_page(tokens, i):
                    raise PageError(f"page {page} is page {i} of a sequence, but has another place or tokens there")
            above = node
