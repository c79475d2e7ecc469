"""Runs a command and ends it, with all that it started, when it takes too long or too much memory."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_OUTPUT_CHARS = 8000
_LOOK_S = 0.05
"""Between two looks at memory: a process writes at most a few hundred MB in it."""


class Outcome(NamedTuple):
    """What a command gave."""

    output: str
    """Standard output and error in one, at most `MAX_OUTPUT_CHARS`; bytes that are no UTF-8 are U+FFFD."""
    num_chars: int
    """Of all output, also what is cut off."""
    status: int
    """Its exit status; 128 + the number of the signal that ended it."""
    ended_by: str | None
    """The limit that this process enforced: `time` or `memory`."""
    seconds: float


class OutputCut:
    """Takes bytes and keeps the first characters. A character that is cut between two pieces stays whole."""

    def __init__(self, max_chars: int = MAX_OUTPUT_CHARS):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._max_chars = max_chars
        self._kept: list[str] = []
        self._num_kept = 0
        self.num_chars = 0

    def push(self, data: bytes, *, last: bool = False) -> None:
        """Takes bytes; with `last` the output has ended, and half a character becomes U+FFFD."""
        text = self._decoder.decode(data, last)
        self.num_chars += len(text)
        kept = text[: self._max_chars - self._num_kept]
        self._kept.append(kept)
        self._num_kept += len(kept)

    @property
    def text(self) -> str:
        """What is kept."""
        return "".join(self._kept)


def run(
    command: Sequence[str], *, timeout_s: float, memory_bytes: int | None, pass_fds: Sequence[int] = (), **popen: object
) -> Outcome:
    """Runs a command with no input. Whatever ends this call, an interrupt too, ends the command's process group.

    memory_bytes: of the resident memory of all its processes together, see `resident_bytes`; None: no limit.
    What the processes touch between two looks at it (50 ms) comes on top.
    """
    start_s = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C in the terminal is for the agent
        pass_fds=tuple(pass_fds),
        **popen,  # pyright: ignore[reportCallIssue, reportArgumentType]
    )
    cut = OutputCut()
    try:
        ended_by = _watch(process, cut, start_s + timeout_s, memory_bytes)
    finally:
        _end(process)
    cut.push(b"", last=True)
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Outcome(cut.text, cut.num_chars, status, ended_by, time.monotonic() - start_s)


def _watch(process: subprocess.Popen[bytes], cut: OutputCut, end_s: float, memory_bytes: int | None) -> str | None:
    """Reads the output until the command has ended, or until a limit has to be enforced, which is named."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    look_s = time.monotonic() + _LOOK_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        is_open = True
        while process.poll() is None:
            if is_open and selector.select(_LOOK_S):
                is_open = _read(process.stdout.fileno(), cut)
            elif not is_open:
                time.sleep(_LOOK_S / 10)
            now_s = time.monotonic()
            if now_s > end_s:
                return "time"
            if memory_bytes is not None and now_s > look_s:
                look_s = now_s + _LOOK_S
                if resident_bytes(process.pid) > memory_bytes:
                    return "memory"
        for _ in range(64):  # what is left in the pipe (64 KiB); a process that lives on may hold it open
            if not _read(process.stdout.fileno(), cut):
                break
    return None


def _read(fd: int, cut: OutputCut) -> bool:
    """Takes what is there; False where nothing is, or the pipe is closed."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return False
    cut.push(data)
    return bool(data)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def resident_bytes(root: int) -> int:
    """Resident memory of a process and all below it, in bytes, without what only mirrors files.

    What a process shares with its parent since the fork is counted for both.
    """
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may end meanwhile
                parents[int(entry.name)] = int(Path(entry.path, "stat").read_bytes().rpartition(b") ")[2].split()[1])
    within = {root}
    grown = True
    while grown:
        found = {pid for pid, parent in parents.items() if parent in within and pid not in within}
        within |= found
        grown = bool(found)
    return sum(map(_memory_bytes, within))


def _memory_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:
        return 0
    fields = (line.split() for line in lines if line.startswith((b"RssAnon:", b"RssShmem:")))
    return sum(int(field[1]) << 10 for field in fields)
