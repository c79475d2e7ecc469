import dataclasses

import pytest

from jaxinfer.structured import StructuredOutputs
from jaxinfer.text.grammar import write
from jaxinfer.text.requests import lower, sample_seed, special_stops
from jaxinfer.types import MAX_STOP_IDS, MAX_STOP_STRINGS, EngineInfo, InvalidRequest, SamplingParams

INFO = EngineInfo(
    model="tiny",
    max_model_len=16,
    vocab_size=500,
    eos_ids=(1, 2),
    sampling_defaults={},
    page_size=8,
    num_pages=64,
    max_num_seqs=4,
)


def lower_one(sampling, *, prompt=(5, 6, 7), info=INFO, tokenizer=None):
    return lower(prompt, sampling, info, tokenizer, "r")[0]


def refusal(sampling, **kwargs):
    with pytest.raises(InvalidRequest) as caught:
        lower_one(sampling, **kwargs)
    return caught.value


def test_each_sample_is_a_request_of_its_own_that_differs_in_id_and_seed():
    requests = lower([5, 6], SamplingParams(n=3, seed=7), INFO, None, "cmpl-x")
    assert [request.request_id for request in requests] == ["cmpl-x-0", "cmpl-x-1", "cmpl-x-2"]
    assert len({request.seed for request in requests}) == 3
    same = [dataclasses.replace(request, request_id="", seed=0) for request in requests]
    assert same[0] == same[1] == same[2]


def test_the_salt_of_the_cache_reaches_every_sample_and_is_empty_where_none_is_given():
    salted = lower([5], SamplingParams(n=2, cache_salt="tenant a"), INFO, None, "r")
    assert [request.cache_salt for request in salted] == ["tenant a"] * 2
    assert lower_one(SamplingParams()).cache_salt == ""


def test_priority_and_session_reach_the_request_and_are_0_and_empty_where_none_is_given():
    info = dataclasses.replace(INFO, prefix_caching=True)
    asked = lower_one(SamplingParams(priority=-5, session_id="chat-1"), info=info)
    assert (asked.priority, asked.session_id) == (-5, "chat-1")
    silent = lower_one(SamplingParams())
    assert (silent.priority, silent.session_id) == (0, "")
    assert {request.priority for request in lower([5], SamplingParams(n=3, priority=7), INFO, None, "r")} == {7}


def test_a_session_is_refused_where_nothing_is_kept_of_a_request():
    error = refusal(SamplingParams(session_id="chat-1"))
    assert error.param == "session_id"
    assert str(error).startswith("session_id is 'chat-1', but ") and "prefix caching is off" in str(error)


def test_a_seed_gives_the_same_streams_again_and_another_seed_gives_others():
    def seeds(seed, n=4):
        return [request.seed for request in lower([5], SamplingParams(n=n, seed=seed), INFO, None, "r")]

    assert seeds(7) == seeds(7) and seeds(7, 2) == seeds(7)[:2]
    assert len({s for seed in range(-50, 50) for s in seeds(seed)}) == 400
    assert all(0 <= s < 2**64 for seed in (0, -1, 2**64 - 1) for s in seeds(seed))
    assert seeds(None) != seeds(None)
    assert sample_seed(-1, 0) == sample_seed(2**64 - 1, 0)


def test_what_the_request_leaves_open_comes_from_the_model_and_then_from_the_defaults():
    plain = lower_one(SamplingParams())
    assert (plain.temperature, plain.top_k, plain.top_p, plain.min_p, plain.repetition_penalty) == (1, 0, 1, 0, 1)
    info = dataclasses.replace(INFO, sampling_defaults={"temperature": 0.6, "top_k": 20.0, "top_p": 0.95})
    model = lower_one(SamplingParams(top_p=0.5), info=info)
    assert (model.temperature, model.top_k, model.top_p, model.min_p) == (0.6, 20, 0.5, 0)
    assert lower_one(SamplingParams(temperature=0.0, top_k=0), info=info).temperature == 0.0
    assert lower_one(SamplingParams(top_k=0), info=info).top_k == 0


def test_top_k_without_effect_is_no_limit():
    assert [lower_one(SamplingParams(top_k=k)).top_k for k in (-1, 0, 1, 499, 500, 10**9)] == [0, 0, 1, 499, 0, 0]


def test_every_other_field_arrives_as_it_was_asked():
    asked = SamplingParams(
        max_tokens=4,
        min_tokens=2,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-1,
        logit_bias={3: 5.0},
        logprobs=2,
    )
    request = lower_one(asked)
    for name in (
        "max_tokens",
        "min_tokens",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "logprobs",
    ):
        assert getattr(request, name) == getattr(asked, name), name


