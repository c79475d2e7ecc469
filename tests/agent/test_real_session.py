"""The embedded default model as an agent: in a pseudo-terminal, and behind the URL of a second process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from jaxinfer import Agent
from jaxinfer.agent import session_file
from jaxinfer.agent.history import INTERRUPTED
from jaxinfer.types import SamplingParams
from tests.api.test_serve_process import ROOT, Serving, environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ENGINE = "--max-model-len 512 --max-num-seqs 1 --max-num-batched-tokens 64 --page-size 16 --dtype float32".split()
QUESTIONS = ("What is the capital of France?", "And of Spain?", "Which of them is larger?")
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours, and what line editors ask a terminal to do."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


class Terminal:
    """A process at a pseudo-terminal."""

    def __init__(self, *args):
        self._fd, inner = pty.openpty()
        command = [sys.executable, "-m", "jaxinfer.cli", "agent", *args]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(TERM="dumb"),
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self.text = ""

    def say(self, line):
        os.write(self._fd, line.encode() + b"\n")

    def press_ctrl_c(self):
        os.killpg(self.process.pid, 2)

    def wait_for(self, pattern, limit_s=60.0):
        """Reads until the pattern comes after what was waited for last."""
        end = time.monotonic() + limit_s
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"{pattern!r} does not come: {self.text[-2000:]!r}"
            if select.select([self._fd], [], [], 1.0)[0]:
                with contextlib.suppress(OSError):  # the other end is closed
                    self.text += os.read(self._fd, 4096).decode(errors="replace")
            self.text = _SEQUENCE.sub("", self.text).replace("\r\n", "\n").replace("\r", "")
        before, self.text = self.text[: found.end()], self.text[found.end() :]
        return before

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait(10)
        os.close(self._fd)


@pytest.fixture
def terminal(cache):
    made = []

    def make(*args):
        made.append(Terminal(*ENGINE, "--compile-cache-dir", cache, "--temperature", "0", *args))
        return made[-1]

    yield make
    for one in made:
        one.close()


def cached_tokens_match_the_history(turns):
    """All of a turn but its last token, which is sampled and not computed, is there when the next one comes."""
    assert turns[0].cached_tokens == 0
    for before, turn in zip(turns, turns[1:], strict=False):
        history = before.prompt_tokens + before.completion_tokens
        assert history - 2 <= turn.cached_tokens <= history < turn.prompt_tokens


def test_three_questions_in_a_terminal_find_their_history_in_the_cache(terminal, tmp_path):
    file = tmp_path / "session.jsonl"
    made = terminal("--max-tokens", "24", "--session", str(file))
    assert "the tools are off: the chat template of smollm2-135m does not show tools" in made.wait_for(r"\n> ")
    for question in QUESTIONS:
        made.say(question)
        made.wait_for(r"\n[^\n]*\w[^\n]*\n[\s\S]*?> ")
    made.say("/stats")
    rows = made.wait_for(r"all .*\n").splitlines()
    made.say("/quit")
    assert made.process.wait(60) == 0
    turns = [entry.turn for entry in session_file.load(file).history.entries if entry.turn is not None]
    assert len(turns) == 3
    cached_tokens_match_the_history(turns)
    shown = [row.split()[:4] for row in rows if re.match(r" *\d+ ", row)]
    assert shown == [
        [str(number), str(turn.prompt_tokens), str(turn.cached_tokens), str(turn.completion_tokens)]
        for number, turn in enumerate(turns, 1)
    ]


def test_ctrl_c_stops_an_answer_and_the_session_goes_on(terminal, tmp_path):
    file = tmp_path / "session.jsonl"
    made = terminal("--session", str(file), "--max-tokens", "300")
    made.wait_for(r"\n> ")
    made.say("Write a very long story about a dragon, a castle and a princess.")
    made.wait_for(r"\w\. \w+ \w+ ")  # a second sentence: a line editor may show the question several times
    made.press_ctrl_c()
    made.wait_for(r"stopped; the session is kept\S*\n> ")
    made.say("/quit")
    assert made.process.wait(60) == 0
    _, reply = session_file.load(file).history.entries
    assert reply.message["content"].endswith(INTERRUPTED) and len(reply.message["content"]) > 30


@pytest.fixture(scope="module")
def server(cache, tmp_path_factory):
    serving = Serving(tmp_path_factory.mktemp("log") / "log", *ENGINE, "--compile-cache-dir", cache)
    yield serving.wait_until_ready()
    serving.close()


def test_the_same_session_runs_against_a_second_process_by_url(server):
    agent = Agent(server.url, sampling=SamplingParams(temperature=0, max_tokens=24))
    answers = [agent.ask(question).text for question in QUESTIONS]
    assert "Paris" in answers[0] and "Madrid" in answers[1]
    cached_tokens_match_the_history(agent.turns)


def test_one_question_by_url_ends_with_a_status_and_json(server):
    command = [sys.executable, "-m", "jaxinfer.cli", "agent", "--url", server.url, "--no-tools", "--json"]
    command += ["--temperature", "0", "--max-tokens", "24", "--prompt", QUESTIONS[0]]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in json.loads(done.stdout)["answer"]
