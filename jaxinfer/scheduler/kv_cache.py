"""KvCache: the pool of pages with all that is cached behind it, as the Scheduler sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.config import SchedulerLimits
from jaxinfer.scheduler.disk_tier import DiskTier
from jaxinfer.scheduler.host_tier import HostTier
from jaxinfer.scheduler.pages import PagePool
from jaxinfer.scheduler.plan import Delete, DiskPage, Transfer, Transferred
from jaxinfer.scheduler.prefix import Grant, Hit, PrefixCache
from jaxinfer.scheduler.sessions import Sessions
from jaxinfer.scheduler.states import States
from jaxinfer.scheduler.tiers import Tiers
from jaxinfer.scheduler.tree import Node, Tree


class KvCache:
    """Joins the pool, the prefix tree on the device, the tiers behind it and the sessions."""

    def __init__(
        self, limits: SchedulerLimits, disk_pages: Iterable[DiskPage] = (), manifests: Mapping[str, Any] | None = None
    ):
        """disk_pages: what former servers left, parents before their children; manifests: of sessions, likewise."""
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.host = HostTier(limits.num_frames, limits.frame_pages)
        self.disk = DiskTier(limits.num_disk_pages, limits.fingerprint)
        self._tree = Tree(limits.page_size)
        self.tiers = Tiers(self._tree, self.host, self.disk)
        self.states = States(limits.num_states, limits.state_tokens)
        # It stays empty without limits.prefix_caching.
        self.prefix = PrefixCache(self.pool, self._tree, self.tiers, self.states)
        self.sessions = Sessions(self._tree, self.prefix, self.tiers)
        nodes: dict[str, Node] = {}
        for page in disk_pages:
            if page.parent is None or page.parent in nodes:
                node = self.tiers.add_from_disk(page, nodes.get(page.parent or ""))
                if node is not None:
                    nodes[page.key] = node
            else:  # what is above it was not taken
                self.tiers.transfers.append(Delete([page]))
        self.sessions.add_saved(manifests or {})
        self.tiers.keep_to_limit()

    @property
    def has_work(self) -> bool:
        """Whether a transfer waits to be planned, or its end to be told."""
        return self.tiers.has_work or self.prefix.has_work or self.sessions.has_work

    @property
    def state(self) -> tuple[int, int, int]:
        """While none of these is higher than before, there is no more room, and no hit is better."""
        return self.pool.num_free, self.prefix.num_added, self.tiers.num_fetched

    def take_transfers(self, step: int, *, is_awaited: bool = False) -> list[Transfer]:
        """What has to be done before the rows of the plan that is being made, `step`, in this order.

        is_awaited: whether somebody's first token is behind it who found all else in the cache, and has no other wait:
        then what can be copied a step later is.
        """
        self.sessions.go_on(step)
        self.tiers.complete_paths(step)
        if not is_awaited:
            self.prefix.copy_early()
        transfers, self.tiers.transfers = self.tiers.transfers, []
        return transfers

    def transferred(self, done: Transferred) -> None:
        """A transfer with a ticket has ended."""
        self.prefix.transferred(done)
        self.tiers.transferred(done)
        self.sessions.transferred(done)

    def find(self, salt: str, tokens: Sequence[int], step: int) -> Hit:
        """What there is for a sequence with these tokens that is admitted in plan `step`.

        Without what would take longer to copy from the host than to compute.
        """
        hit = self.prefix.match(salt, tokens, step)
        size, here = self.limits.page_size, len(hit.pages)
        if hit.tail is not None and not self._is_quicker([hit.tail], hit.restored, hit.num_tokens % size):
            hit = hit._replace(tail=None, num_tokens=hit.num_tokens // size * size)
        if hit.restored and not self._is_quicker([*hit.restored], (), hit.num_tokens - here * size):
            return Hit(here * size, hit.pages, None, hit.num_unheld)
        return hit

    def _is_quicker(self, nodes: Sequence[Node], others: Sequence[Node], num_tokens: int) -> bool:
        """Whether nodes come quicker from the host than their tokens are computed. others: come in any case."""
        frames = {node.frame.number for node in nodes if node.frame}
        frames -= {node.frame.number for node in others if node.frame}
        return len(frames) * self.limits.restore_ms <= num_tokens * self.limits.compute_ms

    def fetch(self, nodes: Sequence[Node]) -> set[int]:
        """Has pages read from disk to the host, as many as half of that holds. Returns the transfers to wait for."""
        tickets: set[int] = set()
        nodes = nodes[: max(self.host.num_pages // 2, self.host.frame_pages)]
        for i, node in enumerate(nodes):
            if node.ticket is None and node.frame is None and self.tiers.fetch(nodes[i:]) is None:
                break
            if node.ticket is not None:  # maybe of another's, or of a session that is loaded
                tickets.add(node.ticket)
        return tickets

    def take(self, hit: Hit, num: int) -> Grant:
        """See PrefixCache."""
        return self.prefix.take(hit, num)

    def forget(self, salt: str, tokens: Sequence[int]) -> None:
        """Forgets what is on disk of these tokens: what it was computed from may be at fault."""
        for node in self._tree.path(salt, tokens):
            if node.on_disk:
                self.tiers.leave_disk(node)

    def check_integrity(self, holders: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Raises PageError unless all of it agrees; see PrefixCache."""
        self.prefix.check_integrity(holders)
