"""Two replicas behind Ray Serve: who answers whom, and what a replica's end does to others."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import threading
import time

import httpx
import pytest

from jaxinfer.config import ConfigError
from tests.api.test_serve_process import environment, is_alive, save_tiny_model

ray = pytest.importorskip("ray", reason="Ray is not installed; the extra 'ray' has it")

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, in this process, of what others will remove

LIMIT_S = 240
"""A replica's start takes a minute on a busy machine."""
TINY = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "page_size": 8, "show_progress": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Ray's processes inherit what the environment says, and the pytest process is their client."""
    before = dict(os.environ)
    os.environ |= environment(JAX_PLATFORMS="cpu")
    from jaxinfer import serve

    folder = tmp_path_factory.mktemp("replicas")
    model = str(save_tiny_model(folder / "model"))
    options = TINY | {"compile_cache_dir": str(folder / "cache")}
    try:
        keys = {"api_keys": ("secret",)}
        with serve(model, port=0, block=False, ray={"num_workers": 2}, server=keys, **options) as running:
            yield running
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ |= before


@pytest.fixture
def client(server):
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(base_url=server.url, timeout=120, headers=headers) as client:
        yield client


def handle():
    from ray import serve

    return serve.get_deployment_handle("Replica", "jaxinfer")


def engines():
    """What the replicas say of themselves, by name."""
    replies = handle().broadcast("engine_stats").results(timeout_s=60, return_exceptions=True)
    return dict(reply for reply in replies if not isinstance(reply, BaseException))


def wait_for(condition, limit_s=LIMIT_S):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, f"it is not so after {limit_s} s"
        time.sleep(0.2)


def ask(client, messages, **body):
    """The reply to a conversation, and the replica that made it."""
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | body
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json(), reply.headers["x-jaxinfer-replica"]


def test_turns_of_a_conversation_land_on_the_replica_that_holds_its_prefix(client):
    """Ten conversations at a time, four turns each."""

    def talk(number):
        letters = "abcdefghijklmnopqrstuvwxyz"
        messages, homes, cached = [], [], []
        for turn in range(4):
            messages.append({"role": "user", "content": letters[number] * 30 + str(turn)})
            reply, replica = ask(client, messages)
            homes.append(replica)
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or "-"})
        return homes, cached

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        talks = list(pool.map(talk, range(10)))
    turns = [(home, homes[0], hit) for homes, cached in talks for home, hit in zip(homes[1:], cached[1:], strict=True)]
    assert sum(home == first for home, first, _ in turns) / len(turns) >= 0.9, talks
    assert sum(hit > 0 for _, _, hit in turns) / len(turns) >= 0.9, talks
    assert len({home for home, _, _ in turns}) == 2, "one replica did all the work"


def test_a_reply_is_streamed_as_it_is_computed_and_is_the_same_as_the_whole(client):
    body = {"prompt": "stream me", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    arrivals, text = [], ""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert len(reply.headers.get_list("x-request-id")) == 1
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.monotonic())
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == whole
    assert len(arrivals) >= 10


def test_what_a_replica_refuses_and_what_no_replica_has_is_told_in_the_same_shape(client, server):
    assert httpx.get(server.url + "/v1/models", timeout=60).status_code == 401
    refused = client.post("/v1/completions", json={"prompt": "a", "temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    for path, body in (
        ("/v1/completions", {"prompt": "a", "session_id": "mine"}),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": "a", "store": True}),
        ("/v1/batches", {}),
    ):
        reply = client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "not_on_replicas"), path
    text = client.get("/metrics").text
    names = {line.partition('replica="')[2].partition('"')[0] for line in text.splitlines() if "replica=" in line}
    assert names == set(engines())
    assert text.count("# TYPE jaxinfer:num_requests_running ") == 1


def test_a_client_that_leaves_ends_its_request_in_the_engine(client):
    """A context of 256 tokens is soon full, so several leave one after the other: few are computed to their ends."""
    before = {name: stats["generation_tokens"] for name, stats in engines().items()}
    for number in range(6):
        body = {"prompt": f"{number}", "max_tokens": 250, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as reply:
            next(reply.iter_lines())
    wait_for(lambda: not sum(stats["num_running"] + stats["num_waiting"] for stats in engines().values()), 60)
    computed = sum(stats["generation_tokens"] - before[name] for name, stats in engines().items())
    assert computed < 6 * 250 * 0.8, "they were computed to their ends"


@pytest.mark.timeout(900)
def test_a_replica_that_dies_is_replaced_and_requests_go_on(client):
    """The engine of one is killed, and then the process of another, while eight clients ask."""
    stop, failed, answered = threading.Event(), [], []

    def keep_asking(number):
        turn = 0
        while not stop.is_set():
            turn += 1
            body = {"prompt": f"{number} {turn} " * 8, "max_tokens": 3, "temperature": 0}
            reply = client.post("/v1/completions", json=body)
            (answered if reply.status_code == 200 else failed).append((reply.status_code, reply.text[:200]))
            time.sleep(0.05)

    first = engines()
    assert len(first) == 2
    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    try:
        for kind in ("engine_pid", "pid"):
            known = engines()
            name, stats = sorted(known.items())[0]
            os.kill(stats[kind], signal.SIGKILL)
            wait_for(lambda name=name: name not in (now := engines()) and len(now) == 2)
            assert not is_alive(stats["engine_pid"])
            count = len(answered)
            wait_for(lambda count=count: len(answered) > count + 16, 60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    # What was being computed by what was killed may fail, and says so: of 8 clients, at two kills.
    assert len(failed) <= 16, failed
    assert all(status in (500, 503) for status, _ in failed), failed
    assert len(answered) > 50


@pytest.mark.parametrize("name", ["ssl_certfile", "batch_dir", "api_server_count"])
def test_what_replicas_cannot_do_is_refused(name, tmp_path):
    from jaxinfer import serve

    value = {"ssl_certfile": "cert.pem", "batch_dir": str(tmp_path), "api_server_count": 2}[name]
    with pytest.raises(ConfigError, match=f"{name} is .* and replicas are asked for"):
        serve(port=0, ray={"num_workers": 2}, server={name: value})


def test_nothing_is_left_once_the_server_is_shut_down(server):
    """Runs last: the module's server ends here."""
    pids = [stats[kind] for stats in engines().values() for kind in ("pid", "engine_pid")]
    assert len(pids) == 4
    server.shutdown()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), 60)
    assert not ray.is_initialized()
