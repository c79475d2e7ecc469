"""LLM, the face for Python scripts, over a tiny model with a tokenizer of single characters."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.api import LLM
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.control_tokens import ControlTokens
from jaxinfer.text.logprobs import OutputLogprob
from jaxinfer.types import FinishReason, InvalidRequest, SamplingParams, UnknownSession

# Printable ASCII, then bytes that make up "é" and "😀", so that outputs hold parts of characters.
TEXT = bytes(range(0x20, 0x7F)).decode() + "\né😀"
EOS = len(TEXT.encode())
CONTEXT = 96
PROMPTS = ["Once upon", "a", "The quick brown fox, 12 + 34 = ", "é😀?", "xyz " * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def save_tokenizer(folder):
    """Byte-level, without merges; the model has more rows than this has tokens."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chars = "".join(char for char, _ in splitter.pre_tokenize_str(TEXT))
    library = tokenizers.Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(chars)}, merges=[]))
    library.pre_tokenizer = splitter
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


@pytest.fixture(scope="module")
def llm(golden, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden("llama").folder / name, folder)
    save_tokenizer(folder)
    options = {"page_size": 8, "num_pages": CONTEXT // 8, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    with LLM(str(folder), compile_cache_dir="", max_waiting=1, show_progress=False, **options) as llm:
        yield llm


@pytest.fixture(autouse=True)
def left_as_it_was(llm):
    """Whatever a test asks: nothing is compiled for it, and nothing of it stays."""
    compiled = llm.stats().compilations_after_ready
    yield
    stats = llm.stats()
    assert stats.num_pages_used == stats.num_running == stats.num_waiting == 0
    assert stats.compilations_after_ready == compiled


def only(outputs):
    ((output,),) = [request.outputs for request in outputs]
    return output


def alone(llm, prompt, sampling=GREEDY):
    return only(llm.generate(prompt, sampling))


def outputs_of(requests):
    """All but what was cached, which others decide that run at the same time."""
    return [request.outputs for request in requests]


def test_the_tokenizer_bounds_the_vocabulary_and_the_pool_bounds_the_context(llm):
    assert llm.info.vocab_size == EOS + 1 < 128
    assert llm.info.max_model_len == CONTEXT
    assert EOS in llm.info.eos_ids


def test_a_text_a_list_and_token_ids_are_the_same_prompt(llm):
    expected = alone(llm, PROMPTS[0])
    ids = llm.tokenizer.encode(PROMPTS[0], add_special_tokens=True)
    assert alone(llm, ids).token_ids == alone(llm, [PROMPTS[0]]).token_ids == expected.token_ids
    assert alone(llm, [ids]).text == alone(llm, [tuple(ids)]).text == expected.text
    assert alone(llm, np.array(ids)).text == alone(llm, np.array([ids])).text == expected.text
    (by_text,), (by_ids,) = llm.generate(PROMPTS[0], GREEDY), llm.generate(ids, GREEDY)
    assert (by_text.prompt, by_ids.prompt) == (PROMPTS[0], None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids


def test_outputs_come_in_the_order_of_the_prompts_and_equal_those_alone(llm):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert only([output]) == alone(llm, prompt)


def test_every_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=3 + i) for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    for prompt, sampling, output in zip(PROMPTS, params, outputs, strict=True):
        assert only([output]) == alone(llm, prompt, sampling)
        assert len(only([output]).token_ids) <= sampling.max_tokens
    with pytest.raises(InvalidRequest, match="2 sampling_params for 5 prompts; give one, or one for each"):
        llm.generate(PROMPTS, params[:2])
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_may_wait_are_held_back_and_all_run(llm):
    outputs = llm.generate([f"{i} is" for i in range(25)], SamplingParams(temperature=0, max_tokens=4))
    assert [output.prompt for output in outputs] == [f"{i} is" for i in range(25)]
    assert all(output.outputs[0].finish_reason for output in outputs)


def test_samples_of_a_prompt_differ_and_come_again_with_the_same_seed(llm):
    sampling = SamplingParams(n=4, temperature=1.5, seed=7, max_tokens=10, ignore_eos=True)
    (first,), (second,) = llm.generate("Dice:", sampling), llm.generate("Dice:", sampling)
    assert first.outputs == second.outputs
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in first.outputs}) == 4
    (unseeded,), (other,) = (llm.generate("Dice:", SamplingParams(max_tokens=16, ignore_eos=True)) for _ in range(2))
    assert unseeded.outputs[0].token_ids != other.outputs[0].token_ids


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=2.0, seed=3, max_tokens=40, logprobs=2)])
def test_a_stream_joined_is_the_whole_output(llm, prompt, sampling):
    expected = alone(llm, prompt, sampling)
    deltas = list(llm.stream(prompt, sampling))
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [id for delta in deltas for id in delta.token_ids] == expected.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == expected.finish_reason
    if sampling.logprobs is not None:
        # The second run finds its prompt cached and computes its last token in another step: rounded otherwise.
        streamed = [logprob for delta in deltas for logprob in delta.logprobs or ()]
        (words, numbers), (expected_words, expected_numbers) = parts(streamed), parts(expected.logprobs)
        assert words == expected_words and numbers == pytest.approx(expected_numbers, abs=1e-4)


