"""Far more than the pool holds, cut short at random: everything ends once, rightly, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import socket
import struct
import time
from collections.abc import Mapping

import httpx
import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.types import FinishReason, InvalidRequest, QueueFull, Request
from tests.api.test_serve_process import Serving, save_tiny_model
from tests.engine.drive import GOLDEN, Output, build, check_idle, compiled_once, drive
from tests.http.conftest import wait_for

OPTIONS = {"page_size": 8, "num_pages": 64, "max_num_seqs": 6, "max_num_batched_tokens": 16, "max_model_len": 256}
PAGE_GIB = 8 * 1024 / 2**30
NUM_REQUESTS = 200
SESSIONS = ("a", "b", "c")
TIERS = {
    "device": {},
    "host": {"kv_host_gib": 128 * PAGE_GIB},
    "disk": {"kv_host_gib": 32 * PAGE_GIB, "kv_disk_gib": 100 * 1.5 * PAGE_GIB},
}


def make_requests() -> list[Request]:
    """Of up to 30 pages. Half of them begin like others; a few are longer than the context."""
    rng = random.Random(3)
    heads = [rng.choices(range(3, 127), k=num) for num in (20, 60, 130)]
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = [*(rng.choice(heads) if rng.random() < 0.5 else ())]
        prompt += rng.choices(range(3, 127), k=rng.choice([1, 5, 20, 60, 100]))
        prompt += [5] * 300 if rng.random() < 0.04 else []
        requests.append(
            Request(
                request_id=f"r{i}",
                prompt_ids=tuple(prompt),
                max_tokens=rng.choice([1, 3, 10, 40]),
                temperature=0.0,
                priority=rng.choice([0, 0, 0, -1, 5]),
                session_id=rng.choice(["", "", *SESSIONS]),
            )
        )
    return requests


@pytest.fixture(scope="module", autouse=True)
def every_size_is_compiled_once():
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def alone() -> Mapping[str, Output]:
    """What every request gives where it is alone and nothing is cached."""
    engine = build(GOLDEN / "qwen3", enable_prefix_caching=False, **OPTIONS)
    found: dict[str, Output] = {}
    for request in make_requests():
        with contextlib.suppress(InvalidRequest):
            found |= drive(engine, [dataclasses.replace(request, priority=0, session_id="")])
    engine.close()
    return found


@pytest.fixture(params=TIERS)
def engine(request, tmp_path):
    tiers = TIERS[request.param]
    engine = build(
        GOLDEN / "qwen3", **OPTIONS, **tiers, **({"kv_disk_dir": str(tmp_path)} if "kv_disk_gib" in tiers else {})
    )
    cache = engine._scheduler.cache
    cache.limits = dataclasses.replace(cache.limits, restore_ms=0.0)  # whatever can be restored is
    yield engine
    engine.close()


def run_all(engine: Engine, rng: random.Random) -> tuple[dict[str, Output], set[str]]:
    """The outputs, and the requests that were refused. Some are cancelled while they wait, run or restore."""
    outputs, refused, left = {}, set(), make_requests()
    running: list[str] = []
    while left or engine.has_work:
        for _ in range(rng.choice([0, 1, 1, 2, 8])):
            if not left:
                break
            request = left.pop(0)
            try:
                engine.submit(request)
            except InvalidRequest as error:
                assert str(len(request.prompt_ids)) in str(error) and "256" in str(error)
                refused.add(request.request_id)
            else:
                outputs[request.request_id] = Output()
                running.append(request.request_id)
        if running and rng.random() < 0.1:
            cancelled = rng.choice(running)
            event = engine.abort(cancelled)
            assert event is not None and event.finish_reason is FinishReason.ABORT
            outputs[cancelled].finish_reason = event.finish_reason
            running.remove(cancelled)
            assert engine.abort(cancelled) is None
        for event in engine.step():
            output = outputs[event.request_id]
            assert output.finish_reason is None, f"{event.request_id} went on after its end"
            output.tokens += event.token_ids
            output.finish_reason = event.finish_reason
            if event.finish_reason is not None:
                running.remove(event.request_id)
        engine._scheduler.check_integrity()
    assert not running
    return outputs, refused


def test_two_hundred_requests_on_a_small_pool_all_end_once_and_as_if_they_were_alone(engine, alone):
    outputs, refused = run_all(engine, random.Random(5))
    assert refused and refused | set(outputs) == {f"r{i}" for i in range(NUM_REQUESTS)}
    num_cancelled = 0
    for name, output in outputs.items():
        expected = alone[name].tokens
        if output.finish_reason is FinishReason.ABORT:
            num_cancelled += 1
            assert output.tokens == expected[: len(output.tokens)]
        else:
            assert (output.tokens, output.finish_reason) == (expected, alone[name].finish_reason)
    assert num_cancelled > 20
    stats = engine.stats()
    check_idle(stats)
    assert stats.num_failed_steps == stats.num_stuck_steps == stats.num_restoring == 0
    assert stats.num_evictions > 0 and stats.num_sessions == len(SESSIONS)
    assert stats.cached_prompt_tokens > 0
    assert (stats.num_restored_pages > 0) == (stats.num_offloaded_pages > 0) == (stats.num_host_pages > 0)
    assert (stats.num_disk_writes > 0) == bool(engine.info.has_disk_tier)
    engine._scheduler.cache.prefix.clear()
    engine._scheduler.check_integrity()
    assert engine._scheduler.cache.pool.num_empty == 64


def test_a_cancelled_request_frees_its_pages_before_the_next_step(engine):
    request = Request(request_id="x", prompt_ids=tuple(range(3, 103)), max_tokens=40, temperature=0.0)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    assert engine.stats().num_pages_used == 13
    engine.abort("x")
    assert engine.stats().num_pages_used == engine.stats().num_running == 0
    while engine.has_work:
        assert engine.step() == []
    engine._scheduler.check_integrity()


def test_a_full_queue_refuses_and_what_waits_is_served(engine):
    requests = [request for request in make_requests() if len(request.prompt_ids) < 200][:20]
    engine._scheduler.limits = dataclasses.replace(engine._scheduler.limits, max_waiting=10)
    with pytest.raises(QueueFull, match="10 requests wait already; the limit is 10"):
        for request in requests:
            engine.submit(request)
    ended = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason is not None]
    assert sorted(ended) == sorted(request.request_id for request in requests[:10])
    check_idle(engine.stats())


# Over HTTP


@pytest.fixture
def server(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    flags = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--page-size", "8", "--num-pages", "40")
    serving = Serving(
        tmp_path / "log", str(model), *flags, "--kv-host-gib", str(200 * PAGE_GIB), "--compile-cache-dir", ""
    )
    yield serving.wait_until_ready()
    serving.close()


def metric(server: Serving, name: str) -> float:
    text = httpx.get(server.url + "/metrics", timeout=10).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def ask_and_die(server: Serving, body: str) -> socket.socket:
    """A client that has read the start of a stream. Closing it resets the connection, as the end of a process does."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(f"{head}\r\n\r\n{body}".encode())
    return client


def test_clients_that_are_killed_free_their_pages_and_a_prompt_that_never_fits_is_a_400_with_both_numbers(server):
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "a" * 400, "max_tokens": 5}, timeout=30)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "400" in message and "256" in message
    body = '{"prompt": "abcabcabc", "max_tokens": 240, "n": 16, "stream": true, "ignore_eos": true, "temperature": 1}'
    clients = [ask_and_die(server, body) for _ in range(4)]
    for client in clients[:2]:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: metric(server, "vllm:kv_cache_usage_perc") > 0, limit_s=10)
    for client in clients:
        client.close()
    start_s = time.monotonic()
    wait_for(lambda: metric(server, "vllm:kv_cache_usage_perc") == 0, limit_s=10)
    assert time.monotonic() - start_s < 5
    assert metric(server, "vllm:generation_tokens_total") < 4 * 16 * 240 / 2, "they were computed to their ends"
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "abc", "max_tokens": 5}, timeout=30)
    assert reply.status_code == 200
