"""Log-probabilities of prompts: OpenAI's echo with logprobs, and vLLM's prompt_logprobs."""

from __future__ import annotations

import pytest


def echoed(server, **body):
    body = {"echo": True, "logprobs": 2, "max_tokens": 3} | body
    (choice,) = server.complete(**body).json()["choices"]
    return choice


@pytest.fixture
def ids(server):
    return server.tokenizer.encode("Hello the cat", add_special_tokens=False)


def test_echoed_prompt_comes_first_in_every_list_with_null_for_its_first_token(server, ids):
    """B1.7, B5.2, B5.3."""
    choice = echoed(server, prompt=ids)
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(ids) + 3}
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:] == [-1.5] * (len(ids) - 1) + [-0.5] * 3
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"]
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_streamed_echo_adds_up_to_the_whole_one(server, engine, ids, max_tokens, n, tokens_per_event):
    """B5.2, B5.8."""
    engine.tokens_per_event = tokens_per_event
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "n": n}
    whole = server.complete(**body).json()
    choices = [event["choices"][0] for event in server.stream_complete(**body)[:-1]]
    for expected in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        for name, values in expected["logprobs"].items():
            assert [value for choice in mine for value in choice["logprobs"][name]] == values
        assert mine[-1]["finish_reason"] == expected["finish_reason"] == "length"


def test_prompt_alone_is_scored_without_a_token_of_output(server, engine, ids):
    """B1.7: what lm-eval asks for; the one token that the engine has to generate is neither shown nor counted."""
    reply = server.complete(prompt=ids, echo=True, logprobs=1, max_tokens=0).json()
    (choice,) = reply["choices"]
    assert choice["text"] == server.tokenizer.decode(ids) and choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == len(ids) and reply["usage"]["completion_tokens"] == 0
    assert [request.max_tokens for request in engine.requests] == [1]


def test_every_prompt_of_a_list_is_scored(server, ids):
    """B11.1."""
    reply = server.complete(prompt=[ids, ids[:2]], n=2, echo=True, logprobs=0, max_tokens=1).json()
    lengths = [len(choice["logprobs"]["tokens"]) for choice in reply["choices"]]
    assert lengths == [len(ids) + 1] * 2 + [3] * 2


def test_vllms_field_has_ids_with_ranks_and_the_prompts_own_token_first(server, engine, ids):
    reply = server.complete(prompt=ids, prompt_logprobs=2, max_tokens=1).json()
    (choice,) = reply["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and choice["logprobs"] is None and len(rest) == len(ids) - 1
    for id, entry in zip(ids[1:], rest, strict=True):
        own, other = entry.items()
        text = server.tokenizer.token_text(id)
        assert own == (str(id), {"logprob": -1.5, "rank": 2, "decoded_token": text})
        assert other[0] == str(id + 1) and other[1]["rank"] == 1 and other[1]["logprob"] == -0.5
    assert "prompt_logprobs" not in server.complete(prompt=ids).json()["choices"][0]
    assert [request.prompt_logprobs for request in engine.requests] == [2, None]


def test_both_ways_at_once_have_each_as_many_alternatives_as_it_asked_for(server, engine, ids):
    choice = echoed(server, prompt=ids, logprobs=0, prompt_logprobs=3)
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(entry) == 3 for entry in choice["prompt_logprobs"][1:])
    assert [request.prompt_logprobs for request in engine.requests] == [3]


def test_chats_are_scored_beside_their_choices(server):
    reply = server.chat(prompt_logprobs=0, max_tokens=2, n=2).json()
    first, *rest = reply["prompt_logprobs"]
    assert first is None and len(rest) == reply["usage"]["prompt_tokens"] - 1
    assert all(len(entry) == 1 for entry in rest)
    error = server.chat(prompt_logprobs=0, stream=True).json()["error"]
    assert error["param"] == "prompt_logprobs" and "stream: false" in error["message"]


def test_engine_that_cannot_says_what_would(server, engine, monkeypatch):
    """B3.2."""
    monkeypatch.setattr(type(engine.info), "has_prompt_logprobs", False)
    for body in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        error = server.complete(**body).json()["error"]
        assert error["param"] == "prompt_logprobs" and "--enable-prompt-logprobs" in error["message"]
    assert not engine.requests
