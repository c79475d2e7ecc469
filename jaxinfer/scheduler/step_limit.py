"""How many tokens a step may have."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from jaxinfer.config import SchedulerLimits

WAITING_SHARE = 2
"""Decoding sequences for each one that waits, below which prompts are computed as fast as streams may bear."""


def prompt_limit(limits: SchedulerLimits, num_waiting: int) -> int:
    """Tokens of a step without decode rows.

    Where more than one sequence waits, the first is to begin to decode before the last is computed: a large step is
    hardly quicker than smaller ones that hold as much, and those who decode advance in each.
    """
    alone = num_waiting <= 1 or limits.calm_mixed_tokens is None
    return limits.max_step_tokens if alone else min(limits.max_mixed_tokens, limits.max_step_tokens)


def mixed_limit(limits: SchedulerLimits, num_decodes: int, num_waiting: int) -> int:
    """Tokens of a step beside `num_decodes` decode rows, these included: more than there are rows.

    A large step makes every stream wait, and gets through prompts little quicker than smaller ones, in which decode
    rows advance as well: so it is calm. From a sequence that waits for every WAITING_SHARE that decode, prompts come
    first, up to what `max_mixed_tokens` allows: calm steps do not keep up with them.
    """
    if limits.calm_mixed_tokens is None or num_waiting * WAITING_SHARE > num_decodes:
        return limits.max_mixed_tokens
    return min(max(limits.calm_mixed_tokens, 2 * num_decodes), limits.max_mixed_tokens)


def cut_limit(limits: SchedulerLimits, limit: int, num_decodes: int, num_tokens: int, num_begun: int) -> int:
    """`limit`, or less: a size that is compiled, where the prompts then take less time than padded to the next one.

    limit: tokens of a step, its `num_decodes` decode rows included, of which there are fewer; num_tokens: of prompts,
    known to be there; num_begun: of these, of the sequence that is in the middle of its prompt. What is returned is
    more than there are decode rows, too. Up to half of a step is padding where sizes are twice apart: in a simulated
    job, by the step times of an H200, 14% of all tokens with 256 sequences and 20% with 512.

    Decode rows advance in every step, so a step costs prompts only the time that it takes beyond a decode step. What
    is cut off waits for a step, in which its sequence does not decode; so a cut leaves the prompts half of their tokens
    at least. Nor does it divide a prompt again beside decode rows: those were given pages for as many steps as it takes
    without (see Admission). More tokens than are there do no harm: the step is padded as it would be without a cut.
    """
    num_tokens = min(num_tokens, limit - num_decodes)
    if not limits.mixed_ms or num_tokens <= 0:
        return limit
    rows = sorted(limits.decode_ms)
    decode_ms = limits.decode_ms[rows[bisect_left(rows, num_decodes)]] if num_decodes else 0.0
    sizes = sorted(limits.mixed_ms)
    _, size = _cheapest(limits.mixed_ms, sizes, decode_ms, num_decodes, num_tokens)
    room = size - num_decodes
    return size if room < num_tokens and (not num_decodes or room >= num_begun) else limit


def _cheapest(
    mixed_ms: Mapping[int, float], sizes: Sequence[int], decode_ms: float, num_decodes: int, num_tokens: int
) -> tuple[float, int]:
    """Milliseconds beyond decode steps that so many tokens of prompts take, and the size of the first step of these.

    Each step takes the smallest size that holds what is left, padded, or the next smaller one, full.
    """
    place = bisect_left(sizes, num_decodes + num_tokens)
    padded_ms = mixed_ms[sizes[place]] - decode_ms
    full = sizes[place - 1] if place else 0
    room = full - num_decodes
    if sizes[place] == num_decodes + num_tokens or 2 * room < num_tokens:
        return padded_ms, sizes[place]
    rest_ms, _ = _cheapest(mixed_ms, sizes, decode_ms, num_decodes, num_tokens - room)
    cut_ms = mixed_ms[full] - decode_ms + rest_ms
    return (cut_ms, full) if cut_ms < padded_ms else (padded_ms, sizes[place])
