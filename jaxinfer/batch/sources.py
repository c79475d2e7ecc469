"""The rows of a job, at random: of files, of folders, and of whatever Python has under numbers."""

from __future__ import annotations

import bisect
import collections
import gzip
import hashlib
import os
import tempfile
import threading
import weakref
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec
import numpy

from jaxinfer.batch.errors import BatchError

TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
GROUPS_KEPT = 4
"""Groups of rows of a table that stay in memory: threads that read ahead may be in several at once."""
SAMPLED_ROWS = 64
"""Of a source that is no file: those that tell whether it is the same one."""


class RawRow(NamedTuple):
    """A row as it lies in the input."""

    number: int  # from 0, over the whole input
    place: str  # for messages: "line 3"
    data: bytes | Mapping[str, Any]  # JSON, or what it stands for


class Rows(Protocol):
    """The rows of an input; threads may share it."""

    digest: str
    """Of the content: equal for equal inputs alone, as far as can be told."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RawRow: ...


def open_rows(source: Any) -> Rows:
    """The rows of a path (JSONL, gzip of it, Parquet, Arrow, or a folder of such), or of a Grain source or a sequence.

    Raises BatchError for what is none of these, OSError for what cannot be read.
    """
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(source))
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, bytes | Mapping):
        return GivenRows(source)
    raise BatchError(
        f"the input is a {type(source).__name__}; a path, or a source with a length and rows under numbers, is needed"
    )


def _open_path(path: Path) -> Rows:
    if not path.is_dir():
        return _open_file(path)
    known = (*TEXT_SUFFIXES, *TABLE_SUFFIXES, ".gz")
    # A data set that was saved to disk has its facts in JSON files beside the data.
    files = sorted(one for one in path.iterdir() if one.suffix in known and one.suffix != ".json")
    if not files:
        raise BatchError(f"{path} has no file of rows; known: {', '.join(known)}")
    return JoinedRows([_open_file(one) for one in files])


def _open_file(path: Path) -> Rows:
    if path.suffix in TABLE_SUFFIXES:
        return TableRows(path)
    return JsonLines(path)


class JsonLines:
    """The lines of a file that are not blank. One that begins as gzip does is unpacked into a temporary file."""

    def __init__(self, path: Path):
        digest = hashlib.sha256()
        self._starts, self._numbers = array("q"), array("q")
        end = 0
        with path.open("rb") as packed, _unpacked(packed, path) as file:
            for number, line in enumerate(file, 1):
                digest.update(line)
                if not line.isspace():
                    self._starts.append(end)
                    self._numbers.append(number)
                end += len(line)
            self._ends = array("q", self._starts[1:])
            self._ends.append(end)
            # Closed with the last reference: a thread that reads ahead may have one after the job has ended.
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> RawRow:
        start, end = self._starts[index], self._ends[index]
        data = os.pread(self._file, end - start, start)
        return RawRow(index, f"line {self._numbers[index]}", data)


def _unpacked(file: BinaryIO, path: Path) -> BinaryIO:
    if file.peek(2)[:2] != b"\x1f\x8b":  # pyright: ignore[reportAttributeAccessIssue]
        return path.open("rb")
    unpacked = tempfile.TemporaryFile()
    try:
        with gzip.open(file) as content:
            while block := content.read(2**20):
                unpacked.write(block)
        unpacked.flush()
    except BaseException as error:
        unpacked.close()
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error):
            raise BatchError(f"{path} is no whole gzip file: {error}") from error
        raise
    unpacked.seek(0)
    return unpacked  # pyright: ignore[reportReturnType]


class TableRows:
    """A Parquet or Arrow file. Each row is a mapping of its columns, those that are null left out."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._read, sizes = _parquet_groups(path) if path.suffix == ".parquet" else _arrow_groups(path)
        self._ends = list(_running_sums(sizes))
        self._kept: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> RawRow:
        number = bisect.bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        (row,) = self._group(number).slice(index - first, 1).to_pylist()
        return RawRow(index, f"row {index + 1}", {name: value for name, value in row.items() if value is not None})

    def _group(self, number: int) -> Any:
        with self._lock:
            if number not in self._kept:
                self._kept[number] = self._read(number)
                if len(self._kept) > GROUPS_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(number)
            return self._kept[number]


