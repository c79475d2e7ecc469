"""Named shapes that tests and benchmarks share: layers of published models."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    name: str
    rows: int  # M
    depth: int  # D
    out: int  # N
    norm: bool = False
    bias: bool = False
    gated: bool = False
    residual: bool = False
    float32_out: bool = False


QKV = {"depth": 256, "out": 384, "norm": True}
GATE_UP = {"depth": 256, "out": 192, "norm": True, "gated": True}
DOWN = {"depth": 448, "out": 128, "residual": True}

CASES = (
    *(Case(name=f"norm, {rows} rows", rows=rows, **QKV) for rows in (1, 2, 8, 16, 17, 32, 33)),
    *(Case(name=f"gate, {rows} rows", rows=rows, **GATE_UP) for rows in (1, 5, 32, 40)),
    *(Case(name=f"residual, {rows} rows", rows=rows, **DOWN) for rows in (1, 3, 16, 64)),
    Case(name="norm and bias, one row", rows=1, bias=True, **QKV),
    Case(name="norm and bias, few rows", rows=7, bias=True, **QKV),
    Case(name="gate and bias, one row", rows=1, bias=True, **GATE_UP),
    Case(name="gate and bias, few rows", rows=4, bias=True, **GATE_UP),
    Case(name="residual and bias", rows=9, bias=True, **DOWN),
    Case(name="odd depth, one row", rows=1, depth=576, out=64, norm=True),
    Case(name="odd depth, few rows", rows=6, depth=576, out=64, norm=True),
    Case(name="head, one row", rows=1, depth=256, out=512, norm=True, float32_out=True),
    Case(name="head, few rows", rows=5, depth=256, out=512, norm=True, float32_out=True),
)


class Arrays(NamedTuple):
    """A case with numbers, float32; None for what it has not."""

    x: np.ndarray  # [M, D]
    weight: np.ndarray  # [L, N, D] or [L, 2, N, D]
    norm: np.ndarray | None  # [L, D]
    bias: np.ndarray | None  # [L, N] or [L, 2, N]
    residual: np.ndarray | None  # [M, N]


def make(case: Case, *, num_layers: int = 2, seed: int = 0) -> Arrays:
    """Random numbers for a case; outputs are of the order of 1."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    parts = (2,) if case.gated else ()
    return Arrays(
        x=normal(case.rows, case.depth) * np.float32(1.5),
        weight=normal(num_layers, *parts, case.out, case.depth) * np.float32(case.depth**-0.5),
        norm=1 + 0.1 * normal(num_layers, case.depth) if case.norm else None,
        bias=normal(num_layers, *parts, case.out) if case.bias else None,
        residual=normal(case.rows, case.out) if case.residual else None,
    )
