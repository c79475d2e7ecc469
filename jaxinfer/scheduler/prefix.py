"""PrefixCache: which page holds which tokens, so that what requests begin alike with is computed once.

A radix tree with a page per node: the path from a root, one per salt, spells the tokens that the keys and values of the
last page were computed from. Tokens are compared, never hashes of them. Siblings are sorted by their tokens, so that
the one which agrees longest with given tokens is a neighbour of the place where these belong.

A full page is shared by all that hit it. A page that agrees in part, or is filled in part, is copied by whoever hits
it: nobody writes to a page that others read. Four things hold, and all of this file keeps to them:

1. Whoever holds the page of a node holds those of all nodes above. So below a page that none holds there is none that
   is held, and all pages that none holds can be evicted, leaves first.
2. Among the nodes whose pages none holds, in the order of their last use, a node comes after all nodes below it. So the
   first is a leaf, and it is the one to evict.
3. No node's tokens are the beginning of a sibling's: the longer serves whoever hits the shorter.
4. A node that is not full is a leaf, and no sequence holds its page.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxinfer.scheduler.pages import PageError, PagePool

Tokens = tuple[int, ...]


class _Node:
    """A page of the tree; a root has no page and no parent."""

    __slots__ = ("children", "page", "parent", "salt", "step", "tokens")

    def __init__(self, salt: str, parent: _Node | None, tokens: Tokens, page: int, step: int):
        self.salt = salt
        self.parent = parent
        self.tokens = tokens  # those on its page
        self.page = page
        self.step = step  # the plan that fills the page
        self.children: list[_Node] = []  # sorted by their tokens

    def place(self, tokens: Tokens) -> int:
        """Index of the first child whose tokens are not less."""
        return bisect.bisect_left(self.children, tokens, key=_tokens)

    def closest(self, tokens: Tokens) -> tuple[_Node | None, int]:
        """The child that agrees with most of the first of `tokens`, and with how many; None with none."""
        i = self.place(tokens)
        if i < len(self.children) and self.children[i].tokens == tokens:
            return self.children[i], len(tokens)
        best, most = None, 0
        for child in self.children[max(i - 1, 0) : i + 1]:
            num = _num_common(child.tokens, tokens)
            if num > most:
                best, most = child, num
        return best, most


def _tokens(node: _Node) -> Tokens:
    return node.tokens


def _num_common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Hit(NamedTuple):
    """What the cache has of a sequence's first tokens."""

    num_tokens: int
    pages: Sequence[int]  # full ones, to share
    source: int | None  # page that holds the tokens behind those, to copy; None: there are none
    num_unheld: int  # of `pages`: held by no sequence, so that a hit makes them fewer that are free


MISS = Hit(0, (), None, 0)


