"""Every failure: its status, its one JSON shape, and that it harms nobody else."""

import json
import socket

import pytest


def error_of(reply, status, code):
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert error["code"] == code
    return error


def post(server, content, path="/v1/completions", kind="application/json"):
    return server.http.post(path, content=content, headers={"Content-Type": kind})


# What the schema refuses


@pytest.mark.parametrize("content", [b"", b"{", b"not json", b'{"prompt": "a"} b', b'{"prompt": NaN}', b"\xff\xfe"])
def test_body_that_is_not_json_is_400(server, content):
    assert "JSON" in error_of(post(server, content), 400, "invalid_json")["message"]
    chat = b'{"messages": [' + content
    assert post(server, chat, "/v1/chat/completions").status_code == 400


@pytest.mark.parametrize("content", [b'{"prompt": "\\ud800"}', b'{"chat_template_kwargs": {"a": ' + b"[" * 5000])
def test_hostile_json_is_400(server, content):
    assert post(server, content, "/v1/chat/completions").status_code == 400


@pytest.mark.parametrize(
    ("part", "code"),
    [
        (b'{"type": "text", "text": "\xff"}', "invalid_json"),
        (b'{"type": "text", "text": "a", "x": 1e999}', "invalid_type"),
        (b'{"type": "text", "x": ' + b"1" * 5000 + b"}", "invalid_type"),
    ],
    ids=["not UTF-8", "float out of range", "integer out of range"],
)
def test_content_part_that_cannot_be_read_is_400_that_names_it(server, part, code):
    body = b'{"messages": [{"role": "user", "content": [' + part + b"]}]}"
    error = error_of(post(server, body, "/v1/chat/completions"), 400, code)
    assert error["param"].startswith("messages[0].content[0]")


def test_token_id_of_thousands_of_digits_is_400_that_names_logit_bias(server):
    assert error_of(server.complete(logit_bias={"9" * 5000: 1}), 400, "invalid_value")["param"] == "logit_bias"


def test_error_message_does_not_repeat_megabytes_of_what_was_sent(server):
    for body in ({"model": "m" * 10**6}, {"m" * 10**6: 1}):
        assert len(server.complete(**body).content) < 10_000
    messages = [{"role": "\x01" * 10**6, "content": "a"}]
    assert len(server.chat(messages=messages).content) < 20_000


def test_endless_prompt_is_refused_before_all_of_it_is_tokenised(server, monkeypatch):
    read = []
    encode = type(server.tokenizer).encode

    def counted(tokenizer, text, **options):
        read.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(type(server.tokenizer), "encode", counted)
    for reply in (
        server.complete(prompt="cat " * 10**6),
        server.complete(prompt=["cat " * 10**6] * 3),
        server.chat(messages=[{"role": "user", "content": "cat " * 10**6}]),
    ):
        message = error_of(reply, 400, "context_length_exceeded")["message"]
        assert "prompt has more than" in message and "limit is 64 tokens" in message
    assert sum(read) < 10**5


def test_body_that_is_not_an_object_is_400(server):
    error_of(post(server, b"[1]"), 400, "invalid_type")


def test_unknown_field_is_400_that_names_it(server, engine):
    for reply in (server.complete(temprature=1), server.chat(temprature=1)):
        error = error_of(reply, 400, "invalid_field")
        assert error["param"] == "temprature" and "temprature" in error["message"]
    assert not engine.requests


def test_unknown_field_inside_an_object_is_named_with_its_path(server):
    error = error_of(server.complete(stream=True, stream_options={"x": 1}), 400, "invalid_field")
    assert error["param"] == "stream_options.x"


def test_missing_field_is_named(server):
    assert error_of(post(server, b"{}"), 400, "invalid_field")["param"] == "prompt"
    assert error_of(post(server, b"{}", "/v1/chat/completions"), 400, "invalid_field")["param"] == "messages"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"logit_bias": {"5": "x"}}, "logit_bias[...]"),
        ({"model": 5}, "model"),
    ],
)
def test_wrong_type_is_400_with_the_path(server, body, param):
    error = error_of(server.complete(**body), 400, "invalid_type")
    assert error["param"] == param and param in error["message"]


# Routes, models, sizes


def test_there_is_no_generate_whose_streams_would_have_to_repeat_all_text(server):
    """B12.5."""
    reply = server.http.post("/generate", json={"text": "Hello", "stream": True})
    assert reply.status_code == 404 and "/generate" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/static", "/v1", "/v1/nothing", "/v1/completions/", "/V1/completions"])
def test_unknown_route_is_404(server, path):
    error_of(server.http.get(path), 404, "route_not_found")
    assert path in error_of(server.http.post(path, json={}), 404, "route_not_found")["message"]


def test_wrong_method_is_405_with_allow(server):
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = server.http.get(path)
        error_of(reply, 405, "method_not_allowed")
        assert reply.headers["allow"] == "POST"
    reply = server.http.post("/v1/models")
    error_of(reply, 405, "method_not_allowed")
    assert "GET" in reply.headers["allow"]


def test_unknown_model_is_404_and_an_absent_one_is_accepted(server):
    for reply in (server.complete(model="other"), server.chat(model="other"), server.http.get("/v1/models/other")):
        error = error_of(reply, 404, "model_not_found")
        assert error["param"] == "model" and "models/fake" in error["message"]
    assert server.complete().status_code == 200
    assert server.complete(model="models/fake").json()["model"] == "models/fake"


