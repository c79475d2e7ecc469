"""What every request passes before its route: the key, web pages' rights, its id, the log."""

import logging
import re
import socket

import pytest

from jaxinfer.config import ConfigError, ServerConfig
from tests.http.conftest import wait_for

KEYS = ("first-key", "second-key")
PAGE = "https://chat.example"


@pytest.fixture
def locked(own_server):
    return own_server(config=ServerConfig(port=0, api_keys=KEYS))


@pytest.mark.parametrize(
    "headers",
    [
        *({"Authorization": f"Bearer {key}"} for key in KEYS),
        {"Authorization": f"bearer {KEYS[0]}"},
        {"X-Api-Key": KEYS[1]},
    ],
)
def test_each_key_opens_every_route(locked, headers):
    """E22."""
    assert locked.http.get("/v1/models", headers=headers).status_code == 200
    reply = locked.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-keyy"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"X-Api-Key": "wrong"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
def test_without_a_known_key_every_route_but_health_and_metrics_is_401_in_the_one_error_form(locked, headers):
    """E22, B3.1, B3.2."""
    for method, path in (
        *(("GET", path) for path in ("/v1/models", "/version", "/nothing", "/v1/sessions/a/manifest")),
        *(("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize")),
    ):
        reply = locked.http.request(method, path, headers=headers)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), path
        error = reply.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["code"] == "invalid_api_key"
        assert not any(key in reply.text for key in KEYS)
    for path in ("/health", "/healthz", "/ping", "/ready", "/readyz", "/metrics"):
        assert locked.http.get(path, headers=headers).status_code == 200
    assert not locked.engine.requests


def test_keys_are_compared_whole_and_all_of_them(locked, monkeypatch):
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or False)
    locked.http.get("/v1/models", headers={"Authorization": "Bearer f"})
    assert compared == [(32, 32)] * len(KEYS)


def test_configuration_shows_no_key():
    assert not any(key in repr(ServerConfig(api_keys=KEYS)) for key in KEYS)
    for key in ("", "a b", "ü", "a\n"):
        with pytest.raises(ConfigError, match="API key 2 is empty or") as error:
            ServerConfig(api_keys=("a", key))
        assert not key or key not in str(error.value).removeprefix("API key 2 is empty or")[:1]


# Web pages


