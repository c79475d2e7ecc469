"""The channel to an engine in a process of its own; the engine at its other end echoes prompts."""

import asyncio
import os
import signal
import sys
import time

import pytest

from jaxinfer.engine import process
from jaxinfer.engine.process import EngineProcess
from jaxinfer.types import EngineDead, FinishReason, InvalidRequest, Request

PROGRAM = """
import sys
from jaxinfer.engine.process import engine_main
from jaxinfer.types import EngineInfo, EngineStats, FinishReason, TokenEvent

class Echo:
    info = EngineInfo(model="echo", max_model_len=10**6, vocab_size=10, eos_ids=(), sampling_defaults={}, page_size=8,
                      num_pages=8, max_num_seqs=8)
    def __init__(self):
        self.requests = {}
    @property
    def has_work(self):
        return any(request.max_tokens < 10**5 for request in self.requests.values())
    def submit(self, request):
        self.requests[request.request_id] = request
    def abort(self, request_id):
        self.requests.pop(request_id, None)
    def step(self):
        ended = [request for request in self.requests.values() if request.max_tokens < 10**5]
        for request in ended:
            del self.requests[request.request_id]
        return [TokenEvent(r.request_id, tuple(r.prompt_ids[:3]), None, FinishReason.LENGTH) for r in ended]
    def stats(self):
        return EngineStats(num_running=len(self.requests))

engine_main(int(sys.argv[1]), Echo)
"""
ENDLESS = 10**6  # max_tokens of a request that the engine never ends


@pytest.fixture
def engine():
    engine = EngineProcess([sys.executable, "-c", PROGRAM])
    yield engine
    engine.close()


def request(name, *, num_prompt=3, max_tokens=1):
    return Request(request_id=name, prompt_ids=(7,) * num_prompt, max_tokens=max_tokens)


async def run(engine, request):
    return [event async for event in engine.generate(request)]


def test_engine_that_stands_still_does_not_stop_the_event_loop_and_then_answers_all(engine):
    async def main():
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            start_s = time.monotonic()
            # 5 MB: many times what a socket holds.
            runs = [asyncio.create_task(run(engine, request(str(i), num_prompt=100_000))) for i in range(50)]
            await asyncio.sleep(0.1)
            runs.pop().cancel()
            await asyncio.sleep(0.1)
            assert time.monotonic() - start_s < 5
            assert not any(task.done() for task in runs)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        for (event,) in await asyncio.wait_for(asyncio.gather(*runs), 30):
            assert tuple(event.token_ids) == (7, 7, 7) and event.finish_reason is FinishReason.LENGTH
        assert (await engine.stats()).num_running == 0

    asyncio.run(main())


def test_engine_that_stands_still_is_ended_at_close_and_its_streams_are_told(engine, monkeypatch):
    monkeypatch.setattr(process, "CLOSE_TIMEOUT_S", 0.3)

    async def main():
        os.kill(engine.pid, signal.SIGSTOP)
        runs = [asyncio.create_task(run(engine, request(str(i), num_prompt=100_000))) for i in range(50)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.to_thread(engine.close), 5)
        for error in await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 5):
            assert isinstance(error, EngineDead)

    asyncio.run(main())


def test_second_request_of_one_id_is_refused_and_the_first_goes_on(engine):
    async def main():
        first = asyncio.create_task(run(engine, request("a", max_tokens=ENDLESS)))
        await asyncio.sleep(0.05)
        with pytest.raises(InvalidRequest, match="'a' is unfinished; ids must differ"):
            await run(engine, request("a"))
        assert (await engine.stats()).num_running == 1
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (await engine.stats()).num_running == 0
        assert len(await run(engine, request("a"))) == 1

    asyncio.run(main())
