"""A client that leaves stops its generation, and no other."""

import asyncio
import json
import socket
import threading

import pytest

from jaxinfer.http.errors import ClientGone
from jaxinfer.http.guard import OpenRequests
from tests.http.conftest import wait_for


def connect(server, path, **body):
    """A connection on which a request was sent, for a client that may leave at any time."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body | {"temperature": 0, "max_tokens": 50}).encode()
    sock = socket.create_connection((host, int(port)), timeout=5)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    sock.sendall(head.encode() + content)
    return sock


BODIES = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", ["queued", "decoding"])
def test_closing_the_socket_cancels_every_sequence(server, engine, path, stream, n, phase):
    """B9.1."""
    engine.step_s = 0.01
    if phase == "queued":
        engine.gate.clear()
    sock = connect(server, path, stream=stream, n=n, **BODIES[path])
    wait_for(lambda: len(engine.running) == n and (phase == "queued" or engine.num_tokens))
    if stream and phase == "decoding":
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    sock.close()
    wait_for(lambda: not engine.running, limit_s=1)
    assert len(engine.cancelled) == n
    assert "num_requests_running" in server.metrics()


def test_iterator_of_the_engine_is_closed_in_the_turn_in_which_the_disconnect_is_noticed():
    closed = []

    async def generate():
        try:
            await asyncio.Event().wait()
            yield
        finally:
            closed.append(True)

    async def scenario():
        gone = asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work():
            async with OpenRequests().guard(receive):
                async for _ in generate():
                    pass

        task = asyncio.create_task(work())
        await asyncio.sleep(0.01)
        gone.set()
        await asyncio.sleep(0)  # the watcher notices
        await asyncio.sleep(0)
        assert closed
        with pytest.raises(ClientGone):
            await task

    asyncio.run(scenario())


def test_client_that_leaves_a_stream_unread_is_noticed(server, engine):
    engine.step_s = 0.005
    body = {"prompt": "Hello", "stream": True, "max_tokens": 50}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        next(reply.iter_lines())
    wait_for(lambda: len(engine.cancelled) == 1, limit_s=1)


def test_closing_one_stream_leaves_the_others_running(server, engine):
    engine.step_s = 0.01
    results = []
    thread = threading.Thread(target=lambda: results.append(server.complete(max_tokens=30)))
    thread.start()
    wait_for(lambda: len(engine.running) == 1)
    sock = connect(server, "/v1/completions", prompt="Hello", stream=True)
    wait_for(lambda: len(engine.running) == 2)
    sock.close()
    thread.join()
    assert results[0].json()["usage"]["completion_tokens"] == 30
    assert len(engine.cancelled) == 1


def test_cancelled_sequences_count_as_abort_and_not_as_success(server, engine):
    """B9.3."""

    def count(reason):
        lines = server.metrics().splitlines()
        name = f'finished_reason="{reason}"'
        return sum(float(x.split()[-1]) for x in lines if x.startswith("jaxinfer:request_success_total") and name in x)

    before = {reason: count(reason) for reason in ("abort", "stop", "length", "error")}
    engine.gate.clear()
    sock = connect(server, "/v1/completions", prompt="Hello", n=2)
    wait_for(lambda: len(engine.running) == 2)
    sock.close()
    wait_for(lambda: not engine.running)
    wait_for(lambda: count("abort") == before["abort"] + 2)
    assert {r: count(r) - before[r] for r in before} == {"abort": 2, "stop": 0, "length": 0, "error": 0}


def test_kept_alive_connection_serves_one_request_after_another(server, engine):
    replies = [server.complete(max_tokens=2), server.complete(stream=True, max_tokens=2), server.chat(max_tokens=2)]
    assert [reply.status_code for reply in replies] == [200] * 3
    assert not engine.cancelled
