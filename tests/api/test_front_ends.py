"""`jaxinfer serve --api-server-count`: several front-end processes behind one port are one server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket

import httpx
import pytest

from jaxinfer import frontend
from jaxinfer import serving as module
from jaxinfer.config import ConfigError, ServerConfig
from jaxinfer.types import EngineDead
from tests.api.test_serve_process import (
    LONG,
    TINY_FLAGS,
    Serving,
    children,
    is_alive,
    save_tiny_model,
)
from tests.http.conftest import wait_for

NUM_FRONT_ENDS = 3
SHORT = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("front_ends")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture
def serve(folder, tmp_path):
    """Starts a server of the tiny model with several front ends, and waits for it."""
    started = []

    def serve(*args):
        flags = [*TINY_FLAGS, "--compile-cache-dir", str(folder / "compiled"), *args]
        flags += ["--api-server-count", str(NUM_FRONT_ENDS)]
        started.append(Serving(tmp_path / f"{len(started)}.log", str(folder / "model"), *flags))
        return started[-1].wait_until_ready()

    yield serve
    for serving in started:
        serving.close()


def processes(server):
    """Process ids of the engine, which is started first, and of the front ends."""
    engine, *front_ends = sorted(children(server.process.pid))
    assert len(front_ends) == NUM_FRONT_ENDS
    return engine, front_ends


def connections_of(pid):
    """How many connections to clients a process holds: its sockets that the kernel lists as established TCP."""
    with open("/proc/net/tcp") as table:
        established = {line.split()[9] for line in table if line.split()[3] == "01"}
    count = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            count += target.startswith("socket:[") and target[8:-1] in established
    return count


def metric(server, name):
    """A metric, summed over labels."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    values = [
        float(line.split()[-1]) for line in lines if line.startswith((f"jaxinfer:{name}" + "{", f"jaxinfer:{name} "))
    ]
    assert values
    return sum(values)


def open_together(stack, url, body):
    """A stream of each front end. At once: on a busy machine the first could be done before the last begins."""
    streams = [httpx.stream("POST", url, json=body, timeout=60) for _ in range(NUM_FRONT_ENDS)]
    with concurrent.futures.ThreadPoolExecutor(NUM_FRONT_ENDS) as pool:
        return [*pool.map(stack.enter_context, streams)]


def test_connections_are_shared_out_evenly_and_again_after_some_have_closed(serve):
    server = serve()
    _, front_ends = processes(server)
    host, port = server.url.removeprefix("http://").split(":")

    def held():
        return [connections_of(pid) for pid in front_ends]

    with contextlib.ExitStack() as stack:

        def connect(count):
            return [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]

        def close(clients):
            for client in clients:
                client.close()

        wait_for(lambda: held() == [0, 0, 0])  # the one that asked for /health has left
        clients = connect(30)
        wait_for(lambda: held() == [10, 10, 10])
        close(clients[::3])
        wait_for(lambda: sum(held()) == 20)

        def is_even_again():
            more = connect(10)
            wait_for(lambda: sum(held()) == 30)
            if held() == [10, 10, 10]:
                return True
            close(more)  # it was not yet known that the others had closed
            wait_for(lambda: sum(held()) == 20)
            return False

        wait_for(is_even_again, limit_s=20)


def test_what_one_front_end_sent_is_cached_for_the_others(serve):
    server = serve()
    bodies = []
    for salt in ("a", "a", "a", "b"):  # a connection each, so each on the next front end
        reply = httpx.post(server.url + "/v1/completions", json=SHORT | {"cache_salt": salt}, timeout=30)
        bodies.append(reply.json())
        assert bodies[-1]["choices"] == bodies[0]["choices"]
    num_prompt = bodies[0]["usage"]["prompt_tokens"]
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
    assert cached == [0, num_prompt - 1, num_prompt - 1, 0]
    for _ in range(NUM_FRONT_ENDS):
        assert metric(server, "prefix_cache_queries_total") == 4 * num_prompt
        assert metric(server, "prefix_cache_hits_total") == sum(cached)
        assert metric(server, "prefix_cache_pages") > 0