def _parquet_groups(path: Path) -> tuple[Any, list[int]]:
    pyarrow = _pyarrow(path)
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise BatchError(f"{path} is no Parquet file: {error}") from error
    return file.read_row_group, [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]


def _arrow_groups(path: Path) -> tuple[Any, list[int]]:
    """A file, or a stream, which is how data sets are saved."""
    pyarrow = _pyarrow(path)
    memory = pyarrow.memory_map(str(path))
    try:
        batches = pyarrow.ipc.open_file(memory).read_all().to_batches()
    except pyarrow.ArrowInvalid:
        memory.seek(0)
        try:
            batches = pyarrow.ipc.open_stream(memory).read_all().to_batches()
        except pyarrow.ArrowInvalid as error:
            raise BatchError(f"{path} is no Arrow file: {error}") from error
    return batches.__getitem__, [len(batch) for batch in batches]


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise BatchError(f"{path} needs pyarrow: pip install 'jaxinfer[parquet]'") from None
    return pyarrow


class GivenRows:
    """A sequence of mappings, or of lines of JSON: any Grain source or data set that has a length."""

    def __init__(self, source: Any):
        self._source = source
        digest = hashlib.sha256(f"{len(source)}".encode())
        for index in sorted(
            {i * (len(source) - 1) // SAMPLED_ROWS for i in range(SAMPLED_ROWS + 1)} if len(source) else ()
        ):
            data = self[index].data
            digest.update(data if isinstance(data, bytes) else encode(data))
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> RawRow:
        row = self._source[index]
        if isinstance(row, str):
            row = row.encode()
        if not isinstance(row, bytes | Mapping):
            row = encode(row)  # refused as a row that is no object, like one of a file
        return RawRow(index, f"row {index + 1}", row)


class JoinedRows:
    """Several inputs, one after the other."""

    def __init__(self, parts: Sequence[Rows]):
        self._parts = parts
        self._ends = list(_running_sums([len(part) for part in parts]))
        self.digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> RawRow:
        number = bisect.bisect_right(self._ends, index)
        first = self._ends[number - 1] if number else 0
        row = self._parts[number][index - first]
        return RawRow(index, f"file {number + 1}, {row.place}", row.data)


class _Named(msgspec.Struct):
    custom_id: str | None = None


_named_decoder = msgspec.json.Decoder(_Named)


def find_duplicates(rows: Rows) -> Mapping[int, int]:
    """Rows whose custom_id an earlier one has, by index, with the index of the first of that name.

    Reads all rows, before anything runs: so it does not depend on shards, on their order or on what was done before.
    """
    indices, digests = array("q"), bytearray()
    for index in range(len(rows)):
        if (custom_id := _custom_id(rows[index].data)) is not None:
            indices.append(index)
            digests += hashlib.blake2b(custom_id.encode("utf-8", "replace"), digest_size=16).digest()
    halves = numpy.frombuffer(bytes(digests), numpy.uint64).reshape(-1, 2)
    order = numpy.lexsort((halves[:, 1], halves[:, 0]))  # stable: of equal ones the first comes first
    ordered = halves[order]
    duplicates: dict[int, int] = {}
    first = 0
    for at in range(1, len(order)):
        if (ordered[at] != ordered[at - 1]).any():
            first = at
        else:
            duplicates[indices[order[at]]] = indices[order[first]]
    return duplicates


def _custom_id(data: bytes | Mapping[str, Any]) -> str | None:
    if isinstance(data, Mapping):
        custom_id = data.get("custom_id")
        return custom_id if isinstance(custom_id, str) else None
    try:
        return _named_decoder.decode(data).custom_id
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def encode(value: Any) -> bytes:
    """JSON, also of numpy's scalars and arrays, which data sets hold."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(f"{type(value).__name__} has no place in JSON")


def _running_sums(sizes: Sequence[int]) -> Iterator[int]:
    total = 0
    for size in sizes:
        total += size
        yield total
