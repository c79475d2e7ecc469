"""How many tokens a step may have beside decode rows."""

from __future__ import annotations

from jaxinfer.config import SchedulerLimits

WAITING_SHARE = 4
"""Decoding sequences for each one that waits, below which prompts are computed as fast as streams may bear."""


def mixed_limit(limits: SchedulerLimits, num_decodes: int, num_waiting: int) -> int:
    """Tokens of a step beside `num_decodes` decode rows, these included: more than there are rows.

    A large step makes every stream wait, but gets through prompts quicker. So it is calm while few wait: streams
    then go on at nearly their own pace. From a sequence that waits for every WAITING_SHARE that decode, the prompts
    come first, up to what `max_mixed_tokens` allows.
    """
    if limits.calm_mixed_tokens is None or num_waiting * WAITING_SHARE > num_decodes:
        return limits.max_mixed_tokens
    return min(max(limits.calm_mixed_tokens, 2 * num_decodes), limits.max_mixed_tokens)
