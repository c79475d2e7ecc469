"""Collectives that are run in Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """Collectives one after the other, each of x [rows, width], over the devices along mesh axes."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    calls: tuple[tuple[str, int, int], ...]  # op, rows, width
    first: int = 0  # number of the collectives before
    absent: tuple[int, ...] = ()  # devices that never come


TWO, FOUR, PAIRS = (("tensor", 2),), (("tensor", 4),), (("expert", 2), ("tensor", 2))
SUMS = (("sum", 1, 64), ("add", 3, 512), ("sum", 1, 7), ("add", 9, 512), ("add", 2, 300))
ALL = (("gather", 3, 100), ("add", 2, 300), ("columns", 3, 100), ("scatter", 8, 60), ("sum", 1, 64), ("gather", 1, 4))
CASES = (
    Case("two devices, sums of many sizes", TWO, ("tensor",), SUMS),
    Case("two devices, more than there are numbers", TWO, ("tensor",), (("sum", 1, 64),) * 4, first=2**31 - 2),
    Case("two devices, all kinds", TWO, ("tensor",), ALL),
    Case("four devices, all kinds", FOUR, ("tensor",), ALL),
    Case("pairs that are apart", PAIRS, ("expert",), ALL),
    Case("pairs of neighbours", PAIRS, ("tensor",), ALL),
    Case("both axes", PAIRS, ("expert", "tensor"), ALL),
    Case("one device never comes", TWO, ("tensor",), (("sum", 1, 64), ("gather", 1, 64), ("sum", 1, 64)), absent=(1,)),
)
