"""The page at / in a real browser, with a real server of the default model, and the pictures of README.md."""

from __future__ import annotations

import contextlib
import os
import re
import signal

import httpx
import pytest
from shoot_playground import MAX_BYTES, shoot

from tests.api.test_serve import MESSAGES, MODEL
from tests.api.test_serve_process import Serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

QUESTION = MESSAGES[-1]["content"]
ANSWERED = "document.querySelector('.answer > .note') !== null"
FLAGS = ("--max-model-len", "512", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def start(tmp_path_factory, compiled):
    """Starts servers, of which the second finds what the first has compiled."""
    folder, started = tmp_path_factory.mktemp("servers"), []

    def start():
        serving = Serving(folder / f"{len(started)}.log", MODEL, *FLAGS, "--compile-cache-dir", compiled, XLA_FLAGS="")
        started.append(serving)
        return serving.wait_until_ready()

    yield start
    for serving in started:
        serving.close()


@pytest.fixture(scope="module")
def model(start):
    return start()


def ask(page, question, **settings):
    for name, value in settings.items():
        page.evaluate(f"document.querySelector('#{name}').value = '{value}'")
    page.focus("#question")
    page.type(question)
    page.press("Enter")


def test_idle_page_shows_a_server_that_is_ready_and_does_nothing(model, browse):
    page = browse(model)
    page.wait_for("document.querySelector('#output').textContent === '0'")
    assert page.text("#model") == MODEL
    shown = [page.text(f"#{name}") for name in ("output", "input", "running", "waiting", "pages", "ttft", "hits")]
    assert shown == ["0", "0", "0", "0", "0%", "–", "–"]
    assert page.text("#totals") == "Since the start: 0 done, 0 tokens in, 0 out."


def test_streamed_answer_is_the_one_that_the_api_gives_and_the_numbers_are_of_it(model, browse):
    page = browse(model)
    ask(page, QUESTION, temperature=0, max_tokens=24)
    page.wait_for(ANSWERED, 120)
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{model.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert page.text(".text") == reply["choices"][0]["message"]["content"].strip()
    usage = reply["usage"]
    assert page.text(".answer > .note").startswith(f"cut: no room for more tokens · {usage['prompt_tokens']} tokens in")
    page.wait_for("document.querySelector('#totals').textContent.startsWith('Since the start: 2 done')")
    totals = f"{2 * usage['prompt_tokens']} tokens in, {2 * usage['completion_tokens']} out."
    assert page.text("#totals").endswith(totals)
    assert page.text("#ttft") != "–" and page.text("#hits") != "0%" and " 0 cached" not in page.text("#pages-note")


def test_stop_frees_the_slot(model, browse):
    page = browse(model)
    ask(page, "Tell me a very long story.", temperature=0)
    page.wait_for("document.querySelector('.running .text')?.textContent.length > 20", 120)
    page.press("Escape")
    page.wait_for(ANSWERED)
    page.wait_for("document.querySelector('#running').textContent === '0'")
    assert page.text(".answer > .note") == "stopped" and len(page.text(".text")) > 20


def test_pictures_show_the_page_idle_under_load_and_after_the_server_has_gone(start, chromium):
    serving = start()

    def end_server():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(serving.process.pid, signal.SIGKILL)

    page, (idle, load, error) = shoot(chromium, serving.url, end_server, num_clients=3, load_s=0)
    assert "ready" in idle.text and "Running\n0\nWaiting\n0" in idle.text
    # Of two slots and four who ask. Between two requests of a client there is a moment without one.
    assert re.search(r"Running\n[12]\nWaiting\n[12]\n", load.text)
    assert " tokens in " in load.text and "Stop" in load.text
    assert "no answer" in error.text and "Last numbers" in error.text
    assert "The connection was lost\nThe answer ended before it was complete." in error.text
    assert all(picture.png.startswith(b"\x89PNG") and len(picture.png) < MAX_BYTES for picture in (idle, load, error))
    assert page.complaints == []
    assert [asked for asked in page.requests if not asked.startswith(f"{serving.url}/")] == []
    known = ("ERR_CONNECTION", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_EMPTY_RESPONSE", "ERR_SOCKET")
    assert [line for line in page.failed_loads if not any(part in line for part in known)] == []
