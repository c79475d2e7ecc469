"""Sequences that begin in pages and go on in host memory give what those give that lie in pages as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Run
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import build
from jaxinfer.config import EngineConfig
from jaxinfer.found import find_model
from jaxinfer.models import registry
from jaxinfer.runner import long_context
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.compiled import (
    compile_lowered,
    compile_programs,
    largest_temp_bytes,
    long_store_program,
    lower,
    lower_long,
)
from jaxinfer.runner.executables import Executables
from jaxinfer.runner.long_context import LongContext
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.scheduler.plan import CachedPrefix, DecodeRow, LongChunk, PrefillChunk, StepPlan
from jaxinfer.sharding import rules
from jaxinfer.types import Request, TokenLogprobs
from tests.engine.drive import TIE
from tests.runner.test_step import (
    abstract_params,
    aliased_outputs,
    assert_no_pool_is_copied,
    make_builder,
    num_state_arrays,
)

MAX_CHUNK = 16  # of ordinary steps
PROMPT_LEN, NUM_TOKENS = 90, 40
TOLERANCE = 2e-5  # of logits, whose size is about 1: parts of a context are summed in another order
SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.9,
    "seed": 7,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "logit_bias": {3: 2.0},
    "logprobs": 3,
}


def make_runner(folder: Path, page_size: int, long: LongContext | None) -> ModelRunner:
    config = EngineConfig(model=str(folder), compile_cache_dir="", page_size=page_size, num_pages=40, max_num_seqs=2)
    checkpoint, tokenizer = find_model(config)
    builder = build.make_builder(config, checkpoint, tokenizer)
    shape = dataclasses.replace(builder.shape, num_pages=40)
    buckets = (Bucket(True, 1, 1), Bucket(True, 2, 2), Bucket(False, MAX_CHUNK, 2))
    builder = dataclasses.replace(builder, shape=shape, buckets=buckets, long=long)
    shardings = rules.shardings(builder.model.specs, builder.mesh)

    def progress(*_: object) -> None: ...

    params = build.load_params(checkpoint, builder.model, shape.dtype, shardings, seed=0, progress=progress)
    programs = compile_programs(builder, params, Executables(None, {}), progress)
    return ModelRunner(builder, params, programs, progress)


@pytest.fixture(
    scope="module",
    params=[("llama", 8, 16, 8), ("llama", 16, 5, 256), ("qwen2", 8, 16, 24), ("qwen3", 16, 32, 48)],
    ids=lambda p: f"{p[0]}, pages of {p[1]}, chunks of {p[2]}, blocks of {p[3]}",
)
def runner(request, golden):
    family, page_size, chunk, block = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_context, "QUERIES", 16)  # so that chunks of 32 have two parts
        runner = make_runner(golden(family).folder, page_size, LongContext(num_tokens=120, chunk=chunk, block=block))
    yield runner
    runner.close()


class Result:
    """Tokens of a request, the raw logits of each, and log-probabilities where it asks for them."""

    def __init__(self, **options) -> None:
        self.request = Request(
            **{"request_id": "r", "prompt_ids": (), "max_tokens": NUM_TOKENS, "temperature": 0.0} | options
        )
        self.tokens: list[int] = []
        self.logits: list[np.ndarray] = []
        self.logprobs: list[TokenLogprobs] = []

    def run(self, runner: ModelRunner, plan: StepPlan) -> None:
        assert plan.num_rows == 1
        result = runner.collect(runner.launch(plan))
        for slot, token in result.token_ids.items():
            self.tokens.append(token)
            self.logits.append(np.asarray(runner._state.logits)[0])
            self.logprobs += [result.logprobs[slot]] if slot in result.logprobs else []


def chunk_of(
    result: Result, prompt: Run[int], slot: int, start: int, end: int, pages: Run[int], size: int
) -> PrefillChunk:
    first, after = -(-start // size), -(-end // size)
    samples, history = end == len(prompt), prompt if start == 0 else None
    new_pages = pages[first:after]
    return PrefillChunk(slot, start, prompt[start:end], new_pages, first, samples, result.request, len(prompt), history)


def run_in_pages(runner: ModelRunner, prompt: Run[int], **options) -> Result:
    size, result = runner._builder.shape.page_size, Result(**options)
    pages = list(range(20, 40))
    for start in range(0, len(prompt), MAX_CHUNK):
        end = min(start + MAX_CHUNK, len(prompt))
        result.run(runner, StepPlan(0, (), (chunk_of(result, prompt, 0, start, end, pages, size),)))
    while len(result.tokens) < NUM_TOKENS:
        position = len(prompt) + len(result.tokens) - 1
        new_page = pages[position // size] if position % size == 0 else None
        row = DecodeRow(0, position, new_page, result.request.is_plain, result.request.logprobs is not None)
        result.run(runner, StepPlan(0, (row,), ()))
    return result


def cuts(start: int, end: int, *sizes: int) -> list[tuple[int, int]]:
    """Runs from start to end, of sizes that follow one another and then begin again."""
    found = []
    while start < end:
        after = min(end, start + sizes[len(found) % len(sizes)])
        found.append((start, after))
        start = after
    return found


def run_beyond(runner: ModelRunner, prompt: Run[int], num_device: int, **options) -> Result:
    """With `num_device` positions in pages, which the slot's page table has in no order."""
    builder, result = runner._builder, Result(**options)
    size, most = builder.shape.page_size, builder.long.chunk
    pages = [3, 1, 2, 7, 5, 4, 6]
    for start, end in cuts(0, num_device, 13, 5):
        result.run(runner, StepPlan(0, (), (chunk_of(result, prompt, 1, start, end, pages, size),)))
    for start, end in cuts(num_device, len(prompt), min(7, most), most, 1, min(3, most)):
        ids = prompt[start:end]
        long = LongChunk(1, start, ids, num_device, end == len(prompt), result.request, len(prompt))
        result.run(runner, StepPlan(0, (), (), long=long))
    while len(result.tokens) < NUM_TOKENS:
        position = len(prompt) + len(result.tokens) - 1
        result.run(
            runner, StepPlan(0, (), (), long=LongChunk(1, position, (), num_device, True, result.request, len(prompt)))
        )
    return result


