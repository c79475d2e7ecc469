"""From the text of a vocabulary entry to the bytes it stands for, by the decoder that tokenizer.json names.

Every decoder accepted here is a concatenation: the bytes of an output are the bytes of its tokens in a row, save for
white space at the very start. Streaming and whole decoding then agree by construction. A decoder that is not a
concatenation (WordPiece, CTC, end-of-word suffixes) is refused with its name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """tokenizer.json asks for something that this package does not do; the message names it."""


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the other 68 bytes get the code points from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


_BYTE_OF_CHAR = _byte_level_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in piece])
    except KeyError:  # an added token, written as plain text
        return piece.encode()


@dataclasses.dataclass(frozen=True, slots=True)
class PieceDecoder:
    """How the entries of one vocabulary become bytes. Made by `PieceDecoder.parse`."""

    to_text: tuple[Callable[[str, bool], str], ...] = ()
    """Applied to a piece in order; the flag says that it is the first piece of the text."""
    byte_level: bool = False
    byte_fallback: bool = False
    strip_char: str = ""
    """Dropped from the start of the whole text, at most `strip_count` times."""
    strip_count: int = 0

    def to_bytes(self, piece: str, *, first: bool = False) -> bytes:
        """The bytes of one vocabulary entry; `first`: no other token came before it."""
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for step in self.to_text:
            piece = step(piece, first)
        return _byte_level(piece) if self.byte_level else piece.encode()

    @classmethod
    def parse(cls, decoder: Mapping[str, Any] | None) -> PieceDecoder:
        """Reads the `decoder` entry of tokenizer.json."""
        if decoder is None:  # tokens joined by single spaces
            return cls(to_text=(lambda piece, _: " " + piece,), strip_char=" ", strip_count=1)
        parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        to_text: list[Callable[[str, bool], str]] = []
        byte_level = byte_fallback = fused = False
        strip_char, strip_count = "", 0
        for part in parts:
            kind = part["type"]
            if strip_count or (fused and kind != "Strip") or (byte_level and kind != "Fuse"):
                raise UnsupportedTokenizer(f"decoder {kind} after {[p['type'] for p in parts]} is not supported")
            if kind == "ByteLevel":
                byte_level = True
            elif kind == "ByteFallback":
                byte_fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Replace" and isinstance(part["pattern"].get("String"), str):
                to_text.append(_replace(part["pattern"]["String"], part["content"]))
            elif kind == "Metaspace":
                scheme = part.get("prepend_scheme") or "always"
                if part.get("add_prefix_space") is False:
                    scheme = "never"
                to_text.append(_metaspace(part["replacement"], strips_first=scheme != "never"))
            elif kind == "Strip" and fused and part["stop"] == 0:
                strip_char, strip_count = part["content"], part["start"]
            else:
                raise UnsupportedTokenizer(f"decoder {part} of tokenizer.json is not supported")
        return cls(tuple(to_text), byte_level, byte_fallback, strip_char, strip_count)


def _replace(old: str, new: str) -> Callable[[str, bool], str]:
    return lambda piece, _: piece.replace(old, new)


def _metaspace(mark: str, *, strips_first: bool) -> Callable[[str, bool], str]:
    return lambda piece, first: piece.replace(mark, "" if first and strips_first else " ")
