"""The embedded default model against what transformers made of the same file (scripts/make_default_model_tokens.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxinfer.api import LLM
from jaxinfer.types import FinishReason, SamplingParams

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "default_model_tokens.json").read_text())
PROMPTS = {prompt["name"]: prompt for prompt in RECORDED["prompts"]}
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def llm():
    # Prompts of 45 and 114 tokens are cut into chunks.
    options = {"max_model_len": 160, "max_num_seqs": 3, "max_num_batched_tokens": 32, "compile_cache_dir": ""}
    with LLM(RECORDED["model"], dtype="float32", show_progress=False, **options) as llm:
        yield llm


def generate(llm, **sampling):
    """The greedy output of each recorded prompt; together, since an unoptimised step takes as long for three."""
    ids = [prompt["prompt_ids"] for prompt in PROMPTS.values()]
    outputs = llm.generate(ids, SamplingParams(temperature=0, **sampling))
    return {name: output.outputs[0] for name, output in zip(PROMPTS, outputs, strict=True)}


@pytest.mark.parametrize("name", PROMPTS)
def test_text_of_a_prompt_becomes_the_recorded_ids(llm, name):
    special = name != "chat"  # a template writes its own
    assert llm.tokenizer.encode(PROMPTS[name]["text"], add_special_tokens=special) == PROMPTS[name]["prompt_ids"]


def test_chat_messages_become_the_recorded_ids(llm):
    assert llm.chat_prompt(RECORDED["chat_messages"]) == PROMPTS["chat"]["prompt_ids"]


def test_greedy_tokens_are_the_recorded_ones(llm):
    for name, output in generate(llm, max_tokens=MAX_TOKENS).items():
        expected = PROMPTS[name]["tokens"]
        assert output.token_ids == expected, name
        ended = expected[-1] == RECORDED["eos_id"]
        assert output.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(expected) == MAX_TOKENS


def test_first_log_probabilities_differ_among_each_other_as_the_recorded_logits_do(llm):
    for name, output in generate(llm, max_tokens=1, logprobs=10).items():
        ((first,), top) = output.logprobs, PROMPTS[name]["top"]
        assert [likely.token_id for likely in first.top] == top["ids"]
        found = [likely.logprob - first.top[0].logprob for likely in first.top]
        expected = [logit - top["logits"][0] for logit in top["logits"]]
        assert found == pytest.approx(expected, abs=2e-3), name