def make_prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    return np.random.default_rng(seed).integers(3, 125, length).tolist()


def assert_same(found: Result, expected: Result) -> None:
    """Up to a tie, which is far behind the pages."""
    for i, (logits, wanted) in enumerate(zip(found.logits, expected.logits, strict=True)):
        real = np.isfinite(wanted)
        np.testing.assert_array_equal(np.isfinite(logits), real)
        np.testing.assert_allclose(logits[real], wanted[real], atol=TOLERANCE, rtol=TOLERANCE, err_msg=f"token {i}")
        if found.tokens[i] != expected.tokens[i]:
            margin = np.diff(np.sort(wanted)[-2:])[0]
            assert margin < TIE and i > NUM_TOKENS // 2, f"token {i} is {found.tokens[i]}, not {expected.tokens[i]}"
            return
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        np.testing.assert_allclose([p for _, p in one.top], [p for _, p in other.top], atol=1e-4)


def poison(runner: ModelRunner) -> None:
    """What nobody wrote may be anything."""
    runner._host = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), runner._host)
    pools = {name: jnp.full_like(getattr(runner._state, name), jnp.nan) for name in ("k_pages", "v_pages")}
    runner._state = runner._state.replace(**pools)


@pytest.mark.parametrize("num_device_pages", [1, 3])
def test_a_context_beyond_the_pages_gives_the_logits_of_one_within_them(runner, num_device_pages):
    poison(runner)
    prompt, num_device = make_prompt(0), num_device_pages * runner._builder.shape.page_size
    if num_device == 8:
        prompt = prompt[:75]  # the host holds 120 tokens
    expected = run_in_pages(runner, prompt)
    poison(runner)
    assert_same(run_beyond(runner, prompt, num_device), expected)
    assert runner.compilations_after_ready == 0


def test_a_prompt_may_end_where_the_pages_end(runner):
    num_device = 3 * runner._builder.shape.page_size
    prompt = make_prompt(1, num_device)
    assert_same(run_beyond(runner, prompt, num_device), run_in_pages(runner, prompt))


def test_what_a_request_asks_of_its_sampling_holds_beyond_the_pages(runner):
    prompt, num_device = make_prompt(2), 2 * runner._builder.shape.page_size
    found, expected = run_beyond(runner, prompt, num_device, **SAMPLED), run_in_pages(runner, prompt, **SAMPLED)
    assert len(found.logprobs) == NUM_TOKENS
    assert found.tokens == expected.tokens
    assert found.tokens != run_in_pages(runner, prompt).tokens
    assert_same(found, expected)


