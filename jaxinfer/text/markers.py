"""Markers in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker: the longest proper prefix of any."""
    longest = min(len(text), max((len(marker) for marker in markers), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0
