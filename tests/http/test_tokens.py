"""/tokenize, /detokenize, and the routes of models that pool."""

import pytest

from tests.http.test_errors import error_of

TEXT = "the cat sat on the mat"


def tokenize(server, path="/tokenize", **body):
    return server.http.post(path, json=body)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_text_becomes_the_ids_that_a_completion_would_run(server, engine, path):
    """E14, B12.2, B12.6."""
    body = tokenize(server, path, prompt=TEXT).json()
    server.complete(prompt=TEXT)
    ids = list(engine.requests[-1].prompt_ids)
    assert body == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": None}
    without = tokenize(server, path, prompt=TEXT, add_special_tokens=False).json()
    assert without["tokens"] == ids[1:] and without["count"] == len(ids) - 1


def test_messages_become_the_ids_that_a_chat_would_run(server, engine):
    """E14, B12.2, B12.6."""
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    for extra in ({}, {"chat_template_kwargs": {"prefix": "A"}}, {"add_generation_prompt": False}):
        body = tokenize(server, messages=messages, **extra).json()
        server.chat(messages=messages, **extra)
        assert body["tokens"] == list(engine.requests[-1].prompt_ids)
        assert body["count"] == len(body["tokens"])


def test_tokenizer_is_described_as_lm_eval_and_vllms_clients_read_it(server):
    facts = server.http.get("/tokenizer_info").json()
    for name in ("bos_token", "eos_token"):
        ids = tokenize(server, prompt=facts[name], add_special_tokens=False).json()["tokens"]
        assert len(ids) == 1 and server.tokenizer.is_special(ids[0])
    assert facts["eos_token"] == server.tokenizer.decode(server.tokenizer.eos_ids[:1], skip_special_tokens=False)
    assert "messages" in facts["chat_template"] and facts["pad_token"] is None


def test_texts_of_the_tokens_joined_are_the_text(server):
    for body in ({"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}):
        shown = tokenize(server, return_token_strs=True, **body).json()
        assert len(shown["token_strs"]) == shown["count"]
        assert TEXT in "".join(shown["token_strs"])


def test_ids_become_their_text_special_tokens_included(server):
    """B12.2."""
    ids = tokenize(server, prompt="Hello <|im_end|> café").json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "<|bos|>Hello <|im_end|> café"}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_empty_text_has_no_tokens(server):
    assert tokenize(server, prompt="").json()["count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": 5}, "invalid_type", "prompt"),
        ("/tokenize", {"prompt": "a", "x": 1}, "invalid_field", "x"),
        ("/tokenize", {"messages": [], "x": 1}, "invalid_field", "x"),
        ("/tokenize", {"messages": []}, "invalid_value", "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "return_token_strs": 1}, "invalid_type", None),
        ("/tokenize", [1], "invalid_json", None),
        ("/detokenize", {}, "invalid_field", "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "invalid_type", "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "invalid_value", "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "invalid_value", "tokens"),
    ],
)
def test_what_cannot_be_read_is_400_that_names_it(server, path, body, code, param):
    """B3.1, B3.2."""
    error = error_of(server.http.post(path, json=body), 400, code)
    assert param is None or error["param"] == param


def test_unknown_model_and_wrong_kinds_of_bodies_have_their_status(server):
    """B3.2, E9."""
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        error_of(server.http.post(path, json=body | {"model": "other"}), 404, "model_not_found")
        error_of(
            server.http.post(path, content=b"a", headers={"Content-Type": "text/plain"}), 415, "unsupported_media_type"
        )
        error_of(server.http.post(path, content=b" " * (16 * 2**20 + 1)), 413, "request_too_large")
        error_of(server.http.get(path), 405, "method_not_allowed")


def test_endless_text_is_refused_before_all_of_it_is_tokenised(server):
    error_of(tokenize(server, prompt="cat " * 10**6), 400, "context_length_exceeded")


def test_without_a_tokenizer_that_is_said(own_server):
    server = own_server(with_tokenizer=False, with_template=False)
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
        ("/detokenize", {"tokens": [1]}),
    ):
        assert "the model has no" in server.http.post(path, json=body).json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling", "/classify"]
)
def test_routes_of_models_that_pool_say_that_this_one_does_not(server, path):
    """E16, E17."""
    error = error_of(server.http.post(path, json={"input": "a"}), 400, "model_does_not_pool")
    assert "'models/fake' generates text and does not pool" in error["message"] and path in error["message"]
    error_of(server.http.get(path), 405, "method_not_allowed")
