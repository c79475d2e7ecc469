"""Named shapes that tests and benchmarks share: layers of experts of published models, made small."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call."""

    name: str
    tokens: int  # T
    depth: int  # D
    width: int  # I
    experts: int  # XG, of all devices
    top_k: int
    here: int | None = None  # X, of this device; None: all
    first_expert: int = 0
    renormalise: bool = True
    residual: bool = True
    offset: float = 0.0  # of the norm's weight
    padding: int = 0  # last tokens, which are not valid
    ties: bool = False  # experts whose router rows are equal
    one_expert: bool = False  # every token's first choice is the same

    @property
    def num_here(self) -> int:
        return self.experts if self.here is None else self.here


TINY = {"depth": 64, "width": 32, "experts": 8, "top_k": 2}
HALF = TINY | {"top_k": 4}
QWEN3 = {"depth": 128, "width": 96, "experts": 128, "top_k": 8}
QWEN15 = {"depth": 128, "width": 176, "experts": 60, "top_k": 4, "renormalise": False}
NEXT = {"depth": 64, "width": 64, "experts": 512, "top_k": 10, "offset": 1.0}
MIXTRAL = {"depth": 128, "width": 448, "experts": 8, "top_k": 2}

CASES = (
    *(Case(name=f"tiny, {tokens} tokens", tokens=tokens, **TINY) for tokens in (1, 2, 4, 5, 16, 17, 70)),
    *(Case(name=f"128 experts, {tokens} tokens", tokens=tokens, **QWEN3) for tokens in (1, 3, 9, 40)),
    *(Case(name=f"60 experts, {tokens} tokens", tokens=tokens, **QWEN15) for tokens in (1, 7, 33)),
    *(Case(name=f"512 experts, {tokens} tokens", tokens=tokens, **NEXT) for tokens in (1, 12)),
    *(Case(name=f"8 wide experts, {tokens} tokens", tokens=tokens, **MIXTRAL) for tokens in (1, 21)),
    *(
        Case(name=f"the middle third, {tokens} tokens", tokens=tokens, here=3, first_expert=3, residual=False, **HALF)
        for tokens in (1, 6, 40)
    ),
    *(Case(name=f"padding, {tokens} tokens", tokens=tokens, padding=tokens // 2, **TINY) for tokens in (2, 8, 50)),
    *(Case(name=f"ties, {tokens} tokens", tokens=tokens, ties=True, **TINY) for tokens in (1, 20)),
    Case(name="one token of padding", tokens=1, padding=1, **TINY),
    Case(name="all experts chosen", tokens=11, **(TINY | {"top_k": 8})),
    Case(name="most rows at one expert", tokens=150, one_expert=True, **TINY),
    Case(name="more choices than one count sees", tokens=700, **(TINY | {"top_k": 5})),
)


class Arrays(NamedTuple):
    """A case with numbers, float32 but for valid; None for what it has not."""

    x: np.ndarray  # [T, D]
    router: np.ndarray  # [L, XG, D]
    gate_up: np.ndarray  # [L, X, 2, I, D]
    down: np.ndarray  # [L, X, D, I]
    norm: np.ndarray  # [L, D]
    residual: np.ndarray | None  # [T, D]
    valid: np.ndarray | None  # [T] bool


MARGIN = 0.03
"""Between the logits of the last expert that is chosen and the next: eight times what bfloat16 rounds away."""


def make(case: Case, *, num_layers: int = 2, seed: int = 0) -> Arrays:
    """Random numbers for a case; outputs are of the order of 1. What padding holds is not a number.

    Choices are clear by MARGIN, but for ties, where every logit is one product and thus equal exactly.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    router = normal(num_layers, case.experts, case.depth, scale=2 * case.depth**-0.5)
    norm = 1 - case.offset + normal(num_layers, case.depth, scale=0.1)
    if case.ties:
        router[:, case.experts // 2 :] = router[:, : case.experts - case.experts // 2]
        x = np.eye(case.depth, dtype=np.float32)[rng.integers(0, case.depth, case.tokens)]
    else:
        if case.one_expert:
            router[:, 5, 0] = 1.5
        x = np.zeros((0, case.depth), np.float32)
        while len(x) < case.tokens:
            more = normal(case.tokens, case.depth, scale=1.5)
            if case.one_expert:
                more[:, 0] = 8
            x = np.concatenate([x, more[_is_clear(case, more, router, norm)]])[: case.tokens]
    valid = None
    if case.padding:
        valid = np.arange(case.tokens) < case.tokens - case.padding
        x[~valid] = np.nan
    return Arrays(
        x=x,
        router=router,
        gate_up=normal(num_layers, case.num_here, 2, case.width, case.depth, scale=case.depth**-0.5),
        down=normal(num_layers, case.num_here, case.depth, case.width, scale=case.width**-0.5),
        norm=norm,
        residual=normal(case.tokens, case.depth) if case.residual else None,
        valid=valid,
    )


def _is_clear(case: Case, x: np.ndarray, router: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """[N]: of the rows of x [N, D], whether their choices are clear in every layer."""
    h = x / np.sqrt((x**2).mean(-1, keepdims=True))
    logits = np.sort(np.einsum("nd,ld,lxd->lnx", h, norm + case.offset, router, optimize=True))
    last = case.experts - case.top_k  # the place of the least logit that is chosen
    return (logits[..., last] - logits[..., last - 1] > MARGIN).all(0) if last else np.ones(len(x), bool)
