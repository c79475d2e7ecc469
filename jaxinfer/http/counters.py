"""Counts and histograms that several front-end processes write side by side and any of them reads.

Observations sit on the path of every token, so a histogram is a row of numbers that is turned into Prometheus' own form
only when scraped. Where several front ends serve, their rows lie in memory that they share, and whichever is scraped
adds them up: a scrape is of the whole server.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client.core import HistogramMetricFamily


class Counters:
    """Counts of several front ends: a row for each, which it alone writes and all read.

    Doubles, of which a processor stores one at once, so that nobody reads half of one; whole up to 2**53.
    """

    NUM_CELLS = 1024
    """Of a front end: room for all that is counted; who takes more is told at once."""
    ROW_BYTES = NUM_CELLS * 8

    def __init__(self, fd: int = -1, num_rows: int = 1, row: int = 0):
        """fd: a file of `num_rows` rows that all front ends map; -1: memory of this process. row: the one to write."""
        cells = memoryview(mmap.mmap(fd, num_rows * self.ROW_BYTES)).cast("d")
        self._rows = [cells[i * self.NUM_CELLS : (i + 1) * self.NUM_CELLS] for i in range(num_rows)]
        self._row = row
        self._used = 0

    @staticmethod
    def make_file(num_rows: int) -> int:
        """A file in memory, of zeros; returns its descriptor."""
        fd = os.memfd_create("jaxinfer-counters")
        os.ftruncate(fd, num_rows * Counters.ROW_BYTES)
        return fd

    def take(self, num_cells: int) -> Cells:
        """The next cells of each row. Every front end has to take the same ones in the same order."""
        start, self._used = self._used, self._used + num_cells
        if self._used > self.NUM_CELLS:
            raise ValueError(f"{self._used} cells are taken; a front end has {self.NUM_CELLS}")
        rows = [row[start : self._used] for row in self._rows]
        return Cells(rows[self._row], rows)


class Cells(NamedTuple):
    """A part of the counters."""

    own: memoryview[float]
    all: Sequence[memoryview[float]]

    def totals(self) -> list[float]:
        """What all front ends counted."""
        return [sum(column) for column in zip(*self.all, strict=True)]


class Histogram:
    """Counts of observations by upper bound, in seconds or in whatever unit the bounds have."""

    def __init__(self, bounds: tuple[float, ...], counters: Counters):
        self._bounds = bounds
        self._cells = counters.take(len(bounds) + 2)  # a count for each bound and for what is above, then the sum
        self._own = self._cells.own

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of `value` each."""
        own = self._own
        own[bisect.bisect_left(self._bounds, value)] += count
        own[-1] += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Adds what all front ends observed, under the values of the family's labels."""
        *counts, value_sum = self._cells.totals()
        buckets, total = [], 0.0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets, value_sum)
