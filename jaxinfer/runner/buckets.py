"""The step sizes that are compiled, and which of them a plan runs in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """One compiled step. decode: every row is one token that the device knows, so tokens == rows."""

    decode: bool
    tokens: int
    rows: int

    def __str__(self) -> str:
        return f"decode {self.rows} rows" if self.decode else f"mixed {self.tokens} tokens, {self.rows} rows"


MIXED_TOKENS = {"cpu": (16, 64, 256, 512), "gpu": (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)}
"""Tokens of mixed steps by platform, cut off at the limit. Four times apart at most, so that padding stays bounded."""
FEW_ROWS, FEW_ROWS_FROM = 8, 512
"""Rows of the second variant of mixed steps from this many tokens on: a lone long prompt need not sample for every
slot."""


def make_buckets(platform: str, max_num_seqs: int, max_step_tokens: int) -> list[Bucket]:
    """All buckets, smallest first within each kind. The largest of each kind holds every legal plan."""
    powers = [2**i for i in range(max_num_seqs.bit_length()) if 2**i < max_num_seqs]
    buckets = [Bucket(True, rows, rows) for rows in [*powers, max_num_seqs]]
    sizes = [t for t in MIXED_TOKENS[platform] if t < max_step_tokens]
    for tokens in [*sizes, max_step_tokens]:
        rows = min(tokens, max_num_seqs)
        if platform != "cpu" and tokens >= FEW_ROWS_FROM and rows > FEW_ROWS:
            buckets.append(Bucket(False, tokens, FEW_ROWS))
        buckets.append(Bucket(False, tokens, rows))
    return buckets


def choose(buckets: Sequence[Bucket], *, decode: bool, tokens: int, rows: int) -> Bucket:
    """The first bucket that holds the step. ValueError if none does, which the scheduler's limits rule out."""
    for bucket in buckets:
        if bucket.decode == decode and bucket.tokens >= tokens and bucket.rows >= rows:
            return bucket
    raise ValueError(f"no compiled step holds {tokens} tokens in {rows} rows (decode: {decode})")
