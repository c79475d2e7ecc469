"""Sequences that begin with pages that are in the cache already, put in place by hand."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.models import registry
from jaxinfer.runner import cache, inputs
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.scheduler.plan import CachedPrefix, DecodeRow, PrefillChunk, StepPlan
from jaxinfer.types import Request
from tests.engine.drive import build, num_equal
from tests.runner.test_step import make_builder

PAGE = 8
MAX_CHUNK = 16
NUM_TOKENS = 16
OPTIONS = {"page_size": PAGE, "num_pages": 14, "max_num_seqs": 2, "max_num_batched_tokens": MAX_CHUNK}


@pytest.fixture(scope="module")
def builder(golden):
    return make_builder(registry.from_config(golden("llama").config))


def random_state(builder):
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(lambda a: rng.integers(0, 2, a.shape).astype(a.dtype), cache.zeros(builder.abstract_state))
    pools = {name: rng.random(getattr(arrays, name).shape, np.float32) for name in ("k_pages", "v_pages")}
    return arrays.replace(**pools)


def put(builder, state, *prefixes):
    for prefix in prefixes:
        packed = inputs.pack_prefix(prefix, table_width=builder.shape.table_width)
        state = jax.jit(builder.set_up_prefix)(state, packed)
    return jax.tree.map(np.asarray, state)


def assert_same_but(found, expected, *names):
    for field in dataclasses.fields(expected):
        if field.name not in names:
            np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), field.name)


def test_shared_pages_change_the_page_table_of_their_slot_alone(builder):
    before = random_state(builder)
    after = put(builder, before, CachedPrefix(1, (5, 3, 9), None))
    assert_same_but(after, before, "page_table")
    assert after.page_table[1].tolist() == [5, 3, 9] + [0] * (builder.shape.table_width - 3)
    np.testing.assert_array_equal(np.delete(after.page_table, 1, 0), np.delete(before.page_table, 1, 0))


def test_a_copied_page_is_the_last_one_in_every_layer_and_its_source_stays(builder):
    before = random_state(builder)
    after = put(builder, before, CachedPrefix(0, (5, 3, 13), 9))
    assert_same_but(after, before, "page_table", "k_pages", "v_pages")
    assert after.page_table[0, :3].tolist() == [5, 3, 13]
    for name in ("k_pages", "v_pages"):
        expected = getattr(before, name).copy()
        expected[:, 13] = expected[:, 9]
        np.testing.assert_array_equal(getattr(after, name), expected)


def test_prefixes_take_place_in_their_order(builder):
    """The second one's page is the first one's source, which nobody needed any more."""
    before = random_state(builder)
    after = put(builder, before, CachedPrefix(0, (4,), 2), CachedPrefix(1, (2,), 7))
    np.testing.assert_array_equal(after.k_pages[:, 4], before.k_pages[:, 2])
    np.testing.assert_array_equal(after.k_pages[:, 2], before.k_pages[:, 7])


def test_a_prefix_may_be_as_long_as_the_page_table(builder):
    pages = tuple(range(1, builder.shape.table_width + 1))
    after = put(builder, random_state(builder), CachedPrefix(0, pages, None))
    assert tuple(after.page_table[0].tolist()) == pages


class Sequence:
    """A request that is stepped by hand, on pages that the test gives it."""

    def __init__(self, slot: int, prompt: list[int], pages: list[int]):
        self.slot, self.prompt, self.pages = slot, prompt, pages
        self.tokens: list[int] = []
        self._request = Request(request_id=str(slot), prompt_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0)

    def chunk(self, start: int) -> PrefillChunk:
        end = min(start + MAX_CHUNK, len(self.prompt))
        first, after = -(-start // PAGE), -(-end // PAGE)
        return PrefillChunk(
            slot=self.slot,
            start=start,
            token_ids=self.prompt[start:end],
            new_pages=self.pages[first:after],
            first_new_page=first,
            samples=end == len(self.prompt),
            request=self._request,
            prompt_len=len(self.prompt),
            history=self.prompt if start == 0 else None,
        )

    def row(self) -> DecodeRow:
        position = len(self.prompt) + len(self.tokens) - 1
        return DecodeRow(self.slot, position, self.pages[position // PAGE] if position % PAGE == 0 else None)


def run_plan(runner: ModelRunner, plan: StepPlan, *sequences: Sequence) -> None:
    sampled = runner.collect(runner.launch(plan)).token_ids
    for sequence in sequences:
        if sequence.slot in sampled:
            sequence.tokens.append(sampled[sequence.slot])


def prefill(runner: ModelRunner, sequence: Sequence, start: int, prefixes: tuple[CachedPrefix, ...] = ()) -> None:
    while start < len(sequence.prompt):
        run_plan(runner, StepPlan(0, (), (chunk := sequence.chunk(start),), prefixes), sequence)
        start, prefixes = start + len(chunk.token_ids), ()


@pytest.fixture(scope="module", params=[1, 2], ids=["1 device", "2 devices"])
def runner(request, golden):
    if jax.device_count() < request.param:
        pytest.skip(f"one device; {request.param} are needed")
    engine = build(golden("llama").folder, tensor_parallel_size=request.param, **OPTIONS)
    yield engine._runner
    engine.close()


@pytest.mark.parametrize("num_cached", [8, 20, 32, 33, 38])
def test_a_prefix_gives_the_tokens_of_a_cold_run_while_its_owner_goes_on(runner, golden, num_cached):
    expected = golden("llama")
    number = int(np.argmax([len(prompt) for prompt in expected.prompts]))
    prompt, tokens, margins = (of[number] for of in (expected.prompts, expected.tokens, expected.margins))
    cold = Sequence(0, prompt.tolist(), [3, 1, 2, 7, 5, 4, 6])
    num_shared = num_cached // PAGE
    warm = Sequence(1, prompt.tolist(), cold.pages[:num_shared] + [14, 10, 8, 9, 13, 11, 12][num_shared:])
    prefill(runner, cold, 0)
    for _ in range(3):
        run_plan(runner, StepPlan(0, (cold.row(),), ()), cold)
    if num_cached % PAGE:
        prefix = CachedPrefix(1, warm.pages[: num_shared + 1], cold.pages[num_shared])
    else:
        prefix = CachedPrefix(1, warm.pages[:num_shared], None)
    prefill(runner, warm, num_cached, (prefix,))
    while len(warm.tokens) < NUM_TOKENS:
        rows = [one.row() for one in (cold, warm) if len(one.tokens) < NUM_TOKENS]
        run_plan(runner, StepPlan(0, tuple(rows), ()), cold, warm)
    num_equal(warm.tokens, tokens.tolist(), margins)
    num_equal(cold.tokens, tokens.tolist(), margins)
    assert runner.compilations_after_ready == 0
