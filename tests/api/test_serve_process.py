"""`jaxinfer serve` as a process: what it says when it cannot start, and what it leaves behind when it ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from checkpoints import safetensors
from jaxinfer.engine.process import EngineProcess
from jaxinfer.types import EngineDead
from tests.api.test_llm import save_tokenizer
from tests.http.conftest import wait_for

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "llama"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"
TINY_FLAGS = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--page-size", "8")


def save_tiny_model(folder: Path) -> Path:
    """The golden llama with a tokenizer of characters and a chat template; its context is 256 tokens."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, folder)
    save_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def environment(**changes: str) -> dict[str, str]:
    """What a process is started with: as the tests are, but steps once compiled are kept in its cache folder."""
    return os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_NUM_CPU_DEVICES": "1"} | changes


def run_cli(*args: str, stdin: str = "", timeout_s: float = 120, **changes: str) -> subprocess.CompletedProcess[str]:
    """A command of the CLI, run to its end."""
    command = [sys.executable, "-m", "jaxinfer.cli", *args]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**changes), input=stdin, capture_output=True, text=True, timeout=timeout_s
    )


class Serving:
    """`jaxinfer serve` on a free port, in a process group of its own."""

    def __init__(self, log: Path, *args: str, **changes: str):
        command = [sys.executable, "-m", "jaxinfer.cli", "serve", "--port", "0", *args]
        self._log = log
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(**changes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                start_new_session=True,
            )

    def wait_until_ready(self) -> Serving:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert " serves " in line, self.stderr
        self.url = line.split()[-1]
        wait_for(self.is_up, limit_s=10)
        return self

    def is_up(self) -> bool:
        return self.health() == 200

    def health(self) -> int | None:
        """The status; None where nothing answers."""
        try:
            return httpx.get(self.url + "/health", timeout=5).status_code
        except httpx.TransportError:
            return None

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    @property
    def engine_pid(self) -> int | None:
        return next(iter(children(self.process.pid)), None)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture
def start(tmp_path):
    """Starts servers of one test."""
    started = []

    def start(*args, **changes):
        started.append(Serving(tmp_path / f"{len(started)}.log", *args, **changes))
        return started[-1]

    yield start
    for serving in started:
        serving.close()


@pytest.fixture
def serve(start, model, cache):
    """Starts a server of the tiny model and waits for it."""
    return lambda *args: start(str(model), *TINY_FLAGS, "--compile-cache-dir", cache, *args).wait_until_ready()


LONG = {"prompt": "abc", "stream": True, "max_tokens": 240, "ignore_eos": True, "temperature": 0, "logprobs": 5}


def test_killed_engine_ends_streams_with_an_error_then_health_says_so_then_the_server_exits_with_the_reason(serve):
    server = serve()
    body = LONG | {"n": 32}  # one after another: far from done when the engine goes, however busy the machine is
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(server.engine_pid, signal.SIGKILL)
        *_, last_event, done = [line for line in lines if line]
    killed_s = time.monotonic()
    error = json.loads(last_event.removeprefix("data: "))["error"]
    assert error["code"] == "engine_dead" and "exit code -9" in error["message"]
    assert done == "data: [DONE]"
    statuses = []
    while (status := server.health()) is not None:
        statuses.append(status)
        time.sleep(0.1)
    assert set(statuses) == {503}
    assert 3 < time.monotonic() - killed_s < 9
    assert server.process.wait(10) == 1
    assert server.stderr.splitlines()[-1] == "jaxinfer serve: the engine's process ended (exit code -9)"
    assert "Traceback" not in server.stderr


@pytest.mark.long
def test_killed_engine_ends_every_open_stream_with_an_error_and_the_server_exits(serve):
    """Of four kinds, some that wait for a slot still; those of the OpenAI API end with [DONE]."""
    server = serve()
    hello = [{"role": "user", "content": "a"}]
    asked = {
        "/v1/completions": LONG | {"n": 32},
        "/v1/chat/completions": {"messages": hello, "max_tokens": 200, "stream": True, "n": 32},
        "/v1/responses": {"input": "a", "max_output_tokens": 200, "stream": True},
        "/v1/messages": {"messages": hello, "max_tokens": 200, "stream": True},
    }

    def read(path: str) -> tuple[int, str]:
        with httpx.stream("POST", server.url + path, json=asked[path], timeout=60) as reply:
            text = ""
            for piece in reply.iter_text():
                text += piece
                begun.set()
            return reply.status_code, text

    begun = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(read, path) for path in [*asked] * 3]
        assert begun.wait(60)
        time.sleep(0.3)
        os.kill(server.engine_pid, signal.SIGKILL)
        found = [(path, *reply.result()) for path, reply in zip([*asked] * 3, replies, strict=True)]
    num_streams = 0
    for path, status, text in found:
        if status != 200:  # nothing of it had begun, so that it has a status of its own
            assert status in (500, 503) and "engine" in text
            continue
        num_streams += 1
        ends = text.rstrip().split("\n\n")
        if "completions" in path:
            assert ends.pop() == "data: [DONE]"
        assert "error" in ends[-1] or "response.failed" in ends[-1], ends[-1]
    assert num_streams >= 1 and server.health() in (503, None)
    assert server.process.wait(20) == 1


