"""serve(): the engine is built while all the rest starts. The engine here is a program that waits to be let go."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from checkpoints.source import CheckpointError
from jaxinfer import frontend, serving
from jaxinfer.config import ConfigError
from jaxinfer.types import EngineDead
from tests.api.test_serve_process import children, is_alive, save_tiny_model
from tests.http.conftest import wait_for

PROGRAM = """
import pathlib, sys, time
from jaxinfer.engine.loop import engine_main
from jaxinfer.types import EngineInfo, EngineStats

class Idle:
    info = EngineInfo(model="idle", max_model_len=99, vocab_size=10, eos_ids=(), sampling_defaults={}, page_size=8,
                      num_pages=8, max_num_seqs=8)
    has_work = False
    def stats(self):
        return EngineStats()

def build():
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return Idle()

engine_main(sys.argv[2], build)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def go(tmp_path, monkeypatch):
    """The file by which the engine's program is ready."""
    path = tmp_path / "go"
    monkeypatch.setattr(serving, "engine_command", lambda *_, **__: [sys.executable, "-c", PROGRAM, str(path)])
    return path


@pytest.fixture
def started():
    """The processes that the test has started and that still run."""
    before = set(children(os.getpid()))
    return lambda: sorted(pid for pid in set(children(os.getpid())) - before if is_alive(pid))


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def has_imported(pid: int) -> bool:
    """Whether a front end has its modules."""
    return "tokenizers" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("num_front_ends", [1, 2])
def test_all_starts_while_the_engine_is_built_and_nothing_is_accepted_before_it_is_ready(
    model, go, started, num_front_ends
):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    servers = []
    options = {"port": port, "block": False, "server": {"api_server_count": num_front_ends}}
    thread = threading.Thread(target=lambda: servers.append(serving.serve(model, **options)))
    thread.start()
    try:
        num_processes = 1 + (num_front_ends if num_front_ends > 1 else 0)
        wait_for(lambda: len(started()) == num_processes, limit_s=20)
        engine, *front_ends = started()
        assert PROGRAM in command_of(engine)
        wait_for(lambda: all(map(has_imported, front_ends)), limit_s=20)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health")
        assert thread.is_alive()
    finally:
        go.touch()
        thread.join(20)
    (server,) = servers
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == 99
    assert server.info.model == "idle"
    server.shutdown()
    assert not started()


@pytest.mark.usefixtures("go")
def test_tokenizer_that_is_refused_ends_the_engine_that_is_being_built_at_once(model, started, monkeypatch):
    seen = []

    def refuse(_):
        seen.extend(started())
        raise CheckpointError("tokenizer.json: unknown")

    monkeypatch.setattr(serving, "load_tokenizer", refuse)
    start_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: unknown"):
        serving.serve(model, port=0, block=False)
    assert len(seen) == 1 and not started()
    assert time.monotonic() - start_s < 5


@pytest.mark.usefixtures("go")
def test_front_end_that_cannot_start_is_told_of_before_the_engine_is_ready(model, started, monkeypatch):
    monkeypatch.setattr(frontend, "__name__", "jaxinfer.not_there")
    with pytest.raises(EngineDead, match=r"^front end \d of 2 \(pid \d+\) ended \(exit code 1\)$"):
        serving.serve(model, port=0, block=False, server={"api_server_count": 2})
    assert not started()


@pytest.mark.parametrize("num_front_ends", [1, 2])
def test_engine_that_cannot_be_built_is_the_reason_and_leaves_no_process(model, started, monkeypatch, num_front_ends):
    program = "import sys; from jaxinfer.engine.loop import engine_main; engine_main(sys.argv[1], lambda: {}[7])"
    monkeypatch.setattr(serving, "engine_command", lambda *_, **__: [sys.executable, "-c", program])
    with pytest.raises(EngineDead, match="^KeyError: 7$"):
        serving.serve(model, port=0, block=False, server={"api_server_count": num_front_ends})
    assert not started()


@pytest.mark.parametrize("name", ["not/there/at all", "chat template"])
def test_what_can_be_told_without_an_engine_is_refused_before_one_is_started(model, monkeypatch, name):
    monkeypatch.setattr(serving, "EngineProcess", None)
    if name == "chat template":
        options = {"server": {"chat_template": "{% if %}"}}
    else:
        model, options = name, {}
    with pytest.raises(
        (CheckpointError, ConfigError, ValueError), match="template|is no file, no folder and no Hub id"
    ):
        serving.serve(model, port=0, block=False, **options)


KILLED = """
import sys
from jaxinfer import serving
serving.engine_command = lambda *_, **__: [sys.executable, "-c", {program!r}, {go!r}]
serving.serve({model!r}, port=0, server={{"api_server_count": 2}})
"""


def test_starter_that_is_killed_while_the_engine_is_built_leaves_no_process(model, go):
    script = KILLED.format(program=PROGRAM, go=str(go), model=model)
    starter = subprocess.Popen([sys.executable, "-c", script])
    wait_for(lambda: len(children(starter.pid)) == 3, limit_s=20)
    processes = children(starter.pid)
    wait_for(lambda: all(map(has_imported, sorted(processes)[1:])), limit_s=20)
    starter.kill()
    starter.wait()
    wait_for(lambda: not any(map(is_alive, processes)), limit_s=5)


def test_process_that_serves_does_not_load_jax():
    code = "import sys, jaxinfer; jaxinfer.serve; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