def test_body_above_16_mib_is_413(server):
    error_of(post(server, b" " * (16 * 2**20 + 1)), 413, "request_too_large")


def test_body_without_a_length_above_16_mib_is_413(server):
    def parts():
        for _ in range(17):
            yield b" " * 2**20

    error_of(post(server, parts()), 413, "request_too_large")


def test_body_of_exactly_16_mib_is_read(server):
    content = b'{"prompt": "Hello", "max_tokens": 1}'.ljust(16 * 2**20)
    assert post(server, content).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_wrong_content_type_is_415(server, kind):
    assert kind in error_of(post(server, b"{}", kind=kind), 415, "unsupported_media_type")["message"]


def test_content_type_may_have_parameters(server):
    assert post(server, b'{"prompt": "a"}', kind="application/json; charset=utf-8").status_code == 200


# What the engine refuses or fails


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["refuse", "refuse_by_event"])
def test_full_queue_is_503_with_retry_after(server, engine, stream, way):
    setattr(engine, way, True)
    for ask in (server.complete, server.chat):
        reply = ask(stream=stream)
        error_of(reply, 503, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_failure_before_the_first_token_is_a_500_even_of_a_stream(server, engine, stream, n):
    engine.fail_after = 0
    for ask in (server.complete, server.chat):
        assert "NaN in the logits" in error_of(ask(stream=stream, n=n), 500, "engine_error")["message"]


@pytest.mark.parametrize("body", [{"temperature": -1}, {"model": "other"}, {"surprise": 1}, {"max_tokens": "x"}])
def test_bad_request_has_its_status_even_of_a_stream(server, body):
    assert server.complete(stream=True, **body).status_code in (400, 404)
    assert server.chat(stream=True, **body).status_code in (400, 404)


def test_failure_after_the_first_token_is_one_error_event_and_then_done(server, engine):
    """B1.8, B3.3."""
    engine.fail_after = 3
    for ask in (server.complete, server.chat):
        reply = ask(stream=True)
        assert reply.status_code == 200
        events = server.events(reply)
        assert events[-1] == "[DONE]"
        assert events[-2]["error"]["code"] == "engine_error"
        assert "NaN in the logits" in events[-2]["error"]["message"]
        assert len(events) > 3 and all("error" not in event for event in events[:-2])


def test_whole_reply_that_fails_late_is_a_500(server, engine):
    engine.fail_after = 3
    error_of(server.complete(), 500, "engine_error")


def test_failed_choice_cancels_its_siblings(server, engine):
    engine.fail_after, engine.fail_only, engine.step_s = 2, "0-1", 0.005
    error_of(server.complete(n=3), 500, "engine_error")
    assert {name[-3:] for name in engine.cancelled} == {"0-0", "0-2"}
    assert not engine.running


def test_failing_request_leaves_other_requests_alone(server, engine):
    """B3.4."""
    engine.step_s, engine.fail_after, engine.fail_only = 0.02, 2, "1-0"
    body = {"prompt": "Hello", "stream": True, "max_tokens": 16, "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json=body) as going_on:
        lines = going_on.iter_lines()
        next(lines)
        error_of(server.complete(prompt=["Hello", "Hello"]), 500, "engine_error")
        assert server.complete(surprise=1).status_code == 400
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_unforeseen_error_is_a_500_without_details(server, engine, monkeypatch, caplog):
    def broken(_request, _receiver):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(engine, "submit", broken)
    error = error_of(server.complete(), 500, "internal_error")
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


def test_broken_http_harms_no_other_connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"\x00\x01 nonsense\r\n\r\n")
        head, _, body = b"".join(iter(lambda: sock.recv(1000), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"
    assert server.complete().status_code == 200


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_request_that_asks_for_an_upgrade_is_answered_like_any_other(server, size):
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "Hello", "max_tokens": 2}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Type: application/json\r\n"
    )
    data = (head + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 2
    data += b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        for start in range(0, len(data), size):
            sock.sendall(data[start : start + size])
        reply = b"".join(iter(lambda: sock.recv(65536), b""))
    assert reply.count(b"HTTP/1.1 200 OK") == 3
    assert reply.count(b'"completion_tokens":2') == 2


def test_many_upgrades_in_one_go_and_a_connect_harm_no_other_connection(server):
    host, port = server.url.removeprefix("http://").split(":")
    many = b"GET /health HTTP/1.1\r\nUpgrade: a\r\nConnection: upgrade\r\n\r\n" * 3000
    for data in (many, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(data)
            assert sock.recv(100).startswith(b"HTTP/1.1 200 OK" if data is many else b"HTTP/1.1 400 Bad Request")
    assert server.complete().status_code == 200


# Shapes of the other routes


def test_models_are_listed_with_the_usable_context(server):
    """B8.4, B12.1."""
    body = server.http.get("/v1/models").json()
    assert body["object"] == "list"
    model = body["data"][0]
    assert model == {
        "id": "models/fake",
        "object": "model",
        "created": model["created"],
        "owned_by": "jaxinfer",
        "root": "models/fake",
        "parent": None,
        "max_model_len": 64,
    }
    assert server.http.get("/v1/models/models/fake").json() == model
    assert [m.id for m in server.openai.models.list()] == ["models/fake"]


def test_health_ping_and_version_answer(server):
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/ping").status_code == 200
    assert isinstance(server.http.get("/version").json()["version"], str)
