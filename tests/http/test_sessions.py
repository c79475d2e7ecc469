"""Requests with a priority and a session, and the routes that save, load, describe and delete sessions."""

import http.client
import json
import threading

import pytest

from jaxinfer.types import EngineDead, InvalidRequest, SessionAction
from tests.http.conftest import wait_for
from tests.http.test_errors import error_of

INFO_KEYS = {
    "object",
    "session_id",
    "model",
    "num_tokens",
    "num_pages",
    "num_bytes",
    "saved",
    "saved_at_s",
    "num_cached_tokens",
}
ROUTES = {
    SessionAction.SAVE: ("POST", "/save"),
    SessionAction.LOAD: ("POST", "/load"),
    SessionAction.MANIFEST: ("GET", "/manifest"),
    SessionAction.DELETE: ("DELETE", ""),
}
BAD_IDS = {
    "dot dot": "..",
    "dot first": ".hidden",
    "escape": "../x",
    "escaped dots": "%2e%2e",
    "escaped slash": "a%2Fb",
    "escaped escape": "%252e",
    "null": "a%00b",
    "line feed": "a%0A",
    "space": "a%20b",
    "no UTF-8": "%ff%fe",
    "unicode": "%C3%A9",
    "500 characters": "x" * 500,
    "empty": "",
    "backslash": "a%5Cb",
    "absolute": "/etc/passwd",
}


@pytest.fixture
def caching(own_server):
    return own_server(prefix_caching=True)


def ask(server, action, session_id, body=None):
    """The request as it is written: httpx would resolve dots in the path. Returns a status and an object."""
    method, end = ROUTES[action]
    return raw(server, method, f"/v1/sessions/{session_id}{end}", body)


def raw(server, method, path, body=None):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body)
        reply = connection.getresponse()
        assert reply.headers["content-type"] == "application/json"
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def refused(reply, status, code):
    assert reply[0] == status, reply
    error = reply[1]["error"]
    assert reply[1].keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


# Fields of a request


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_priority_reaches_every_sequence_of_a_request(server, engine, route):
    for priority in (-(2**31), 2**31 - 1):
        assert getattr(server, route)(priority=priority, n=2).status_code == 200
    getattr(server, route)()
    assert [request.priority for request in engine.requests] == [-(2**31)] * 2 + [2**31 - 1] * 2 + [0]


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_session_reaches_the_sequence_of_a_request(caching, route):
    ask = getattr(caching, route)
    for session_id in ("chat-1", "x" * 128):
        assert ask(session_id=session_id).status_code == 200
        assert caching.engine.requests[-1].session_id == session_id
    assert ask().status_code == 200
    assert caching.engine.requests[-1].session_id == ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("session_id", ["", "..", ".a", "../x", "a/b", "é", "x" * 500, "a b"])
def test_session_that_is_no_id_is_refused_with_what_would_be(caching, route, session_id, stream):
    error = error_of(getattr(caching, route)(session_id=session_id, stream=stream), 400, "invalid_value")
    assert error["param"] == "session_id"
    assert repr(session_id) in error["message"] and "1 to 128 characters" in error["message"]
    assert not caching.engine.requests


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_session_of_another_type_is_refused_by_its_name(caching, route):
    assert error_of(getattr(caching, route)(session_id=5), 400, "invalid_type")["param"] == "session_id"


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_a_session_has_one_sequence_so_several_choices_are_refused(caching, route):
    error = error_of(getattr(caching, route)(session_id="a", n=2), 400, "invalid_value")
    assert error["param"] == "session_id"
    assert error["message"] == "session_id is 'a' and n is 2; a session is one sequence, so n must be 1"
    assert not caching.engine.requests


def test_a_session_has_one_sequence_so_several_prompts_are_refused(caching):
    for prompt in (["a", "b", "c"], [[5], [6], [7]]):
        error = error_of(caching.complete(session_id="a", prompt=prompt), 400, "invalid_value")
        assert error["param"] == "session_id" and "'a' with 3 prompts" in error["message"]
    assert not caching.engine.requests
    assert caching.complete(session_id="a", prompt=["a"]).status_code == 200


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_without_a_prefix_cache_a_session_is_refused(server, engine, route):
    error = error_of(getattr(server, route)(session_id="a"), 400, "invalid_value")
    assert error["param"] == "session_id" and "prefix caching is off" in error["message"]
    assert not engine.requests


def test_openais_client_sends_priority_and_session(caching):
    ask = {"model": "models/fake", "messages": [{"role": "user", "content": "Hello"}]}
    caching.openai.chat.completions.create(**ask, extra_body={"priority": -1, "session_id": "a"})
    assert (caching.engine.requests[0].priority, caching.engine.requests[0].session_id) == (-1, "a")


# Routes


def test_answers_have_what_is_known_of_the_session_under_the_documented_names(server, engine):
    engine.sessions["chat-1"] = False
    status, body = ask(server, SessionAction.MANIFEST, "chat-1")
    assert status == 200
    assert body == {
        "object": "session",
        "session_id": "chat-1",
        "model": "models/fake",
        "num_tokens": 40,
        "num_pages": 3,
        "num_bytes": 0,
        "saved": False,
        "saved_at_s": None,
        "num_cached_tokens": 32,
    }
    saved = body | {"num_bytes": 3000, "saved": True, "saved_at_s": 1_700_000_000}
    for action in (SessionAction.SAVE, SessionAction.LOAD, SessionAction.MANIFEST):
        status, body = ask(server, action, "chat-1")
        assert (status, body) == (200, saved) and body.keys() == INFO_KEYS
    assert ask(server, SessionAction.DELETE, "chat-1") == (
        200,
        {"id": "chat-1", "object": "session", "deleted": True},
    )
    assert not engine.sessions
    assert engine.session_calls == [(action, "chat-1") for action in ("manifest", "save", "load", "manifest", "delete")]


