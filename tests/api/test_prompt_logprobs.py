"""Log-probabilities of prompts: those of the same tokens when they were generated, however the prompt is computed."""

from __future__ import annotations

import dataclasses
import random

import pytest

from jaxinfer.api import LLM
from jaxinfer.types import InvalidRequest, SamplingParams

pytestmark = pytest.mark.long

OPTIONS = {"page_size": 8, "num_pages": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256}
VOCAB = 128
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)


def make(golden, **options):
    return LLM(str(golden("llama").folder), compile_cache_dir="", show_progress=False, **OPTIONS, **options)


@pytest.fixture(scope="module")
def llm(golden):
    with make(golden, enable_prompt_logprobs=True) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_compiled_and_every_page_comes_back(llm):
    yield
    stats = llm.stats()
    assert stats.num_pages_used == stats.num_running == stats.num_waiting == stats.compilations_after_ready == 0


@pytest.fixture
def ids(request):
    """Random token ids, the same in every run."""
    rng = random.Random(request.node.name)
    return lambda count: rng.choices(range(3, VOCAB), k=count)


def same(found, expected):
    assert [entry.token_id for entry in found] == [entry.token_id for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [top.logprob for top in one.top] == pytest.approx([top.logprob for top in other.top], abs=1e-4)
        likelier = sum(top.logprob > one.logprob for top in one.top)
        assert one.rank == likelier + 1 or (likelier == len(one.top) < one.rank)


def written(llm, prompts):
    """The prompts, each with what the model goes on with, and its log-probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
    return [[*prompt, *output.token_ids] for prompt, output in zip(prompts, outputs, strict=True)], [
        output.logprobs for output in outputs
    ]


def test_scores_of_a_prompt_are_those_of_its_tokens_when_they_were_generated(llm, ids):
    """G8. In chunks of 32 tokens and less, several at once, of prompts that are cached from when they were written."""
    prompts, expected = written(llm, [ids(n) for n in (1, 7, 30, 50, 3, 12)])
    for output, logprobs in zip(llm.generate(prompts, SCORED), expected, strict=True):
        found = output.prompt_logprobs
        assert len(found) == len(output.prompt_token_ids) and output.num_cached_tokens == 0
        assert (found[0].logprob, found[0].top, found[0].rank) == (None, (), 0)
        same(found[-len(logprobs) :], logprobs)


def test_scores_do_not_depend_on_what_shares_the_steps_and_change_no_other_output(llm, ids):
    prompts, _ = written(llm, [ids(n) for n in (20, 40, 9)])
    alone = [llm.generate([prompt], SCORED)[0].prompt_logprobs for prompt in prompts]
    plain = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    others = [ids(n) for n in (10, 33, 5)]
    expected = [output.outputs[0].token_ids for output in llm.generate(others, plain)]
    mixed = [one for pair in zip(others, prompts, strict=True) for one in pair]
    outputs = llm.generate(mixed, [plain, SCORED] * 3)
    assert [output.outputs[0].token_ids for output in outputs[::2]] == expected
    assert all(output.prompt_logprobs is None for output in outputs[::2])
    for output, scores in zip(outputs[1::2], alone, strict=True):
        same(output.prompt_logprobs[1:], scores[1:])


def test_as_many_alternatives_as_were_asked_for_each_with_the_first_the_likeliest(llm, ids):
    prompt = ids(20)
    for k in (0, 1, 20):
        (output,) = llm.generate([prompt], dataclasses.replace(SCORED, prompt_logprobs=k))
        for entry in output.prompt_logprobs[1:]:
            tops = [top.logprob for top in entry.top]
            assert len(tops) == k and tops == sorted(tops, reverse=True)


def test_sequences_that_give_way_and_are_computed_again_are_scored_once(golden, ids):
    """The pool holds two of them: prompts and outputs of 56 tokens need 7 pages each, and there are 15."""
    with (
        make(golden, enable_prompt_logprobs=True) as roomy,
        LLM(
            str(golden("llama").folder),
            compile_cache_dir="",
            show_progress=False,
            **OPTIONS | {"num_pages": 15},
            enable_prompt_logprobs=True,
        ) as tight,
    ):
        sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=2)
        prompts = [ids(26) for _ in range(4)]
        outputs = [llm.generate(prompts, sampling) for llm in (tight, roomy)]
        assert tight.stats().num_preemptions > 0
    for one, other in zip(*outputs, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        same(one.prompt_logprobs[1:], other.prompt_logprobs[1:])


def test_a_stream_which_could_not_tell_them_refuses_them(llm):
    with pytest.raises(InvalidRequest, match="prompt_logprobs is 3; a stream does not tell them"):
        llm.stream([5, 6], SCORED)


def test_engine_without_the_steps_refuses_and_says_what_would_work(golden):
    with make(golden) as llm, pytest.raises(InvalidRequest, match="--enable-prompt-logprobs"):
        llm.generate([[5, 6]], SCORED)
