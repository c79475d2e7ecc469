"""What programs take from the host, of all groups of devices: what each takes, one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import numpy as np

from jaxinfer.runner import inputs, sampling
from jaxinfer.runner.cache import StateShape
from jaxinfer.scheduler.plan import CachedPrefix, LastToken, LongChunk, PrefillChunk, StepPlan, StepResult, TokenMask
from jaxinfer.types import TokenLogprobs

NOTHING = np.zeros(0, np.int32)
"""Packed inputs of no step."""


def steps(packed: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Inputs of a step, of each group padded to `size`."""
    found = np.zeros(len(packed) * size, np.int32)
    for i, of_group in enumerate(packed):
        found[i * size : i * size + len(of_group)] = of_group
    return found


def prefixes(
    of_groups: Sequence[CachedPrefix], packed: Sequence[np.ndarray], size: int, shape: StateShape
) -> np.ndarray:
    """A prefix of each group, with the inputs of the step that follows, which are padded to `size`."""
    start = inputs.prefix_size(shape.table_width)
    found = np.zeros((len(of_groups), start + size), np.int32)
    for row, prefix, rows in zip(found, of_groups, packed, strict=True):
        row[:start] = inputs.pack_prefix(prefix, table_width=shape.table_width)
        row[start : start + len(rows)] = rows
    return found.reshape(-1)


def no_prefix(shape: StateShape) -> CachedPrefix:
    """Of a group in which none begins."""
    return CachedPrefix(shape.num_slots, (), None)


def histories(chunks: Sequence[PrefillChunk | LongChunk | LastToken | None], shape: StateShape) -> np.ndarray:
    """The history of a slot of each group; None: of none."""
    packed = np.zeros((len(chunks), inputs.history_size(shape.max_model_len)), np.int32)
    packed[:, 0] = shape.num_slots
    for row, chunk in zip(packed, chunks, strict=True):
        if chunk is not None:
            row[:] = inputs.pack_history(chunk, max_model_len=shape.max_model_len, vocab_rows=shape.vocab_rows)
    return packed.reshape(-1)


def histories_of(plan: StepPlan, shape: StateShape) -> Iterator[np.ndarray]:
    """Of the requests with penalties or a bias whose admission begins with this plan."""
    for chunks in zip_longest(*map(_begins_with_history, plan.parts)):
        yield histories(chunks, shape)


def _begins_with_history(plan: StepPlan) -> list[PrefillChunk | LongChunk | LastToken]:
    lasts = (prefix.last for prefix in plan.prefixes if prefix.last is not None)
    found = (chunk for chunk in (*plan.chunks, *lasts) if chunk.history is not None)
    return [chunk for chunk in found if chunk.request.has_penalties or chunk.request.logit_bias]


def masks(
    masks: Sequence[TokenMask], num_groups: int, most: int, shape: StateShape
) -> Iterator[tuple[int, np.ndarray]]:
    """The masks of rows in packs of one or `most` for each group: how many, and the pack."""
    groups = [[mask for mask in masks if mask.group == number] for number in range(num_groups)]
    longest = max(map(len, groups))
    for start in range(0, longest, most):
        num_rows = 1 if longest - start == 1 else most
        sizes = {"vocab_rows": shape.vocab_rows, "num_slots": shape.num_slots}
        yield (
            num_rows,
            np.concatenate([inputs.pack_masks(group[start : start + most], num_rows, **sizes) for group in groups]),
        )


def state_copies(places: Sequence[tuple[int, int] | None], shape: StateShape) -> np.ndarray:
    """From where to where a recurrent state is copied in each group; None: nothing is."""
    unused = shape.num_slots
    return np.array([pair or (unused, unused) for pair in places], np.int32).reshape(-1)


def results(plan: StepPlan, tokens: np.ndarray, logprobs: np.ndarray | None) -> StepResult:
    """Takes apart what is kept of the slots of all groups, and was read: tokens [N + 1] of each; and, if any row asked,
    logprobs [N + 1, 1 + 2k]."""
    num_groups = len(plan.parts)
    of_groups = [None] * num_groups if logprobs is None else logprobs.reshape(num_groups, -1, logprobs.shape[1])
    tokens = tokens.reshape(num_groups, -1)
    found = [_result(*each) for each in zip(plan.parts, tokens, of_groups, strict=True)]
    return StepResult(plan.step, {}, {}, found) if plan.groups else found[0]


def _result(plan: StepPlan, tokens: np.ndarray, packed: np.ndarray | None) -> StepResult:
    slots = [row.slot for row in plan.decodes] + [chunk.slot for chunk in plan.chunks if chunk.samples]
    sampled = dict(zip(slots, tokens[slots].tolist(), strict=True))
    if packed is None:
        return StepResult(plan.step, sampled, {})
    rows = zip(slots, *(part.tolist() for part in sampling.unpack_logprobs(packed[slots])), strict=True)
    logprobs = {slot: TokenLogprobs(chosen, tuple(zip(ids, top, strict=True))) for slot, chosen, ids, top in rows}
    return StepResult(plan.step, sampled, logprobs)
