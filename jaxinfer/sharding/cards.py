"""GPUs that a plan may be for, by figures that its times follow from."""

from __future__ import annotations

from typing import NamedTuple


class Card(NamedTuple):
    """A GPU, and its way to the others of its host."""

    memory_bytes: int  # of all that a process can have
    read_bytes_per_s: float  # at which it reads what it does not keep
    matrix_flops: float  # operations per second of large products in bfloat16
    link_bytes_per_s: float  # to the other GPUs, each way
    collective_s: float  # of a collective with hardly any bytes
    source: str


CARDS = {
    "h200": Card(139 * 2**30, 4.3e12, 790e12, 450e9, 10e-6,
                 "copy and products measured, NVLink nominal, time of a small collective assumed"),
    "h100": Card(79 * 2**30, 3.35e12, 989e12, 450e9, 10e-6,
                 "the data sheet of the SXM5 card, time of a small collective assumed"),
}  # fmt: skip
"""By the names that users give."""
