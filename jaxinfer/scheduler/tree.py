"""The radix tree of the prefix cache: a page a node, whose path from the root spells what it was computed from."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator

from jaxinfer.scheduler.pages import PageError, PagePool
from jaxinfer.scheduler.plan import DiskPage

Tokens = tuple[int, ...]


class Frame:
    """A run of pages in host memory that is written and read as one, since a copy of a single page is half as fast."""

    __slots__ = ("nodes", "num_locks", "number")

    def __init__(self, number: int):
        self.number = number
        self.nodes: list[Node | None] = []  # by place in the frame; None: nobody wants it any more
        self.num_locks = 0  # whoever counts on what is in it


class Node:
    """A page of tokens, and where their keys and values are; a root has no tokens and no parent."""

    __slots__ = (
        "children",
        "frame",
        "index",
        "key",
        "num_pins",
        "num_saves",
        "on_disk",
        "page",
        "parent",
        "salt",
        "step",
        "ticket",
        "tokens",
    )

    def __init__(self, salt: str, parent: Node | None, tokens: Tokens):
        self.salt = salt
        self.parent = parent
        self.tokens = tokens  # those on its page
        self.children: list[Node] = []  # sorted by their tokens
        self.page = 0  # of the device; 0: it is not there
        self.step = -1  # the plan that fills the page
        self.ticket: int | None = None  # of the transfer that fills the page, while it is under way
        self.frame: Frame | None = None  # of the host; None: it is not there
        self.index = 0  # place in the frame
        self.on_disk = False  # or on its way there
        self.key = ""  # name on disk; empty: not worked out, or a root
        self.num_pins = 0  # sessions that would like to find it
        self.num_saves = 0  # of these, those that are saved on disk

    @property
    def is_anywhere(self) -> bool:
        return bool(self.page or self.frame or self.on_disk)

    def place(self, tokens: Tokens) -> int:
        """Index of the first child whose tokens are not less."""
        return bisect.bisect_left(self.children, tokens, key=_tokens)

    def closest(self, tokens: Tokens) -> tuple[Node | None, int]:
        """The child that agrees with most of the first of `tokens`, and with how many; None with none."""
        i = self.place(tokens)
        if i < len(self.children) and self.children[i].tokens == tokens:
            return self.children[i], len(tokens)
        best, most = None, 0
        for child in self.children[max(i - 1, 0) : i + 1]:
            num = num_common(child.tokens, tokens)
            if num > most:
                best, most = child, num
        return best, most

    def subtree(self) -> list[Node]:
        """This node and all below it, a parent before its children."""
        found = [self]
        for node in found:
            found += node.children
        return found

    def upwards(self) -> Iterator[Node]:
        """This node and all above it but the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def disk_page(self) -> DiskPage:
        """What names it on disk."""
        for node in reversed([node for node in self.upwards() if not node.key]):
            assert node.parent is not None
            node.key = page_key(node.parent.key, node.salt, node.tokens)
        assert self.parent is not None
        return DiskPage(self.key, self.parent.key or None, self.salt, self.tokens)


def page_key(parent: str, salt: str, tokens: Tokens) -> str:
    """The name of a page on disk: SHA-256, in hex, of its salt, of the name of the page before it and of its tokens."""
    text = f"{len(salt)}:{salt}:{parent}:{','.join(map(str, tokens))}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def check_below(root: Node, page_size: int, pool: PagePool) -> None:
    """Raises PageError unless all nodes below a root are where rules 3 to 5 of `prefix.py` want them."""
    for node in root.subtree():
        if node.children and node.parent and len(node.tokens) < page_size:
            raise PageError(f"page {node.page} has {len(node.tokens)} tokens, and pages below it")
        for before, child in zip([None, *node.children], node.children, strict=False):
            if child.parent is not node or child.salt != node.salt:
                raise PageError(f"page {child.page} has another place in the tree")
            if not child.is_anywhere:
                raise PageError(f"a page of tokens {child.tokens} is in the tree, but nowhere else")
            if child.page and node.parent and not node.page:
                raise PageError(f"page {child.page} is on the device, but the one above it is not")
            if not 1 <= len(child.tokens) <= page_size:
                raise PageError(f"page {child.page} has {len(child.tokens)} tokens")
            if len(child.tokens) < page_size and child.page and pool.is_held(child.page):
                raise PageError(f"page {child.page} has {len(child.tokens)} tokens, and a sequence holds it")
            if before and not before.tokens < child.tokens:
                raise PageError(f"pages {before.page} and {child.page} are not in order")
            if before and num_common(before.tokens, child.tokens) == len(before.tokens):
                raise PageError(f"page {before.page} has the beginning of page {child.page}, and beside it")


def _tokens(node: Node) -> Tokens:
    return node.tokens


def num_common(a: Tokens, b: Tokens) -> int:
    """How many of the first tokens are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
