"""Named shapes that tests and benchmarks share: heads of published models, lengths that meet every edge."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from pallas_kernels.paged_attention.api import PagedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Lengths are in tokens; rows are (tokens in the step, tokens in the cache before it)."""

    name: str
    num_heads: int  # H
    num_kv_heads: int  # K
    head_width: int  # E
    rows: tuple[tuple[int, int], ...]
    page_size: int = 16  # S
    pad_tokens: int = 0  # that belong to no row, after the last
    pad_rows: int = 0
    window: int | None = None  # tokens
    soft_cap: float | None = None
    sinks: bool = False

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
    def num_pages(self) -> int:
        """P: those of all rows, and page 0."""
        return 1 + sum(-(-(new + old) // self.page_size) for new, old in self.rows)


SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_width": 64}
QWEN2_05B = {"num_heads": 14, "num_kv_heads": 2, "head_width": 64}
QWEN3_06B = {"num_heads": 16, "num_kv_heads": 8, "head_width": 128}
QWEN3_4B = {"num_heads": 32, "num_kv_heads": 8, "head_width": 128}
LLAMA2_7B = {"num_heads": 32, "num_kv_heads": 32, "head_width": 128}
QWEN25_7B = {"num_heads": 28, "num_kv_heads": 4, "head_width": 128}
QWEN3_30B = {"num_heads": 32, "num_kv_heads": 4, "head_width": 128}
GPT_OSS_20B = {"num_heads": 64, "num_kv_heads": 8, "head_width": 64}
GEMMA3_1B = {"num_heads": 4, "num_kv_heads": 1, "head_width": 256}

CASES = (
    Case(name="decode, one row", **SMOLLM2, rows=((1, 36),)),
    Case(name="decode, the first token of a sequence", **QWEN3_4B, rows=((1, 0),)),
    Case(name="decode, lengths around a page edge", **QWEN3_06B, rows=tuple((1, n) for n in (14, 15, 16, 17, 31, 32))),
    Case(name="decode, padded rows", **QWEN3_4B, rows=((1, 40), (1, 3), (1, 77)), pad_tokens=5, pad_rows=5),
    Case(name="decode, group of 1", **LLAMA2_7B, rows=((1, 21), (1, 9))),
    Case(name="decode, group of 7", **QWEN25_7B, rows=((1, 50), (1, 1))),
    Case(name="decode, group of 8", **QWEN3_30B, rows=((1, 65), (1, 30), (1, 7))),
    Case(name="decode, wide heads", **GEMMA3_1B, rows=((1, 63), (1, 5)), page_size=8),
    Case(name="decode, long contexts of several lengths", **QWEN2_05B, rows=((1, 700), (1, 255), (1, 256), (1, 511))),
    Case(name="decode, window within a page", **QWEN2_05B, rows=((1, 100), (1, 3)), window=5),
    Case(name="decode, window across long contexts", **QWEN2_05B, rows=((1, 600), (1, 90)), window=300),
    Case(name="decode, large pages", **QWEN3_06B, rows=((1, 127), (1, 128), (1, 300)), page_size=128),
    Case(name="prefill, one odd prompt", **SMOLLM2, rows=((37, 0),), pad_tokens=27),
    Case(name="prefill, one token", **SMOLLM2, rows=((1, 0),), pad_tokens=15),
    Case(name="prefill, exactly a page", **QWEN3_4B, rows=((16, 0),)),
    Case(name="prefill, longer than a block of queries", **SMOLLM2, rows=((131, 0),), pad_tokens=5),
    Case(name="prefill, a chunk in mid-page", **QWEN3_06B, rows=((13, 29),), pad_tokens=3),
    Case(name="prefill, a chunk after a long context", **QWEN2_05B, rows=((70, 530),), pad_tokens=2),
    Case(
        name="prefill, several prompts", **QWEN25_7B, rows=((7, 0), (33, 0), (1, 0), (16, 16)), pad_tokens=7, pad_rows=4
    ),
    Case(name="prefill, window", **QWEN2_05B, rows=((45, 20), (9, 0)), pad_tokens=10, window=8),
    Case(name="mixed, decode rows and a chunk", **QWEN3_4B, rows=((1, 15), (1, 16), (1, 90), (19, 32)), pad_tokens=10),
    Case(
        name="mixed, long contexts",
        **QWEN2_05B,
        rows=((1, 600), (1, 2), (65, 258), (1, 0)),
        pad_tokens=60,
        pad_rows=3,
    ),
    Case(name="mixed, wide heads", **GEMMA3_1B, rows=((1, 33), (12, 7), (1, 8)), page_size=8, pad_tokens=2, pad_rows=1),
    Case(name="decode, soft cap", **QWEN3_06B, rows=((1, 40), (1, 700)), soft_cap=2.0),
    Case(name="decode, sinks", **GPT_OSS_20B, rows=((1, 40), (1, 0), (1, 700)), sinks=True, window=128),
    Case(name="prefill, soft cap", **QWEN3_06B, rows=((40, 0), (70, 300)), soft_cap=2.0),
    Case(name="prefill, sinks", **GPT_OSS_20B, rows=((40, 0), (70, 300)), sinks=True),
    Case(name="mixed, window", **GEMMA3_1B, rows=((1, 63), (20, 30)), pad_tokens=11, pad_rows=2, window=16),
)


class Arrays(NamedTuple):
    """A case with numbers. Pages lie in the pool in an order of their own."""

    q: np.ndarray  # [T, H, E] float32, as all but rows
    keys: np.ndarray  # [T, K, E]
    values: np.ndarray  # [T, K, E]
    k_pool: np.ndarray  # [L, P, S, K, E]
    v_pool: np.ndarray  # [L, P, S, K, E]
    rows: PagedRows
    sinks: np.ndarray | None  # [H]


def make(case: Case, *, num_layers: int = 2, seed: int = 0) -> Arrays:
    """Random numbers for a case; the pool is full of them, beyond the rows' lengths too."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tokens, kv = case.num_tokens, (case.num_kv_heads, case.head_width)
    pool = (num_layers, case.num_pages, case.page_size, *kv)
    q, keys, values = normal(tokens, case.num_heads, case.head_width), normal(tokens, *kv), normal(tokens, *kv)
    pools = normal(*pool), normal(*pool)
    rows = _rows(case, rng.permutation(case.num_pages - 1) + 1)
    return Arrays(q, keys, values, *pools, rows, normal(case.num_heads) if case.sinks else None)


def _rows(case: Case, free_pages: np.ndarray) -> PagedRows:
    lens = np.array([*case.rows, *[(0, 0)] * case.pad_rows], np.int32)
    query_len, context_len = lens.T
    query_start = (np.cumsum(query_len) - query_len).astype(np.int32)
    if case.decode:
        query_start = np.arange(case.num_rows, dtype=np.int32)
    num_pages = -(-lens.sum(1) // case.page_size)
    table = np.zeros((case.num_rows, max(1, *num_pages)), np.int32)
    token_row, position, page = (np.zeros(case.num_tokens, np.int32) for _ in range(3))
    for row, count in enumerate(num_pages):
        table[row, :count], free_pages = free_pages[:count], free_pages[count:]
        mine = slice(query_start[row], query_start[row] + query_len[row])
        token_row[mine] = row
        position[mine] = context_len[row] + np.arange(query_len[row])
        page[mine] = table[row, position[mine] // case.page_size]
    return PagedRows(table, query_start, query_len, context_len, token_row, position, page)
