"""Sessions: conversations that come back. Their pages are evicted last, and are saved to disk on demand."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxinfer.scheduler.plan import DeleteSession, SaveSession, Transferred
from jaxinfer.scheduler.prefix import PrefixCache
from jaxinfer.scheduler.tiers import Tiers
from jaxinfer.scheduler.tree import Node, Tree
from jaxinfer.types import InvalidRequest, SessionInfo, UnknownSession

MAX_SESSIONS = 1024
"""Sessions that are known and not saved; the one used least recently is forgotten, which only unpins its pages."""
NO_DISK = "there is no disk tier; start with --kv-host-gib (GiB) and --kv-disk-dir (a folder)"

Outcome = tuple[str, SessionInfo | Exception]
"""Of a save: the id of the session, and what became of it."""


class _Session:
    """What is known of a session."""

    __slots__ = ("nodes", "salt", "saved", "saved_at_s", "saved_nodes", "saved_salt", "session_id", "tokens")

    def __init__(self, session_id: str, salt: str, tokens: Sequence[int]):
        self.session_id = session_id
        self.salt = salt
        self.tokens = tokens  # of its last sequence, those that were computed
        self.nodes: list[Node] = []  # that it pins
        self.saved: Sequence[int] = ()  # tokens that are on disk
        self.saved_salt = salt
        self.saved_nodes: list[Node] = []  # that stay on disk for it
        self.saved_at_s: int | None = None  # since the epoch


@dataclasses.dataclass(slots=True)
class _Save:
    """A save under way: of what the session was when it began."""

    session: _Session
    salt: str
    tokens: Sequence[int]
    nodes: list[Node]  # to be on disk, in the end; none of them is deleted meanwhile
    saved_at_s: int
    tickets: set[int] = dataclasses.field(default_factory=set)  # of what is being written
    is_listed: bool = False  # whether that is the list of the pages


class Sessions:
    """Owner of the sessions. Saving goes on with the plans: a frame of pages at a time, then the manifest."""

    def __init__(self, tree: Tree, prefix: PrefixCache, tiers: Tiers, now_s: Callable[[], float] = time.time):
        self._tree = tree
        self._prefix = prefix
        self._tiers = tiers
        self._now_s = now_s
        self._sessions: dict[str, _Session] = {}  # used last at the end
        self._saves: dict[str, _Save] = {}
        self._outcomes: list[Outcome] = []

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def has_work(self) -> bool:
        """Whether a save is under way, or its outcome has not been taken."""
        return bool(self._saves or self._outcomes)

    def take_outcomes(self) -> list[Outcome]:
        """What has become of saves."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def add_saved(self, manifests: Mapping[str, Any]) -> None:
        """The sessions that former servers saved."""
        for session_id, manifest in manifests.items():
            session = _Session(session_id, manifest["salt"], tuple(manifest["tokens"]))
            session.saved, session.saved_at_s = session.tokens, manifest["saved_at_s"]
            self._sessions[session_id] = session
            self._keep_on_disk(session, self._tree.path(session.salt, session.tokens))

    def update(self, session_id: str, salt: str, tokens: Sequence[int]) -> None:
        """A sequence of the session has ended; these tokens of it were computed, and its pages are the cache's."""
        session = self._sessions.pop(session_id, None) or _Session(session_id, salt, tokens)
        session.salt, session.tokens = salt, tokens
        self._sessions[session_id] = session
        self._pin(session, self._tree.path(salt, tokens))
        unsaved = [one for one in self._sessions.values() if one.saved_at_s is None]
        for oldest in unsaved[: max(len(unsaved) - MAX_SESSIONS, 0)]:
            if oldest.session_id not in self._saves:
                self._pin(oldest, [])
                del self._sessions[oldest.session_id]

    def info(self, session_id: str) -> SessionInfo:
        """What is known of it. UnknownSession. Without the model's name, and with pages on disk for num_bytes."""
        session = self._get(session_id)
        size = self._tree.page_size
        path = self._tree.path(session.salt, session.tokens)
        num_found = min(len(path) * size, len(session.tokens))
        return SessionInfo(
            session_id=session_id,
            model="",
            num_tokens=len(session.tokens),
            num_pages=-(-len(session.tokens) // size),
            num_bytes=sum(node.on_disk for node in session.saved_nodes),
            saved=session.saved_at_s is not None,
            saved_at_s=session.saved_at_s,
            num_cached_tokens=num_found,
        )

    def save(self, session_id: str) -> None:
        """Begins to save what is cached of a session. InvalidRequest without a disk tier; UnknownSession.

        The outcome is one of `take_outcomes`, later.
        """
        self._check_disk()
        session = self._get(session_id)
        if session_id in self._saves:
            return
        nodes = self._tree.path(session.salt, session.tokens)
        for node in nodes:
            node.num_saves += 1
        self._saves[session_id] = _Save(session, session.salt, session.tokens, nodes, int(self._now_s()))

    def load(self, session_id: str) -> SessionInfo:
        """Pins what there is of a saved session, and has the first of it that is on disk alone read to the host."""
        self._check_disk()
        session = self._get(session_id)
        if session.saved_at_s is None:
            raise UnknownSession(f"session {session_id!r} is not saved; save it first")
        session.tokens, session.salt = session.saved, session.saved_salt
        path = self._tree.path(session.salt, session.tokens)
        self._pin(session, path)
        on_disk = [node for node in path if node.on_disk and not node.page and not node.frame]
        frame_pages = self._tiers.host.frame_pages
        for start in range(0, min(len(on_disk), self._tiers.host.num_pages // 2), frame_pages):
            if self._tiers.fetch(on_disk[start : start + frame_pages]) is None:
                break
        return self.info(session_id)

    def delete(self, session_id: str) -> SessionInfo:
        """Forgets a session, and deletes what is on disk for it alone. Returns what was known of it."""
        session = self._get(session_id)
        if session_id in self._saves:
            raise InvalidRequest(f"session {session_id!r} is being saved; delete it afterwards", param="session_id")
        info = self.info(session_id)
        del self._sessions[session_id]
        self._pin(session, [])
        if self._tiers.disk.num_pages:
            self._tiers.transfers.append(DeleteSession(session_id))
        nodes = session.saved_nodes
        self._keep_on_disk(session, [])
        for node in reversed(nodes):
            if node.on_disk and not node.num_saves:
                self._tiers.leave_disk(node)
        return info

    def go_on(self, step: int) -> None:
        """Has the next pages of each save written: of one frame at a time, as memory is bounded.

        step: the plan that is being made.
        """
        for session_id, save in list(self._saves.items()):
            if not save.tickets and self._tiers.may_save:
                self._go_on(session_id, save, step)

    def transferred(self, done: Transferred) -> None:
        """A transfer has ended."""
        for session_id, save in list(self._saves.items()):
            if done.ticket not in save.tickets:
                continue
            save.tickets.discard(done.ticket)
            # Pages that others had begun to write are known to have failed by the time that the list is written.
            missing = [node for node in save.nodes if not node.on_disk and not self._was_filled(node)]
            num_failed = len(done.failed) or save.is_listed * len(missing)
            for node in reversed(save.nodes):
                if node.key in done.failed and node.on_disk:
                    self._tiers.leave_disk(node)
            if num_failed:
                self._end(session_id, RuntimeError(f"{num_failed} pages or the list of them could not be written"))
            elif save.is_listed:
                self._end(session_id, None)

    def _go_on(self, session_id: str, save: _Save, step: int) -> None:
        nodes = save.nodes
        if nodes and self._was_filled(nodes[-1]):
            nodes.pop().num_saves -= 1
        missing = [node for node in nodes if not node.on_disk]
        if any(not node.is_anywhere or node.parent is None for node in nodes):
            return self._end(session_id, RuntimeError("a page of the session was lost while it was saved"))
        if not missing:
            return self._write_manifest(session_id, save)
        first = missing[0]
        if first.frame is None and not self._copy_to_host(missing, step):
            return None  # later: all frames are in use just now
        frame = first.frame
        assert frame is not None
        if frame.num_locks:
            return None
        nodes = [node for node in missing if node.frame is frame]
        if (ticket := self._tiers.save(nodes, frame)) is None:
            room, needed = self._tiers.disk.num_pages, len(save.nodes)
            reason = (
                f"the disk tier holds {room} pages, not enough free for the {needed} of the session (--kv-disk-gib)"
            )
            return self._end(session_id, RuntimeError(reason))
        save.tickets.add(ticket)
        return None

    def _was_filled(self, node: Node) -> bool:
        """Whether a page that was not full has given way to one that goes on: mostly, the session's own next turn."""
        return node.parent is None and node.num_tokens < self._tree.page_size

    def _copy_to_host(self, nodes: Iterable[Node], step: int) -> bool:
        """Copies the first of `nodes` that are on the device and not on the host to a frame; whether there was one."""
        can = (node for node in nodes if node.page and node.frame is None and node.ticket is None)
        wanted = [node for node in can if node.step < step]
        if not wanted or not (frame := self._tiers.make_frame()):
            return False
        self._tiers.offload(wanted[: self._tiers.host.frame_pages], frame)
        return True

    def _write_manifest(self, session_id: str, save: _Save) -> None:
        save.tokens = tuple(save.tokens[: len(save.nodes) * self._tree.page_size])
        save.is_listed = True
        manifest = {"salt": save.salt, "tokens": list(save.tokens), "saved_at_s": save.saved_at_s}
        ticket = self._tiers.ticket()
        save.tickets.add(ticket)
        self._tiers.transfers.append(SaveSession(ticket, session_id, manifest, [node.key for node in save.nodes]))

    def _end(self, session_id: str, error: Exception | None) -> None:
        """A save has ended. After an error what was saved before still is."""
        save = self._saves.pop(session_id)
        if error is None:
            session = save.session
            self._keep_on_disk(session, save.nodes)
            session.saved, session.saved_salt, session.saved_at_s = save.tokens, save.salt, save.saved_at_s
        for node in save.nodes:
            node.num_saves -= 1
        self._outcomes.append((session_id, error or self.info(session_id)))

    def _pin(self, session: _Session, nodes: list[Node]) -> None:
        self._prefix.pin(nodes, 1)
        self._prefix.pin(session.nodes, -1)
        session.nodes = nodes

    def _keep_on_disk(self, session: _Session, nodes: list[Node]) -> None:
        for node in nodes:
            node.num_saves += 1
        for node in session.saved_nodes:
            node.num_saves -= 1
        session.saved_nodes = nodes

    def _get(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSession(f"there is no session {session_id!r}, in memory or on disk")
        return session

    def _check_disk(self) -> None:
        if not self._tiers.disk.num_pages:
            raise InvalidRequest(NO_DISK, param="session_id", code="no_disk_tier")