def parts(logprobs: list[OutputLogprob]) -> tuple[list, list[float]]:
    """What is exact, and the numbers."""
    words = [(one.token_id, one.token, one.bytes, one.text_offset, [t[:3] for t in one.top]) for one in logprobs]
    return words, [number for one in logprobs for number in (one.logprob, *(t.logprob for t in one.top))]


def test_closing_a_stream_early_frees_its_pages(llm):
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=80, ignore_eos=True))
    next(stream)
    assert llm.stats().num_pages_used > 0
    stream.close()
    stats = llm.stats()
    assert stats.num_running == 0


def test_a_stream_that_is_never_read_runs_nothing(llm):
    before = llm.stats().num_steps
    llm.stream("Once", GREEDY)
    assert llm.stats().num_steps == before
    with pytest.raises(InvalidRequest, match="n is 2; a stream has one output"):
        llm.stream("Once", SamplingParams(n=2))


def test_a_stop_string_ends_the_output_and_frees_its_pages(llm):
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    whole = alone(llm, PROMPTS[2], long)
    stop = whole.text[5:7]
    end = whole.text.index(stop)
    before = llm.stats().generation_tokens
    shown = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=[stop])
    output = alone(llm, PROMPTS[2], shown)
    assert (output.text, output.finish_reason, output.stop_reason) == (whole.text[:end], FinishReason.STOP, stop)
    assert llm.stats().generation_tokens - before < 60
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    beside = llm.generate([PROMPTS[2], PROMPTS[0]], [shown, long])
    assert only(beside[:1]) == output
    assert only(beside[1:]) == alone(llm, PROMPTS[0], long)


def test_an_eos_ends_the_output_only_after_min_tokens_and_unless_ignored(llm):
    likely = {"logit_bias": {EOS: 100.0}, "temperature": 0.0, "max_tokens": 9}
    output = alone(llm, "a", SamplingParams(**likely))
    assert (output.text, output.token_ids, output.finish_reason) == ("", [EOS], FinishReason.STOP)
    late = alone(llm, "a", SamplingParams(**likely, min_tokens=4))
    assert late.token_ids.index(EOS) == 4 and len(late.token_ids) == 5
    ignored = alone(llm, "a", SamplingParams(**likely, ignore_eos=True))
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS] * 9, FinishReason.LENGTH)


def test_without_max_tokens_an_output_fills_the_context(llm):
    output = alone(llm, "abc", SamplingParams(temperature=0, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (CONTEXT - 3, FinishReason.LENGTH)


def test_tokens_without_a_text_are_never_drawn(llm):
    hot = SamplingParams(temperature=50.0, seed=1, max_tokens=90, ignore_eos=True, n=4)
    (output,) = llm.generate("a", hot)
    assert max(max(sample.token_ids) for sample in output.outputs) <= EOS


def test_logprobs_are_of_the_raw_logits_whatever_the_token_is_chosen_by(llm):
    """B5.7."""
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=3)
    (raw,) = alone(llm, "ab", first).logprobs
    second = raw.top[1]
    (forced,) = alone(llm, "ab", dataclasses.replace(first, logit_bias={second.token_id: 100.0})).logprobs
    assert (forced.token_id, forced.logprob) == (second.token_id, pytest.approx(second.logprob, abs=1e-5))
    hot = {"temperature": 2.0, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1.0}
    for other in ({"top_k": 2}, {"frequency_penalty": 2.0, "logit_bias": {raw.token_id: -50.0}}):
        (found,) = alone(llm, "ab", dataclasses.replace(first, seed=1, **hot | other)).logprobs
        assert [top.token_id for top in found.top] == [top.token_id for top in raw.top]
        assert [top.logprob for top in found.top] == pytest.approx([top.logprob for top in raw.top], abs=1e-5)


def test_logprobs_are_there_for_every_token_when_asked_for(llm):
    output = alone(llm, "ab", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3))
    assert [logprob.token_id for logprob in output.logprobs] == output.token_ids
    for logprob in output.logprobs:
        assert [top.logprob for top in logprob.top] == sorted((top.logprob for top in logprob.top), reverse=True)
        assert (logprob.top[0].token_id, logprob.top[0].logprob) == (logprob.token_id, logprob.logprob)
        assert len(logprob.top) == 3 and logprob.logprob < 0
    assert alone(llm, "ab").logprobs is None


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ("", {}, "prompt is empty"),
        ("x" * CONTEXT, {}, f"prompt has {CONTEXT} tokens; the limit is {CONTEXT} tokens"),
        ([EOS + 1], {}, f"prompt has token id {EOS + 1}; the vocabulary has ids 0 to {EOS}"),
        ("a", {"logit_bias": {500: 1.0}}, "logit_bias has token id 500"),
        ("a", {"min_tokens": CONTEXT}, f"min_tokens is {CONTEXT}"),
        ("a", {"max_tokens": 0}, "max_tokens is 0"),
        (b"abc", {}, "prompt is the bytes b'abc'; text or token ids are needed"),
        (None, {}, "prompt is the NoneType None; text or token ids"),
        ({"prompt": "a"}, {}, "prompt is the dict .*; text or token ids"),
        ([1.5], {}, r"prompt is the list \[1.5\]; text or token ids"),
    ],
)
def test_a_request_at_fault_is_refused_before_any_of_the_call_runs(llm, prompt, sampling, message):
    before = llm.stats().num_steps
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(["fine", prompt], [GREEDY, SamplingParams(**sampling)])
    assert llm.stats().num_steps == before