def test_max_tokens_is_a_cap_that_the_context_cuts():
    """B8.1."""
    assert lower_one(SamplingParams(max_tokens=1000)).max_tokens == 13
    assert lower_one(SamplingParams()).max_tokens == 13
    assert lower_one(SamplingParams(max_tokens=2)).max_tokens == 2
    assert lower_one(SamplingParams(), prompt=[5] * 15).max_tokens == 1


def test_a_prompt_needs_room_for_one_token_and_the_refusal_names_both_numbers():
    """B3.5, B8.5."""
    for length in (16, 17, 4097):
        error = refusal(SamplingParams(max_tokens=1), prompt=[5] * length)
        assert f"prompt has {length} tokens; the limit is 16 tokens" in str(error)
        assert (error.param, error.code) == ("prompt", "context_length_exceeded")


def test_prompts_that_are_empty_or_outside_the_vocabulary_are_refused():
    error = refusal(SamplingParams(), prompt=[])
    assert error.param == "prompt" and "empty" in str(error)
    for wrong in (-1, 500):
        error = refusal(SamplingParams(), prompt=[5, wrong])
        assert error.param == "prompt" and f"token id {wrong}" in str(error) and "0 to 499" in str(error)


def test_ids_outside_the_vocabulary_are_refused_by_parameter():
    error = refusal(SamplingParams(logit_bias={3: 1.0, 500: 1.0}))
    assert error.param == "logit_bias" and "token id 500" in str(error)
    error = refusal(SamplingParams(stop_token_ids=[-2]))
    assert error.param == "stop_token_ids" and "token id -2" in str(error)


def test_a_generation_of_no_tokens_is_refused():
    assert refusal(SamplingParams(max_tokens=0)).param == "max_tokens"


def test_min_tokens_beyond_the_context_is_refused():
    error = refusal(SamplingParams(min_tokens=14))
    assert error.param == "min_tokens" and "14" in str(error) and "leaves 13" in str(error)
    assert lower_one(SamplingParams(min_tokens=13)).min_tokens == 13


def test_stop_ids_are_the_models_eos_and_the_requests_own_each_once(byte_level):
    assert lower_one(SamplingParams(stop_token_ids=[9, 2])).stop_ids == (1, 2, 9)
    assert lower_one(SamplingParams(stop_token_ids=[9, 2], ignore_eos=True)).stop_ids == (9, 2)
    assert lower_one(SamplingParams(ignore_eos=True)).stop_ids == ()
    end = byte_level.special_id("</think>")
    sampling = SamplingParams(stop=["the", "</think>"])
    assert lower_one(sampling, tokenizer=byte_level).stop_ids == (1, 2, end)
    assert special_stops(sampling.stop, byte_level) == {end: "</think>"}
    assert special_stops(sampling.stop, None) == {}


def test_more_stop_ids_than_the_device_keeps_are_refused():
    fits = SamplingParams(stop_token_ids=range(10, 10 + MAX_STOP_IDS - 2))
    assert len(lower_one(fits).stop_ids) == MAX_STOP_IDS
    error = refusal(SamplingParams(stop_token_ids=range(10, 10 + MAX_STOP_IDS - 1)))
    assert error.param == "stop_token_ids" and str(MAX_STOP_IDS) in str(error)


def test_stop_strings_need_a_tokenizer():
    assert refusal(SamplingParams(stop="x")).param == "stop"


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e39), ("temperature", 10**400), ("repetition_penalty", 1e-50), ("repetition_penalty", 1e300)],
)
def test_numbers_that_float32_cannot_hold_are_refused_by_parameter(name, value):
    with pytest.raises(InvalidRequest, match=f"{name} is 1") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_more_stop_strings_than_are_followed_are_refused():
    stops = [str(i) for i in range(MAX_STOP_STRINGS + 1)]
    assert len(SamplingParams(stop=stops[1:]).stop) == MAX_STOP_STRINGS
    with pytest.raises(InvalidRequest, match="stop has 129 strings; at most 128") as caught:
        SamplingParams(stop=stops)
    assert caught.value.param == "stop"


def test_a_form_becomes_the_grammar_of_every_sample_and_needs_a_tokenizer(byte_level):
    form = StructuredOutputs(choice=["a", "b"])
    requests = lower((5, 6), SamplingParams(n=2, structured_outputs=form), INFO, byte_level, "r")
    assert [request.grammar for request in requests] == [write(form)] * 2
    assert not any(request.is_plain for request in requests)
    with pytest.raises(InvalidRequest, match="structured_outputs needs a tokenizer"):
        lower_one(SamplingParams(structured_outputs=form))
