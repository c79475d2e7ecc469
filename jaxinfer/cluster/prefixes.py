"""Which engine a request goes to: the one whose cache holds the longest beginning of it, unless others are idler.

What an engine's cache holds is not asked for but remembered: the beginnings of the prompts that were sent there lately,
as hashes of text. That is right as long as the cache keeps what it is thought to keep, and costs a longer first token
where it does not. SGLang's and vLLM's routers go by the same: affinity while the load is even, balance where it is not.
"""

from __future__ import annotations

import collections
import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

CHUNK_BYTES = 64
"""Of text behind each key: about 16 tokens, a page."""
MAX_KEYS = 4096
"""Of a request: what is behind its first 256 KiB is not looked at, which takes 4 ms."""
MAX_REMEMBERED = 2**18
"""Keys of an engine: 16 MiB of text, about the tokens that a GPU's cache has room for; 30 MB of memory."""
MAX_LEAD = 32
"""Requests by which an engine may be ahead of the idlest one and still be given one that it has all of.

For one that it has a part of it is less, by the square of that part: 8 for a half, 2 for a quarter."""
MIN_SHARE = 0.5
"""Of a request's keys that an engine has to have to be better than another one that has as little to do: a beginning
that all prompts share is soon everywhere, and would until then draw all of them to one cache."""


def prompt_keys(body: bytes) -> array[int]:
    """A key for each of the first chunks of what a request has the model read; none for what is no such request.

    Each key stands for all that is before the end of its chunk, so requests share keys as far as they begin alike. Of a
    conversation every turn begins with those before it.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return array("Q")
    if not isinstance(fields, dict):
        return array("Q")
    # Beginnings are shared only under one model and one salt.
    key = hashlib.blake2b(repr((fields.get("model"), fields.get("cache_salt"))).encode(), digest_size=8).digest()
    keys, text = array("Q"), memoryview(_text(fields))
    for start in range(0, min(len(text) - CHUNK_BYTES + 1, MAX_KEYS * CHUNK_BYTES), CHUNK_BYTES):
        key = hashlib.blake2b(text[start : start + CHUNK_BYTES], digest_size=8, key=key).digest()
        keys.append(int.from_bytes(key))
    return keys


def _text(fields: Mapping[str, Any]) -> bytes:
    """What of a body is read first to last: of the same turns it is the same bytes."""
    prompt = fields.get("prompt", fields.get("input"))
    messages = fields.get("messages")
    if isinstance(prompt, str):
        parts: list[Any] = [fields.get("instructions"), prompt]
    elif isinstance(prompt, list):
        parts = [fields.get("instructions"), *(prompt[:1] if prompt and isinstance(prompt[0], list) else prompt)]
    elif isinstance(messages, list):
        parts = [fields.get("tools"), fields.get("system"), *messages]
    else:
        return b""
    return b"\0".join(msgspec.json.encode(part) for part in parts)


class Prefixes:
    """What each engine is thought to have in its cache, and how much each has to do."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED):
        self._max_remembered = max_remembered
        self._known: dict[str, collections.OrderedDict[int, None]] = {}
        self._loads: dict[str, int] = {}

    def update(self, engines: Iterable[str]) -> None:
        """The engines that there are. Those that are gone are forgotten, and so is what one with their name had."""
        names = set(engines)
        self._known = {name: self._known.get(name, collections.OrderedDict()) for name in names}
        self._loads = {name: self._loads.get(name, 0) for name in names}

    def choose(self, keys: Sequence[int], avoid: Iterable[str] = ()) -> list[str]:
        """All engines but those to avoid, best first. If there is no other, those to avoid are better than none."""
        names = sorted(set(self._known) - set(avoid)) or sorted(self._known)
        if not names:
            return []
        matched = {name: self.matched(name, keys) for name in names}
        least = min(self._loads[name] for name in names)
        at_idlest = max(matched[name] for name in names if self._loads[name] == least)

        def rank(name: str) -> tuple[int, int, int, int]:
            load, known = self._loads[name], len(self._known[name])
            gain = max(matched[name] - at_idlest, 0) / max(len(keys), 1)
            if load - least > MAX_LEAD * gain**2:
                return 1, load, -matched[name], known
            return 0, -matched[name] if matched[name] >= MIN_SHARE * len(keys) else 0, load, known

        return sorted(names, key=rank)

    def matched(self, name: str, keys: Sequence[int]) -> int:
        """Leading keys that an engine is thought to have."""
        known = self._known[name]
        for number, key in enumerate(keys):
            if key not in known:
                return number
        return len(keys)

    def sent(self, name: str, keys: Sequence[int]) -> None:
        """A request was given to an engine, if it is still there."""
        if (known := self._known.get(name)) is None:
            return
        self._loads[name] += 1
        for key in reversed(keys):  # of what is forgotten, the ends go before the beginnings that they hang from
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._max_remembered:
            known.popitem(last=False)

    def ended(self, name: str) -> None:
        """A request that was given to an engine has ended."""
        if self._loads.get(name, 0) > 0:
            self._loads[name] -= 1
