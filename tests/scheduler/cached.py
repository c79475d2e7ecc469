"""The cache with all its tiers, without a device: what is asked of it is listed, and ended by the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.scheduler.kv_cache import KvCache
from jaxinfer.scheduler.plan import DiskPage, Transfer, Transferred, page_key
from jaxinfer.scheduler.prefix import Hit
from jaxinfer.scheduler.tree import Node
from tests.scheduler.fake_device import make_limits

NOW = 100  # a plan after all that filled pages
Held = tuple[str, Sequence[int], list[int]]


class Cache(KvCache):
    """Pages of 2 tokens: 8 on the device, 4 frames of 2 on the host and 20 on disk, unless told. Checked throughout."""

    def __init__(
        self, pages: Sequence[DiskPage] = (), manifests: Mapping[str, Any] | None = None, **limits: int | None
    ):
        sizes = {"page_size": 2, "num_pages": 8, "num_frames": 4, "frame_pages": 2, "num_disk_pages": 20}
        super().__init__(make_limits(prefix_caching=True, **sizes | limits), pages, manifests)
        self.holders: list[Held] = []
        self.pending: dict[int, None] = {}  # tickets of what has begun and not ended
        self.log: list[Transfer] = []  # all that was ever asked for
        self.check()

    def check(self) -> None:
        self.check_integrity(self.holders)

    def hit(self, tokens: Sequence[int], salt: str = "") -> Hit:
        return self.find(salt, tokens, NOW)

    def begin(self, tokens: Sequence[int], salt: str = "") -> tuple[Held, set[int]]:
        """A sequence takes what is cached of its tokens. Returns it, and the transfers that it waits for."""
        hit = self.hit(tokens, salt)
        grant = self.take(hit, -(-len(tokens) // self.limits.page_size) - len(hit.pages))
        held = salt, tokens, grant.pages
        self.holders.append(held)
        self.check()
        return held, grant.tickets

    def end(self, held: Held) -> None:
        """It leaves its pages to the cache."""
        self.holders.remove(held)
        self.prefix.release(*held, 0)
        self.check()

    def keep(self, tokens: Sequence[int], salt: str = "") -> None:
        """A sequence comes and goes. What it waited for has ended."""
        held, _ = self.begin(tokens, salt)
        self.settle()
        self.end(held)

    def begun(self) -> list[Transfer]:
        """What is asked for."""
        transfers = self.take_transfers(10**9)
        self.log += transfers
        numbers = (getattr(one, "ticket", None) for one in transfers)
        self.pending |= dict.fromkeys(number for number in numbers if number is not None)
        self.check()
        return transfers

    def done(self, ticket: int, *failed: str) -> None:
        self.pending.pop(ticket, None)
        self.transferred(Transferred(ticket, frozenset(failed)))
        self.check()

    def settle(self) -> list[Transfer]:
        """Ends all that is asked for, and what that asks for in turn. Returns what it found to be begun."""
        all_begun: list[Transfer] = []
        while (begun := self.begun()) or self.pending:
            all_begun += begun
            for ticket in [*self.pending]:
                self.done(ticket)
        return all_begun

    def node(self, tokens: Sequence[int], salt: str = "") -> Node:
        """The last of those with these tokens."""
        path = self._tree.path(salt, tokens)
        assert len(path) == -(-len(tokens) // self.limits.page_size), f"{tokens} are not there"
        return path[-1]

    def has(self, tokens: Sequence[int], salt: str = "") -> bool:
        return len(self._tree.path(salt, tokens)) == -(-len(tokens) // self.limits.page_size)

    def where(self, tokens: Sequence[int], salt: str = "") -> str:
        """Of the page of the last: "D" on the device, "H" on the host, "F" in a file; empty: nowhere."""
        if not self.has(tokens, salt):
            return ""
        node = self.node(tokens, salt)
        return "D" * bool(node.page) + "H" * bool(node.frame) + "F" * node.on_disk


def page(tokens: Sequence[int], before: Sequence[int] = (), salt: str = "", size: int = 2) -> DiskPage:
    """What a former server left of the page of `tokens` behind `before`."""
    parent = None
    for start in range(0, len(before), size):
        parent = page_key("", salt, parent, before[start : start + size])
    return DiskPage(page_key("", salt, parent, tokens), parent, salt, tuple(tokens))


def of_kind(transfers: Sequence[Transfer], *kinds: type) -> list[Any]:
    return [transfer for transfer in transfers if isinstance(transfer, kinds)]
