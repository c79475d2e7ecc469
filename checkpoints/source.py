"""What a checkpoint offers to whoever loads it: tensors by their published names, and one error for all faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the values at fault."""


_LFS_POINTER = b"version https://git-lfs"


def refuse_pointer(path: Path, start: bytes) -> None:
    """CheckpointError for a file that starts as those do which a clone without Git LFS leaves in place of the data."""
    if start.startswith(_LFS_POINTER):
        raise CheckpointError(f"{path}: a Git LFS pointer in place of the file; run in its folder: git lfs pull")


class TensorSource(Protocol):
    """Tensors under the names that Hugging Face publishes. Shapes are known before any data is read."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor; linear weights are (out, in)."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One whole tensor: a read-only view of the mapped file in its stored dtype, or float32 if it was quantised.

        A name that `shapes` lacks raises KeyError.
        """
        ...
