"""A plan, packed into one vector on the host and taken apart on the device, is the same plan."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.runner import inputs, sampling
from jaxinfer.runner.buckets import Bucket
from jaxinfer.scheduler.plan import DecodeRow, LongChunk, PrefillChunk, StepPlan
from jaxinfer.types import MAX_STOP_IDS, Request

PAGE, SLOTS, CONTEXT, VOCAB = 8, 6, 64, 50
DECODE, MIXED = Bucket(True, 6, 6), Bucket(False, 32, 6)
quick = settings(deadline=None, max_examples=60)


@functools.cache
def unpack(bucket: Bucket):
    return jax.jit(functools.partial(inputs.unpack, bucket=bucket, page_size=PAGE, num_slots=SLOTS))


@functools.cache
def parameters():
    return jax.jit(sampling.SamplingRows.from_fields)


@functools.cache
def unpack_history():
    return jax.jit(functools.partial(inputs.unpack_history, max_model_len=CONTEXT))


def float32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


requests = st.builds(
    Request,
    request_id=st.just("r"),
    prompt_ids=st.just((1,)),
    max_tokens=st.just(9),
    min_tokens=st.integers(0, 9),
    temperature=float32(0, 4),
    top_k=st.integers(0, 2**31 - 1),
    top_p=float32(2**-20, 1),
    min_p=float32(0, 1),
    repetition_penalty=float32(2**-10, 4),
    frequency_penalty=float32(-2, 2),
    presence_penalty=float32(-2, 2),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), float32(-100, 100), max_size=VOCAB),
    stop_ids=st.lists(st.integers(0, 10**6), max_size=MAX_STOP_IDS, unique=True).map(tuple),
    logprobs=st.sampled_from([None, 0, 20]),
)


@st.composite
def decode_rows(draw, slots):
    rows = []
    for slot in slots:
        position = draw(st.integers(0, CONTEXT - 1))
        page = draw(st.integers(1, 10**6)) if position % PAGE == 0 else None
        rows.append(DecodeRow(slot, position, page))
    return tuple(rows)


@st.composite
def chunks(draw, slots, max_tokens):
    result = []
    for left, slot in zip(range(len(slots), 0, -1), slots, strict=True):
        length = draw(st.integers(1, max(1, max_tokens - left + 1)))
        max_tokens -= length
        start = draw(st.integers(0, CONTEXT - length))
        first = -(-start // PAGE)
        num_pages = max(0, -(-(start + length) // PAGE) - first)
        pages = draw(st.lists(st.integers(1, 10**6), min_size=num_pages, max_size=num_pages))
        tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length))
        samples, prompt_len = draw(st.booleans()), draw(st.integers(1, CONTEXT))
        result.append(PrefillChunk(slot, start, tokens, pages, first, samples, draw(requests), prompt_len, None))
    return tuple(result)


@st.composite
def plans(draw, mixed: bool):
    slots = draw(st.permutations(range(SLOTS)))
    count = draw(st.integers(1, SLOTS))
    num_decodes = draw(st.integers(0, count - 1)) if mixed else count
    decodes = draw(decode_rows(slots[:num_decodes]))
    prefills = draw(chunks(slots[num_decodes:count], MIXED.tokens - num_decodes)) if mixed else ()
    return StepPlan(0, decodes, prefills)


def taken_apart(plan: StepPlan, bucket: Bucket) -> inputs.StepInputs:
    packed = inputs.pack(plan, bucket, page_size=PAGE, num_slots=SLOTS)
    assert packed.shape == (inputs.packed_size(bucket, PAGE),) and packed.dtype == np.int32
    return jax.tree.map(np.asarray, unpack(bucket)(packed))


def pages_of(step: inputs.StepInputs) -> set[tuple[int, int, int]]:
    """(slot, index in its page table, page) of each update."""
    return {tuple(update) for update in step.page_updates.tolist() if update[2] != 0}


def expected_pages(plan: StepPlan) -> set[tuple[int, int, int]]:
    found = {(row.slot, row.position // PAGE, row.new_page) for row in plan.decodes if row.new_page}
    return found | {
        (chunk.slot, chunk.first_new_page + i, page)
        for chunk in plan.prefills
        for i, page in enumerate(chunk.new_pages)
    }


@quick
@given(plans(mixed=False))
def test_a_decode_plan_comes_out_as_it_went_in(plan):
    step = taken_apart(plan, DECODE)
    num = len(plan.decodes)
    np.testing.assert_array_equal(step.slot[:num], [row.slot for row in plan.decodes])
    np.testing.assert_array_equal(step.context_len[:num], [row.position for row in plan.decodes])
    assert step.samples[:num].all() and (step.query_len[:num] == 1).all()
    assert step.tokens is None and step.sampling is None
    assert pages_of(step) == expected_pages(plan)
    check_padding(step, num)


@quick
@given(plans(mixed=True))
def test_a_mixed_plan_comes_out_as_it_went_in(plan):
    step = taken_apart(plan, MIXED)
    num = plan.num_rows
    rows = [(row.slot, 1, row.position, True) for row in plan.decodes]
    rows += [(chunk.slot, len(chunk.token_ids), chunk.start, chunk.samples) for chunk in plan.prefills]
    slots, lengths, contexts, samples = zip(*rows, strict=True)
    for array, wanted in zip(step[:4], (slots, lengths, contexts, samples), strict=True):
        np.testing.assert_array_equal(array[:num], wanted)
    tokens = [-1] * len(plan.decodes) + [token for chunk in plan.prefills for token in chunk.token_ids]
    np.testing.assert_array_equal(step.tokens[: len(tokens)], tokens)
    assert pages_of(step) == expected_pages(plan)
    check_padding(step, num)


@quick
@given(plans(mixed=True))
def test_sampling_parameters_reach_the_device_bit_by_bit_and_only_those_of_chunks(plan):
    step = taken_apart(plan, MIXED)
    slots, fields = step.sampling
    num_decodes = len(plan.decodes)
    assert (slots[:num_decodes] == SLOTS).all() and (slots[plan.num_rows :] == SLOTS).all()
    np.testing.assert_array_equal(slots[num_decodes : plan.num_rows], [chunk.slot for chunk in plan.prefills])
    rows = jax.tree.map(np.asarray, parameters()(fields))
    for i, chunk in enumerate(plan.prefills, num_decodes):
        request = chunk.request
        for name in inputs.FLOATS:
            assert getattr(rows, name)[i] == getattr(request, name)
        seed = int(rows.seed_low.view(np.uint32)[i]) | int(rows.seed_high.view(np.uint32)[i]) << 32
        assert seed == request.seed
        assert rows.top_k[i] == request.top_k
        assert rows.wants_logprobs[i] == (request.logprobs is not None)
        assert rows.has_bias[i] == bool(request.logit_bias)
        assert rows.has_penalties[i] == request.has_penalties
        assert rows.no_stop_before[i] == (chunk.prompt_len + request.min_tokens if request.min_tokens else 0)
        stops = [*request.stop_ids] + [-1] * (MAX_STOP_IDS - len(request.stop_ids))
        np.testing.assert_array_equal(rows.stop_ids[i], stops)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_penalties_may_be_numbers_of_numpy(kind, name):
    def fields(penalty: Any) -> np.ndarray:
        asked: dict[str, Any] = {name: penalty}
        return inputs.sampling_fields(Request(request_id="r", prompt_ids=(1,), max_tokens=9, **asked), 1)

    np.testing.assert_array_equal(fields(kind(1.5)), fields(1.5))


def check_padding(step: inputs.StepInputs, num: int) -> None:
    """Rows that pad belong to the slot past the last, have no tokens and sample nothing."""
    assert (step.slot[num:] == SLOTS).all()
    assert not step.query_len[num:].any() and not step.context_len[num:].any() and not step.samples[num:].any()
    assert all(slot < SLOTS for slot, _, _ in pages_of(step))


def test_a_plan_without_rows_is_all_padding():
    for bucket in (DECODE, MIXED):
        step = taken_apart(StepPlan(0, (), ()), bucket)
        check_padding(step, 0)
        assert not pages_of(step)


def test_the_most_page_updates_that_a_step_can_have_fit():
    # Every row begins a page with its first token and one more with its last.
    lengths = [9, 9, 9, 1, 1, 1]
    assert sum(lengths) <= MIXED.tokens
    request = Request(request_id="r", prompt_ids=(1,), max_tokens=1)
    prefills = [
        PrefillChunk(slot, 0, [1] * n, [slot + 1] * -(-n // PAGE), 0, True, request, 1, None)
        for slot, n in enumerate(lengths)
    ]
    plan = StepPlan(0, (), tuple(prefills))
    assert pages_of(taken_apart(plan, MIXED)) == expected_pages(plan)


@quick
@given(requests, st.integers(0, SLOTS), st.integers(1, CONTEXT), st.data())
def test_the_history_of_a_slot_comes_out_as_it_went_in(request_, slot, prompt_len, data):
    known = data.draw(st.integers(prompt_len, CONTEXT))
    tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=known, max_size=known))
    chunk = PrefillChunk(slot, 0, tokens[:1], (1,), 0, False, request_, prompt_len, tuple(tokens))
    packed = inputs.pack_history(chunk, max_model_len=CONTEXT, vocab_rows=VOCAB)
    history = jax.tree.map(np.asarray, unpack_history()(packed))
    assert history.slot == slot
    np.testing.assert_array_equal(history.tokens[:known], tokens)
    np.testing.assert_array_equal(np.flatnonzero(history.is_prompt), np.arange(prompt_len))
    np.testing.assert_array_equal(np.flatnonzero(history.is_output), np.arange(prompt_len, known))
    used = history.bias_ids < VOCAB
    assert dict(zip(history.bias_ids[used].tolist(), history.bias[used].tolist(), strict=True)) == request_.logit_bias


@quick
@given(st.integers(0, SLOTS - 1), st.lists(st.integers(0, VOCAB - 1), max_size=16), st.integers(0, 9), st.booleans())
def test_a_long_chunk_survives_packing(slot, tokens, num_pages, samples):
    request = Request(request_id="r", prompt_ids=(), max_tokens=1, temperature=0.5, seed=2**40 + 3)
    chunk = LongChunk(slot, num_pages * PAGE + 5, tokens, num_pages * PAGE, samples, request, 9)
    padded = np.pad(inputs.pack_long(chunk, 16), (0, 11))  # the buffer that it is staged in may be longer
    found = jax.tree.map(np.asarray, unpack_long()(padded))
    assert found[:4] == (slot, chunk.num_tokens, chunk.start, chunk.num_device_tokens)
    assert chunk.num_tokens == max(1, len(tokens)) and found.samples == samples
    np.testing.assert_array_equal(found.sampling, inputs.sampling_fields(request, 9))
    assert found.tokens[: chunk.num_tokens].tolist() == (tokens or [-1])
    assert len(found.tokens) == 16


@functools.cache
def unpack_long():
    return jax.jit(functools.partial(inputs.unpack_long, num_tokens=16))


@pytest.mark.parametrize("samples", [True, False])
def test_a_plan_with_a_long_chunk_is_one_row_that_asks_for_what_its_request_does(samples):
    plain = Request(request_id="r", prompt_ids=(), max_tokens=1, temperature=0.0)
    asks = Request(request_id="r", prompt_ids=(), max_tokens=1, temperature=0.7, logprobs=1)
    for request, tokens in ((plain, (1, 2, 3)), (asks, (1, 2, 3)), (asks, ())):
        plan = StepPlan(0, (), (), long=LongChunk(0, 8, tokens, 8, samples, request, 9))
        assert (plan.num_rows, plan.num_tokens) == (1, len(tokens) or 1)
        assert plan.is_plain == (request is plain or not samples)
        assert plan.wants_logprobs == (request is asks and samples)
