"""What a stream sends when its client reads more slowly than tokens come."""

import asyncio

import pytest

from jaxinfer.http.counters import Counters
from jaxinfer.http.errors import problem
from jaxinfer.http.metrics import SequenceTimer, ServerMetrics
from jaxinfer.http.replies import ReplyHead
from jaxinfer.http.streams import Choice, EventStream, Generation, stream_reply
from jaxinfer.text.output import OutputStream
from jaxinfer.types import EngineDead, EngineInfo, FinishReason, Request, SamplingParams, TokenEvent


class Connection:
    """The server's side of a connection; closed, it takes nothing more until it is opened."""

    def __init__(self):
        self.messages = []
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, message):
        await self.open.wait()
        self.messages.append(message)

    @property
    def bodies(self):
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


def run(scenario):
    async def main():
        connection = Connection()
        await scenario(connection, EventStream(connection.send))

    asyncio.run(main())


def test_event_is_sent_before_write_returns():
    async def scenario(connection, stream):
        stream.write(b"a")
        assert [message["type"] for message in connection.messages] == ["http.response.start", "http.response.body"]
        stream.write(b"b")
        assert connection.bodies == [b"a", b"b"]

    run(scenario)


def test_events_that_the_client_does_not_take_wait_and_then_go_out_in_order_and_in_one_piece():
    async def scenario(connection, stream):
        stream.write(b"a")
        connection.open.clear()
        for event in (b"b", b"c", b"d"):
            stream.write(event)
        await asyncio.sleep(0)
        assert connection.bodies == [b"a"]
        connection.open.set()
        await asyncio.sleep(0.01)
        assert connection.bodies == [b"a", b"b", b"cd"]
        stream.write(b"e")
        assert connection.bodies[-1] == b"e"

    run(scenario)


@pytest.mark.parametrize("started", [True, False])
def test_end_comes_after_all_that_waited(started):
    async def scenario(connection, stream):
        if started:
            stream.write(b"a")
        connection.open.clear()
        stream.write(b"b")
        stream.write(b"c")
        asyncio.get_running_loop().call_later(0.01, connection.open.set)
        await stream.end(b"d")
        assert b"".join(connection.bodies) == (b"a" if started else b"") + b"bcddata: [DONE]\n\n"
        assert connection.messages[0]["type"] == "http.response.start"
        assert [message.get("more_body") for message in connection.messages[1:]][-2:] == [True, False]

    run(scenario)


def test_failure_of_a_stream_that_waited_is_told_even_after_its_request_was_cancelled():
    async def scenario(connection, stream):
        stream.write(b"a")
        connection.open.clear()
        stream.write(b"b")
        ending = asyncio.create_task(stream.end())
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        connection.open.set()
        await stream.fail(problem(EngineDead("gone")))
        assert b"the engine stopped: gone" in connection.bodies[-1]
        assert connection.bodies[-1].endswith(b"data: [DONE]\n\n")

    run(scenario)


class ThreeTokens:
    """An engine that answers anything with three tokens, one by one."""

    def submit(self, request, receiver):
        for token in (5, 6, 7):
            reason = FinishReason.LENGTH if token == 7 else None
            event = TokenEvent(request_id=request.request_id, token_ids=(token,), finish_reason=reason)
            asyncio.get_running_loop().call_soon(receiver.push, event)

    def cancel(self, request_id):
        pass


def test_every_token_of_a_model_without_a_tokenizer_is_an_event():
    async def scenario(connection, stream):
        request = Request(request_id="r", prompt_ids=(1, 2), max_tokens=3)
        output = OutputStream(None, request.prompt_ids, SamplingParams())
        sizes = {"max_model_len": 64, "page_size": 16, "num_pages": 8, "max_num_seqs": 8}
        info = EngineInfo(model="m", vocab_size=9, eos_ids=(), sampling_defaults={}, **sizes)
        choice = Choice(0, request, output, SequenceTimer(ServerMetrics("m", Counters(), info), 0.0), "")
        generation = Generation(
            head=ReplyHead("id", 0, "m", False),
            choices=[choice],
            n=1,
            prompt_tokens=2,
            shows_cached=False,
            logprobs=False,
            stream=True,
            include_usage=False,
            continuous_usage=False,
        )
        await stream_reply(ThreeTokens(), generation, stream)
        assert [body.count(b'"text":""') for body in connection.bodies] == [1, 1, 1, 0]

    run(scenario)