@pytest.mark.parametrize(
    ("number", "everyone"),
    [
        pytest.param(signal.SIGINT, True, id="from a terminal"),
        pytest.param(signal.SIGTERM, True, id="from a service manager"),
        pytest.param(signal.SIGTERM, False, id="to the front end alone"),
    ],
)
def test_signal_lets_a_stream_finish_then_the_server_exits_with_0_and_leaves_no_process(serve, number, everyone):
    server = serve()
    engine_pid = server.engine_pid
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=30) as reply:
        lines = reply.iter_lines()
        next(lines)
        (os.killpg if everyone else os.kill)(server.process.pid, number)
        *_, last_event, done = [line for line in lines if line]
    assert json.loads(last_event.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert done == "data: [DONE]"
    assert server.process.wait(15) == 0
    assert not is_alive(engine_pid)
    assert "Traceback" not in server.stderr and "jaxinfer serve:" not in server.stderr


def test_killed_front_end_ends_the_engine_with_it(serve):
    server = serve()
    engine_pid = server.engine_pid
    assert is_alive(engine_pid)
    server.process.kill()
    wait_for(lambda: not is_alive(engine_pid), limit_s=10)
    assert "Traceback" not in server.stderr


@pytest.mark.long
def test_front_end_killed_while_the_engine_is_built_ends_the_engine_long_before_it_is_ready(start):
    server = start("smollm2-135m", "--compile-cache-dir", "")
    wait_for(lambda: server.engine_pid is not None, limit_s=60)
    engine_pid = server.engine_pid
    wait_for(lambda: "compiling" in server.stderr, limit_s=120)
    server.process.kill()
    wait_for(lambda: not is_alive(engine_pid), limit_s=2)


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        pytest.param(lambda pid: os.killpg(pid, signal.SIGINT), 1, "jaxinfer serve: interrupted\n", id="interrupt"),
        pytest.param(
            lambda pid: os.kill(pid, signal.SIGTERM),  # of the first process alone
            128 + signal.SIGTERM,
            "jaxinfer: terminated while it started\n",
            id="termination",
        ),
    ],
)
@pytest.mark.parametrize("after_s", [0, 0.5])
def test_a_start_that_is_ended_says_so_without_a_traceback_and_ends_its_processes(
    start, model, end, status, words, after_s
):
    server = start(str(model), *TINY_FLAGS, "--api-server-count", "2")
    wait_for(lambda: server.engine_pid is not None, limit_s=60)
    time.sleep(after_s)
    processes = children(server.process.pid)
    end(server.process.pid)
    assert server.process.wait(20) == status
    wait_for(lambda: not any(map(is_alive, processes)), limit_s=5)
    assert server.stderr == words


def test_interrupt_while_the_engine_is_built_ends_both_without_a_traceback(start):
    server = start("smollm2-135m", "--compile-cache-dir", "")
    wait_for(lambda: server.engine_pid is not None, limit_s=60)
    engine_pid = server.engine_pid
    wait_for(lambda: "loading" in server.stderr, limit_s=60)
    os.killpg(server.process.pid, signal.SIGINT)
    assert server.process.wait(20) != 0
    wait_for(lambda: not is_alive(engine_pid), limit_s=5)
    assert "Traceback" not in server.stderr


def doctored(folder: Path, change) -> str:
    """A copy of the golden model whose tensors `change` has changed."""
    folder.mkdir()
    shutil.copy(GOLDEN / "config.json", folder)
    source = safetensors.open_folder(GOLDEN)
    tensors = {name: np.array(source.read(name)) for name in source.shapes()}
    change(tensors)
    safetensors.write(folder / "model.safetensors", tensors)
    return str(folder)


def spoil(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:100]


SPOILED = (
    "the checkpoint does not fit the model (21 tensors found, 21 expected)\n"
    "1 missing: model.layers.1.mlp.up_proj.weight\n"
    "1 extra: model.layers.2.mlp.up_proj.weight\n"
    "1 misshapen: lm_head.weight is [100, 64] where the model has [128, 64]\n"
)


def test_tensors_that_do_not_fit_are_all_named_on_stderr_without_a_traceback(start, tmp_path):
    server = start(doctored(tmp_path / "spoiled", spoil), *TINY_FLAGS)
    assert server.process.wait(60) == 1
    assert server.stderr.endswith(f"jaxinfer serve: {SPOILED}")
    assert "Traceback" not in server.stderr


def test_backend_that_jax_cannot_start_is_named_on_stderr_without_a_traceback(start):
    server = start(str(GOLDEN), *TINY_FLAGS, JAX_PLATFORMS="nonsense")
    assert server.process.wait(60) == 1
    assert server.stderr.startswith("jaxinfer serve: JAX cannot start on JAX_PLATFORMS 'nonsense': Unable to init")
    assert server.stderr.count("\n") == 1


def test_fault_while_the_engine_is_built_is_the_reason_and_shows_where(capfd):
    program = "import sys; from jaxinfer.engine.loop import engine_main; engine_main(sys.argv[1], lambda: {}[7])"
    with pytest.raises(EngineDead, match="^KeyError: 7$"):
        EngineProcess([sys.executable, "-c", program]).wait_until_ready()
    assert "Traceback" in capfd.readouterr().err


def test_more_choices_than_may_wait_are_refused_with_503_and_when_to_come_again(serve):
    server = serve("--max-waiting", "1")
    body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    reply = httpx.post(server.url + "/v1/completions", json=body | {"n": 8}, timeout=30)
    assert reply.status_code == 503
    assert int(reply.headers["Retry-After"]) >= 1
    assert reply.json()["error"]["code"] == "queue_full"
    assert "1 requests" in reply.json()["error"]["message"]
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200
