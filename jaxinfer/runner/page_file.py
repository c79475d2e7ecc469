"""A page of the KV cache as a file: a header that says which page it is, then its bytes.

A reader trusts nothing: the header has a SHA-256 of itself and a CRC-32 of the data. What they guard against is damage
of the disk and files half written when the power failed, not people, whom the folder keeps out; of damaged pages, one
in 2**32 would pass. A page of a 4B model has 2.4 MB, and thousands are moved: on a core of an EPYC, CRC-32 does
4.3 GB/s, SHA-256 1.8 (with instructions for it) and BLAKE2b 1.0, and only the first keeps up with a disk (3 to 7 GB/s).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by name once this is loaded
import numpy as np

from jaxinfer.runner.disk_cache import open_own
from jaxinfer.scheduler.plan import DiskPage, page_key

VERSION = 1
BLOCK_BYTES = 4096
"""A header fills a whole number of these, so that data is aligned to a disk's blocks. One holds all but long salts."""
MAX_HEADER_BYTES = 2**20
"""What a damaged length cannot go beyond."""
_MAGIC = b"jaxinfer kv page"
_START = struct.Struct("<16sII32s")  # magic, version, bytes of the header, digest of these and of the header


class PageLayout(NamedTuple):
    """What all pages of one model have in common."""

    fingerprint: str  # of the model; 64 hexadecimal digits
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def data_bytes(self) -> int:
        """Of a page without its header."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


class PageFault(Exception):
    """A file that is not a page to be used here. kind: "damaged", "version", "fingerprint", "shape"."""

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class Header(NamedTuple):
    """What stands before the data."""

    page: DiskPage
    data_crc: int
    num_bytes: int  # of the header's blocks: where the data begins


def encode(layout: PageLayout, page: DiskPage, data: np.ndarray) -> tuple[bytes, memoryview]:
    """The header and the data of a file. ValueError for data of another shape or dtype, or a wrong key."""
    if data.shape != layout.shape or data.dtype != layout.dtype:
        raise ValueError(f"page {data.dtype}{list(data.shape)}; this folder's are {layout}")
    if page.key != page_key(layout.fingerprint, page.salt, page.parent, page.tokens):
        raise ValueError(f"page key {page.key!r} is not that of its {len(page.tokens)} tokens")
    content = _bytes(np.ascontiguousarray(data))
    fields = {
        "fingerprint": layout.fingerprint,
        **page._asdict(),
        "shape": layout.shape,
        "dtype": layout.dtype.name,
        "data_crc": zlib.crc32(content),
    }
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-(_START.size + len(header)) % BLOCK_BYTES)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes; the limit is {MAX_HEADER_BYTES}")
    return _START.pack(_MAGIC, VERSION, len(header), _digest(VERSION, header)) + header, content


def read_header(file: BinaryIO, layout: PageLayout) -> Header:
    """Reads up to the data. PageFault if the file is not a whole one of that layout; OSError if the disk fails."""
    start = file.read(_START.size)
    if len(start) < _START.size:
        raise PageFault("damaged", f"it has {len(start)} bytes")
    magic, version, header_bytes, digest = _START.unpack(start)
    if magic != _MAGIC:
        raise PageFault("damaged", "it does not begin as a page does")
    if version != VERSION:
        raise PageFault("version", f"it is of version {version}, not {VERSION}")
    text = file.read(header_bytes) if header_bytes <= MAX_HEADER_BYTES else b""
    if len(text) != header_bytes or digest != _digest(version, text):
        raise PageFault("damaged", "its header is damaged")
    try:
        header = _decode(json.loads(text), layout, _START.size + header_bytes)
    except (ValueError, KeyError, TypeError) as error:
        raise PageFault("damaged", f"its header makes no sense ({type(error).__name__}: {error})") from None
    size = os.fstat(file.fileno()).st_size
    if size != header.num_bytes + layout.data_bytes:
        raise PageFault("damaged", f"it has {size} bytes, not {header.num_bytes + layout.data_bytes}")
    return header


def _decode(fields: dict[str, Any], layout: PageLayout, num_bytes: int) -> Header:
    if fields["fingerprint"] != layout.fingerprint:
        raise PageFault("fingerprint", f"it is of model {fields['fingerprint']}, not {layout.fingerprint}")
    if fields["shape"] != list(layout.shape) or fields["dtype"] != layout.dtype.name:
        raise PageFault("shape", f"it holds {fields['dtype']}{fields['shape']}, not {layout}")
    page = DiskPage(fields["key"], fields["parent"], fields["salt"], tuple(fields["tokens"]))
    if page.key != page_key(layout.fingerprint, page.salt, page.parent, page.tokens):
        raise PageFault("damaged", "its key is not that of its tokens")
    return Header(page, fields["data_crc"], num_bytes)


def read_page(path: Path, layout: PageLayout, page: DiskPage, out: np.ndarray) -> None:
    """Fills `out` with the page that is asked for; PageFault or OSError if the file does not hold it, whole."""
    with open(open_own(path), "rb", buffering=0) as file:
        header = read_header(file, layout)
        if header.page != page:
            raise PageFault("damaged", f"it holds page {header.page.key}, not {page.key}")
        data, num_read = _bytes(out), 0
        while num_read < len(data) and (count := file.readinto(data[num_read:])):
            num_read += count
    if num_read != len(data) or zlib.crc32(data) != header.data_crc:
        raise PageFault("damaged", f"its {num_read} bytes of data are damaged")


def _bytes(array: np.ndarray) -> memoryview:
    """Those of a contiguous array, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8))


def _digest(version: int, header: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<16sII", _MAGIC, version, len(header)) + header).digest()
