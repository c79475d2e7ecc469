"""What a job has written, and its checkpoint: one file of rows and one small file beside it.

A checkpoint is the position of the iterator over the input together with the length of the output and the counts, in
one JSON file that is replaced by a rename, after the rows it speaks of are on the disk. So there is no moment at which
the one is known without the other: what stands behind that length was written and not yet counted, and is cut off and
computed again. Orbax would write a folder of files and its own marks of completion for what is a hundred bytes here,
and takes 4 s to import; the output itself could not be part of its checkpoint.

    OUTPUT.partial   rows so far, as JSON lines (each checkpoint a member of its own where they are packed)
    OUTPUT.state     the checkpoint; it stays, so that a job that is done is not done again
    OUTPUT           there once the job is done
"""

from __future__ import annotations

import dataclasses
import fcntl
import gzip
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from jaxinfer.batch.errors import BatchError

STATE_VERSION = 1
"""Of the state file."""
MAX_SHOWN_CHARS = 200
"""Longest value in a message about what has changed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the rows that were written add up to."""

    num_rows: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, that were in the KV cache: of what was computed again after a kill, too
    output_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            num_rows=self.num_rows + other.num_rows,
            num_failed=self.num_failed + other.num_failed,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint."""

    version: int = STATE_VERSION
    identity: dict[str, Any]  # of input, model and parameters: a job is not resumed with others
    created_s: int  # when the job began, in seconds since the epoch
    iterator: dict[str, Any] | None = None  # of Grain, behind the last row that is written; None: at the start
    num_bytes: int = 0  # of the partial file
    counts: Counts = Counts()
    written: bool = False  # all rows are; what is left is to give the output its name


Finish = Callable[[Path, Path], None]
"""Makes the output, in a new file (second), from the JSON lines (first)."""


class Journal:
    """The output of a job, and where it stands. As a context it is closed at the end, without a checkpoint."""

    def __init__(self, output: Path, file: BinaryIO, state: State, finish: Finish | None):
        self._output = output
        self._file = file
        self._state = state
        self._finish = finish
        self._packed = output.suffix == ".gz"
        self._lines: list[bytes] = []
        self._counts = state.counts
        self._iterator = state.iterator
        self._appending = threading.Lock()
        self._error: BatchError | None = None

    @classmethod
    def open(
        cls,
        output: Path,
        identity: Mapping[str, Any],
        created_s: int,
        *,
        restart: bool = False,
        finish: Finish | None = None,
    ) -> Self:
        """The job of `output`, as far as it was done. restart: what there is of it is deleted.

        finish: makes the output where it is not the JSON lines themselves. Raises BatchError where another process
        has it, where it was begun with another `identity`, and where there is an output that no job wrote.
        """
        partial, path = _beside(output, ".partial"), _beside(output, ".state")
        file = _opened(partial)
        try:
            if restart:
                for old in (path, output):
                    old.unlink(missing_ok=True)
            state = _read_state(path)
            if state is None:
                if output.exists():
                    raise BatchError(f"{output} exists and no job has written it; name another, or restart")
                state = State(identity=_as_json(identity), created_s=created_s)
            else:
                _check_same(state.identity, _as_json(identity), output)
            journal = cls(output, file, state, finish)
            journal._cut()
            return journal
        except BaseException:
            file.close()
            raise

    @property
    def counts(self) -> Counts:
        """Of all rows that were appended."""
        return self._counts

    @property
    def iterator(self) -> dict[str, Any] | None:
        """Where to go on in the input."""
        return self._iterator

    @property
    def created_s(self) -> int:
        """When the job began, also where it has been resumed since."""
        return self._state.created_s

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the job was begun with."""
        return self._state.identity

    @property
    def can_write(self) -> bool:
        """Whether no checkpoint has failed."""
        return self._error is None

    def append(self, line: bytes, counts: Counts, iterator: dict[str, Any]) -> None:
        """The next row of the output; it counts with the next checkpoint."""
        with self._appending:
            self._lines.append(line)
            self._counts += counts
            self._iterator = iterator

    def checkpoint(self, *, written: bool = False) -> None:
        """Makes sure of all that was appended. From any thread, but one at a time.

        Raises BatchError where the disk is full, and from then on: what it had no room for must not be left out.
        """
        if self._error is not None:
            raise self._error
        with self._appending:
            lines, counts, iterator = self._lines, self._counts, self._iterator
            self._lines = []
        if not lines and not written and self._state.iterator is not None:
            return
        data = b"".join(lines)
        if self._packed and (data or (written and not self._state.num_bytes)):  # a packed file has a head at least
            data = gzip.compress(data, mtime=0)
        state = msgspec.structs.replace(
            self._state,
            iterator=iterator,
            counts=counts,
            num_bytes=self._state.num_bytes + len(data),
            written=written,
        )
        try:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
            _replace(_beside(self._output, ".state"), msgspec.json.encode(state))
        except OSError as error:
            self._error = self._failed(error)
            raise self._error from error
        self._state = state

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Adds what is known of the model only once it is loaded. Raises BatchError where it was different before."""
        known = self._state.identity
        _check_same({name: known.get(name, facts[name]) for name in facts}, _as_json(facts), self._output)
        self._state = msgspec.structs.replace(self._state, identity=known | _as_json(facts))

    def finish(self) -> None:
        """Gives the output its name, once all rows are written. Does nothing more if it has it."""
        if self._lines or not self._state.written:
            self.checkpoint(written=True)
        partial = _beside(self._output, ".partial")
        if not partial.exists():
            return
        try:
            if self._finish is None:
                os.replace(partial, self._output)
            else:
                made = _beside(self._output, ".tmp")
                self._finish(partial, made)
                with made.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(made, self._output)
                partial.unlink()
            _sync_folder(self._output)
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Lets others have the job."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cut(self) -> None:
        """Back to the last checkpoint."""
        size = os.fstat(self._file.fileno()).st_size
        if self._state.written and size == 0 and self._output.exists():
            _beside(self._output, ".partial").unlink()  # made by opening it: the job is done
            return
        if size < self._state.num_bytes:
            raise BatchError(
                f"{_beside(self._output, '.partial')} has {size} bytes, and {self._state.num_bytes} were written: "
                "rows are lost; restart"
            )
        self._file.truncate(self._state.num_bytes)
        self._file.seek(self._state.num_bytes)

    def _failed(self, error: OSError) -> BatchError:
        return BatchError(
            f"{self._output} cannot be written ({error.strerror}); {self._state.counts.num_rows} rows are safe: make "
            "room, and run the same job again to go on"
        )


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _opened(partial: Path) -> BinaryIO:
    """The partial file, for this process alone; made if it is not there."""
    # Not buffered: what a full disk has not taken would be written once more when the file is closed.
    file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BatchError(f"another process is at work on {partial}; wait for it, or name another output") from None
    return _Whole(file)  # pyright: ignore[reportReturnType]


class _Whole:
    """A file without a buffer, whose `write` writes all: the system may take a part, as where the disk gets full."""

    def __init__(self, file: Any):
        self._file = file

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _read_state(path: Path) -> State | None:
    try:
        state = msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise BatchError(f"{path} is no state of a job ({error}); restart") from None
    if state.version != STATE_VERSION:
        raise BatchError(f"{path} is of version {state.version}, and this is {STATE_VERSION}; restart")
    return state


def _replace(path: Path, data: bytes) -> None:
    """All of the new content or all of the old, whatever happens."""
    temporary = _beside(path, ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path)


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _as_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(dict(identity)))


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], output: Path) -> None:
    changed = [
        f"{name} was {_shown(before.get(name))} and is {_shown(now.get(name))}"
        for name in sorted(now)
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise BatchError(
            f"{output} was begun otherwise: {'; '.join(changed)}. Run it as it was, name another output, or restart, "
            "which deletes what there is"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
