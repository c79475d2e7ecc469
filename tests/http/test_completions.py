"""/v1/completions: prompts, parameters, log-probabilities, stop strings, lengths, several choices."""

import pytest


def choices(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def refused(reply, param, *words):
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    for word in words:
        assert word in error["message"]
    return error


# Prompts


def test_reply_has_the_shape_that_openai_gives_it(server):
    body = server.complete(max_tokens=4).json()
    assert body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert body["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


def test_string_prompt_is_encoded_with_the_models_special_tokens_once(server, engine):
    """B12.6."""
    server.complete(prompt="Hello")
    server.complete(prompt="<|bos|>Hello")
    first, second = (list(request.prompt_ids) for request in engine.requests)
    assert first == second == [0, *server.tokenizer.encode("Hello", add_special_tokens=False)]


def test_token_ids_are_used_as_they_are(server, engine):
    server.complete(prompt=[5, 9, 300])
    assert list(engine.requests[0].prompt_ids) == [5, 9, 300]


@pytest.mark.parametrize("ids", ["[5,9,300]", " [ 5\n,9 , 300 ]", "[5\t, 9, 300\n]", "[[5,9,300]]"])
def test_token_ids_are_read_alike_however_their_list_is_written(server, engine, ids):
    assert server.http.post("/v1/completions", content=f'{{"prompt":{ids}}}').status_code == 200
    assert list(engine.requests[0].prompt_ids) == [5, 9, 300]


def test_only_text_is_prepared_in_a_thread(server, engine, monkeypatch):
    monkeypatch.setattr("asyncio.to_thread", lambda *_: 1 / 0)
    ids, text = ('{"prompt": ' + prompt + " " * 20_000 + "}" for prompt in ("[5, 9]", '"Hello"'))
    assert server.http.post("/v1/completions", content=ids).status_code == 200
    assert list(engine.requests[0].prompt_ids) == [5, 9]
    assert "ZeroDivisionError" in server.http.post("/v1/completions", content=text).text


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", ""], [[1], []]])
def test_empty_prompt_is_refused(server, prompt):
    refused(server.complete(prompt=prompt), "prompt", "empty")


@pytest.mark.parametrize("prompt", [["a", 1], [1, "a"], [1, [2]], ["a", [1]]])
def test_mixed_prompt_list_is_refused(server, prompt):
    refused(server.complete(prompt=prompt), "prompt", "mixes")


@pytest.mark.parametrize("prompt", [[-1], [320], [[1], [10**12]]])
def test_token_id_outside_the_vocabulary_is_refused(server, prompt):
    refused(server.complete(prompt=prompt), "prompt", "vocabulary")


@pytest.mark.parametrize("wrong", [-7, 320, 2**32 - 1, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("other", [-8, 400])
def test_the_first_token_id_outside_the_vocabulary_is_named(server, engine, wrong, other):
    error = refused(server.complete(prompt=[5, 9, wrong, 6, other]), "prompt", "vocabulary")
    assert error["message"] == f"prompt has token id {wrong}; the vocabulary has ids 0 to {engine.info.vocab_size - 1}"


def test_long_prompt_is_tokenised_beside_the_event_loop_and_gives_the_same_ids(server, engine):
    error = refused(server.complete(prompt="the cat " * 4000), "prompt", "64")
    assert error["code"] == "context_length_exceeded"
    body = '{"prompt": "Hello", "temperature": 0' + " " * 20000 + "}"
    assert server.http.post("/v1/completions", content=body).status_code == 200
    assert list(engine.requests[-1].prompt_ids) == server.tokenizer.encode("Hello", add_special_tokens=True)


# Parameters


def test_every_sampling_parameter_reaches_the_engine(server, engine):
    asked = {
        "max_tokens": 9,
        "min_tokens": 3,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logprobs": 3,
    }
    server.complete(**asked, seed=7, logit_bias={"5": -100, "6": 1.5}, stop_token_ids=[8], ignore_eos=True)
    request = engine.requests[0]
    assert {name: getattr(request, name) for name in asked} == asked
    assert request.logit_bias == {5: -100, 6: 1.5}
    assert tuple(request.stop_ids) == (8,)


def test_null_stands_for_not_given_in_every_field(server, engine):
    names = "model suffix best_of echo logprobs stream stream_options n max_tokens min_tokens top_p top_k min_p"
    names += " frequency_penalty presence_penalty repetition_penalty seed logit_bias stop stop_token_ids ignore_eos"
    names += " include_stop_str_in_output skip_special_tokens cache_salt priority session_id user"
    assert server.complete(**dict.fromkeys(names.split())).status_code == 200
    assert engine.requests[0].max_tokens == 16


def test_user_is_accepted_and_changes_nothing(server):
    assert choices(server.complete(user="someone")) == choices(server.complete())


def test_model_defaults_hold_where_the_request_is_silent(server, engine):
    server.complete(temperature=None)
    assert engine.requests[0].temperature == 1.0
    assert set(server.tokenizer.eos_ids) == set(engine.requests[0].stop_ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop_token_ids": [320]}, "stop_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"priority": 10**30}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": "1"}, "priority"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_value_that_cannot_be_honoured_is_refused_with_its_parameter(server, engine, body, param):
    """B3.2, B5.1, B6.8, B8.3."""
    refused(server.complete(**body), param)
    assert not engine.requests


def test_best_of_equal_to_n_is_accepted(server):
    assert len(choices(server.complete(n=2, best_of=2))) == 2


# Echo


def test_echo_puts_the_prompts_text_first(server):
    """B1.7."""
    ids = server.tokenizer.encode("Hello", add_special_tokens=False)
    for prompt in ("Hello", ids):
        assert choices(server.complete(prompt=prompt, echo=True))[0]["text"].startswith("Hellothe cat")


def test_echo_with_max_tokens_0_gives_only_the_prompt(server, engine):
    """B1.7."""
    reply = server.complete(echo=True, max_tokens=0)
    assert choices(reply)[0]["text"] == "Hello"
    assert choices(reply)[0]["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == 0
    assert not engine.requests


def test_echoed_text_does_not_match_a_stop_string(server):
    """B6.8."""
    choice = choices(server.complete(prompt="stop here", echo=True, stop=["stop"], max_tokens=3))[0]
    assert choice["finish_reason"] == "length"
    assert choice["text"].startswith("stop here")


# Log-probabilities


def test_logprobs_are_parallel_lists_with_one_entry_per_token(server):
    """B5.1."""
    logprobs = choices(server.complete(logprobs=2, max_tokens=5))[0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {5}
    assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"])


def test_logprobs_0_gives_the_sampled_token_only(server):
    """B5.1."""
    logprobs = choices(server.complete(logprobs=0, max_tokens=3))[0]["logprobs"]
    tokens = logprobs["tokens"]
    assert logprobs["top_logprobs"] == [{token: -0.5} for token in tokens]


def test_text_offset_goes_on_across_the_chunks_of_a_stream(server):
    """B5.2."""
    whole = choices(server.complete(logprobs=1, max_tokens=8))[0]
    events = server.stream_complete(logprobs=1, max_tokens=8)[:-1]
    offsets = [o for e in events for o in e["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]
    for offset, token in zip(offsets, whole["logprobs"]["tokens"], strict=True):
        assert whole["text"][offset:].startswith(token)


def test_every_token_has_its_logprob_when_a_chunk_has_several(server, engine):
    """B5.8."""
    whole = choices(server.complete(logprobs=1, max_tokens=8))[0]["logprobs"]
    engine.tokens_per_event = 3
    events = server.stream_complete(logprobs=1, max_tokens=8)[:-1]
    assert [t for e in events for t in e["choices"][0]["logprobs"]["tokens"]] == whole["tokens"]


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
def test_logprob_that_json_cannot_say_is_clamped(server, engine, logprob):
    """B5.6."""
    engine.logprob = logprob
    assert choices(server.complete(logprobs=0, max_tokens=2))[0]["logprobs"]["token_logprobs"] == [-9999.0] * 2


def test_of_two_ids_with_one_text_the_larger_logprob_is_kept(server, engine):
    """B5.9."""
    engine.reply = "한"  # each of its bytes alone reads as U+FFFD
    top = choices(server.complete(logprobs=20, max_tokens=1))[0]["logprobs"]["top_logprobs"][0]
    assert top["\ufffd"] == -0.5


# Stop strings


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_stop_string_may_end_inside_a_token_and_what_follows_is_discarded(server, engine, num_tokens):
    """B6.1, B6.5."""
    engine.reply, engine.tokens_per_event = "ABC DEF ABC", num_tokens
    for stop in ("DE", ["DE"]):
        choice = choices(server.complete(stop=stop))[0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ABC ", "stop", "DE")


def test_earliest_stop_wins_whatever_the_order_of_the_list(server):
    """B6.2."""
    for stop in (["mat", "sat"], ["sat", "mat"]):
        assert choices(server.complete(stop=stop))[0]["stop_reason"] == "sat"


def test_stop_string_can_be_shown(server):
    assert choices(server.complete(stop="sat", include_stop_str_in_output=True))[0]["text"] == "the cat sat"


def test_text_that_only_began_like_a_stop_string_is_released_at_the_end(server):
    """B6.4."""
    assert choices(server.complete(stop="mat!", max_tokens=7))[0]["text"].startswith("the cat sat on the")
    events = server.stream_complete(stop=["the catX"], max_tokens=3)[:-1]
    whole = choices(server.complete(max_tokens=3))[0]["text"]
    assert "".join(e["choices"][0]["text"] for e in events) == whole


def test_stop_string_ends_the_engines_request(server, engine):
    choices(server.complete(stop="sat"))
    assert engine.cancelled == [engine.requests[0].request_id]
    assert not engine.running


def test_stop_string_ends_the_engines_request_of_its_own_choice_only(server, engine):
    """B11.5."""
    found = choices(server.complete(prompt=["Hello", "Hello"], stop="sat", max_tokens=40))
    assert [c["finish_reason"] for c in found] == ["stop", "stop"]
    assert len(engine.cancelled) == 2


def test_one_stop_string_is_a_list_of_one_and_null_is_none(server):
    """B6.8."""
    bodies = [choices(server.complete(stop=stop, max_tokens=6))[0] for stop in ("sat", ["sat"], None, [])]
    assert bodies[0] == bodies[1] and bodies[0]["stop_reason"] == "sat"
    assert bodies[2] == bodies[3] == choices(server.complete(max_tokens=6))[0]


def test_min_tokens_suppresses_stop_strings(server):
    """B6.9."""
    choice = choices(server.complete(stop="the", min_tokens=3, max_tokens=20))[0]
    assert choice["text"].startswith("the cat")
    assert choice["finish_reason"] == "stop"


def test_eos_stops_without_a_stop_reason(server, engine):
    """B6.6."""
    engine.end_with_eos = True
    choice = choices(server.complete(max_tokens=50))[0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (engine.reply, "stop", None)


def test_stop_token_id_is_the_stop_reason_and_is_not_shown(server):
    """B1.6."""
    ids = server.tokenizer.encode(server.engine.reply, add_special_tokens=False)
    choice = choices(server.complete(stop_token_ids=[ids[2]]))[0]
    assert choice["stop_reason"] == ids[2]
    assert choice["text"] == server.tokenizer.decode(ids[:2])


def test_stop_string_that_is_a_special_token_works_while_these_are_skipped(server, engine):
    """B6.7."""
    engine.reply = "the cat<|im_end|> sat"
    choice = choices(server.complete(stop="<|im_end|>"))[0]
    assert (choice["text"], choice["stop_reason"]) == ("the cat", "<|im_end|>")


def test_special_tokens_are_shown_on_request(server, engine):
    engine.reply = "the<|im_start|>"
    assert "<|im_start|>" not in choices(server.complete())[0]["text"]
    assert "<|im_start|>" in choices(server.complete(skip_special_tokens=False))[0]["text"]


# Lengths


def test_prompt_as_long_as_the_context_is_refused_with_both_numbers(server):
    """B3.5, B8.1, B8.5."""
    refused(server.complete(prompt=[5] * 64), "prompt", "64 tokens", "limit is 64")
    refused(server.complete(prompt=[5] * 100), "prompt", "100 tokens", "limit is 64")


def test_max_tokens_is_a_cap_that_the_context_may_cut(server):
    """B8.1."""
    reply = server.complete(prompt=[5] * 60, max_tokens=1000)
    assert choices(reply)[0]["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == 4


def test_max_completion_tokens_wins_in_completions_too(server):
    """B8.3."""
    assert server.complete(max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_completions_have_16_tokens_unless_asked_otherwise(server):
    """B8.2."""
    assert server.complete().json()["usage"]["completion_tokens"] == 16


# Several choices


def test_index_is_prompt_times_n_plus_sample_and_choices_come_sorted(server, engine):
    """B11.1."""
    found = choices(server.complete(prompt=["Hello", "ABC", "DEF"], n=2, echo=True, max_tokens=2))
    assert [c["index"] for c in found] == list(range(6))
    assert [c["text"][:2] for c in found] == ["He", "He", "AB", "AB", "DE", "DE"]
    assert sorted(r.request_id[-3:] for r in engine.requests) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]


def test_usage_counts_each_prompt_once_and_sums_completions(server):
    """B11.2."""
    usage = server.complete(prompt=[[5, 6, 7], [8]], n=3, max_tokens=4).json()["usage"]
    assert usage == {"prompt_tokens": 4, "completion_tokens": 24, "total_tokens": 28}


def test_seeded_samples_differ_and_are_reproducible(server):
    """B11.3."""
    first, second = (choices(server.complete(n=4, temperature=1, seed=11)) for _ in range(2))
    assert first == second
    assert len({c["text"] for c in first}) > 1


def test_greedy_samples_are_equal(server):
    """B11.4."""
    found = choices(server.complete(n=3))
    assert len({c["text"] for c in found}) == 1


def test_choices_run_side_by_side(server, engine):
    engine.step_s = 0.01
    found = choices(server.complete(n=8, max_tokens=10))
    assert len(found) == 8
    starts = [r.request_id for r in engine.requests]
    assert len(starts) == 8 and not engine.running


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(own_server):
    server = own_server(with_tokenizer=False, with_template=False)
    assert server.complete(prompt=[5, 6], max_tokens=3).json()["usage"]["completion_tokens"] == 3
    refused(server.complete(), "prompt", "token ids")
    refused(server.complete(prompt=[5], echo=True), "echo")
    refused(server.chat(), "messages")
