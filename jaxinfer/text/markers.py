"""Markers in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def unfinished(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker: the longest proper prefix of any."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
