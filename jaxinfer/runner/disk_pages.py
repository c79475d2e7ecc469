"""The disk tier of the KV cache: a folder of pages, and of the sessions that are made of them; it outlives the server.

Each model has a folder of its own, named after its fingerprint, so that several share what --kv-disk-dir names, and one
server at a time holds it. A file appears whole or not at all: it is written beside its place and renamed. Nothing waits
for the disk (no fsync): what a power failure leaves is found out by its checksum, and computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import heapq
import json
import logging
import os
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.config import ConfigError
from jaxinfer.runner import page_file
from jaxinfer.runner.disk_cache import make_private, open_own
from jaxinfer.runner.page_file import PageFault, PageLayout
from jaxinfer.scheduler.plan import DiskPage

log = logging.getLogger(__name__)

MANIFEST_VERSION = 1
SESSION_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SKIPPED = {
    "damaged": "damaged, and deleted",
    "orphan": "deleted, as the page before them is not there",
    "unreadable": "unreadable",
    "foreign": "no pages",
    "version": "of another version of jaxinfer",
    "fingerprint": "of another model",
    "shape": "of another page size or dtype",
}
"""What is wrong with files in the folder, as the log says it. Only the first two are deleted."""


class _Found(NamedTuple):
    page: DiskPage
    num_bytes: int
    used_ns: int  # when it was last written or read


class DiskPages:
    """The pages and sessions of one model.

    Threads: `pages` and `close` are called while no other call runs. All else may be called from any thread; of two at
    once that concern the same page, one comes first, and reading a page that is being removed gives None.
    """

    def __init__(self, folder: Path, layout: PageLayout, lock_fd: int):
        """Use `open`."""
        self.folder = folder
        self._layout = layout
        self._lock_fd = lock_fd
        self._pages_folder = folder / "pages"
        self._sessions_folder = folder / "sessions"
        self._known: dict[str, tuple[DiskPage, int]] = {}  # by key: the page, and the bytes of its file
        self._num_bytes = 0
        self._lock = threading.Lock()  # over these two

    @classmethod
    def open(cls, folder: Path, *, fingerprint: str, page_shape: tuple[int, ...], dtype: str) -> DiskPages:
        """The tier of the model `fingerprint` (64 hexadecimal digits) in `folder`, which is made for this user alone.

        ConfigError if the folder cannot be made or locked, if others can write to it, or if another server holds it.
        How many pages there may be is the caller's business.
        """
        if not _DIGEST.fullmatch(fingerprint):
            raise ValueError(f"fingerprint {fingerprint!r} is not 64 hexadecimal digits")
        layout = PageLayout(fingerprint, tuple(page_shape), np.dtype(dtype))
        own = folder / fingerprint[:16]
        try:
            for one in (folder, own, own / "pages", own / "sessions"):
                if others := make_private(one):
                    raise ConfigError(
                        f"{others}, so that its pages cannot be trusted; make it yours alone (chmod 700) or give "
                        "another --kv-disk-dir"
                    )
            lock_fd = _lock(own)
        except OSError as error:
            raise ConfigError(f"--kv-disk-dir {folder} cannot be used: {error}") from error
        made = cls(own, layout, lock_fd)
        made._delete_partial()
        return made

    def close(self) -> None:
        """Lets another server have the folder. A process that ends does so, too."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @property
    def fingerprint(self) -> str:
        """Of the model, in the names of its pages."""
        return self._layout.fingerprint

    @property
    def num_bytes(self) -> int:
        """Of the files of all pages that are known: those of `pages`, and those written since."""
        return self._num_bytes

    @property
    def num_pages(self) -> int:
        """That are known."""
        return len(self._known)

    def pages(self) -> list[DiskPage]:
        """Looks through the folder, and forgets what was known before.

        Parents come before their children, and else what was used least recently. Headers are read, but no data:
        0.06 ms a page where they are cached. What is no page to be used is skipped, and the log says why, by kind.
        """
        found, skipped = self._scan()
        ordered = _parents_first(found)
        for key in found.keys() - {one.page.key for one in ordered}:
            skipped.append(("orphan", self._path(key), f"page {found[key].page.parent} is not there"))
        _tell(self.folder, skipped)
        for kind, path, _ in skipped:
            if kind in ("damaged", "orphan"):
                _unlink(path)
        with self._lock:
            self._known = {one.page.key: (one.page, one.num_bytes) for one in ordered}
            self._num_bytes = sum(one.num_bytes for one in ordered)
        return [one.page for one in ordered]

    def write(self, page: DiskPage, data: np.ndarray) -> None:
        """Keeps a page, in the place of what its key had before. A child whose parent is never written is lost.

        ValueError for data of another shape or dtype, or a wrong key. OSError, as for a full disk, changes nothing.
        """
        header, content = page_file.encode(self._layout, page, data)
        _write(self._path(page.key), (header, content))
        with self._lock:
            self._forget(page.key)
            self._known[page.key] = (page, len(header) + len(content))
            self._num_bytes += len(header) + len(content)

    def read(self, key: str, out: np.ndarray | None = None) -> np.ndarray | None:
        """The data of a page that is known; None, with a warning, if its file is not there or not what was written.

        out: contiguous, of the page's shape and dtype: is filled and returned; what is in it after None is not told.
        A file that is not what was written is deleted.
        """
        known = self._known.get(key)
        if known is None:
            log.warning("page %s is not in %s", key, self.folder)
            return None
        if out is None:
            out = np.empty(self._layout.shape, self._layout.dtype)
        elif out.shape != self._layout.shape or out.dtype != self._layout.dtype or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype}{list(out.shape)}; it must be {self._layout}, and contiguous")
        path = self._path(key)
        try:
            page_file.read_page(path, self._layout, known[0], out)
        except FileNotFoundError:
            log.warning("page %s is gone from %s", key, self.folder)
            self.remove(key)
            return None
        except (OSError, PageFault) as error:
            log.warning("%s is not read: %s", path, error)
            if isinstance(error, PageFault):
                self.remove(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used last, when the folder is next looked through
        return out

    def has(self, key: str) -> bool:
        """Whether the page's file is there; nothing is read of it."""
        return key in self._known and self._path(key).exists()

    def remove(self, key: str) -> None:
        """Deletes a page; nothing if there is none. The caller removes its children, which nothing reaches any more."""
        path = self._path(key)
        with self._lock:
            self._forget(key)
        _unlink(path)

    def _forget(self, key: str) -> None:
        _, num_bytes = self._known.pop(key, (None, 0))
        self._num_bytes -= num_bytes

    def write_manifest(self, session_id: str, manifest: dict[str, Any]) -> None:
        """Keeps what a session is made of, as JSON. ValueError for a bad id; OSError as for `write`."""
        path = self._manifest_path(session_id)
        content = json.dumps(manifest)
        told = {
            "version": MANIFEST_VERSION,
            "fingerprint": self._layout.fingerprint,
            "session_id": session_id,
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
            "content": content,
        }
        _write(path, (json.dumps(told).encode(),))

    def read_manifest(self, session_id: str) -> dict[str, Any] | None:
        """What `write_manifest` kept; None if there is nothing, or, with a warning, if that is not to be used."""
        path = self._manifest_path(session_id)
        try:
            with open(open_own(path), "rb") as file:
                told = json.loads(file.read())
            content = told["content"]
            expected = (MANIFEST_VERSION, self._layout.fingerprint, session_id)
            if (told["version"], told["fingerprint"], told["session_id"]) != expected:
                raise ValueError("it is of another version, model or session")
            if told["sha256"] != hashlib.sha256(content.encode()).hexdigest():
                raise ValueError("it is damaged")
            return json.loads(content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("session %s is not read from %s: %s: %s", session_id, path, type(error).__name__, error)
            return None

    def remove_manifest(self, session_id: str) -> None:
        """Deletes what was kept of a session; nothing if there is none."""
        _unlink(self._manifest_path(session_id))

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Every session that can be read, by id, in the order of the ids."""
        ids = sorted(path.name.removesuffix(".json") for path in self._sessions_folder.iterdir())
        read = {one: self.read_manifest(one) for one in ids if SESSION_ID.fullmatch(one)}
        return {one: manifest for one, manifest in read.items() if manifest is not None}

    def _path(self, key: str) -> Path:
        if not _DIGEST.fullmatch(key):
            raise ValueError(f"page key {key!r} is not 64 hexadecimal digits")
        return self._pages_folder / key

    def _manifest_path(self, session_id: str) -> Path:
        if not SESSION_ID.fullmatch(session_id):
            raise ValueError(
                f"session id {session_id[:200]!r} must be 1 to 128 characters of A-Z, a-z, 0-9, '.', '_' and '-', and "
                "not begin with '.'"
            )
        return self._sessions_folder / f"{session_id}.json"

    def _scan(self) -> tuple[dict[str, _Found], list[tuple[str, Path, str]]]:
        """Pages by key, and of what is none: a kind of `_SKIPPED`, the path and the reason."""
        found: dict[str, _Found] = {}
        skipped = []
        for path in self._pages_folder.iterdir():
            if not _DIGEST.fullmatch(path.name):
                skipped.append(("foreign", path, "its name is none of a page"))
                continue
            try:
                one = _look_at(path, self._layout)
            except PageFault as fault:
                skipped.append((fault.kind, path, str(fault)))
            except OSError as error:
                skipped.append(("unreadable", path, str(error)))
            else:
                found[path.name] = one
        return found, skipped

    def _delete_partial(self) -> None:
        """Deletes what a server that died was writing."""
        for folder in (self._pages_folder, self._sessions_folder):
            for path in folder.glob(".*"):
                _unlink(path)


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder until it is closed. OSError if that is not possible here."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            f"another server of this model uses {folder}; stop it, or give this one another --kv-disk-dir"
        ) from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _look_at(path: Path, layout: PageLayout) -> _Found:
    with open(open_own(path), "rb", buffering=0) as file:
        header, info = page_file.read_header(file, layout), os.fstat(file.fileno())
    if header.page.key != path.name:
        raise PageFault("damaged", f"it holds page {header.page.key}")
    return _Found(header.page, info.st_size, info.st_mtime_ns)


def _parents_first(found: dict[str, _Found]) -> list[_Found]:
    """Those that are reached from a first page, each behind its parent, and else in the order of their last use."""
    children: dict[str | None, list[_Found]] = {}
    for one in found.values():
        children.setdefault(one.page.parent, []).append(one)
    ready: list[tuple[int, str]] = []

    def add(parent: str | None) -> None:
        for one in children.get(parent, ()):
            heapq.heappush(ready, (one.used_ns, one.page.key))

    add(None)
    ordered = []
    while ready:
        _, key = heapq.heappop(ready)
        ordered.append(found[key])
        add(key)
    return ordered


def _tell(folder: Path, skipped: Sequence[tuple[str, Path, str]]) -> None:
    """A warning for every kind of file that is skipped."""
    examples = {kind: (path, reason) for kind, path, reason in skipped}
    for kind, count in Counter(kind for kind, _, _ in skipped).items():
        path, reason = examples[kind]
        log.warning("%s: %d files are %s; one is %s: %s", folder, count, _SKIPPED[kind], path.name, reason)


def _write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    """All or nothing. OSError if the disk fails."""
    fd, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with open(fd, "wb", buffering=0) as file:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _unlink(path: Path) -> None:
    """Deletes a file, if it is there. A disk that fails is a warning: the file is found again at the next start."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be deleted: %s", path, error)
