"""How many sequences run at once in a batch job whose user does not say: more than in a server, where memory allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxinfer.config import EngineConfig
from jaxinfer.kv_tiers import TierSizes, size_memory
from jaxinfer.runner.buckets import make_buckets
from jaxinfer.runner.cache import PoolError
from jaxinfer.runner.step import StepBuilder

JOB_NUM_SEQS = 512
"""Sequences that run at once in a job on a GPU: nobody waits there for the next token of one. A simulated job of 20,000
rows makes 6% more tokens per second so, with steps of any length, than with 256 and 30 ms (step times of an H200)."""
JOB_TOKENS = 512
"""Of the KV cache, for each of these sequences: with less, memory would keep many of them from running."""


def size_job(
    config: EngineConfig, builder: StepBuilder, temp_bytes: Callable[[StepBuilder], int]
) -> tuple[StepBuilder, TierSizes]:
    """See `size_memory`: the same with JOB_NUM_SEQS sequences where nobody said how many, or else as it is.

    Each takes memory for its logits, penalties and recurrent state beside its pages. So there are more than `builder`
    has only if the pages are what memory holds, and still hold JOB_TOKENS for each, and the whole context: then more
    sequences change nothing of what a row may ask for. As it is on a CPU; with several processes, which all have to be
    told alike; and with several groups of devices, which have so many sequences each.
    """
    larger = _with_job_slots(config, builder)
    if larger is None:
        return size_memory(config, builder, temp_bytes)
    try:
        sized, tiers = size_memory(config, larger, temp_bytes)
    except PoolError:
        return size_memory(config, builder, temp_bytes)
    if sized.shape.num_pages * sized.shape.page_size >= max(JOB_NUM_SEQS * JOB_TOKENS, builder.shape.max_model_len):
        return sized, tiers
    return size_memory(config, builder, temp_bytes)


def _with_job_slots(config: EngineConfig, builder: StepBuilder) -> StepBuilder | None:
    """Not sized yet; None where the builder's number of slots is to stay."""
    tokens = builder.buckets[-1].tokens
    is_chosen = config.max_num_seqs is not None or config.num_pages is not None
    if (
        builder.platform == "cpu"
        or is_chosen
        or config.num_processes > 1
        or builder.num_groups > 1
        or tokens < 2 * JOB_NUM_SEQS
    ):
        return None
    shape = dataclasses.replace(builder.shape, num_slots=JOB_NUM_SEQS)
    buckets = make_buckets(builder.platform, JOB_NUM_SEQS, tokens)
    return dataclasses.replace(builder, shape=shape, buckets=tuple(buckets))
