"""Which model keys and values were computed by: what is on disk under another fingerprint is not used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from checkpoints.resolve import Checkpoint
from checkpoints.safetensors import INDEX_NAME
from checkpoints.source import CheckpointError

KV_LAYOUT = 1
"""Of a page's bytes. Raised when their order changes, or the formula of what stands in them."""
EDGE_BYTES = 2**16
"""Read of each weight file at its start, its middle and its end."""
SPOT_BYTES = 2**12
NUM_SPOTS = 512
"""Read besides, evenly over all files: 8 GB have one every 16 MB, so that nearly every matrix has its own."""


def fingerprint(checkpoint: Checkpoint, *, dtype: str, seed: int) -> str:
    """SHA-256, as 64 hexadecimal digits, of what decides keys and values: config, dtype and weights.

    Weights count by the names of their files, the sizes and samples of the content, not by where they lie: 8 GB take
    some 10 ms where they are cached. So a file that was changed in a few of its bytes may pass for what it was; what
    trains or merges weights changes whole matrices. seed: of the weights where these are random, else of no matter.
    dtype: of the cache, by name. CheckpointError if a file cannot be read.
    """
    digest = hashlib.sha256()
    random = checkpoint.format == "dummy"
    facts = [KV_LAYOUT, dtype, checkpoint.format, dict(checkpoint.config), seed if random else None]
    _add(digest, json.dumps(facts, sort_keys=True).encode())
    try:
        files = [] if random else _weight_files(checkpoint)
        for name, path in files:
            _add(digest, name.encode())
            with path.open("rb", buffering=0) as file:
                for block in _samples(file, NUM_SPOTS // len(files)):
                    _add(digest, block)
    except OSError as error:
        raise CheckpointError(f"{checkpoint.path}: the weights cannot be read ({error})") from error
    return digest.hexdigest()


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """With its length, so that the end of one part is no beginning of the next."""
    digest.update(len(part).to_bytes(8, "little") + part)


def _weight_files(checkpoint: Checkpoint) -> Sequence[tuple[str, Path]]:
    """Name and path, in order of the names. More than are read do no harm."""
    path = checkpoint.path
    if path.is_file():  # GGUF
        return [(path.name, path)]
    if checkpoint.format == "orbax":
        found = [one for one in path.rglob("*") if one.is_file() and one.parent != path]
    elif checkpoint.format == "gguf":
        found = list(path.glob("*.gguf"))
    else:
        found = [*path.glob("*.safetensors"), *path.glob(INDEX_NAME)]
    return sorted((str(one.relative_to(path)), one) for one in found)


def _samples(file: BinaryIO, num_spots: int) -> Iterator[bytes]:
    """The file's size, its edges and its middle, and `num_spots` places evenly spread."""
    size = file.seek(0, 2)
    yield size.to_bytes(8, "little")
    edges = (0, size // 2 - EDGE_BYTES // 2, size - EDGE_BYTES)
    if size <= 3 * EDGE_BYTES:
        file.seek(0)
        yield file.read(size)
        return
    spots = (size * i // (num_spots + 1) for i in range(1, num_spots + 1))
    for start, count in [*((edge, EDGE_BYTES) for edge in edges), *((spot, SPOT_BYTES) for spot in spots)]:
        file.seek(start)
        yield file.read(count)
