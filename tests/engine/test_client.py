"""What a front end makes of the engine's messages; the test is the engine."""

import asyncio
import socket

import pytest

from jaxinfer.engine.channel import Channel, Step
from jaxinfer.engine.client import EngineClient
from jaxinfer.types import EngineInfo, FinishReason, Request, TokenEvent

INFO = EngineInfo(
    model="none",
    max_model_len=64,
    vocab_size=9,
    eos_ids=(),
    sampling_defaults={},
    page_size=8,
    num_pages=8,
    max_num_seqs=8,
)


class Seen:
    """A receiver that adds what it is told to a list that all streams share."""

    def __init__(self, name, seen):
        self.name = name
        self.seen = seen

    def push(self, event):
        self.seen.append((self.name, *event.token_ids, *([event.finish_reason] if event.finish_reason else [])))

    def fail(self, error):
        self.seen.append((self.name, error))


@pytest.fixture
def run():
    """Runs a scenario with streams 0 to 2, what they saw, and the engine's end of the channel."""

    def run(scenario):
        async def main():
            ours, theirs = socket.socketpair()
            client, engine, seen = EngineClient(theirs, INFO, lambda: None), Channel(ours), []
            for name in range(3):
                client.submit(Request(request_id=str(name), prompt_ids=(1,), max_tokens=9), Seen(name, seen))
            try:
                await scenario(client, engine, seen)
            finally:
                engine.close()
                client.close()
                await asyncio.sleep(0.01)

        asyncio.run(main())

    return run


def test_first_tokens_of_a_step_come_before_the_others(run):
    async def scenario(_client, engine, seen):
        engine.put(Step([0], [5], []))
        await asyncio.sleep(0.01)
        engine.put(Step([0, 1, 2], [6, 7, 8], []))
        await asyncio.sleep(0.01)
        assert seen == [(0, 5), (1, 7), (2, 8), (0, 6)]

    run(scenario)


def test_first_tokens_that_tell_more_come_before_the_others_too(run):
    async def scenario(_client, engine, seen):
        engine.put(Step([0], [5], []))
        await asyncio.sleep(0.01)
        cached = TokenEvent("", (8,), cached_tokens=16)
        last = TokenEvent("", (9,), None, FinishReason.LENGTH)
        engine.put(Step([1], [7], [(0, last), (2, cached)]))
        await asyncio.sleep(0.01)
        assert seen == [(0, 5), (1, 7), (2, 8), (0, 9, "length")]

    run(scenario)


def test_steps_that_arrive_together_keep_the_order_of_every_stream(run):
    async def scenario(_client, engine, seen):
        for tokens in ([1], [2, 1], [3, 2, 1], [4, 3, 2]):
            engine.put(Step(list(range(len(tokens))), tokens, []))
        engine.put(Step([], [], [(1, TokenEvent("", (4,), None, FinishReason.LENGTH))]))
        await asyncio.sleep(0.02)
        of = {name: [tuple(rest) for other, *rest in seen if other == name] for name in range(3)}
        assert of == {0: [(1,), (2,), (3,), (4,)], 1: [(1,), (2,), (3,), (4, "length")], 2: [(1,), (2,)]}

    run(scenario)


def test_stream_that_is_cancelled_between_its_tokens_sees_no_more(run):
    async def scenario(client, engine, seen):
        engine.put(Step([0], [5], []))
        await asyncio.sleep(0.01)

        class CancelsAnother(Seen):
            def push(self, event):
                super().push(event)
                client.cancel("0")

        client.submit(Request(request_id="3", prompt_ids=(1,), max_tokens=9), CancelsAnother(3, seen))
        engine.put(Step([0, 3], [6, 7], []))
        engine.put(Step([0, 3], [7, 8], []))
        await asyncio.sleep(0.01)
        assert seen == [(0, 5), (3, 7), (3, 8)]

    run(scenario)
