"""Named rows that tests and benchmarks share: what requests ask, of logits of several shapes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

NUM_STOPS = 32
QWEN3 = 151_936
"""Rows of the vocabulary of Qwen3."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What one row asks."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_k: int = 0
    bias: bool = False
    allowed: int = 0  # tokens that a grammar allows: the bias bars all others; 0: no grammar
    logprobs: bool = False
    bars_stops: bool = False
    active: bool = True

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. shape: of the logits: "normal", "peaked" as a model's are, "ties" of few values, "equal"."""

    name: str
    asks: tuple[Ask, ...]
    vocab: int = 1000
    padded: int = 0  # last tokens of the vocabulary, whose logits are -inf
    shape: str = "peaked"


GREEDY = Ask(temperature=0.0)
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.7}
FILTERS = (
    *(Ask(top_k=k) for k in (1, 2, 50, 999, 1000, 2**31 - 1)),
    *(Ask(top_p=p) for p in (1e-6, 0.3, 0.9, 0.999)),
    *(Ask(min_p=p, temperature=2.0) for p in (0.01, 0.2, 1.0)),
    Ask(top_k=40, top_p=0.8, temperature=1.5),
    Ask(top_k=700, top_p=0.95, temperature=3.0),
    Ask(top_k=40, top_p=0.9, min_p=0.05, temperature=1.3),
    Ask(top_p=0.9, temperature=1e-6),
    Ask(top_p=0.5, temperature=1e4),
)
MIXED = (
    GREEDY,
    Ask(),
    Ask(active=False, top_p=0.5, logprobs=True, **PENALTIES),
    Ask(temperature=0.6, top_k=20, top_p=0.95),
    Ask(temperature=0.0, **PENALTIES, logprobs=True),
    Ask(bias=True, logprobs=True),
    Ask(bias=True, bars_stops=True, **PENALTIES, top_p=0.9),
    Ask(temperature=0.0, bars_stops=True),
    Ask(min_p=0.1, logprobs=True),
    Ask(temperature=0.0, logprobs=True),
)

GRAMMARS = (
    Ask(bias=True, allowed=1, top_p=0.9),
    Ask(bias=True, allowed=2, temperature=0.0, logprobs=True),
    Ask(bias=True, allowed=40, top_k=50, top_p=0.8),
    Ask(bias=True, allowed=3, **PENALTIES, min_p=0.1, logprobs=True),
    Ask(bias=True, allowed=500),
    Ask(bias=True, allowed=9, top_p=0.5, temperature=0.6),
    Ask(temperature=0.7),
)

CASES = (
    Case(name="one greedy row", asks=(GREEDY,)),
    *(Case(name=f"grammars, {shape}", asks=GRAMMARS, shape=shape, padded=9) for shape in ("peaked", "ties")),
    Case(name="grammars, Qwen3", asks=GRAMMARS[:4], vocab=QWEN3, padded=267),
    Case(name="one row, temperature", asks=(Ask(temperature=0.8),), padded=17),
    *(Case(name=f"filters, {shape}", asks=FILTERS, shape=shape) for shape in ("normal", "peaked", "ties", "equal")),
    *(Case(name=f"every feature, {shape}", asks=MIXED, shape=shape, padded=9) for shape in ("peaked", "ties")),
    Case(name="several programs a row", asks=MIXED + FILTERS, vocab=20_000, padded=99, shape="normal"),
    Case(name="fewer tokens than log-probabilities", asks=MIXED, vocab=12),
    Case(name="Qwen3, peaked", asks=(Ask(top_k=50, top_p=0.95), Ask(temperature=0.7)), vocab=QWEN3, padded=267),
    Case(name="Qwen3, flat", asks=(Ask(top_p=0.9), Ask(**PENALTIES, logprobs=True)), vocab=QWEN3, shape="normal"),
    Case(name="Qwen3, ties", asks=(Ask(top_k=30_000, top_p=0.9),), vocab=QWEN3, shape="ties"),
)


class Arrays(NamedTuple):
    """A case with numbers, all float32 or int32 save in_prompt; the fields of `api.sample`."""

    logits: np.ndarray  # [R + 1, V]
    parameters: tuple[np.ndarray, ...]
    history: tuple[np.ndarray, ...]
    places: tuple[np.ndarray, ...]


def make(case: Case, *, seed: int = 0) -> Arrays:
    """Random numbers for a case. Slots are in no order, and there is one more row of logits than rows that sample."""
    rng = np.random.default_rng(seed)
    num, vocab = len(case.asks), case.vocab
    logits = rng.standard_normal((num + 1, vocab), np.float32)
    if case.shape == "peaked":
        logits = 2 * logits
        for row in logits:
            likely = rng.choice(vocab, 10, replace=False)
            row[likely] = 12 - 1.5 * np.arange(10)
    elif case.shape == "ties":
        logits = np.round(logits)
    elif case.shape == "equal":
        logits[:] = 3
    logits[:, vocab - case.padded :] = -np.inf
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    floats = [np.array([getattr(ask, name) for ask in case.asks], np.float32) for name in names]
    position = rng.integers(1, 4000, num).astype(np.int32)
    seeds = rng.integers(-(2**31), 2**31, (2, num)).astype(np.int32)
    flags = [[a.has_penalties for a in case.asks], [a.bias for a in case.asks], [a.logprobs for a in case.asks]]
    stops = np.full((num, NUM_STOPS), -1, np.int32)
    stops[:, :2] = np.argsort(-logits[:num], axis=1, kind="stable")[:, :2]
    before = position + np.array([1 if ask.bars_stops else -1 for ask in case.asks], np.int32)
    ints = [np.array([ask.top_k for ask in case.asks], np.int32), *seeds, *(np.array(f, np.int32) for f in flags)]
    shape = (num + 2, vocab)
    counts = rng.integers(1, 4, shape, np.int32) * (rng.random(shape, np.float32) < 0.1)
    bias = rng.standard_normal(shape, np.float32) * (rng.random(shape, np.float32) < 0.05)
    in_prompt, slots = rng.random(shape, np.float32) < 0.1, rng.permutation(num + 2)[:num].astype(np.int32)
    for slot, ask in zip(slots, case.asks, strict=True):
        if ask.allowed:
            barred = np.ones(vocab, bool)
            barred[rng.choice(vocab - case.padded, ask.allowed, replace=False)] = False
            bias[slot, barred] = -np.inf
    return Arrays(
        logits,
        (*floats, *ints, before, stops),
        (counts.astype(np.int32), in_prompt, bias.astype(np.float32)),
        (slots, position, np.array([ask.active for ask in case.asks])),
    )