@pytest.mark.parametrize("action", SessionAction)
def test_unknown_session_is_404(server, action):
    error = refused(ask(server, action, "nobody"), 404, "session_not_found")
    assert error["message"] == "there is no session 'nobody'" and error["param"] == "session_id"
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("action", SessionAction)
@pytest.mark.parametrize("session_id", BAD_IDS.values(), ids=BAD_IDS)
def test_hostile_id_is_400_and_never_reaches_the_engine(server, engine, action, session_id):
    error = refused(ask(server, action, session_id), 400, "invalid_value")
    assert error["param"] == "session_id" and "1 to 128 characters" in error["message"]
    assert not engine.session_calls


@pytest.mark.parametrize("session_id", ["a", "%61", "A-b_c.9", "x" * 128, "save", "manifest"])
def test_id_of_harmless_characters_reaches_the_engine(server, engine, session_id):
    plain = session_id.replace("%61", "a")
    engine.sessions[plain] = True
    for action in SessionAction:
        assert ask(server, action, session_id)[0] == 200
        assert engine.session_calls[-1] == (action, plain)


@pytest.mark.parametrize("action", SessionAction)
def test_engine_without_a_disk_tier_is_400_with_the_flags_that_give_one(server, engine, action):
    message = "there is no disk tier; start with --kv-host-gib and --kv-disk-dir"
    engine.session_error = InvalidRequest(message, code="no_disk_tier")
    error = refused(ask(server, action, "a"), 400, "no_disk_tier")
    assert error["message"] == message


@pytest.mark.parametrize("action", SessionAction)
@pytest.mark.parametrize(
    ("error", "status", "code", "says"),
    [
        (EngineDead("CUDA error 700"), 503, "engine_dead", "the engine stopped: CUDA error 700"),
        (TimeoutError(), 504, "session_timeout", "takes too long"),
        (RuntimeError("No space left on device: /cache"), 500, "session_failed", "No space left on device: /cache"),
    ],
    ids=["dead", "slow", "disk"],
)
def test_failure_of_the_engine_has_its_status(server, engine, action, error, status, code, says):
    engine.session_error = error
    told = refused(ask(server, action, "a"), status, code)
    assert says in told["message"] and told["type"] == "server_error"


def test_unforeseen_error_is_a_500_without_details_and_ends_nothing_else(server, engine, caplog):
    engine.session_error = ZeroDivisionError("secret")
    assert "secret" not in refused(ask(server, SessionAction.SAVE, "a"), 500, "internal_error")["message"]
    assert "secret" in caplog.text
    assert server.complete().status_code == 200


def test_dead_engine_is_503_before_it_is_asked(own_server):
    server = own_server(failure_grace_s=5)
    server.engine.failure = "CUDA error 700"
    for action in SessionAction:
        assert "CUDA error 700" in refused(ask(server, action, "a"), 503, "engine_dead")["message"]
    assert not server.engine.session_calls


@pytest.mark.parametrize("action", SessionAction)
def test_body_is_empty_or_an_empty_object(server, engine, action):
    engine.sessions["a"] = True
    for body in (b"", b"{}", b" {} \n"):
        assert ask(server, action, "a", body)[0] == 200
        engine.sessions["a"] = True
    engine.session_calls.clear()
    for body in (b'{"path": "/etc"}', b"null", b"x" * 10**6, b"{}{}"):
        assert "must be empty" in refused(ask(server, action, "a", body), 400, "invalid_field")["message"]
    refused(ask(server, action, "a", b"{"), 400, "invalid_json")
    assert not engine.session_calls


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/sessions/a/save", "POST"),
        ("GET", "/v1/sessions/a/load", "POST"),
        ("POST", "/v1/sessions/a/manifest", "GET"),
        ("GET", "/v1/sessions/a", "DELETE"),
    ],
)
def test_wrong_method_is_405_with_allow(server, engine, method, path, allowed):
    reply = server.http.request(method, path)
    error_of(reply, 405, "method_not_allowed")
    assert allowed in reply.headers["allow"]
    assert not engine.session_calls


def test_list_of_sessions_is_no_route(server):
    error_of(server.http.get("/v1/sessions"), 404, "route_not_found")


# Saves that take long


def test_requests_are_served_while_a_session_is_saved(server, engine):
    engine.sessions["a"] = False
    engine.gate.clear()
    replies = []
    thread = threading.Thread(target=lambda: replies.append(ask(server, SessionAction.SAVE, "a")))
    thread.start()
    wait_for(lambda: engine.session_calls)
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/v1/models").status_code == 200
    assert not replies
    engine.gate.set()
    thread.join()
    assert replies[0][0] == 200


def test_client_that_leaves_while_a_session_is_saved_leaves_nothing_behind(server, engine):
    engine.sessions["a"] = False
    engine.gate.clear()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request("POST", "/v1/sessions/a/save")
    wait_for(lambda: engine.session_calls)
    assert len(server.frontend.open_requests) == 1
    connection.close()
    wait_for(lambda: not len(server.frontend.open_requests))
    engine.gate.set()
    assert ask(server, SessionAction.MANIFEST, "a")[0] == 200


def test_server_that_stops_ends_the_wait_for_a_save_with_an_error(own_server):
    server = own_server(grace_s=0.1)
    server.engine.sessions["a"] = False
    server.engine.gate.clear()
    replies = []
    thread = threading.Thread(target=lambda: replies.append(ask(server, SessionAction.SAVE, "a")))
    thread.start()
    wait_for(lambda: server.engine.session_calls)
    server.thread.shutdown()
    thread.join()
    assert "shutting down" in refused(replies[0], 503, "shutting_down")["message"]
