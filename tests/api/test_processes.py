"""Two processes on loopback, of four virtual devices each, are one engine: they serve, end and fail to start as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.api.test_serve_process import ROOT, Serving, children, environment, save_tiny_model
from tests.engine.drive import num_equal
from tests.engine.test_group import free_port
from tests.http.conftest import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
FLAGS = ("--max-num-seqs", "3", "--max-num-batched-tokens", "16", "--page-size", "8", "--num-pages", "40")
MESH = "tensor=4,pipeline=2"
"""Of eight devices: both axes have devices of both processes."""
DEVICES = {"JAX_NUM_CPU_DEVICES": "4", "JAX_ENABLE_COMPILATION_CACHE": "false"}
END_S = 30.0


class Pair:
    """`jaxinfer serve` twice."""

    def __init__(self, folder: Path, *args: str, second: tuple[str, ...] = ()):
        shared = (*args, "--num-processes", "2", "--coordinator", f"127.0.0.1:{free_port()}")
        self.first = Serving(folder / "first.log", *shared, **DEVICES)
        self.second = Serving(folder / "second.log", *shared, "--process-id", "1", *second, **DEVICES)

    def wait_until_ready(self) -> Pair:
        stdout = self.first.process.stdout
        assert stdout is not None
        # Gloo, by which CPUs sum, writes to standard output, too.
        line = next((line for line in iter(stdout.readline, b"") if b" serves " in line), b"")
        assert line, self.first.stderr + self.second.stderr
        self.first.url = line.decode().split()[-1]
        wait_for(self.first.is_up, limit_s=10)
        return self

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture
def pair(tmp_path):
    """Starts pairs of one test."""
    started = []

    def start(*args, **how):
        started.append(Pair(tmp_path, *args, **how))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


BODIES = [
    {"prompt": "abcdefgh" * 6, "max_tokens": 30, "temperature": 0, "logprobs": 3},
    {"prompt": "abcdefgh" * 6, "max_tokens": 12, "temperature": 0},
    {"prompt": "abcdefgh" * 6 + "i", "max_tokens": 12, "temperature": 1, "seed": 7, "n": 3},
    {"prompt": "b a", "max_tokens": 40, "temperature": 0.8, "seed": 3, "frequency_penalty": 1, "presence_penalty": 1},
    {"prompt": "c", "max_tokens": 20, "temperature": 0, "logit_bias": {"5": 4.0, "9": 4.0}},
    {"prompt": "d", "max_tokens": 20, "temperature": 1, "seed": 1, "structured_outputs": {"regex": "[a-f]{4}-[0-9]+"}},
    {"prompt": "e", "max_tokens": 60, "temperature": 0, "min_tokens": 60},
]
"""With shared beginnings, seeds, penalties, biases and grammars; three run at once."""


def answers(url: str) -> list[dict]:
    """Of all bodies at once, then of all again, which begin in the cache."""
    found = []
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(len(BODIES)) as pool:
        for _ in range(2):
            replies = list(pool.map(lambda body: client.post("/v1/completions", json=body), BODIES))
            assert {reply.status_code for reply in replies} == {200}, [reply.text for reply in replies]
            found += [reply.json() for reply in replies]
    return found


def test_two_processes_serve_the_same_as_one_and_end_together_with_0(pair, model, tmp_path):
    one = Serving(tmp_path / "one.log", model, *FLAGS, JAX_NUM_CPU_DEVICES="1").wait_until_ready()
    try:
        expected = answers(one.url)
    finally:
        one.close()
    two = pair(model, *FLAGS, "--mesh", MESH).wait_until_ready()
    for number, (ours, theirs) in enumerate(zip(answers(two.first.url), expected, strict=True)):
        for choice, other in zip(ours["choices"], theirs["choices"], strict=True):
            assert (choice["text"], choice["finish_reason"]) == (other["text"], other["finish_reason"])
            if choice["logprobs"] is not None:
                pairs = [one["logprobs"]["token_logprobs"] for one in (choice, other)]
                np.testing.assert_allclose(*pairs, atol=1e-4)
        # How much of what is shared is found depends on what has ended when a request begins.
        cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in (ours["usage"], theirs["usage"])]
        assert ours["usage"] == theirs["usage"]
        assert number < len(BODIES) or ours["usage"]["prompt_tokens"] < 40 or all(cached)
    metrics = httpx.get(two.first.url + "/metrics").text.splitlines()
    (compilations,) = (line for line in metrics if line.startswith("jaxinfer:xla_compilations_after_ready_total{"))
    assert float(compilations.split()[-1]) == 0
    two.first.process.send_signal(signal.SIGTERM)
    assert (two.first.process.wait(END_S), two.second.process.wait(END_S)) == (0, 0)
    assert "Traceback" not in two.first.stderr + two.second.stderr


ENDLESS = {"prompt": "abc", "stream": True, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "n": 60}
GONE = "process {} of 2 is gone: its connection ended"


@pytest.mark.parametrize(
    ("victim", "of_stream", "of_other"),
    [
        pytest.param("second engine", GONE.format(1), GONE.format(1), id="the engine of process 1"),
        pytest.param("second command", "process 1 of 2 ended: it was shut down", "it was shut down", id="process 1"),
        pytest.param("first engine", "exit code -9", GONE.format(0), id="the engine of process 0"),
        pytest.param("first command", None, None, id="process 0"),
    ],
)
def test_killing_either_process_ends_the_other_with_the_reason(pair, model, victim, of_stream, of_other):
    two = pair(model, *FLAGS, "--mesh", MESH).wait_until_ready()
    which, what = victim.split()
    killed, other = (two.first, two.second) if which == "first" else (two.second, two.first)
    engines = children(two.first.process.pid) + children(two.second.process.pid)
    last = []
    with httpx.stream("POST", two.first.url + "/v1/completions", json=ENDLESS, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(killed.process.pid if what == "command" else killed.engine_pid, signal.SIGKILL)
        killed_s = time.monotonic()
        try:
            last = [line for line in lines if line]
        except httpx.TransportError:
            assert victim == "first command"
    if of_stream is not None:
        error = json.loads(last[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead" and of_stream in error["message"]
        assert last[-1] == "data: [DONE]"
    status = other.process.wait(END_S)
    assert time.monotonic() - killed_s < END_S
    assert not any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in engines)
    if of_other is not None:
        assert status == 1 and of_other in other.stderr.splitlines()[-1]


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("args", "second", "reason"),
    [
        pytest.param(
            ("--mesh", MESH),
            ("--max-num-seqs", "2", "--seed", "5"),
            "process 1 differs from process 0, and all must be alike: max_num_seqs is 2, not 3; seed is 5, not 0",
            id="other options",
        ),
        pytest.param(("--mesh", "tensor=4"), (), "mesh tensor=4 has no device of process 1", id="a mesh for one"),
        pytest.param(("--mesh", "tensor=16"), (), "mesh tensor=16 has 16 devices, but there are 8", id="too large"),
    ],
)
def test_what_cannot_run_is_refused_in_both_processes(pair, model, args, second, reason):
    two = pair(model, *FLAGS, *args, second=second)
    assert (two.first.process.wait(120), two.second.process.wait(120)) == (1, 1)
    for one in (two.first, two.second):
        assert reason in one.stderr and "Traceback" not in one.stderr


def test_a_process_that_never_comes_is_named_within_the_bound(model):
    command = [sys.executable, "-m", "jaxinfer.cli", "serve", model, "--port", "0", "--num-processes", "2"]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--initialization-timeout-s", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(**DEVICES), capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "jaxinfer serve: process 1 of 2 did not come to 127.0.0.1:" in done.stderr


PROGRAM = """
import json, sys, jaxinfer
options = json.loads(sys.argv[1])
if options["process_id"]:
    jaxinfer.follow(**options)
