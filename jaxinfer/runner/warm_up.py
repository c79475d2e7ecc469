"""Steps that a runner runs before the first request: full ones, so that what they take is what steps take."""

from __future__ import annotations

from itertools import cycle, islice

from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import StateShape
from jaxinfer.scheduler.plan import DecodeRow, PrefillChunk, StepPlan
from jaxinfer.types import Request

STRIDE = 7919
"""Between the ids of tokens, so that a model with experts sends them to most of these; a prime number."""
FEW = 8
"""Sequences that fill a step, where they are long enough: its time then is that of prompts, and not of many rows."""
NOBODY = Request(request_id="", prompt_ids=(), max_tokens=1)


def full_plan(bucket: Bucket, shape: StateShape, vocab_size: int, num_groups: int) -> StepPlan:
    """A step with as many tokens as a bucket holds, or nearly so, in each group of devices.

    Padding would do for a dense model, but no expert computes it. The step leaves behind in slots and pages what any
    request does; where there are fewer pages than it needs, rows share them.
    """
    part = _full_part(bucket, shape, vocab_size)
    return part if num_groups == 1 else StepPlan(0, (), (), groups=(part,) * num_groups)


def _full_part(bucket: Bucket, shape: StateShape, vocab_size: int) -> StepPlan:
    pages = cycle(range(1, shape.num_pages + 1))
    if bucket.decode:
        return StepPlan(0, [DecodeRow(slot, 0, next(pages)) for slot in range(bucket.rows)], ())
    num_seqs = min(bucket.rows, max(FEW, -(-bucket.tokens // shape.max_model_len)))
    length = min(bucket.tokens // num_seqs, shape.max_model_len)
    num_pages = -(-length // shape.page_size)
    chunks = [
        PrefillChunk(
            slot=slot,
            start=0,
            token_ids=[token * STRIDE % vocab_size for token in range(slot * length, (slot + 1) * length)],
            new_pages=tuple(islice(pages, num_pages)),
            first_new_page=0,
            samples=True,
            request=NOBODY,
            prompt_len=length,
            history=None,
        )
        for slot in range(num_seqs)
    ]
    return StepPlan(0, (), chunks)
