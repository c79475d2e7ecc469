"""PagePool: which pages of the KV cache are free. Host integers only; what is in a page is the device's business."""

from __future__ import annotations

from collections.abc import Iterable


class PageError(RuntimeError):
    """The books of the pool do not balance, or it was asked for more than it has: a fault of the caller."""


class PagePool:
    """Pages 1..num_pages, each free or owned by one sequence. Page 0 takes the writes of padding: never given out.

    The page freed last is given out first: a small load then touches a small part of the cache.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise PageError(f"num_pages is {num_pages}; a pool has at least 1 page")
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # a stack: page 1 is given out first
        self._is_free = bytearray([0]) + bytearray([1]) * num_pages  # by page; finds a double free in O(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def alloc(self, num: int) -> list[int]:
        """Takes `num` pages. Raises PageError when fewer are free: callers look at `num_free` first."""
        if num > len(self._free):
            raise PageError(f"{num} pages asked for, but {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises PageError with the number of a page that is free already or not of this pool."""
        for page in pages:
            if not 1 <= page <= self.num_pages:
                raise PageError(f"page {page} was freed, but the pool has pages 1..{self.num_pages}")
            if self._is_free[page]:
                raise PageError(f"page {page} was freed twice")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raises PageError unless free and owned pages together are 1..num_pages, each once. O(num_pages)."""
        holders = dict.fromkeys(range(1, self.num_pages + 1), "")
        for kind, pages in (("free", self._free), ("owned", owned)):
            for page in pages:
                if page not in holders:
                    raise PageError(f"page {page} is {kind}, but the pool has pages 1..{self.num_pages}")
                if holders[page]:
                    raise PageError(f"page {page} is {kind}, and {holders[page]} as well")
                holders[page] = kind
                if self._is_free[page] != (kind == "free"):
                    raise PageError(f"page {page} is {kind}, but its flag says otherwise")
        lost = [page for page, holder in holders.items() if not holder]
        if lost:
            raise PageError(f"{len(lost)} pages are neither free nor owned, the first is page {lost[0]}")