def test_every_front_end_takes_priorities_and_sessions_and_asks_the_engine_for_the_latter(serve):
    server = serve()
    for _ in range(NUM_FRONT_ENDS):  # a connection each, so each on the next front end
        ask = SHORT | {"priority": -1, "session_id": "chat-1"}
        assert httpx.post(server.url + "/v1/completions", json=ask, timeout=30).status_code == 200
    for path in ("/save", "/load"):
        for _ in range(NUM_FRONT_ENDS):
            reply = httpx.post(f"{server.url}/v1/sessions/chat-1{path}", timeout=30)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert "--kv-host-gib" in error["message"] and "--kv-disk-dir" in error["message"]
    url = f"{server.url}/v1/sessions/chat-1"
    assert [httpx.delete(url, timeout=30).status_code for _ in range(NUM_FRONT_ENDS)] == [200] + [404] * (
        NUM_FRONT_ENDS - 1
    )


def test_metrics_are_those_of_the_whole_server_whichever_front_end_is_asked(serve):
    server = serve()
    names = (
        "request_success_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "prompt_tokens_total",
        "generation_tokens_total",
    )
    for count in range(1, 2 * NUM_FRONT_ENDS + 1):  # a connection each, so each on the next front end
        assert httpx.post(server.url + "/v1/completions", json=SHORT, timeout=30).status_code == 200
        found = [metric(server, name) for name in names]
        assert found == [count, count, 4 * count, 3 * count, 5 * count]


def test_every_front_end_gives_the_same_answers(serve):
    server = serve()

    def ask(_):
        with httpx.Client(base_url=server.url, timeout=30) as client:  # a connection of its own
            replies = [client.get(path) for path in ("/health", "/ping", "/v1/models", "/version")]
            text = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
            return [(reply.status_code, reply.text) for reply in replies], text

    with concurrent.futures.ThreadPoolExecutor(2 * NUM_FRONT_ENDS) as pool:
        first, *others = pool.map(ask, range(4 * NUM_FRONT_ENDS))
    assert all(other == first for other in others)


def test_front_end_that_is_killed_takes_its_requests_and_the_server_drains_and_says_which(serve):
    server = serve("--max-num-seqs", "24", "--max-num-batched-tokens", "64")
    engine_pid, front_ends = processes(server)
    body = LONG | {"n": 8}  # all run at once, and so slowly that none is done when the front end goes
    with contextlib.ExitStack() as stack:
        replies = [
            stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30))
            for _ in range(NUM_FRONT_ENDS)
        ]
        lines = [reply.iter_lines() for reply in replies]
        for line in lines:
            next(line)
        os.kill(front_ends[-1], signal.SIGKILL)  # whose stream has only begun
        ends = []
        for line in lines:
            try:
                ends.append([text for text in line if text][-1])
            except httpx.RemoteProtocolError:
                ends.append(None)
    assert sorted(ends, key=str) == [None] + ["data: [DONE]"] * (NUM_FRONT_ENDS - 1)
    assert server.process.wait(15) == 1
    reason = f"front end 3 of 3 (pid {front_ends[-1]}) ended (exit code -9)"
    assert server.stderr.splitlines()[-1] == f"jaxinfer serve: {reason}"
    assert f"{reason}; its requests are lost, and the server stops" in server.stderr
    assert not any(is_alive(pid) for pid in (engine_pid, *front_ends))
    assert "Traceback" not in server.stderr