@pytest.mark.parametrize("prompts", [None, 7, {"prompt": "a"}])
def test_prompts_that_are_in_no_order_are_refused(llm, prompts):
    with pytest.raises(InvalidRequest, match="prompts is the .*; text, token ids or a list of them is needed"):
        llm.generate(prompts)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], 5])
def test_sampling_params_of_another_kind_are_refused(llm, params):
    with pytest.raises(InvalidRequest, match="sampling_params is the .*; a SamplingParams, or a list of them"):
        llm.generate("a", params)


def test_a_session_has_one_prompt_so_several_are_refused_before_any_runs(llm):
    before = llm.stats()
    one, other = (dataclasses.replace(GREEDY, session_id=session_id) for session_id in ("chat-1", "chat-2"))
    for sampling in (one, [one, other, one]):
        with pytest.raises(InvalidRequest, match=r"session_id is 'chat-1' with [23] prompts; a session is one seq"):
            llm.generate(PROMPTS[:3], sampling)
    assert llm.stats() == before
    assert len(llm.generate(PROMPTS[:3], [one, other, GREEDY])) == 3


@pytest.mark.parametrize("name", ["save_session", "load_session"])
def test_sessions_without_a_disk_tier_are_refused_with_what_gives_one(llm, name):
    act = getattr(llm, name)
    with pytest.raises(InvalidRequest, match=r"no disk tier; .*--kv-host-gib .*--kv-disk-dir"):
        act("chat-1")
    with pytest.raises(InvalidRequest, match=r"session_id is '\.\./x'; it must have 1 to 128"):
        act("../x")


def test_a_session_in_memory_can_be_deleted_without_a_disk_tier(llm):
    llm.generate("Once upon a time there was", dataclasses.replace(GREEDY, session_id="chat-2"))
    assert not llm.session_manifest("chat-2").saved
    llm.delete_session("chat-2")
    with pytest.raises(UnknownSession, match="there is no session 'chat-2'"):
        llm.delete_session("chat-2")


def test_priority_changes_no_token(llm):
    assert only(llm.generate("a", dataclasses.replace(GREEDY, priority=-3))) == only(llm.generate("a", GREEDY))


def test_chat_needs_a_template_and_uses_the_one_there_is(llm, monkeypatch):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InvalidRequest, match="has no chat template; use generate"):
        llm.chat(messages)
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mark }}"
    monkeypatch.setattr(llm, "_template", ChatTemplate.from_config({"chat_template": source}))
    monkeypatch.setattr(llm, "_control_tokens", ControlTokens(llm.tokenizer, source))
    expected = alone(llm, "user: Hi\n>")
    assert only(llm.chat(messages, GREEDY, mark=">")) == expected
    assert [only([output]) for output in llm.chat([messages, messages], GREEDY, mark=">")] == [expected] * 2


def test_threads_that_generate_at_once_get_what_they_get_alone(llm):
    jobs = [PROMPTS[:3], PROMPTS[2:], PROMPTS[::-1]]
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=20)
    expected = [outputs_of(llm.generate(job, sampling)) for job in jobs]
    found: dict[int, list] = {}

    def generate(index):
        found[index] = [outputs_of(llm.generate(jobs[index], sampling)) for _ in range(3)]

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {index: [outputs] * 3 for index, outputs in enumerate(expected)}
