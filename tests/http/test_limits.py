"""Time limits, readiness, addresses that others reach, and HTTPS: on real sockets."""

import shutil
import socket
import ssl
import subprocess
import threading
import time

import httpx
import pytest

from jaxinfer.config import ConfigError, ServerConfig
from jaxinfer.http.exposure import check_certificate, refuse_public_without_key
from jaxinfer.http.run import bind, url_of
from tests.http.conftest import wait_for

# Time limits


def test_request_that_takes_too_long_is_504_and_its_sequences_are_cancelled(own_server):
    """E28, B3.2, B9.1, B9.3."""
    server = own_server(config=ServerConfig(port=0, request_timeout_s=0.1))
    server.engine.gate.clear()
    for ask in (server.complete, server.chat):
        for stream in (False, True):
            reply = ask(n=2, stream=stream)
            assert reply.status_code == 504
            error = reply.json()["error"]
            assert error["code"] == "request_timeout" and "longer than 0.1 s" in error["message"]
    assert not server.engine.running and len(server.engine.cancelled) == 8
    text = server.metrics()
    assert 'jaxinfer:request_success_total{engine="0",finished_reason="abort",model_name="models/fake"} 8.0' in text
    server.engine.gate.set()
    assert server.complete(max_tokens=2).status_code == 200


def test_stream_that_takes_too_long_ends_with_an_error_event(own_server):
    """E28, B3.3."""
    server = own_server(config=ServerConfig(port=0, request_timeout_s=0.3), step_s=0.02, max_model_len=10_000)
    events = server.stream_complete(max_tokens=5000)
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "request_timeout"
    assert len(events) > 3 and not server.engine.running


def test_body_that_comes_too_slowly_is_408(own_server):
    server = own_server(config=ServerConfig(port=0, request_timeout_s=0.1))
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        reply = b"".join(iter(lambda: sock.recv(1000), b""))
    assert reply.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in reply


def test_without_a_limit_a_request_may_take_its_time(server, engine):
    engine.step_s = 0.02
    assert server.complete(max_tokens=20).status_code == 200
    assert server.frontend.open_requests.timeout_s is None


# Stopping


def test_server_that_drains_is_healthy_and_not_ready_and_ends_open_streams(own_server):
    """E10, E11, O11."""
    server = own_server(step_s=0.02, grace_s=5)
    assert server.http.get("/ready").status_code == 200
    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": "Hello", "stream": True, "max_tokens": 30, "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        stopping = threading.Thread(target=server.thread.shutdown)
        stopping.start()

        def refuses():
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_for(refuses)
        assert server.frontend._is_draining and server.engine.running
        assert [line for line in lines if line][-1] == "data: [DONE]"
    stopping.join()


@pytest.mark.parametrize("path", ["/ready", "/readyz"])
def test_server_that_drains_or_has_no_engine_says_that_it_is_not_ready(own_server, path):
    """E10, E11."""
    server = own_server(failure_grace_s=2)
    server.frontend.drain()
    reply = server.http.get(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert server.http.get("/health").status_code == 200
    server = own_server(failure_grace_s=2)
    server.engine.failure = "CUDA error 700"
    reply = server.http.get(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")


def test_draining_ends_in_time_with_what_is_open_told_of_it(own_server):
    server = own_server(step_s=0.05, max_model_len=10_000, grace_s=0.3)
    results = []
    asking = threading.Thread(target=lambda: results.append(server.complete(stream=True, max_tokens=5000)))
    asking.start()
    wait_for(lambda: server.engine.num_tokens > 2)
    start_s = time.monotonic()
    server.thread.shutdown()
    assert 0.3 <= time.monotonic() - start_s < 2
    asking.join()
    assert server.events(results[0])[-2]["error"]["code"] == "shutting_down"


# Addresses


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_address_that_others_reach_needs_a_key_or_a_word(host):
    with bind(host, 0) as sock:
        with pytest.raises(ConfigError, match=f"host is '{host}'.*--api-key.*--allow-public-without-key"):
            refuse_public_without_key(sock, ServerConfig(host=host))
        refuse_public_without_key(sock, ServerConfig(host=host, api_keys=("k",)))
        refuse_public_without_key(sock, ServerConfig(host=host, allow_public_without_key=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1", "::ffff:127.0.0.1"])
def test_address_of_this_machine_alone_needs_no_key(host):
    with bind(host, 0) as sock:
        refuse_public_without_key(sock, ServerConfig(host=host))


def test_default_address_is_of_this_machine_alone():
    assert ServerConfig().host == "127.0.0.1"


# HTTPS


def make_certificate(folder, name="cert", *options):
    """A certificate of 127.0.0.1 that vouches for itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    who = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(cert), *(options or ["-nodes"])]
    subprocess.run(["openssl", "req", "-x509", *kind, *who, *files], check=True, capture_output=True, timeout=60)
    return cert, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl, which is not installed")
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_certificate_makes_the_server_speak_https_alone(own_server, certificate):
    """E23."""
    cert, key = certificate
    config = ServerConfig(port=0, ssl_certfile=str(cert), ssl_keyfile=str(key))
    check_certificate(config)
    server = own_server(config=config, step_s=0.01)
    url = server.url.replace("http:", "https:")
    with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(cert)), timeout=10) as client:
        assert client.get("/health").json() == {"status": "ok"}
        body = {"prompt": "Hello", "stream": True, "max_tokens": 5, "temperature": 0}
        events = server.events(client.post("/v1/completions", json=body))
        assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
        big = {"prompt": "Hello", "max_tokens": 1, "user": "x" * 10**6}
        assert client.post("/v1/completions", json=big).status_code == 200
    with pytest.raises(httpx.HTTPError):
        server.http.get("/health")


def test_url_of_a_server_with_a_certificate_is_https():
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock, tls=True).startswith("https://127.0.0.1:")


def test_certificate_that_cannot_be_served_is_refused_with_its_files(certificate, tmp_path):
    cert, key = certificate
    _, other_key = make_certificate(tmp_path)
    sealed_cert, sealed_key = make_certificate(tmp_path, "sealed", "-passout", "pass:secret")
    for cert_file, key_file in (
        (tmp_path / "none.pem", key),
        (cert, tmp_path / "none.key"),
        (cert, other_key),
        (key, None),
        (cert, None),
        (sealed_cert, sealed_key),
    ):
        config = ServerConfig(ssl_certfile=str(cert_file), ssl_keyfile=key_file and str(key_file))
        with pytest.raises(ConfigError, match=f"HTTPS cannot be served with ssl_certfile '{cert_file}'"):
            check_certificate(config)


def test_strict_server_refuses_what_it_would_have_to_cut(own_server):
    """B8.1, B8.5."""
    server = own_server(config=ServerConfig(port=0, strict_max_tokens=True))
    room = 64 - len(server.tokenizer.encode("Hello", add_special_tokens=True))
    assert server.complete(max_tokens=room).json()["usage"]["completion_tokens"] == room
    assert server.complete(max_tokens=None).status_code == 200
    for ask in (server.complete, server.chat):
        error = ask(max_tokens=64).json()["error"]
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert "max_tokens is 64; the limit is 64 tokens" in error["message"]
