"""The token ids of a prompt, out of the JSON of a request's body."""

from __future__ import annotations

import re
import secrets
from array import array
from typing import NamedTuple

import msgspec
import numpy

MARK = f'"{secrets.token_hex(16)}"'.encode()
"""What stands for a list of ids while the rest of its body is read: nobody else can have written it."""
MIN_BYTES = 2**15
"""Shorter bodies, of some 4,000 ids, are read quicker as they are."""
SHORT_BYTES = 2**14
"""Lists below this, of some 2,000 ids, are read without numpy."""
MAX_DIGITS = 8
"""Of an id that is read here, as many as fit in a word of 64 bits."""
_list_decoder = msgspec.json.Decoder(list[int])
_LIST = re.compile(rb'"prompt"\s*:\s*\[(?=[0-9])')
_COMMA, _SPACE, _ZERO = b", 0"
_LEAST = numpy.array([0, 0, *(10**n for n in range(1, MAX_DIGITS))], numpy.uint64)
"""The least number of so many digits, as JSON allows no zeros before it."""


class Cut(NamedTuple):
    """A body in two."""

    rest: bytes  # with MARK in place of the list
    ids: bytes  # what stands between its brackets


def cut(body: bytes) -> Cut | None:
    """Takes the first list out of a body that may be the prompt's, and is if MARK is the prompt of the rest.

    None if there is no list that begins with a digit, or if the body has less than MIN_BYTES.
    """
    if len(body) < MIN_BYTES:
        return None
    found = _LIST.search(body)
    end = body.find(b"]", found.end()) if found is not None else -1
    if found is None or end < 0:
        return None
    return Cut(b"".join((body[: found.end() - 1], MARK, body[end + 1 :])), body[found.end() : end])


def read(text: bytes) -> array[int] | None:
    """The ids as an array("I"). None for whatever is not digits between commas, with one space behind each or none.

    All ids at once, each in a word of its own: 32,768 take 0.4 ms, 0.55 with numpy's parser and 0.96 with msgspec's.
    """
    size = len(text)
    padded = b"".join((bytes(8), text, bytes(8 - size % 8)))  # so that there are 8 bytes before every end
    chars = numpy.frombuffer(padded, numpy.uint8)
    commas = numpy.flatnonzero(chars == _COMMA)
    starts, ends = numpy.empty(len(commas) + 1, numpy.int64), numpy.empty(len(commas) + 1, numpy.int64)
    starts[0], ends[-1] = 8, 8 + size
    ends[:-1] = commas
    is_spaced = len(commas) > 0 and chars[commas[0] + 1] == _SPACE
    if is_spaced and not (chars.take(commas + 1) == _SPACE).all():
        return None
    numpy.add(commas, 1 + is_spaced, out=starts[1:])
    lengths = ends - starts
    num_digits = numpy.count_nonzero((chars - numpy.uint8(_ZERO)) < 10)
    if lengths.min() < 1 or lengths.max() > MAX_DIGITS or num_digits != lengths.sum():
        return None
    values = _numbers(_words_before(padded, ends), lengths)
    if (values < _LEAST.take(lengths)).any():
        return None
    return array("I", values.astype(numpy.uint32).tobytes())


def of_json(prompt: msgspec.Raw) -> array[int] | None:
    """The ids of a prompt that is one list of them; None if it is not, or has an id that is refused anyway.

    However the list is written, while `read` knows the two usual ways. numpy reads 32,768 ids in 0.55 ms; msgspec
    takes 0.96 ms, and 0.2 ms more to pack what it makes of them.
    """
    view = memoryview(prompt)
    if bytes(view[:1]) != b"[" or not bytes(view[1:2]).isdigit():
        return None
    if len(view) < SHORT_BYTES:
        return _few_of_json(prompt)
    text = bytes(view[1:-1])
    try:
        ids = numpy.fromstring(text, numpy.int64, sep=",")  # an id of more than 64 bits becomes the highest
    except ValueError:  # it is no list of integers alone
        return None
    num_commas = numpy.count_nonzero(numpy.frombuffer(text, numpy.uint8) == ord(","))
    if len(ids) != num_commas + 1:  # numpy below 2.3 ends there instead, with a warning
        return None
    return array("I", ids.astype(numpy.uint32).tobytes()) if ids.min() >= 0 and ids.max() < 2**32 else None


def _few_of_json(prompt: msgspec.Raw) -> array[int] | None:
    """The same in one call: a server with nothing else to do has numpy's code in no cache, and 0.06 ms to wait for it.

    Measured on a virtual machine with 3 ms between two requests: 0.04 ms for a body of 16 ids instead of 0.10, and for
    1,000 ids 0.06 instead of 0.09; from 3,000 on it takes longer.
    """
    try:
        return array("I", _list_decoder.decode(prompt))
    except (msgspec.DecodeError, OverflowError):
        return None


def _words_before(padded: bytes, ends: numpy.ndarray) -> numpy.ndarray:
    """The 8 bytes before each end, the last of them in the highest bits: parts of two words that lie side by side."""
    words, first = numpy.frombuffer(padded, "<u8"), ends - 8
    shift = ((first & 7) << 3).astype(numpy.uint64)
    first >>= 3
    found = words.take(first)
    found >>= shift
    first += 1
    numpy.subtract(63, shift, out=shift)
    after = words.take(first)
    after <<= shift
    after <<= 1  # a shift by 64 is undefined
    found |= after
    return found


def _numbers(words: numpy.ndarray, lengths: numpy.ndarray) -> numpy.ndarray:
    """What the last digits of each word spell, as many as `lengths` says. Joins neighbours: digits, pairs, fours."""
    before = ((8 - lengths) << 3).astype(numpy.uint64)
    words &= 0x0F0F0F0F0F0F0F0F
    words >>= before
    words <<= before
    for factor, shift, mask in ((10, 8, 0x00FF00FF00FF00FF), (100, 16, 0x0000FFFF0000FFFF), (10000, 32, 0xFFFFFFFF)):
        higher = words * numpy.uint64(factor)
        words >>= shift
        words += higher
        words &= mask
    return words
