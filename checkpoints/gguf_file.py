"""The container of GGUF versions 2 and 3: metadata and quantised tensors under the file's own names."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from checkpoints.gguf_dequant import TYPES, UNSUPPORTED_NAMES, TensorType
from checkpoints.source import CheckpointError, refuse_pointer

MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorInfo(NamedTuple):
    """One tensor of the file. shape: rows first, as numpy has it. start: bytes from the start of the file."""

    kind: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.kind.block_values * self.kind.block_bytes


class _Cursor:
    """Reads values in order; running off the end is a CheckpointError that says where."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.position = path, data, 0

    def fail(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {why} (at byte {self.position} of {len(self.data)})")

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise self.fail(f"truncated: {num_bytes} more bytes expected")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> int | float | bool:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def size(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.take(self.size()).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> object:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY or depth > 2:
            raise self.fail(f"metadata of type {kind} at depth {depth} is not known")
        item, count = int(self.number("I")), self.size()
        if count > len(self.data) - self.position:  # every item takes a byte or more
            raise self.fail(f"truncated: an array claims {count} items")
        if item in _SCALARS:
            code = _SCALARS[item]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        return [self.value(item, depth + 1) for _ in range(count)]


class GgufFile:
    """One GGUF file, mapped into memory. Opening it reads the metadata and checks every tensor's place.

    metadata: key to int, float, bool, str or list.
    tensors: name to TensorInfo, in file order.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{self.path}: cannot be read ({error})") from error
        cursor = _Cursor(self.path, self._map)
        num_tensors, num_keys = _read_preamble(cursor)
        self.metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise cursor.fail(f"metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(int(cursor.number("I")))
        self.tensors = self._read_tensor_infos(cursor, num_tensors)

    def _read_tensor_infos(self, cursor: _Cursor, num_tensors: int) -> Mapping[str, TensorInfo]:
        relative: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name, info = _read_tensor_info(cursor)
            if name in relative:
                raise cursor.fail(f"tensor {name!r} occurs twice")
            relative[name] = info
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.fail(f"general.alignment is {alignment!r}; it must be at least 1")
        data_start = -(-cursor.position // alignment) * alignment
        placed = {name: info._replace(start=data_start + info.start) for name, info in relative.items()}
        self._check_places(placed, data_start)
        return placed

    def _check_places(self, tensors: Mapping[str, TensorInfo], data_start: int) -> None:
        position, previous = data_start, "the header"
        for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
            if info.start < position:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} starts at byte {info.start} and overlaps {previous}, "
                    f"which ends at {position}"
                )
            position, previous = info.start + info.num_bytes, f"tensor {name!r}"
            if position > len(self._map):
                raise CheckpointError(
                    f"{self.path}: truncated: tensor {name!r} ends at byte {position}, "
                    f"but the file ends after {len(self._map)}"
                )

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor as a read-only view, uint8 [..., bytes per row]."""
        info = self.tensors[name]
        if info.num_bytes == 0:
            return np.empty((*info.shape[:-1], 0), np.uint8)
        data = np.frombuffer(self._map, np.uint8, info.num_bytes, info.start)
        return data.reshape(*info.shape[:-1], -1)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; gives the counts of tensors and of metadata keys."""
    refuse_pointer(cursor.path, cursor.data[:64])
    magic = cursor.take(4)
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.path}: starts with {magic!r}, so it is not a GGUF file")
    version = int(cursor.number("I"))
    if version not in (2, 3):
        hint = "; the file is big-endian" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{cursor.path}: GGUF version {version} is not supported{hint}; known: 2, 3")
    counts = cursor.size(), cursor.size()
    if max(counts) > len(cursor.data):
        raise cursor.fail(f"truncated: {counts[0]} tensors and {counts[1]} metadata keys are claimed")
    return counts


def _read_tensor_info(cursor: _Cursor) -> tuple[str, TensorInfo]:
    name, num_dims = cursor.string(), int(cursor.number("I"))
    if num_dims > MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions; at most {MAX_DIMS} are allowed")
    shape = tuple(cursor.size() for _ in range(num_dims))[::-1]
    number, start = int(cursor.number("I")), cursor.size()
    kind = TYPES.get(number)
    if kind is None:
        known = ", ".join(t.name for t in TYPES.values())
        raise CheckpointError(
            f"{cursor.path}: tensor {name!r} is of type {UNSUPPORTED_NAMES.get(number, number)}; supported: {known}"
        )
    if shape and shape[-1] % kind.block_values:
        raise cursor.fail(
            f"tensor {name!r} has rows of {shape[-1]} values; {kind.name} needs a multiple of {kind.block_values}"
        )
    return name, TensorInfo(kind, shape or (1,), start)
