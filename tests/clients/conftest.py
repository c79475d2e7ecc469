"""What other people's clients ask: the embedded default model, and an engine that says what a test wants."""

import httpx
import pytest

from tests.api.test_serve import MESSAGES, MODEL
from tests.api.test_serve_process import Serving
from tests.http.test_tools import make_server


class Model:
    """The default model's server, and what it answers to plain HTTP."""

    def __init__(self, url):
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120)
        self.text = self.chat(max_tokens=12)["message"]["content"]
        """The greedy answer to MESSAGES, 12 tokens of it."""
        assert "," in self.text

    def chat(self, **body):
        body = {"model": MODEL, "messages": MESSAGES, "temperature": 0} | body
        return self.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients")
    flags = ("--max-model-len", "256", "--max-num-seqs", "4", "--enable-prompt-logprobs")
    flags += ("--compile-cache-dir", str(folder / "compiled"))
    serving = Serving(folder / "log", MODEL, *flags, XLA_FLAGS="")
    try:
        model = Model(serving.wait_until_ready().url)
        yield model
        model.http.close()
    finally:
        serving.close()


@pytest.fixture(scope="session")
def shared_script():
    server = make_server(added=["<think>", "<tool_call>"])
    server.engine.end_with_eos = True
    yield server
    server.close()


@pytest.fixture
def script(shared_script):
    """A server whose model says `script.engine.reply` and ends its turn; its name is models/fake."""
    shared_script.engine.requests.clear()
    return shared_script
