"""Many clients at once, of which some leave and some send nonsense: nobody else notices, and nothing is left behind."""

import concurrent.futures
import http.client
import json
import os
import random
import re
import socket
import threading

import pytest

from tests.http.conftest import wait_for

LIMIT_S = 120
HELLO = [{"role": "user", "content": "Hello"}]
KINDS = {
    "/v1/completions": lambda n: {"prompt": "Hello", "max_tokens": n},
    "/v1/chat/completions": lambda n: {"messages": HELLO, "max_tokens": n, "n": 2},
    "/v1/responses": lambda n: {"input": "Hello", "max_output_tokens": n},
    "/v1/messages": lambda n: {"messages": HELLO, "max_tokens": n},
}
MALFORMED = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"messages": 5}',
    b'{"prompt": ' + b"[" * 20_000,
    b'{"prompt": "a", "surprise": 1}',
    b'{"input": [{"type": "message"}], "messages": [{}], "prompt": {}}',
)
CHANGING = re.compile(rb'(cmpl-|chatcmpl-|resp_|msg_|rs_|fc_)[0-9a-f]{32}|"(created|created_at|completed_at)":\d+')
"""Ids and times, which are new in every reply."""
INDEX = re.compile(rb'^data: .*"choices":\[\{"index":(\d)')
MOMENTS = ("in the body", "before the head", "in the stream")


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def by_choice(reply):
    """The events of a stream, those of one choice after those of another: how they mix is a matter of time."""
    events = reply.split(b"\n\n")
    return b"\n\n".join(sorted(events, key=lambda event: INDEX.search(event)[1] if INDEX.search(event) else b"9"))


def ask(server, path, body):
    """The whole reply, without ids and times."""
    connection = http.client.HTTPConnection(*address(server), timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, by_choice(CHANGING.sub(b"", reply.read()))
    finally:
        connection.close()


def leave(server, path, body, moment, num_bytes):
    """Asks, and closes the connection at that moment."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(address(server), timeout=LIMIT_S) as sock:
        if moment == "in the body":
            sock.sendall(head.encode() + content[: len(content) // 2])
            return
        sock.sendall(head.encode() + content)
        while moment == "in the stream" and num_bytes > 0:
            num_bytes -= len(sock.recv(num_bytes)) or num_bytes


def send_nonsense(server, path, body):
    """The status of the answer."""
    connection = http.client.HTTPConnection(*address(server), timeout=LIMIT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def num_sockets():
    """Of this process, in which the server runs too."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            pass
    return found


@pytest.mark.parametrize(
    ("seed", "num_clients", "num_malformed"),
    [(1, 60, 30), (2, 60, 30), pytest.param(3, 300, 150, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)
def test_clients_that_leave_and_nonsense_change_no_other_stream_and_leave_nothing_behind(
    own_server, seed, num_clients, num_malformed
):
    """B3.4, B9.1."""
    rng = random.Random(seed)
    server = own_server(max_model_len=400, step_s=0.004)
    engine = server.engine
    asked = [
        (path, KINDS[path](rng.randint(5, 40)) | {"stream": rng.random() < 0.7, "temperature": 0})
        for path in rng.choices(list(KINDS), k=num_clients)
    ]
    staying, leaving = asked[num_clients // 3 :], asked[: num_clients // 3]
    leaving = [(path, body | {"stream": True}, rng.choice(MOMENTS), rng.randint(1, 3000)) for path, body in leaving]
    nonsense = [(rng.choice(list(KINDS)), rng.choice(MALFORMED)) for _ in range(num_malformed)]
    alone = [ask(server, *request) for request in staying]
    assert {status for status, _ in alone} == {200}
    assert server.http.get("/health").status_code == 200
    before = num_sockets()
    engine.requests.clear()
    engine.gate.clear()  # so that some leave while they wait for their first token
    with concurrent.futures.ThreadPoolExecutor(num_clients + num_malformed) as pool:
        jobs = [(ask, request) for request in staying] + [(leave, request) for request in leaving]
        jobs += [(send_nonsense, request) for request in nonsense]
        order = rng.sample(range(len(jobs)), len(jobs))
        futures = {i: pool.submit(jobs[i][0], server, *jobs[i][1]) for i in order}
        threading.Timer(0.3, engine.gate.set).start()
        while not all(future.done() for future in futures.values()):
            assert server.http.get("/health", timeout=LIMIT_S).status_code == 200
            concurrent.futures.wait(futures.values(), timeout=0.05)
    results = [futures[i].result() for i in range(len(jobs))]
    assert results[: len(staying)] == alone
    assert set(results[len(staying) + len(leaving) :]) == {400}

    wait_for(lambda: not engine.running and not engine.tasks and not len(server.frontend.open_requests))
    wait_for(lambda: num_sockets() <= before)
    num_staying = sum(body.get("n", 1) for _, body in staying)
    num_cancelled = len(set(engine.cancelled))
    assert 0 < num_cancelled and len(engine.requests) - num_cancelled >= num_staying
    stats = server.metrics()
    assert re.search(r"^jaxinfer:num_requests_running\{.*\} 0\.0$", stats, re.M)
    assert server.http.get("/health").json() == {"status": "ok"}
    assert [ask(server, *request) for request in staying[:4]] == alone[:4]
