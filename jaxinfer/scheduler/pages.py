"""PagePool: who holds which page of the KV cache. Host integers only; what is in a page is the device's business."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

EMPTY = -1
"""In place of a number of holders. So a page that is freed twice is found in O(1)."""


class PageError(RuntimeError):
    """The books of the pool do not balance, or it was asked for more than it has: a fault of the caller."""


class PagePool:
    """Pages 1..num_pages. Page 0 takes the writes of padding: never given out.

    A page is held by one or more sequences, or empty, or neither: then the prefix cache keeps it, and may give it up at
    any time. The page emptied last is given out first: a small load then touches a small part of the memory.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise PageError(f"num_pages is {num_pages}; a pool has at least 1 page")
        self.num_pages = num_pages
        self._empty = list(range(num_pages, 0, -1))  # a stack: page 1 is given out first
        self._num_holders = [0] + [EMPTY] * num_pages  # sequences, by page
        self._num_used = 0

    @property
    def num_used(self) -> int:
        """Pages that sequences hold, each counted once."""
        return self._num_used

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds: empty, or cached and given up when they are needed."""
        return self.num_pages - self._num_used

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence holds and the prefix cache keeps."""
        return self.num_free - len(self._empty)

    def is_held(self, page: int) -> bool:
        """Whether a sequence holds the page."""
        return self._num_holders[page] > 0

    def num_unheld(self, pages: Iterable[int]) -> int:
        """How many of these no sequence holds."""
        holders = self._num_holders
        return [holders[page] for page in pages].count(0)

    def alloc(self, num: int) -> list[int]:
        """Takes `num` empty pages for one sequence. Raises PageError when fewer are empty: callers see to that."""
        if num > len(self._empty):
            raise PageError(f"{num} pages asked for, but {len(self._empty)} of {self.num_pages} are empty")
        pages = [self._empty.pop() for _ in range(num)]
        for page in pages:
            self._num_holders[page] = 1
        self._num_used += num
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Counts one more sequence that holds each of these pages. Raises PageError for an empty one.

        No page may come twice.
        """
        holders = self._num_holders
        before = [holders[page] for page in pages]
        if EMPTY in before:
            raise PageError(f"page {pages[before.index(EMPTY)]} was shared, but it is empty")
        for page in pages:
            holders[page] += 1
        self._num_used += before.count(0)

    def release(self, pages: Iterable[int]) -> list[int]:
        """Counts one sequence less; returns the pages that none holds any more: the caller's, to cache or to empty.

        Raises PageError with the number of a page that nobody holds or that is not of this pool.
        """
        unheld: list[int] = []
        holders, last = self._num_holders, self.num_pages
        for page in pages:
            if not 1 <= page <= last:
                self._check_number(page, "released")
            left = holders[page] - 1
            if left < 0:
                raise PageError(f"page {page} was released, but no sequence holds it")
            holders[page] = left
            if not left:
                unheld.append(page)
        self._num_used -= len(unheld)
        return unheld

    def empty(self, pages: Iterable[int]) -> None:
        """Takes back pages that nobody holds and nobody wants. PageError names one that is held or empty already."""
        for page in pages:
            self._check_number(page, "emptied")
            if (num := self._num_holders[page]) != 0:
                raise PageError(f"page {page} was emptied, but it is {'empty' if num == EMPTY else 'held'}")
            self._num_holders[page] = EMPTY
            self._empty.append(page)

    def check_integrity(self, held: Iterable[int], cached: Iterable[int]) -> None:
        """Raises PageError unless each of 1..num_pages is empty, held or cached, and one of these only. O(num_pages).

        held: the pages of all sequences, a page as often as sequences hold it; cached: those kept for no sequence.
        """
        num_holders = Counter(held)
        kinds = dict.fromkeys(range(1, self.num_pages + 1), "")
        for kind, pages in (("empty", self._empty), ("held", num_holders), ("cached", cached)):
            for page in pages:
                self._check_number(page, kind)
                if kinds[page]:
                    raise PageError(f"page {page} is {kind}, and {kinds[page]} as well")
                kinds[page] = kind
                counted = self._num_holders[page]
                if (counted == EMPTY) != (kind == "empty"):
                    raise PageError(f"page {page} is {kind}, but its count says otherwise")
                if kind != "empty" and counted != num_holders[page]:
                    raise PageError(f"page {page} has {num_holders[page]} holders, but {counted} are counted")
        lost = [page for page, kind in kinds.items() if not kind]
        if lost:
            raise PageError(f"{len(lost)} pages are neither empty, held nor cached, the first is page {lost[0]}")
        if self._num_used != len(num_holders):
            raise PageError(f"{len(num_holders)} pages are held, but {self._num_used} are counted")

    def _check_number(self, page: int, what: str) -> None:
        if not 1 <= page <= self.num_pages:
            raise PageError(f"page {page} is {what}, but the pool has pages 1..{self.num_pages}")
