"""Scores of prompts: log-probabilities as NumPy has them, whatever the size of the step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.runner import scoring
from jaxinfer.scheduler.plan import DecodeRow, PrefillChunk, StepPlan
from jaxinfer.types import Request

VOCAB, PADDED = 30, 33


def chunk(slot, tokens, next_token=None, *, scored=True):
    request = Request(request_id="", prompt_ids=(), max_tokens=1)
    return PrefillChunk(slot, 0, tokens, (), 0, True, request, len(tokens), None, next_token, scored)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
def test_scores_are_those_of_float64_and_padding_of_the_vocabulary_has_none(num_tokens):
    rng = np.random.default_rng(num_tokens)
    table = rng.normal(size=(8, PADDED)).astype(np.float32)
    hidden = rng.normal(size=(num_tokens, 8)).astype(np.float32)
    targets = rng.integers(-1, VOCAB, num_tokens).astype(np.int32)
    targets[0] = 3
    packed = np.asarray(scoring.score(lambda rows: rows @ table, jnp.asarray(hidden), jnp.asarray(targets), VOCAB))
    plan = StepPlan(0, (), [chunk(5, [0] * num_tokens)])
    found = scoring.unpack(plan, packed)[5]
    logits = (hidden.astype(np.float64) @ table)[:, :VOCAB]
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for score, target, row in zip(found, targets, logprobs, strict=True):
        if target < 0:
            assert (score.logprob, score.rank) == (0, 0)
            continue
        order = np.argsort(-row)
        assert score.logprob == pytest.approx(row[target], abs=1e-5)
        assert score.rank == order.tolist().index(target) + 1
        assert [id for id, _ in score.top] == order[:20].tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(row[order[:20]], abs=1e-5)


def test_targets_are_the_tokens_behind_each_and_lie_where_the_step_has_them():
    decodes = [DecodeRow(0, 4, None), DecodeRow(1, 9, None)]
    plan = StepPlan(0, decodes, [chunk(2, [7, 8], scored=False), chunk(3, [4, 5, 6], 9), chunk(4, [1])])
    assert scoring.targets(plan, 10).tolist() == [-1, -1, -1, -1, 5, 6, 9, -1, -1, -1]
    packed = np.arange(10, dtype=np.int32)[:, None] * np.ones(scoring.num_fields(PADDED), np.int32)
    found = scoring.unpack(plan, packed)
    assert {slot: [score.rank for score in scores] for slot, scores in found.items()} == {3: [4, 5, 6], 4: [7]}