else:
    prompts, sampling = json.loads(sys.argv[2]), jaxinfer.SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    with jaxinfer.LLM(**options) as llm:
        outputs = [llm.generate(prompts, sampling) for _ in range(2)][-1]
        print(json.dumps([[output.outputs[0].token_ids for output in outputs], llm.stats().compilations_after_ready]))
"""


@pytest.mark.parametrize(
    ("family", "mesh", "devices"),
    [("llama", "pipeline=2,tensor=4", 4), ("qwen3_moe", "expert=4,tensor=2", 4), ("qwen3_5", "tensor=2,pipeline=2", 2)],
)
def test_an_llm_of_two_processes_gives_the_tokens_of_transformers(family, mesh, devices, golden):
    expected = golden(family)
    options = {"model": str(expected.folder), "num_processes": 2, "coordinator": f"127.0.0.1:{free_port()}"}
    options |= {"mesh": mesh, "page_size": 8, "num_pages": 30, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    prompts = json.dumps([prompt.tolist() for prompt in expected.prompts])
    env = environment(**DEVICES | {"JAX_NUM_CPU_DEVICES": str(devices)})
    how = {"cwd": ROOT, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = []
    for number in range(2):
        given = json.dumps(options | {"process_id": number, "show_progress": False})
        started.append(subprocess.Popen([sys.executable, "-c", PROGRAM, given, prompts], text=True, **how))
    try:
        first, second = (process.communicate(timeout=400) for process in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], (first[1], second[1])
    tokens, compilations = json.loads(next(line for line in first[0].splitlines() if line.startswith("[[")))
    for found, wanted, margins in zip(tokens, expected.tokens, expected.margins, strict=True):
        num_equal(found, wanted.tolist(), margins)
    assert compilations == 0


LOST = """
import json, os, signal, subprocess, sys, time, jaxinfer
options = json.loads(sys.argv[1])
other = subprocess.Popen([sys.executable, "-c", sys.argv[2], json.dumps(options | {"process_id": 1})])
llm = jaxinfer.LLM(**options, process_id=0)
try:
    for count, _ in enumerate(llm.stream([1, 2, 3], jaxinfer.SamplingParams(max_tokens=200, ignore_eos=True))):
        if count == 10:
            other.kill()
            start_s = time.monotonic()
except jaxinfer.types.EngineDead as error:
    print(f"\\nraised {error} after {time.monotonic() - start_s:.0f} s", flush=True)
llm.close()
"""


def test_an_llm_whose_other_process_is_killed_raises_its_reason(model):
    options = {"model": model, "num_processes": 2, "coordinator": f"127.0.0.1:{free_port()}", "mesh": MESH}
    options |= {"page_size": 8, "num_pages": 40, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    command = [sys.executable, "-c", LOST, json.dumps(options | {"show_progress": False}), PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment(**DEVICES), capture_output=True, text=True, timeout=400)
    assert "raised process 1 of 2 is gone: its connection ended after" in done.stdout, done.stderr
    assert done.returncode == 1
