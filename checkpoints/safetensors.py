"""Safetensors files: a reader that maps them into memory, and a writer.

A file is the header's length (8 bytes, little-endian), a JSON header of dtype, shape and byte range per tensor, and the
data. The ranges tile the data without gaps or overlaps, so that any damage to the length shows before anything is read.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.source import CheckpointError, refuse_pointer

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class _Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    end: int


class SafetensorsFile:
    """One file, mapped into memory. Opening it checks the whole header against the file's length."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise CheckpointError(f"{self.path}: {size} bytes, too short for a safetensors file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        self._entries = _parse_header(self.path, self._map)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file; KeyError for an unknown name."""
        entry = self._entries[name]
        count = math.prod(entry.shape)
        if count == 0:
            return np.empty(entry.shape, entry.dtype)
        return np.frombuffer(self._map, entry.dtype, count, entry.start).reshape(entry.shape)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise CheckpointError(f"the header names {sorted({n for n in names if names.count(n) > 1})} more than once")
    return result


def _parse_header(path: Path, data: mmap.mmap) -> dict[str, _Entry]:
    refuse_pointer(path, data[:64])
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: the header claims {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if 8 + length > len(data):
        raise CheckpointError(f"{path}: the header claims {length} bytes, but the file ends after {len(data)}")
    try:
        header = json.loads(data[8 : 8 + length].decode("utf-8"), object_pairs_hook=_unique)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is a {type(header).__name__}, not an object")
    entries = {n: _parse_entry(path, n, v, 8 + length) for n, v in header.items() if n != "__metadata__"}
    _check_tiling(path, entries, 8 + length, len(data))
    return entries


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_entry(path: Path, name: str, value: object, data_start: int) -> _Entry:
    def fail(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name!r}: {why}")

    if not isinstance(value, dict):
        raise fail(f"its entry is {value!r}, not an object")
    code, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(code, str) or code not in DTYPES:
        raise fail(f"dtype {code!r} is not supported; known: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise fail(f"shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise fail(f"data_offsets {offsets!r} is not a pair of sizes")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != needed:
        raise fail(f"{code} {shape} takes {needed} bytes, but data_offsets {offsets} span {end - begin}")
    return _Entry(DTYPES[code], tuple(shape), data_start + begin, data_start + end)


def _check_tiling(path: Path, entries: Mapping[str, _Entry], data_start: int, file_bytes: int) -> None:
    position, previous = data_start, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != position:
            what = "overlaps" if entry.start < position else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {name!r} starts at byte {entry.start} and {what} {previous}, which ends at {position}"
            )
        if entry.end > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {entry.end}, but the file ends after {file_bytes}"
            )
        position, previous = entry.end, f"tensor {name!r}"
    if position != file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - position} bytes follow the last tensor, which ends at {position}")


class SafetensorsFolder:
    """The files of one checkpoint as one source."""

    def __init__(self, files: Sequence[SafetensorsFile]):
        self._owner: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.shapes():
                if name in self._owner:
                    other = self._owner[name].path.name
                    raise CheckpointError(f"{file.path}: tensor {name!r} is also in {other}")
                self._owner[name] = file
        self._shapes = {name: shape for file in files for name, shape in file.shapes().items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        return self._owner[name].read(name)


def open_folder(folder: str | Path) -> SafetensorsFolder | None:
    """The safetensors files of a folder as one source; None if it has none.

    In order of preference: `model.safetensors`; the files that the index names; `model*.safetensors`; any others, with
    `consolidated*.safetensors` (a second copy under the publisher's own names) only where nothing else is there.
    """
    folder = Path(folder)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in names:
        return SafetensorsFolder([SafetensorsFile(folder / "model.safetensors")])
    if (folder / INDEX_NAME).exists():
        return _open_index(folder)
    if not names:
        return None
    plain = [name for name in names if not name.startswith("consolidated")]
    chosen = [name for name in plain if name.startswith("model")] or plain or names
    _check_all_shards(folder, chosen)
    return SafetensorsFolder([SafetensorsFile(folder / name) for name in chosen])


def _open_index(folder: Path) -> SafetensorsFolder:
    path = folder / INDEX_NAME
    try:
        index = json.loads(path.read_text("utf-8"))
        weight_map = dict(index["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of shards ({type(error).__name__}: {error})") from None
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{path}: names {name!r}, which is not a file of this folder")
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise CheckpointError(f"{path}: {len(absent)} of {len(names)} files are missing: {', '.join(absent[:20])}")
    files = {name: SafetensorsFile(folder / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].shapes():
            raise CheckpointError(f"{path}: places tensor {tensor!r} in {name}, which does not hold it")
    return SafetensorsFolder(list(files.values()))


def _check_all_shards(folder: Path, names: Sequence[str]) -> None:
    """Shards that count themselves ("-00001-of-00003") must all be there, since no index says what they hold."""
    totals = {int(match[1]) for name in names if (match := re.search(r"-of-(\d+)\.safetensors$", name))}
    if totals and (len(totals) > 1 or totals != {len(names)}):
        raise CheckpointError(
            f"{folder}: {len(names)} safetensors files ({', '.join(names[:20])}) that count to {sorted(totals)}; "
            f"a shard is missing, or two checkpoints share the folder"
        )


def write(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file. A dtype that the format lacks raises CheckpointError."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        code = _CODES.get(tensor.dtype)
        if code is None:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}; safetensors holds {', '.join(DTYPES)}")
        end = position + tensor.nbytes
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data then starts at a multiple of 8 bytes, as views of 64-bit types need
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
