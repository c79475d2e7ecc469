"""Bytes by key in a folder of files: what is damaged is thrown away, what was used least recently makes room.

What is kept here is run as code by whoever reads it, so that only the user's own files in the user's own folder count.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)

MAX_BYTES = 2**30
"""Most that a folder holds: about a hundred configurations, at 0.1 to 0.4 MB for each of the 40 programs of one."""
MAGIC = b"jaxinfer entry 1\n"
STALE_S = 3600.0
"""Age from which a file that is being written belongs to a process that died."""
_DIGEST_BYTES = hashlib.sha256().digest_size


class DiskCache:
    """A folder of entries. Threads and processes may share it: an entry appears whole or not at all."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES):
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path, max_bytes: int = MAX_BYTES) -> DiskCache | None:
        """The cache in `folder`, which is made for this user alone. None, with a warning, where others could write."""
        return cls(folder, max_bytes) if is_private(folder) else None

    def get(self, key: str) -> bytes | None:
        """What was put under `key`. None if there is nothing; what is damaged or not the user's own is deleted."""
        path = self._folder / key
        try:
            data = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.discard(key, str(error))
            return None
        header = len(MAGIC) + _DIGEST_BYTES
        if data[:header] != MAGIC + _digest(key, data[header:]):
            self.discard(key, f"its {len(data)} bytes are damaged")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # deleted last, of those that are there
        return data[header:]

    def put(self, key: str, data: bytes) -> None:
        """Keeps `data`, and deletes what was used least recently beyond the limit. A disk that fails is a warning."""
        content = MAGIC + _digest(key, data) + data
        if len(content) > self._max_bytes:
            log.warning("an entry of %d bytes is not kept: the limit of %s is less", len(content), self._folder)
            return
        try:
            fd, name = tempfile.mkstemp(prefix=".", dir=self._folder)
            try:
                with open(fd, "wb") as file:
                    file.write(content)
                os.replace(name, self._folder / key)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
            self._make_room()
        except OSError as error:
            log.warning("a compiled step is not kept: %s", error)

    def discard(self, key: str, reason: str) -> None:
        """Deletes an entry that cannot be used; a folder, which is none of ours, stays."""
        log.warning("%s is discarded: %s", self._folder / key, reason)
        with contextlib.suppress(OSError):
            os.unlink(self._folder / key)

    def _make_room(self) -> None:
        with self._lock:
            found = []
            for entry in os.scandir(self._folder):
                with contextlib.suppress(FileNotFoundError):  # another process made room too
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(info.st_mode):
                        continue
                    if not entry.name.startswith("."):
                        found.append((info.st_mtime_ns, info.st_size, entry.path))
                    elif time.time() - info.st_mtime > STALE_S:
                        os.unlink(entry.path)
            excess = sum(size for _, size, _ in found) - self._max_bytes
            for _, size, path in sorted(found):
                if excess <= 0:
                    return
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                excess -= size


def is_private(folder: Path) -> bool:
    """Whether only this user can write to `folder`, which is made if it is not there. If not, a warning says why."""
    try:
        others = make_private(folder)
    except OSError as error:
        log.warning("compiled steps are not kept: %s", error)
        return False
    if others is None:
        return True
    log.warning(
        "compiled steps are neither kept nor read: %s, and what is in it is run as code; make it yours alone "
        "(chmod 700) or give another --compile-cache-dir",
        others,
    )
    return False


def make_private(folder: Path) -> str | None:
    """Makes `folder` for this user alone, unless it is there. None if only this user can write to it, else who can.

    OSError if it can be neither made nor looked at.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return None
    return f"others can write to {folder} (owner {info.st_uid}, mode {stat.S_IMODE(info.st_mode):o})"


def _read(path: Path) -> bytes:
    """A file of the user's own. OSError for anything else."""
    with open(open_own(path), "rb") as file:
        return file.read()


def open_own(path: Path) -> int:
    """A descriptor, to read a file that this user alone can write to. OSError for anything else."""
    # Neither through a link, nor waiting for whoever would write to a pipe.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError("it is no file")
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise OSError("others can write to it")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _digest(key: str, data: bytes) -> bytes:
    """Of an entry: with its key, so that a file under another name is as good as damaged."""
    return hashlib.sha256(key.encode() + b"\n" + data).digest()
