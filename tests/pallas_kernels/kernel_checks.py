"""What every kernel is checked with, in Triton's interpreter and on a GPU, and when it has passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pallas_kernels.delta_rule.cases import CASES as DELTA_RULE
from pallas_kernels.kv_write.cases import CASES as KV_WRITE
from pallas_kernels.linear.cases import CASES as LINEAR
from pallas_kernels.moe.cases import CASES as MOE
from pallas_kernels.paged_attention.cases import CASES as PAGED_ATTENTION
from pallas_kernels.paged_attention.cases import Case as AttentionCase
from pallas_kernels.sample.cases import CASES as SAMPLE


class Check(NamedTuple):
    """A case of an op."""

    case: Any
    counters: bool = True
    """Whether the op gets counters, with which programs share a result."""

    @property
    def name(self) -> str:
        return self.case.name if self.counters else f"{self.case.name}, without counters"


def without_counters(cases: Sequence[Any], *names: str) -> list[Check]:
    return [Check(case, counters=False) for case in cases if case.name in names]


MANY_PARTS = AttentionCase(
    name="decode, more parts of a context than are merged at a time",
    num_heads=14,
    num_kv_heads=2,
    head_width=64,
    rows=((1, 2999), (1, 2304), (1, 90)),
)
IN_ONE = tuple(case for case in (*PAGED_ATTENTION, MANY_PARTS) if case.decode and not (case.soft_cap or case.sinks))
"""Decode steps whose attention has no option that models with a fused kernel have not."""
CHECKS: Mapping[str, Sequence[Check]] = {
    "linear": [*map(Check, LINEAR), *without_counters(LINEAR, "residual, 3 rows", "gate and bias, few rows")],
    "kv_write": [*map(Check, KV_WRITE)],
    "paged_attention": [
        *map(Check, (*PAGED_ATTENTION, MANY_PARTS)),
        *without_counters(PAGED_ATTENTION, "decode, long contexts of several lengths", "mixed, long contexts"),
    ],
    "decode_attention": [
        *map(Check, IN_ONE),
        *without_counters(IN_ONE, "decode, long contexts of several lengths"),
    ],
    "sample": [*map(Check, SAMPLE), *without_counters(SAMPLE, "every feature, ties")],
    "route": [*map(Check, MOE), *without_counters(MOE, "128 experts, 9 tokens")],
    "moe": [*map(Check, MOE), *without_counters(MOE, "128 experts, 9 tokens")],
    "delta_rule": [*map(Check, DELTA_RULE)],
}


def of_every_case(test: Any) -> Any:
    """Gives a test `op` and `name` of every check."""
    names = [
        pytest.param(op, check.name, id=f"{op}: {check.name}") for op, checks in CHECKS.items() for check in checks
    ]
    return pytest.mark.parametrize(("op", "name"), names)(test)


def assert_right(found: Mapping[str, Mapping[str, Any]], tolerance: float) -> None:
    """found: by route, what check_kernels.py printed of a check. A route may refuse, but not every one."""
    failed = {route: result["failed"] for route, result in found.items() if "failed" in result}
    assert not failed, "\n".join(failed.values())
    done = {route: result for route, result in found.items() if "refused" not in result}
    assert done, found
    for route, result in done.items():
        assert not result["wrong"], route
        assert result["error"] < tolerance, route
