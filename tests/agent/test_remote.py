"""A model behind a URL: how replies are read, what is sent, and what each failure is."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from jaxinfer import Agent
from jaxinfer.agent.model import ContextFull, Ending, ModelFailed
from jaxinfer.agent.remote import RemoteModel
from jaxinfer.http.run import ServerThread, bind, in_this_process, url_of
from jaxinfer.http.server import create_app
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.types import InvalidRequest, SamplingParams
from tests.agent.scripted import Call, Thought, Words
from tests.http.conftest import ANY_PORT
from tests.http.fake_engine import FakeEngine

USER = [{"role": "user", "content": "Hello"}]


def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


class Written:
    """A server that answers every chat request with the next of its replies: events, or a status and a body."""

    def __init__(self):
        self.replies, self.requests = [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self._send(200, json.dumps({"data": [{"id": "served"}]}).encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, dict(self.headers), body))
                reply = outer.replies.pop(0)
                if isinstance(reply, tuple):
                    self._send(*reply)
                else:
                    events = [one if isinstance(one, str) else json.dumps(one) for one in reply]
                    self._send(200, "".join(f": note\ndata: {event}\n\n" for event in events).encode())

            def _send(self, status, body):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def written():
    server = Written()
    yield server
    server.close()


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def call_piece(index, **fields):
    id = {"id": fields.pop("id")} if "id" in fields else {}
    return {"index": index, **id, "function": fields}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 30, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 16}},
}


def test_a_streamed_reply_is_read_part_by_part(written):
    written.replies.append(
        [
            delta(role="assistant", content=""),
            delta(reasoning_content="hm"),
            delta(content="Let me"),
            delta(tool_calls=[call_piece(0, id="a", name="double", arguments="")]),
            delta(tool_calls=[call_piece(1, id="b", name="double", arguments='{"number": 2}')]),
            delta(tool_calls=[call_piece(0, arguments='{"num')]),
            delta(tool_calls=[call_piece(0, arguments='ber": 1}')]),
            delta("tool_calls"),
            USAGE,
            "[DONE]",
        ]
    )
    assert list(RemoteModel(written.url).reply(USER, [])) == [
        Thought("hm"),
        Words("Let me"),
        Call(0, "a", "double", '{"number": 1}'),
        Call(1, "b", "double", '{"number": 2}'),
        Ending("tool_calls", 30, 16, 4),
    ]


def test_what_is_sent_is_an_openai_request_with_the_key_and_what_was_set(written):
    written.replies += [[delta("stop", content="hi"), "[DONE]"]] * 2
    agent = Agent(f"{written.url}/v1/", [double], sampling=SamplingParams(temperature=0, max_tokens=9), api_key="k")
    (turn,) = agent.ask("Hello").turns
    assert (turn.prompt_tokens, turn.cached_tokens) == (None, None)
    path, headers, body = written.requests[0]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert body == {
        "model": "served",
        "messages": USER,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": agent.toolbox.definitions(),
        "temperature": 0,
        "max_tokens": 9,
    }
    list(RemoteModel(written.url, model="other").reply(USER, []))
    assert written.requests[1][2]["model"] == "other" and "tools" not in written.requests[1][2]


@pytest.mark.parametrize(
    ("reply", "kind", "told"),
    [
        ((401, b'{"error": {"message": "wrong key"}}'), ModelFailed, "the server answers 401: wrong key"),
        ((503, b"<html>"), ModelFailed, "answers 503: '<html>'"),
        ((400, b'{"error": {"message": "no tools here"}}'), InvalidRequest, "refuses the request: no tools here"),
        ((400, b'{"error": {"message": "x", "code": "context_length_exceeded"}}'), ContextFull, "x"),
        (
            (400, b'{"error": {"message": "This model\'s maximum context length is 9"}}'),
            ContextFull,
            "maximum context length is 9",
        ),
        ([delta(content="half")], ModelFailed, "closed the connection in the middle of a reply"),
        ([delta(content="half"), "[DONE]"], ModelFailed, "ended a reply without a reason"),
        ([{"error": {"message": "out of memory"}}], ModelFailed, "the server failed: out of memory"),
        (["no json"], ModelFailed, "which is no JSON object"),
    ],
)
def test_every_failure_says_what_it_is(written, reply, kind, told):
    written.replies.append(reply)
    with pytest.raises(kind) as caught:
        list(RemoteModel(written.url, model="m").reply(USER, []))
    assert told in str(caught.value)


def test_a_server_that_is_not_there_is_named():
    with bind("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(ModelFailed, match=f"{url}: .*refused"):
        Agent(url).ask("Hello")


def test_wrong_settings_are_refused():
    with pytest.raises(InvalidRequest, match="'localhost:8000' is no URL of a server; write it as http://"):
        RemoteModel("localhost:8000")
    with pytest.raises(InvalidRequest, match="logprobs is not sent to a URL; supported: max_tokens"):
        RemoteModel("http://localhost", SamplingParams(logprobs=1))


@pytest.fixture
def own(qwen3):
    """Our own server, with Qwen3's template and an engine that calls a tool again and again."""
    made = []

    def make(max_model_len=2048):
        tokenizer, config = qwen3
        reply = '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>'
        engine = FakeEngine(tokenizer, reply=reply, end_with_eos=True, max_model_len=max_model_len, prefix_caching=True)
        engine.cached_tokens = {"-0": 5}
        app = create_app(engine, tokenizer, ChatTemplate.from_config(config), ANY_PORT)
        sock = bind("127.0.0.1", 0)
        made.append(ServerThread(url_of(sock), in_this_process(app, sock, grace_s=0.2)).start())
        return made[-1].url

    yield make
    for server in made:
        server.shutdown()


def test_the_loop_runs_against_our_own_server(own):
    answer = Agent(own(), [double], sampling=SamplingParams(temperature=0), max_turns=3).ask("Twice 4?")
    assert [ended.result.text for ended in answer.calls[:2]] == ["8", "8"]
    assert (answer.finish, [turn.cached_tokens for turn in answer.turns]) == ("max_turns", [5, 5, 5])
    assert answer.turns[0].prompt_tokens < answer.turns[1].prompt_tokens < answer.turns[2].prompt_tokens


def test_a_context_that_our_own_server_finds_full_is_shortened(own):
    def read(number: int) -> str:
        """Reads a lot."""
        return "word " * 300 * number

    read.__name__ = "double"
    agent = Agent(own(max_model_len=1500), [read], sampling=SamplingParams(temperature=0, max_tokens=60), max_turns=3)
    answer = agent.ask("Read.")
    assert answer.finish == "max_turns"
    assert "the context is full: shortened an output of double from 6000 to 200 characters" in answer.notices[0]
