"""What the measured times of steps tell the scheduler of cutting them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.step import StepBuilder


class CutTimes(NamedTuple):
    """Milliseconds of steps by size, for SchedulerLimits; empty: no step is cut."""

    mixed_ms: dict[int, float]  # by tokens
    decode_ms: dict[int, float]  # by rows


def cut_times(builder: StepBuilder, times_ms: Mapping[Bucket, float]) -> CutTimes:
    """What steps take, by `times_ms` of each of them, where that says what cutting one in two would cost.

    Empty on a CPU, whose times vary from run to run; and where several groups of devices run a step together, whose
    size is that of the group with the most tokens: the scheduler of another one would cut its part for nothing, and
    wait for a step more.
    """
    if builder.platform == "cpu" or builder.num_groups > 1:
        return CutTimes({}, {})
    mixed_ms: dict[int, float] = {}
    for bucket, ms in times_ms.items():
        if not bucket.decode:  # a size counts with as many rows as it has: any number of sequences may decode in it
            mixed_ms[bucket.tokens] = max(ms, mixed_ms.get(bucket.tokens, 0.0))
    return CutTimes(mixed_ms, {bucket.rows: ms for bucket, ms in times_ms.items() if bucket.decode})