def test_a_second_sequence_sees_nothing_of_the_first(runner):
    num_device = 2 * runner._builder.shape.page_size
    prompt = make_prompt(4, 50)
    alone = run_beyond(runner, prompt, num_device)
    run_beyond(runner, make_prompt(3), num_device)
    again = run_beyond(runner, prompt, num_device)
    assert again.tokens == alone.tokens
    for found, expected in zip(again.logits, alone.logits, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_sequence_whose_pages_are_all_in_the_cache_begins_beyond_them(runner):
    """What its request asks of its sampling comes with its first long chunk then."""
    size = runner._builder.shape.page_size
    prompt, num_device = make_prompt(7, 2 * size + 4), 2 * size
    expected, warm = run_beyond(runner, prompt, num_device, **SAMPLED), Result(**SAMPLED)
    long = LongChunk(0, num_device, prompt[num_device:], num_device, True, warm.request, len(prompt), prompt)
    warm.run(runner, StepPlan(0, (), (), (CachedPrefix(0, (3, 1), None),), long=long))
    for position in range(len(prompt), len(prompt) + NUM_TOKENS - 1):
        again = LongChunk(0, position, (), num_device, True, warm.request, len(prompt))
        warm.run(runner, StepPlan(0, (), (), long=again))
    assert warm.tokens == expected.tokens


def test_decode_steps_run_ahead_of_their_results(runner):
    """The token that the second step computes has not come to the host when it is launched."""
    prompt, num_device = make_prompt(5, 60), runner._builder.shape.page_size
    expected = run_beyond(runner, prompt, num_device).tokens
    request = Result().request
    for start, end in cuts(num_device, 60, runner._builder.long.chunk):
        long = LongChunk(1, start, prompt[start:end], num_device, end == 60, request, 60)
        flights = [runner.launch(StepPlan(0, (), (), long=long))]
    for i in range(8):
        flights.append(runner.launch(StepPlan(0, (), (), long=LongChunk(1, 60 + i, (), num_device, True, request, 60))))
    assert [runner.collect(flight).token_ids[1] for flight in flights] == expected[:9]


def test_a_chunk_that_does_not_fit_is_refused(runner):
    request, most = Result().request, runner._builder.long.chunk
    for start, length, message in ((16, most + 1, "does not fit"), (16 + 120, 1, "the host 120")):
        long = LongChunk(0, start, (5,) * length, 16, False, request, 200)
        with pytest.raises(ValueError, match=message):
            runner.launch(StepPlan(0, (), (), long=long))


@pytest.mark.parametrize("lost", [False, True])
def test_after_a_reset_a_sequence_begins_anew(runner, lost):
    prompt, num_device = make_prompt(6, 50), runner._builder.shape.page_size
    expected = run_beyond(runner, prompt, num_device)
    poison(runner)
    before = runner._host
    if lost:
        before.k.delete()
    runner.reset()
    assert (runner._host is before) != lost  # making it anew takes a second for each GiB
    assert run_beyond(runner, prompt, num_device).tokens == expected.tokens


def test_without_long_steps_a_long_chunk_is_refused_and_none_are_compiled(golden):
    runner = make_runner(golden("llama").folder, 8, None)
    assert not runner._programs.long and not runner._programs.long_stores
    with pytest.raises(ValueError, match="no step was compiled"):
        runner.launch(StepPlan(0, (), (), long=LongChunk(0, 8, (5,), 8, False, Result().request, 9)))
    runner.close()


def test_a_long_context_on_several_devices_is_refused(golden):
    if jax.device_count() < 2:
        pytest.skip("one device; 2 are needed")
    builder = make_builder(registry.from_config(golden("llama").config), num_devices=2)
    with pytest.raises(NotImplementedError, match="run on one device, not on 2"):
        dataclasses.replace(builder, long=LongContext(64, 16, 8))


@pytest.fixture(scope="module")
def builder(golden):
    builder = make_builder(registry.from_config(golden("llama").config))
    return dataclasses.replace(builder, long=LongContext(num_tokens=100, chunk=16, block=24))


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_every_array_of_state_keeps_its_place_in_a_long_step_and_nothing_large_is_copied(builder, num_tokens):
    compiled = compile_lowered(builder, lower_long(builder, abstract_params(builder), num_tokens))
    assert aliased_outputs(compiled) == num_state_arrays(builder)
    assert_no_pool_is_copied(builder, compiled)


@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_long_step_needs_no_more_room_for_a_longer_context(builder, num_tokens):
    def temp_bytes(most: int) -> int:
        longer = dataclasses.replace(builder, long=builder.long._replace(num_tokens=most))
        lowered = lower_long(longer, abstract_params(builder), num_tokens)
        return compile_lowered(builder, lowered).memory_analysis().temp_size_in_bytes

    assert temp_bytes(100_000) == temp_bytes(100)


def test_what_is_stored_on_the_host_is_written_in_place(builder):
    compiled = compile_lowered(builder, lower(long_store_program(builder, 16)))
    assert aliased_outputs(compiled) == 2
    assert compiled.memory_analysis().temp_size_in_bytes < 100


def test_the_temporaries_of_a_long_step_count_when_the_cache_is_sized(builder):
    params, nothing = abstract_params(builder), Executables(None, {})
    large = dataclasses.replace(builder, long=LongContext(num_tokens=2048, chunk=512, block=512))
    sizes = [largest_temp_bytes(b, params, nothing, lambda *_: None, lambda: None) for b in (builder, large)]
    assert sizes[1] > 4 * 4 * 512 * 512 > sizes[0]
