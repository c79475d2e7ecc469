"""LLM with the prefix cache: the same answers as without it, and what was cached is what one counts by hand.

A sequence leaves in the cache all its tokens but the last, which was sampled and never computed. A full page is shared;
of the next page all tokens that agree are copied. The last token of a prompt is always computed.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from jaxinfer.api import LLM
from jaxinfer.types import SamplingParams

OPTIONS = {"page_size": 8, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256}
VOCAB = 128
NUM_OUTPUT = 6


def make(golden, **options):
    return LLM(str(golden("llama").folder), compile_cache_dir="", show_progress=False, **OPTIONS, **options)


@pytest.fixture(scope="module")
def caching(golden):
    with make(golden) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(golden):
    with make(golden, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_compiled_and_every_page_comes_back(caching, plain):
    yield
    for llm in (caching, plain):
        stats = llm.stats()
        assert stats.num_pages_used == stats.num_running == stats.num_waiting == stats.compilations_after_ready == 0
        assert (stats.num_pages_cached > 0) == (llm is caching)


@pytest.fixture
def ids(request):
    """Random token ids, the same in every run."""
    rng = random.Random(request.node.name)
    return lambda count: rng.choices(range(3, VOCAB), k=count)


@pytest.fixture
def greedy(request):
    """With a salt of every test's own, so that none finds what another left."""
    return SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, cache_salt=request.node.name)


def same(caching, plain, prompts, sampling):
    """The outputs of both engines, which are equal; of the one that caches, with what was cached."""
    found, expected = caching.generate(prompts, sampling), plain.generate(prompts, sampling)
    for one, other in zip(found, expected, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
        assert other.num_cached_tokens == 0
    return found


def cached(outputs):
    return [output.num_cached_tokens for output in outputs]


def test_the_same_prompt_again_is_cached_up_to_its_last_token(caching, plain, ids, greedy):
    before = caching.stats()
    prompt = ids(30)
    assert cached(same(caching, plain, [prompt], greedy)) == [0]
    assert cached(same(caching, plain, [prompt], greedy)) == [29]
    stats = caching.stats()
    assert stats.prompt_tokens - before.prompt_tokens == 60
    assert stats.cached_prompt_tokens - before.cached_prompt_tokens == 29


def test_a_repeat_with_one_token_more_computes_that_and_what_the_answer_never_computed(caching, plain, ids, greedy):
    prompt = ids(30)
    (first,) = same(caching, plain, [prompt], greedy)
    assert cached(same(caching, plain, [[*prompt, *ids(1)]], greedy)) == [30]
    answer = first.outputs[0].token_ids
    assert cached(same(caching, plain, [[*prompt, *answer, *ids(1)]], greedy)) == [30 + NUM_OUTPUT - 1]


@pytest.mark.parametrize(("agree", "expected"), [(16, 16), (19, 19), (7, 7), (0, 0)])
def test_prompts_that_part_within_a_page_share_what_comes_before(caching, plain, ids, greedy, agree, expected):
    prompt = ids(30)
    other = [*prompt[:agree], *((id + 1 - 3) % (VOCAB - 3) + 3 for id in prompt[agree:])]
    same(caching, plain, [prompt], greedy)
    assert cached(same(caching, plain, [other], greedy)) == [expected]


def test_every_turn_of_a_conversation_finds_the_turns_before(caching, plain, ids, greedy):
    history, in_cache = ids(20), 0
    for _ in range(10):
        (output,) = same(caching, plain, [history], greedy)
        assert output.num_cached_tokens == in_cache
        history = [*history, *output.outputs[0].token_ids]
        in_cache = len(history) - 1
        history += ids(random.Random(in_cache).randrange(1, 12))
    assert len(history) < 256


def test_prompts_with_markers_of_their_own_get_their_own_answers_at_once(caching, plain, ids, greedy):
    system = ids(21)
    prompts = [[*system, *ids(4), *system[:9]] for _ in range(16)]
    first = same(caching, plain, prompts, greedy)
    assert first[0].num_cached_tokens == 0
    # Of a sequence in the same step only full pages can be used: its last one is not there yet to be copied.
    assert all(16 <= count <= 21 for count in cached(first)[1:])
    assert cached(same(caching, plain, prompts[-4:], greedy)) == [33] * 4


def test_salts_are_apart(caching, plain, ids, greedy):
    prompt = ids(30)

    def salted(salt):
        return cached(same(caching, plain, [prompt], dataclasses.replace(greedy, cache_salt=salt)))

    assert [salted(salt) for salt in ("a", "b", None, "a", None, "b")] == [[0]] * 3 + [[29]] * 3


def test_samples_of_a_seed_are_those_of_an_engine_without_a_cache(caching, plain, ids, greedy):
    options = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2, "min_tokens": 2}
    sampling = dataclasses.replace(greedy, n=3, seed=5, temperature=1.0, **options)
    prompt = ids(29)
    for expected in (0, 28):
        (output,) = same(caching, plain, [prompt], sampling)
        assert output.num_cached_tokens == expected
        assert all(len(one.logprobs) == len(one.token_ids) for one in output.outputs)


def test_a_cache_that_is_full_gives_up_what_was_used_least_and_answers_stay_the_same(caching, plain, ids, greedy):
    prompts = [ids(60) for _ in range(9)]
    before = caching.stats().num_evictions
    for _ in range(2):
        same(caching, plain, prompts, greedy)
    assert caching.stats().num_evictions > before
    assert cached(same(caching, plain, prompts[-1:], greedy)) == [59]


def test_a_stream_takes_from_the_cache_too(caching, plain, ids, greedy):
    prompt = ids(30)
    expected = [id for delta in plain.stream(prompt, greedy) for id in delta.token_ids]
    before = caching.stats().cached_prompt_tokens
    for _ in range(2):
        assert [id for delta in caching.stream(prompt, greedy) for id in delta.token_ids] == expected
    assert caching.stats().cached_prompt_tokens - before == 29
