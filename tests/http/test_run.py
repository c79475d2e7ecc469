"""Starting, stopping and dying."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from jaxinfer.config import ConfigError, ServerConfig
from jaxinfer.http.run import ServerThread, bind, in_this_process, url_of
from tests.http.conftest import wait_for

ROOT = Path(__file__).parents[2]


def port_of(sock):
    return sock.getsockname()[1]


def test_bound_socket_refuses_connections_until_it_serves():
    with bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=1)


@pytest.mark.parametrize("listening", [False, True])
def test_port_in_use_is_refused_with_its_number_and_a_way_out(listening):
    with bind("127.0.0.1", 0) as sock:
        if listening:
            sock.listen()
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port_of(sock)} .*0 for any free one"):
            bind("127.0.0.1", port_of(sock))


def test_host_that_does_not_resolve_is_refused_with_its_name():
    with pytest.raises(ConfigError, match=r"'no host'.*127\.0\.0\.1"):
        bind("no host", 0)


def test_url_of_a_wildcard_address_is_one_that_can_be_reached():
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{port_of(sock)}"


def test_restart_on_the_same_port_is_possible_at_once(own_server):
    first = own_server()
    host, port = first.url.removeprefix("http://").split(":")
    assert first.complete().status_code == 200
    first.close()
    bind(host, int(port)).close()


def test_accepted_sockets_send_without_delay():
    """B1.1."""
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_served_names_replace_the_loaded_one(own_server):
    server = own_server(config=ServerConfig(port=0, served_model_names=("a", "b")))
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["a", "b"]
    assert server.complete().json()["model"] == "a"
    assert server.complete(model="b").json()["model"] == "b"
    assert server.complete(model="models/fake").status_code == 404


def test_template_arguments_of_the_server_yield_to_those_of_a_request(own_server):
    server = own_server(config=ServerConfig(port=0, chat_template_kwargs={"prefix": "A"}))
    for kwargs, ending in ((None, "assistant\nA"), ({"prefix": "B"}, "assistant\nB")):
        server.chat(chat_template_kwargs=kwargs)
        ids = server.engine.requests[-1].prompt_ids
        assert server.tokenizer.decode(ids, skip_special_tokens=False).endswith(ending)


def test_shutdown_is_idempotent_and_frees_the_port(own_server):
    server = own_server()
    server.thread.shutdown()
    server.thread.shutdown()
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")
    assert server.thread.failure is None


def in_background(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_shutdown_lets_requests_in_progress_finish(own_server):
    server = own_server(step_s=0.02, grace_s=5)
    thread, results = in_background(lambda: server.complete(stream=True, max_tokens=20))
    wait_for(lambda: server.engine.running)
    server.thread.shutdown()
    thread.join()
    assert server.events(results[0])[-2]["choices"][0]["finish_reason"] == "length"


def test_shutdown_ends_what_does_not_finish_in_time_with_an_error(own_server):
    server = own_server(grace_s=0.1)
    server.engine.gate.clear()
    whole, whole_result = in_background(server.complete)
    wait_for(lambda: len(server.engine.running) == 1)
    server.engine.gate.set()
    server.engine.step_s = 0.05
    stream, stream_result = in_background(lambda: server.complete(stream=True, max_tokens=60))
    wait_for(lambda: len(server.engine.running) == 2)
    wait_for(lambda: server.engine.num_tokens > 3)
    server.thread.shutdown()
    whole.join()
    stream.join()
    assert whole_result[0].status_code in (200, 503)
    events = server.events(stream_result[0])
    assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == "shutting_down"
    assert not server.engine.running


def test_client_that_reads_nothing_does_not_keep_the_server_from_stopping(own_server):
    server = own_server(grace_s=0.1, max_model_len=200_000, tokens_per_event=50)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        body = b'{"prompt": "Hello", "stream": true, "max_tokens": 190000, "logprobs": 0}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        sock.sendall(head + body)
        tokens = []
        wait_for(
            lambda: tokens.append(server.engine.num_tokens) or (tokens[-1] > 0 and tokens[-40:].count(tokens[-1]) == 40)
        )
        start = time.monotonic()
        server.thread.shutdown()
        assert time.monotonic() - start < 6
    assert not server.engine.running


def test_dead_engine_ends_streams_with_an_error_and_health_says_why_until_the_server_stops(own_server):
    server = own_server(die_after=3, failure_grace_s=0.5)
    assert server.http.get("/health").status_code == 200
    events = server.stream_complete()
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "engine_dead"
    for path in ("/health", "/ping"):
        reply = server.http.get(path)
        assert reply.status_code == 503
        assert "CUDA error 700" in reply.json()["error"]["message"]
    reply = server.complete()
    assert reply.status_code == 500 and "CUDA error 700" in reply.json()["error"]["message"]
    assert server.http.get("/metrics").status_code == 200
    assert server.thread.wait(5)
    assert server.thread.failure == "CUDA error 700"


def test_dead_engine_before_the_first_token_is_a_500(own_server):
    server = own_server(die_after=0)
    assert server.complete(stream=True).json()["error"]["code"] == "engine_dead"


def test_thread_on_a_broken_socket_raises_what_kept_it_from_starting(own_server):
    app = own_server().app
    sock = bind("127.0.0.1", 0)
    thread = ServerThread(url_of(sock), in_this_process(app, sock))
    sock.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        thread.start()


SCRIPT = """
import sys
from jaxinfer.config import ServerConfig
from jaxinfer.http.run import bind, in_this_process, run, url_of
from jaxinfer.http.server import create_app
from tests.http.fake_engine import FakeEngine
from tests.http.tiny_tokenizer import make_tokenizer
tokenizer, _ = make_tokenizer()
engine = FakeEngine(tokenizer, step_s=0.02)
if "die" in sys.argv:
    engine.failure = "out of memory"
sock = bind("127.0.0.1", 0)
print(url_of(sock), flush=True)
app = create_app(engine, tokenizer, None, ServerConfig(port=0))
reason = run(in_this_process(app, sock, failure_grace_s=0.1))
assert "jax" not in sys.modules
sys.exit(reason)
"""


@pytest.fixture
def process():
    started = []

    def start(*args):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_open_streams_and_exits_with_0_without_loading_jax(process, number):
    server = process()
    url = server.stdout.readline().decode().strip()

    def health():
        try:
            return httpx.get(url + "/health").status_code == 200
        except httpx.ConnectError:
            return False

    wait_for(health, limit_s=20)
    body = {"prompt": "Hello", "stream": True, "max_tokens": 30, "temperature": 0}
    with httpx.stream("POST", url + "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(server.pid, number)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.wait(10) == 0, server.stderr.read().decode()


def test_dead_engine_makes_the_process_exit_with_its_reason(process):
    server = process("die")
    assert server.wait(20) != 0
    assert "out of memory" in server.stderr.read().decode()
