"""The radix tree of the prefix cache: a page a node, whose path from the root spells what it was computed from."""

from __future__ import annotations

import bisect
import operator
from array import array
from collections.abc import Iterator, Sequence

from jaxinfer.scheduler.pages import PageError, PagePool

TOKEN_BYTES = array("I").itemsize
_packed = operator.attrgetter("packed")


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as the tree compares them: as bytes of an array("I").

    To cut a page of 16 tokens out and to compare it takes 0.1 us, as tuples 0.3; and the collector never looks at them.
    """
    return (tokens if isinstance(tokens, array) else array("I", tokens)).tobytes()


class Frame:
    """A run of pages in host memory that is written and read as one, since a copy of a single page is half as fast."""

    __slots__ = ("nodes", "num_locks", "number")

    def __init__(self, number: int):
        self.number = number
        self.nodes: list[Node | None] = []  # by place in the frame; None: nobody wants it any more
        self.num_locks = 0  # whoever counts on what is in it


class Run:
    """Full pages one below the other, with their tokens side by side: 2,048 pages are compared in 15 us, one at a time
    in 370. A node that is added below the last page of a run goes on with it; any other full one begins its own.
    """

    __slots__ = ("nodes", "packed")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.packed = bytearray()  # of all of them

    def append(self, node: Node) -> None:
        """Goes on with a page below its last."""
        node.run, node.place = self, len(self.nodes)
        self.nodes.append(node)
        self.packed += node.packed

    def cut(self, num: int, size: int) -> None:
        """Keeps the first `num` pages, of `size` bytes of tokens each."""
        del self.nodes[num:], self.packed[num * size :]

    def alike(self, start: int, packed: bytes, offset: int, size: int) -> list[Node]:
        """The pages from `start` on that agree with `packed` from `offset` on, each as a whole of `size` bytes."""
        first = start * size
        num = min(len(self.nodes) - start, (len(packed) - offset) // size)
        agreed = 0
        while num and self.packed[first : first + num * size] != packed[offset : offset + num * size]:
            half = num // 2  # all of the first half agree, or what differs first is in it
            if self.packed[first : first + half * size] == packed[offset : offset + half * size]:
                agreed, first, offset, num = agreed + half, first + half * size, offset + half * size, num - half
                num -= num == 1  # a single page, and it differs
            else:
                num = half
        return self.nodes[start : start + agreed + num]


class Node:
    """A page of tokens, and where their keys and values are; a root has no tokens and no parent."""

    __slots__ = (
        "children",
        "frame",
        "index",
        "is_queued",
        "key",
        "num_pins",
        "num_saves",
        "on_disk",
        "packed",
        "page",
        "parent",
        "place",
        "run",
        "salt",
        "state",
        "state_step",
        "step",
        "ticket",
    )

    def __init__(self, salt: str, parent: Node | None, packed: bytes):
        self.salt = salt
        self.parent = parent  # None: a root, or not in the tree any more
        self.packed = packed  # the tokens on its page: see `pack`
        self.run: Run | None = None  # None: the page is not full, or it is a root
        self.place = 0  # in the run
        self.children: list[Node] = []  # sorted by these bytes, so that what begins alike is together
        self.page = 0  # of the device; 0: it is not there
        self.step = -1  # the plan that fills the page
        self.state: int | None = None  # place of the recurrent state behind its last token; only with a page
        self.state_step = -1  # the plan that copies it there
        self.ticket: int | None = None  # of the transfer that brings it, while it is under way
        self.frame: Frame | None = None  # of the host; None: it is not there
        self.index = 0  # place in the frame
        self.is_queued = False  # to be copied to the host before the device needs the room
        self.on_disk = False  # or on its way there
        self.key = ""  # name on disk; empty: not worked out, or a root
        self.num_pins = 0  # sessions that would like to find it
        self.num_saves = 0  # of these, those that are saved on disk

    @property
    def is_anywhere(self) -> bool:
        """Whether something has its keys and values."""
        return bool(self.page or self.frame or self.on_disk)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those on its page."""
        return tuple(array("I", self.packed))

    @property
    def num_tokens(self) -> int:
        """On its page."""
        return len(self.packed) // TOKEN_BYTES

    def index_of(self, packed: bytes) -> int:
        """Index of the first child that is not less."""
        return bisect.bisect_left(self.children, packed, key=_packed)

    def closest(self, packed: bytes) -> tuple[Node | None, int]:
        """The child that agrees with most of the first of these tokens, and with how many; None with none."""
        i = self.index_of(packed)
        if i < len(self.children) and self.children[i].packed == packed:
            return self.children[i], len(packed) // TOKEN_BYTES
        best, most = None, 0
        for child in self.children[max(i - 1, 0) : i + 1]:
            num = num_common(child.packed, packed)
            if num > most:
                best, most = child, num
        return best, most

    def subtree(self) -> list[Node]:
        """This node and all below it, a parent before its children."""
        found: list[Node] = [self]
        for node in found:
            found += node.children
        return found

    def upwards(self) -> Iterator[Node]:
        """This node and all above it but the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class Tree:
    """All nodes, under a root for each salt."""

    def __init__(self, page_size: int):
        """`page_size`: tokens."""
        self.page_size = page_size
        self._roots: dict[str, Node] = {}  # by salt; those with children

    def root(self, salt: str) -> Node:
        """The root of a salt. Whoever asks adds to it."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(salt, None, b"")
        return root

    def find_root(self, salt: str) -> Node | None:
        """The root of a salt, if it has one."""
        return self._roots.get(salt)

    def walk(self, salt: str, tokens: Sequence[int]) -> tuple[list[Node], Node | None, int]:
        """The full pages that `tokens` begin with; the one that agrees longest with what follows, and how long."""
        node, found, size = self._roots.get(salt), [], self.page_size * TOKEN_BYTES
        packed, start = pack(tokens), 0
        while node is not None:
            page, children = packed[start : start + size], node.children
            if len(children) == 1 and children[0].packed == page and len(page) == size:
                child = children[0]
            else:
                child, common = node.closest(page)
                if child is None or common < self.page_size:
                    return found, child, common
            assert child.run is not None
            alike = child.run.alike(child.place, packed, start, size)
            found += alike
            node, start = alike[-1], start + len(alike) * size
        return found, None, 0

    def path(self, salt: str, tokens: Sequence[int]) -> list[Node]:
        """The nodes that have all of `tokens`, as far as there are any."""
        found, last, common = self.walk(salt, tokens)
        is_whole = last is not None and len(found) * self.page_size + common == len(tokens)
        return [*found, last] if last is not None and is_whole else found

    def add(self, parent: Node, packed: bytes) -> Node:
        """A new child."""
        new = Node(parent.salt, parent, packed)
        parent.children.insert(parent.index_of(packed), new)
        if len(packed) == self.page_size * TOKEN_BYTES:
            run = parent.run
            (run if run is not None and run.nodes[-1] is parent else Run()).append(new)
        return new

    def detach(self, node: Node) -> None:
        """Takes a node, with all below it, out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[parent.index_of(node.packed)]
        for below in node.subtree():
            below.parent = None
        if node.run is not None:  # other runs below it have no page above the node
            node.run.cut(node.place, self.page_size * TOKEN_BYTES)
        if parent.parent is None and not parent.children and self._roots.get(parent.salt) is parent:
            del self._roots[parent.salt]

    def nodes(self) -> list[Node]:
        """All of them, a parent before its children."""
        return [node for root in self._roots.values() for node in root.subtree()[1:]]

    def check_integrity(self, pool: PagePool) -> None:
        """Raises PageError unless all nodes are where rules 3 to 5 of `prefix.py` want them."""
        for salt, root in self._roots.items():
            if not root.children:
                raise PageError(f"salt {salt!r} has no page")
            for node in root.subtree():
                self._check(node, pool)

    def _check(self, node: Node, pool: PagePool) -> None:
        size = self.page_size
        if node.children and node.parent and node.num_tokens < size:
            raise PageError(f"page {node.page} has {node.num_tokens} tokens, and pages below it")
        for before, child in zip([None, *node.children], node.children, strict=False):
            if child.parent is not node or child.salt != node.salt:
                raise PageError(f"page {child.page} has another place in the tree")
            self._check_run(node, child)
            if not child.is_anywhere:
                raise PageError(f"a page of tokens {child.tokens} is in the tree, but nowhere else")
            if child.page and node.parent and not node.page:
                raise PageError(f"page {child.page} is on the device, but the one above it is not")
            if not 1 <= child.num_tokens <= size or len(child.packed) % TOKEN_BYTES:
                raise PageError(f"page {child.page} has {len(child.packed) / TOKEN_BYTES} tokens")
            if child.num_tokens < size and child.page and pool.is_held(child.page):
                raise PageError(f"page {child.page} has {child.num_tokens} tokens, and a sequence holds it")
            if node.parent and (child.num_pins > node.num_pins or child.num_saves > node.num_saves):
                raise PageError(f"page {child.page} has more pins than the one above it")
            if before and not before.packed < child.packed:
                raise PageError(f"pages {before.page} and {child.page} are not in order")
            if before and num_common(before.packed, child.packed) == before.num_tokens:
                raise PageError(f"page {before.page} has the beginning of page {child.page}, and beside it")

    def _check_run(self, node: Node, child: Node) -> None:
        run, place, size = child.run, child.place, self.page_size * TOKEN_BYTES
        if run is None and child.num_tokens == self.page_size:
            raise PageError(f"page {child.page} is full, and in no run")
        if run is None:
            return
        is_in = len(run.packed) == len(run.nodes) * size and run.nodes[place : place + 1] == [child]
        if not is_in or run.packed[place * size : (place + 1) * size] != child.packed:
            raise PageError(f"page {child.page} is page {place} of a run that has something else there")
        if place and run.nodes[place - 1] is not node:
            raise PageError(f"page {child.page} follows in its run on another than the one above it")


def num_common(a: bytes, b: bytes) -> int:
    """How many of the first tokens are the same, of tokens that are packed."""
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:  # nearly always
        return 0
    num = min(len(a), len(b))
    if a[:num] == b[:num]:
        return num // TOKEN_BYTES
    differ = int.from_bytes(a[:num], "little") ^ int.from_bytes(b[:num], "little")
    return ((differ & -differ).bit_length() - 1) // (8 * TOKEN_BYTES)  # the lowest bit that differs is in this token
