"""Collectives that are run in Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """Collectives one after the other, each of x [rows, width], over the devices along mesh axes."""

    name: str
    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, ...], ...]  # of each call, and then from the first again
    calls: tuple[tuple[str, int, int], ...]  # op, rows, width
    first: int = 0  # number of the collectives before
    absent: tuple[int, ...] = ()  # devices that never come
    late: int | None = None  # a device that comes LATE_S after the others
    slow: int | None = None  # a device that looks LATE_S late at what has come first, from each


TWO, FOUR, PAIRS = (("tensor", 2),), (("tensor", 4),), (("expert", 2), ("tensor", 2))
SUMS = (("sum", 1, 64), ("add", 3, 512), ("sum", 1, 7), ("add", 9, 512), ("add", 2, 300))
ALL = (
    ("gather", 3, 100),
    ("add", 2, 300),
    ("columns", 3, 100),
    ("scatter", 8, 60),
    ("sum", 1, 64),
    ("gather", 1, 4),
    ("mask", 3, 5),
)
EXPERT, TENSOR, BOTH = ("expert",), ("tensor",), ("expert", "tensor")
CASES = (
    Case("two devices, sums of many sizes", TWO, (TENSOR,), SUMS),
    Case("two devices, more than there are numbers", TWO, (TENSOR,), (("sum", 1, 64),) * 4, first=2**31 - 2),
    Case("two devices, all kinds", TWO, (TENSOR,), ALL),
    Case("four devices, all kinds", FOUR, (TENSOR,), ALL),
    Case("pairs that are apart", PAIRS, (EXPERT,), ALL),
    Case("pairs of neighbours", PAIRS, (TENSOR,), ALL),
    Case("both axes", PAIRS, (BOTH,), ALL),
    Case("a sum over axes in another order", PAIRS, (("tensor", "expert"),), SUMS[:2]),
    Case("one device is late, over other axes", PAIRS, (EXPERT, EXPERT, TENSOR), (("sum", 1, 64),) * 6, late=0),
    Case("one device is late, over more devices", PAIRS, (EXPERT, BOTH, TENSOR), (("sum", 1, 64),) * 6, late=3),
    Case("one device looks late", TWO, (TENSOR,), (("sum", 1, 64), ("sum", 3, 300)) * 3, slow=1),
    Case("one device looks late, over other axes", PAIRS, (EXPERT, TENSOR), (("sum", 1, 64),) * 6, slow=1),
    Case("one device never comes", TWO, (TENSOR,), (("sum", 1, 64), ("gather", 1, 64), ("sum", 1, 64)), absent=(1,)),
)
