"""A server on a real socket, with an engine whose behaviour each test sets."""

import dataclasses
import json
import os
import time

import httpx
import openai
import pytest
from chromium import Chromium, find_chromium

from jaxinfer.config import ServerConfig
from jaxinfer.http.run import ServerThread, bind, in_this_process, url_of
from jaxinfer.http.server import create_app
from jaxinfer.text.chat_template import ChatTemplate
from tests.http.fake_engine import FakeEngine
from tests.http.tiny_tokenizer import make_tokenizer

ANY_PORT = ServerConfig(port=0)
READY = "document.querySelector('#state').textContent === 'ready'"
"""What the page at / shows once it has found its server."""


class Server:
    """The server under test, and short ways to ask it."""

    def __init__(self, engine, tokenizer, template, config=ANY_PORT, responses=None, **limits):
        self.engine = engine
        self.tokenizer = tokenizer
        self.app = create_app(engine, tokenizer, template, config, responses=responses)
        sock = bind("127.0.0.1", 0)
        self.thread = ServerThread(url_of(sock), in_this_process(self.app, sock, **limits)).start()
        self.url = self.thread.url
        self.http = httpx.Client(base_url=self.url, timeout=10)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=10)

    def close(self):
        self.openai.close()
        self.http.close()
        self.thread.shutdown()

    @property
    def frontend(self):
        return self.app.frontend

    def complete(self, **body):
        return self.http.post("/v1/completions", json={"prompt": "Hello", "temperature": 0} | body)

    def chat(self, **body):
        messages = [{"role": "user", "content": "Hello"}]
        return self.http.post("/v1/chat/completions", json={"messages": messages, "temperature": 0} | body)

    def events(self, reply):
        """The events of a streamed reply as objects, [DONE] as a string; checks the framing of each."""
        assert reply.text.endswith("\n\n")
        lines = reply.text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        payloads = [line.removeprefix("data: ") for line in lines]
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]

    def stream_complete(self, **body):
        return self.events(self.complete(stream=True, **body))

    def stream_chat(self, **body):
        return self.events(self.chat(stream=True, **body))

    def metrics(self):
        return self.http.get("/metrics").text


def wait_for(condition, limit_s=5.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"still not so after {limit_s} s"
        time.sleep(0.003)


@pytest.fixture(scope="session")
def text_parts():
    tokenizer, config = make_tokenizer()
    return tokenizer, ChatTemplate.from_config(config)


@pytest.fixture(scope="session")
def shared_server(text_parts):
    tokenizer, template = text_parts
    server = Server(FakeEngine(tokenizer), tokenizer, template, grace_s=0.2)
    yield server
    server.close()


@pytest.fixture
def server(shared_server):
    """A server whose engine is as new; do not kill it, others use it too."""
    engine = shared_server.engine
    for setting in dataclasses.fields(engine):
        if setting.default is not dataclasses.MISSING and not setting.name.startswith("num_"):
            setattr(engine, setting.name, setting.default)
    engine.requests.clear()
    engine.cancelled.clear()
    engine.session_calls.clear()
    engine.sessions.clear()
    engine.gate.set()
    yield shared_server
    engine.gate.set()
    wait_for(lambda: not engine.running and not len(shared_server.frontend.open_requests))


@pytest.fixture
def engine(server):
    return server.engine


@pytest.fixture
def own_server(text_parts):
    """Makes servers for one test alone, which may kill their engines."""
    tokenizer, template = text_parts
    made = []

    def make(*, with_tokenizer=True, with_template=True, config=ANY_PORT, **settings):
        limits = {name: settings.pop(name) for name in ("grace_s", "failure_grace_s") if name in settings}
        made.append(
            Server(
                FakeEngine(tokenizer, **settings),
                tokenizer if with_tokenizer else None,
                template if with_template else None,
                config,
                **({"grace_s": 0.2, "failure_grace_s": 0.2} | limits),
            )
        )
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(scope="session")
def chromium():
    command = find_chromium()
    if command is None:
        # Where a browser is asked for by name, as CI does, its absence is a failure.
        missing = pytest.fail if "JAXINFER_CHROMIUM" in os.environ else pytest.skip
        missing(f"no Chromium: {os.environ.get('JAXINFER_CHROMIUM', 'the package chromium')} is not installed")
    with Chromium(command) as browser:
        yield browser


@pytest.fixture
def browse(chromium):
    """Opens pages of one test; at its end none may have complained, or asked another server for anything."""
    opened = []

    def browse(server, ready=READY, **settings):
        page = chromium.open(f"{server.url}/", **settings)
        page.wait_for(ready)
        page.expected_failures = []
        opened.append((server.url, page))
        return page

    yield browse
    for url, page in opened:
        page.evaluate("1")  # what happened until now has been told
        assert page.complaints == []
        assert [asked for asked in page.requests if not asked.startswith(f"{url}/")] == []
        unexpected = [line for line in page.failed_loads if not any(part in line for part in page.expected_failures)]
        assert unexpected == []
