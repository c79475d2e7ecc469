"""Named shapes that tests and benchmarks share: heads of published models, lengths that meet every edge of a chunk."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from pallas_kernels.delta_rule.api import TAPS, SlotRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Lengths are in tokens; rows are (tokens in the step, tokens of the sequence before it)."""

    name: str
    key_heads: int  # Hk
    group: int  # r
    key_width: int  # dk
    value_width: int  # dv
    rows: tuple[tuple[int, int], ...]
    pad_tokens: int = 0  # that belong to no row, after the last
    pad_rows: int = 0
    free_slots: int = 2  # besides those of the rows

    @property
    def num_rows(self) -> int:
        return len(self.rows) + self.pad_rows

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.rows) + self.pad_tokens

    @property
    def decode(self) -> bool:
        """Whether token t is row t, one token a row."""
        return all(new == 1 for new, _ in self.rows) and self.pad_tokens == self.pad_rows

    @property
    def max_query_len(self) -> int:
        return 1 if self.decode else self.num_tokens

    @property
    def num_slots(self) -> int:
        """N."""
        return len(self.rows) + self.free_slots

    @property
    def channels(self) -> int:
        """C: of a key head that are convolved."""
        return 2 * self.key_width + self.group * self.value_width


TINY = {"key_heads": 2, "group": 2, "key_width": 16, "value_width": 16}
QWEN35_08B = {"key_heads": 16, "group": 1, "key_width": 128, "value_width": 128}
QWEN35_4B = {"key_heads": 16, "group": 2, "key_width": 128, "value_width": 128}
QWEN35_27B = {"key_heads": 16, "group": 3, "key_width": 128, "value_width": 128}
GROUP_OF_3 = {"key_heads": 1, "group": 3, "key_width": 32, "value_width": 16}
WIDE_VALUES = {"key_heads": 1, "group": 1, "key_width": 64, "value_width": 128}
HALF_WIDE = {"key_heads": 1, "group": 2, "key_width": 128, "value_width": 64}
WIDEST = {"key_heads": 1, "group": 1, "key_width": 256, "value_width": 256}
ONE_HEAD = {"key_heads": 1, "group": 1, "key_width": 128, "value_width": 128}

CASES = (
    Case(name="decode, one row", **TINY, rows=((1, 36),)),
    Case(name="decode, the first tokens of sequences", **TINY, rows=((1, 0), (1, 1), (1, 2), (1, 3), (1, 4))),
    Case(name="decode, padded rows", **ONE_HEAD, rows=((1, 40), (1, 0), (1, 77)), pad_tokens=5, pad_rows=5),
    Case(name="decode, group of 3", **GROUP_OF_3, rows=((1, 21), (1, 9))),
    Case(name="decode, wide values", **WIDE_VALUES, rows=((1, 7), (1, 0))),
    Case(name="decode, widest heads", **WIDEST, rows=((1, 700),)),
    Case(name="prefill, one odd prompt", **TINY, rows=((37, 0),), pad_tokens=27),
    Case(name="prefill, one token", **TINY, rows=((1, 0),), pad_tokens=15),
    Case(name="prefill, exactly a chunk", **ONE_HEAD, rows=((64, 0),)),
    Case(name="prefill, a token more than chunks", **GROUP_OF_3, rows=((129, 0),), pad_tokens=2),
    Case(name="prefill, after other chunks", **HALF_WIDE, rows=((70, 65),), pad_tokens=3),
    Case(name="prefill, a few tokens after one or two", **TINY, rows=((2, 1), (3, 2), (2, 3), (5, 1)), pad_tokens=1),
    Case(name="prefill, several prompts", **TINY, rows=((7, 0), (133, 0), (2, 0), (64, 64)), pad_tokens=7, pad_rows=4),
    Case(name="prefill, widest heads", **WIDEST, rows=((66, 3),), pad_tokens=1),
    Case(name="mixed, decode rows and a chunk", **TINY, rows=((1, 15), (1, 0), (1, 90), (19, 32)), pad_tokens=10),
    Case(
        name="mixed, more prompts than are in turn at a time",
        **GROUP_OF_3,
        rows=((2, 0), (1, 2), (65, 8), (3, 0), (4, 9), (2, 2), (1, 0), (9, 0), (2, 1), (3, 3), (8, 0), (2, 5)),
        pad_tokens=60,
        pad_rows=3,
    ),
)


class Arrays(NamedTuple):
    """A case with numbers, float32 but for rows. The slots of rows that begin, and slot N, hold NaN."""

    x: np.ndarray  # [T, Hk, C + r * dv + 2 * r]
    conv: np.ndarray  # [L, Hk, C, 4]
    a_log: np.ndarray  # [L, Hk, r]
    dt_bias: np.ndarray  # [L, Hk, r]
    norm: np.ndarray  # [L, dv]
    state_pool: np.ndarray  # [L, N + 1 + copies, Hk, r, dk, dv]
    conv_pool: np.ndarray  # [L, N + 1 + copies, 4, Hk, C]
    rows: SlotRows


COPIES = 2
"""Places behind the slots, which no step touches."""


def make(case: Case, *, num_layers: int = 2, seed: int = 0) -> Arrays:
    """Random numbers for a case; rows have slots in an order of their own. Gates as those of published models."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    heads, group, slots = case.key_heads, case.group, case.num_slots + 1 + COPIES
    rows = place(case, rng.permutation(case.num_slots))
    state = 0.3 * normal(num_layers, slots, heads, group, case.key_width, case.value_width)
    ring = normal(num_layers, slots, TAPS, heads, case.channels)
    lost = [*rows.slot[rows.context_len == 0], case.num_slots]
    state[:, lost], ring[:, lost] = np.nan, np.nan
    return Arrays(
        x=normal(case.num_tokens, heads, case.channels + group * case.value_width + 2 * group),
        conv=0.5 * normal(num_layers, heads, case.channels, TAPS),
        a_log=np.log(rng.uniform(1, 16, (num_layers, heads, group))).astype(np.float32),
        dt_bias=rng.uniform(-4, 0, (num_layers, heads, group)).astype(np.float32),
        norm=1 + 0.1 * normal(num_layers, case.value_width),
        state_pool=state,
        conv_pool=ring,
        rows=rows,
    )


def place(case: Case, free_slots: np.ndarray | None = None) -> SlotRows:
    """Rows, one after the other, with the first of `free_slots`; without them in slots 0, 1 and so on."""
    free_slots = np.arange(case.num_slots) if free_slots is None else free_slots
    lens = np.array([*case.rows, *[(0, 0)] * case.pad_rows], np.int32)
    query_len, context_len = lens.T
    query_start = (np.cumsum(query_len) - query_len).astype(np.int32)
    if case.decode:
        query_start = np.arange(case.num_rows, dtype=np.int32)
    slot = np.full(case.num_rows, case.num_slots, np.int32)
    slot[: len(case.rows)] = free_slots[: len(case.rows)]
    token_row, position = np.zeros(case.num_tokens, np.int32), np.zeros(case.num_tokens, np.int32)
    for row in range(case.num_rows):
        mine = slice(query_start[row], query_start[row] + query_len[row])
        token_row[mine] = row
        position[mine] = context_len[row] + np.arange(query_len[row])
    return SlotRows(slot, query_start, query_len, context_len, token_row, position)