def test_killed_engine_ends_streams_of_every_front_end_with_the_reason_and_then_the_server(serve):
    server = serve("--max-num-seqs", "24", "--max-num-batched-tokens", "64")
    engine_pid, front_ends = processes(server)
    body = LONG | {"n": 8}  # all run at once, and so slowly that none is done when the engine goes
    with contextlib.ExitStack() as stack:
        replies = open_together(stack, server.url + "/v1/completions", body)
        lines = [reply.iter_lines() for reply in replies]
        os.kill(engine_pid, signal.SIGKILL)
        for line in lines:
            *_, last_event, done = [text for text in line if text]
            error = json.loads(last_event.removeprefix("data: "))["error"]
            assert error["code"] == "engine_dead" and "exit code -9" in error["message"]
            assert done == "data: [DONE]"
    assert {server.health() for _ in range(2 * NUM_FRONT_ENDS)} == {503}
    assert server.process.wait(15) == 1
    assert server.stderr.splitlines()[-1] == "jaxinfer serve: the engine's process ended (exit code -9)"
    assert server.stderr.count("the engine stopped:") == 1
    assert not any(map(is_alive, front_ends)) and "Traceback" not in server.stderr


@pytest.mark.parametrize("everyone", [True, False], ids=["to every process", "to the supervisor alone"])
def test_signal_lets_streams_of_every_front_end_finish_and_leaves_no_process(serve, everyone):
    server = serve("--max-num-seqs", "4", "--max-num-batched-tokens", "32")
    pids = processes(server)
    with contextlib.ExitStack() as stack:
        replies = [
            stack.enter_context(httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=30))
            for _ in range(NUM_FRONT_ENDS)
        ]
        lines = [reply.iter_lines() for reply in replies]
        for line in lines:
            next(line)
        (os.killpg if everyone else os.kill)(server.process.pid, signal.SIGTERM)
        assert [[text for text in line if text][-1] for line in lines] == ["data: [DONE]"] * NUM_FRONT_ENDS
    assert server.process.wait(15) == 0
    assert not any(map(is_alive, [pids[0], *pids[1]]))
    assert "Traceback" not in server.stderr and "jaxinfer serve:" not in server.stderr


def test_killed_supervisor_leaves_no_process(serve):
    server = serve()
    engine_pid, front_ends = processes(server)
    server.process.kill()
    wait_for(lambda: not any(map(is_alive, [engine_pid, *front_ends])), limit_s=10)
    assert "Traceback" not in server.stderr


def test_front_ends_started_from_python_serve_on_a_free_port_and_end_at_shutdown(folder):
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "page_size": 8, "show_progress": False}
    before = set(children(os.getpid()))
    with module.serve(
        str(folder / "model"),
        port=0,
        block=False,
        server={"api_server_count": 2},
        compile_cache_dir=str(folder / "compiled"),
        **options,
    ) as server:
        started = set(children(os.getpid())) - before
        assert len(started) == 3
        reply = httpx.post(server.url + "/v1/completions", json=SHORT, timeout=30)
        assert reply.json()["usage"]["completion_tokens"] == 5
        for pid in started:
            with open(f"/proc/{pid}/cmdline") as command, open(f"/proc/{pid}/maps") as maps:
                is_front_end = "jaxinfer.frontend" in command.read()
                assert ("jaxlib" in maps.read()) != is_front_end  # JAX would take 150 MB in each
    assert not any(map(is_alive, started))


def test_number_of_front_ends_follows_the_cores_where_nobody_says():
    assert [module._front_ends_for(cores) for cores in (1, 2, 7, 8, 15, 16, 64)] == [1, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("count", [0, -1, 65])
def test_number_of_front_ends_out_of_range_is_refused(count):
    with pytest.raises(ConfigError, match=f"api_server_count is {count}; it must be from 1 to 64"):
        ServerConfig(api_server_count=count)


def test_front_end_that_cannot_start_is_the_reason_and_leaves_no_process(folder, monkeypatch):
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "page_size": 8, "show_progress": False}
    monkeypatch.setattr(frontend, "__name__", "jaxinfer.not_there")
    before = set(children(os.getpid()))
    with pytest.raises(EngineDead, match=r"^front end \d of 2 \(pid \d+\) ended \(exit code 1\)$"):
        module.serve(
            str(folder / "model"),
            port=0,
            block=False,
            server={"api_server_count": 2},
            compile_cache_dir=str(folder / "compiled"),
            **options,
        )
    assert not set(children(os.getpid())) - before