class PrefixCache:
    """The tree, and the order in which its pages are given up. Its pages are of `pool`, which counts their holders."""

    def __init__(self, pool: PagePool, page_size: int):
        """`page_size`: tokens."""
        self.pool = pool
        self.page_size = page_size
        self.num_evictions = 0  # cached pages that were given to others
        self.num_added = 0  # pages that ever entered the tree: while it is the same, no hit becomes longer
        self._roots: dict[str, _Node] = {}  # by salt; those with children
        self._nodes: dict[int, _Node] = {}  # by page
        self._unheld: OrderedDict[int, None] = OrderedDict()  # pages of nodes that none holds, last used last

    def match(self, salt: str, tokens: Sequence[int], step: int) -> Hit:
        """The longest beginning of `tokens` that the cache has for a sequence admitted in plan `step`.

        The copy of a page is made before the step runs, so only a page that an earlier plan fills can be copied.
        """
        node, child, size, start, common = self._roots.get(salt), None, self.page_size, 0, 0
        pages: list[int] = []
        while node is not None:
            child, common = node.closest(tuple(tokens[start : start + size]))
            if child is None or common < size:
                break
            pages.append(child.page)
            node, start = child, start + size
        num_unheld = sum(page in self._unheld for page in pages)
        if child is None or child.step >= step:
            return Hit(start, pages, None, num_unheld)
        return Hit(start + common, pages, child.page, num_unheld)

    def take(self, hit: Hit, num: int) -> list[int]:
        """Pages for a sequence with that hit: those it shares, then `num` others. What it copies is evicted last."""
        self.pool.share(hit.pages)
        for page in hit.pages:
            self._unheld.pop(page, None)
        if hit.source is not None and hit.source in self._unheld:
            self._unheld.move_to_end(hit.source)
        return [*hit.pages, *self.alloc(num)]

    def alloc(self, num: int) -> list[int]:
        """Pages for a sequence, whose content nobody wants or which is evicted: least recently used first.

        Raises PageError when fewer are free: callers look at `pool.num_free` first.
        """
        while self.pool.num_empty < num and self._unheld:
            self._remove(self._nodes[next(iter(self._unheld))])
            self.num_evictions += 1
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
        path: list[_Node] = []
        for i in range(-(-len(tokens) // self.page_size)):
            node = self._nodes.get(pages[i])
            if node is None:
                parent = path[-1] if path else self._root(salt)
                node = self._add(parent, self._page_tokens(tokens, i), pages[i], step)
            path.append(node)
        self.pool.empty(page for page in self.pool.release(pages) if page not in self._nodes)
        for node in reversed(path):
            if not self.pool.is_held(node.page):
                self._unheld[node.page] = None
                self._unheld.move_to_end(node.page)

    def clear(self) -> None:
        """Forgets all tokens. Sequences keep their pages, which hold them alone from now on."""
        self._roots.clear()
        self._nodes.clear()
        self.pool.empty(self._unheld)
        self._unheld.clear()

    def _page_tokens(self, tokens: Sequence[int], index: int) -> Tokens:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _root(self, salt: str) -> _Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = _Node(salt, None, (), 0, 0)
        return root

    def _add(self, parent: _Node, tokens: Tokens, page: int, step: int) -> _Node:
        """The child with these tokens, or more: one that is there, or a new one with `page`."""
        child, common = parent.closest(tokens)
        if child is not None and common == len(tokens):
            return child
        self.num_added += 1
        new = self._nodes[page] = _Node(parent.salt, parent, tokens, page, step)
        parent.children.insert(parent.place(tokens), new)
        if child is not None and common == len(child.tokens):
            self._remove(child)  # the beginning of the new one: by rule 3 there is no other
        return new

    def _remove(self, leaf: _Node) -> None:
        """Takes a leaf whose page none holds out of the tree, and empties the page."""
        parent = leaf.parent
        assert parent is not None and not leaf.children
        del self._nodes[leaf.page], self._unheld[leaf.page], parent.children[parent.place(leaf.tokens)]
        if parent.parent is None and not parent.children:
            del self._roots[leaf.salt]
        self.pool.empty([leaf.page])

    def check_integrity(self, holders: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Raises PageError unless pool, tree and order agree. holders: of each sequence its salt, the known
        tokens that it has computed, and its pages.

        O(pages * page_size).
        """
        holders = list(holders)
        self.pool.check_integrity((page for _, _, pages in holders for page in pages), self._unheld)
        found: dict[int, _Node] = {}
        for salt, root in self._roots.items():
            if not root.children:
                raise PageError(f"salt {salt!r} has no page")
            self._check_below(root, found)
        if found != self._nodes:
            raise PageError(f"the tree has pages {sorted(found)}, but those by number are {sorted(self._nodes)}")
        if {page for page in found if not self.pool.is_held(page)} != {*self._unheld}:
            raise PageError(f"pages {[*self._unheld]} wait for eviction, which are not those that none holds")
        place = {page: i for i, page in enumerate(self._unheld)}
        for page, node in found.items():
            if node.parent and place.get(page, -1) > place.get(node.parent.page, len(place)):
                raise PageError(f"page {page} would be evicted after page {node.parent.page} above it")
        for salt, tokens, pages in holders:
            self._check_holder(salt, tokens, pages)

    def _check_below(self, node: _Node, found: dict[int, _Node]) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            if node.children and node.parent and len(node.tokens) < self.page_size:
                raise PageError(f"page {node.page} has {len(node.tokens)} tokens, and pages below it")
            for before, child in zip([None, *node.children], node.children, strict=False):
                if child.parent is not node or child.salt != node.salt or child.page in found:
                    raise PageError(f"page {child.page} has another place in the tree")
                if not 1 <= len(child.tokens) <= self.page_size:
                    raise PageError(f"page {child.page} has {len(child.tokens)} tokens")
                if len(child.tokens) < self.page_size and self.pool.is_held(child.page):
                    raise PageError(f"page {child.page} has {len(child.tokens)} tokens, and a sequence holds it")
                if before and not before.tokens < child.tokens:
                    raise PageError(f"pages {before.page} and {child.page} are not in order")
                if before and _num_common(before.tokens, child.tokens) == len(before.tokens):
                    raise PageError(f"page {before.page} has the beginning of page {child.page}, and beside it")
                found[child.page] = child
            stack += node.children

    def _check_holder(self, salt: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """The pages of a sequence that are in the tree are its first ones, and one is below the other."""
        node = self._roots.get(salt)
        for i, page in enumerate(pages):
            child = self._nodes.get(page)
            if child is not None and (child.parent is not node or child.tokens != self._page_tokens(tokens, i)):
                raise PageError(f"page {page} is page {i} of a sequence, but has another place or tokens in the tree")
            node = child