def preflight(server, origin=PAGE, method="POST", headers="authorization, content-type"):
    asked = {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
    return server.http.options("/v1/chat/completions", headers=asked)


@pytest.mark.parametrize("origins", [("*",), (PAGE, "http://localhost:3000")])
def test_page_of_an_allowed_origin_may_ask_with_a_key_and_reads_replies_and_errors(own_server, origins):
    """E23."""
    server = own_server(config=ServerConfig(port=0, api_keys=KEYS, allowed_origins=origins))
    shown = "*" if origins == ("*",) else PAGE
    answer = preflight(server)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == shown
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    for path, key, status in (("/v1/models", KEYS[0], 200), ("/v1/models", "wrong", 401), ("/no", KEYS[0], 404)):
        reply = server.http.get(path, headers={"Origin": PAGE, "Authorization": f"Bearer {key}"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, shown)
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    headers = {"Origin": PAGE, "Authorization": f"Bearer {KEYS[0]}"}
    reply = server.http.post("/v1/completions", json=body, headers=headers)
    assert reply.headers["access-control-allow-origin"] == shown and reply.text.endswith("[DONE]\n\n")


def test_page_of_another_origin_is_told_of_no_rights(own_server):
    server = own_server(config=ServerConfig(port=0, allowed_origins=(PAGE,)))
    answer = preflight(server, origin="https://evil.example")
    assert answer.status_code == 400 and "origin" in answer.json()["error"]["message"]
    reply = server.http.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert reply.status_code == 200
    for answered in (answer, reply):
        assert "access-control-allow-origin" not in answered.headers and "Origin" in answered.headers["vary"]


def test_methods_headers_and_cookies_of_pages_are_those_of_the_configuration(own_server):
    config = ServerConfig(
        port=0, allowed_origins=(PAGE,), allowed_methods=("GET",), allowed_headers=("X-One",), allow_credentials=True
    )
    server = own_server(config=config)
    assert preflight(server, method="GET", headers="x-one").headers["access-control-allow-credentials"] == "true"
    assert preflight(server, method="POST", headers="x-one").status_code == 400
    assert preflight(server, method="GET", headers="x-two").status_code == 400


def test_without_allowed_origins_no_page_is_told_anything(server):
    assert preflight(server).status_code == 405
    reply = server.http.get("/v1/models", headers={"Origin": PAGE})
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_origins": ["chat.example"]}, r"allowed_origins has 'chat.example'; give scheme://host"),
        ({"allowed_origins": ["https://a/b"]}, r"allowed_origins has 'https://a/b'"),
        ({"allowed_origins": "*"}, r"allowed_origins is one string; give a list"),
        ({"allowed_origins": ["*"], "allow_credentials": True}, r"allow_credentials is True and .* '\*'"),
        ({"ssl_keyfile": "key.pem"}, r"ssl_keyfile is 'key.pem' and there is no ssl_certfile"),
        ({"request_timeout_s": 0}, r"request_timeout_s is 0; it must be from 0.01 to 86400 seconds"),
        ({"drain_timeout_s": -1}, r"drain_timeout_s is -1; it must be from 0 to 86400 seconds"),
        ({"drain_timeout_s": float("nan")}, r"drain_timeout_s is nan"),
        ({"access_log": "all"}, r"access_log is 'all'; known: off, requests, prompts"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_values(options, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**options)


# Ids


def test_request_id_of_the_client_comes_back_and_a_missing_or_strange_one_is_replaced(server):
    """E26."""
    for path in ("/health", "/v1/models", "/nothing", "/v1/models/other"):
        assert server.http.get(path, headers={"X-Request-Id": "abc-1.2_3:4"}).headers["x-request-id"] == "abc-1.2_3:4"
    for strange in ("", "a b", "a" * 129, "<script>"):
        made = server.http.get("/health", headers={"X-Request-Id": strange}).headers["x-request-id"]
        assert len(made) == 32 and made != strange
    first, second = (server.complete().headers["x-request-id"] for _ in range(2))
    assert first != second


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"temperature": -1}, {"surprise": 1}, {"model": "other"}])
def test_every_reply_has_a_request_id(server, body):
    """E26."""
    reply = server.http.post("/v1/completions", json={"prompt": "a", **body}, headers={"X-Request-Id": "mine"})
    assert reply.headers.get_list("x-request-id") == ["mine"]


# The log


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, logger="jaxinfer.access")
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "jaxinfer.access"]
    logging.getLogger("jaxinfer.access").setLevel(logging.NOTSET)


@pytest.mark.parametrize(("kind", "shows"), [("off", None), ("requests", False), ("prompts", True)])
def test_log_has_a_line_for_each_request_and_prompts_only_if_asked_for(own_server, logged, kind, shows):
    """E26, O8."""
    server = own_server(config=ServerConfig(port=0, access_log=kind))
    server.http.post("/v1/completions", json={"prompt": "se\ncret", "max_tokens": 1}, headers={"X-Request-Id": "id-7"})
    server.http.get("/no%0Athing")
    if shows is None:
        return
    wait_for(lambda: len(logged()) == 2)
    first, second = logged()
    assert "POST '/v1/completions' 200 " in first and " id-7" in first
    assert r"GET '/no\nthing' 404 " in second
    assert ("cret" in first) is shows and "\n" not in first + second
    assert not shows or len(first) < 3000


def test_without_a_log_there_is_none(own_server, logged):
    server = own_server()
    server.complete()
    assert logged() == []


def test_reply_to_what_is_no_http_has_a_request_id_too(server):
    """E26."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"nonsense\r\n\r\n")
        head = b"".join(iter(lambda: sock.recv(1000), b"")).partition(b"\r\n\r\n")[0]
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", head)
