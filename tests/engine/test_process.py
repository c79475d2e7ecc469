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
from jaxinfer.engine.loop import engine_main
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

engine_main(sys.argv[1], Echo)
"""
HANGS = 10**4  # max_tokens of a request whose step never returns
HANGING = (
    PROGRAM.replace(
        "ended = ", f"[time.sleep(999) for r in self.requests.values() if r.max_tokens == {HANGS}]; ended = "
    )
    .replace("import sys", "import sys, time\nfrom jaxinfer.engine import loop\nloop.STEP_MARGIN_S = 0.2")
    .replace("Echo)", "Echo, step_timeout_s=0.2)")
)
"""The same, with a watchdog that allows a step 0.6 s."""
ENDLESS = 10**6  # max_tokens of a request that the engine never ends


@pytest.fixture
def start():
    """Starts the engine's process for a number of front ends."""
    started = []

    def start(num_front_ends=1, program=PROGRAM):
        started.append(EngineProcess([sys.executable, "-c", program], num_front_ends))
        started[-1].wait_until_ready()
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture
def process_and_client(start):
    process = start()
    return process, process.client()


def request(name, *, num_prompt=3, max_tokens=1):
    return Request(request_id=name, prompt_ids=(7,) * num_prompt, max_tokens=max_tokens)


class Events:
    """A receiver whose events can be awaited."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def push(self, event):
        self.queue.put_nowait(event)

    def fail(self, error):
        self.queue.put_nowait(error)

    async def all(self):
        events = []
        while not events or events[-1].finish_reason is None:
            event = await self.queue.get()
            if isinstance(event, Exception):
                raise event
            events.append(event)
        return events


async def run(engine, request):
    events = Events()
    engine.submit(request, events)
    try:
        return await events.all()
    finally:
        engine.cancel(request.request_id)


def unready():
    """An engine that is never built, and deaf to its owner as while it loads JAX."""
    return EngineProcess([sys.executable, "-c", "import time; time.sleep(100)"])


def test_engine_that_is_not_ready_is_ended_at_once():
    engine = unready()
    start_s = time.monotonic()
    engine.close()
    assert engine.exit_code == -signal.SIGKILL and time.monotonic() - start_s < 2
    assert engine.failure == "the engine was shut down (exit code -9)"


def test_what_fails_elsewhere_ends_the_waiting_for_the_engine():
    engine, calls = unready(), []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise ZeroDivisionError

    start_s = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        engine.wait_until_ready(check)
    assert time.monotonic() - start_s < 2
    engine.close()


def test_engine_that_stands_still_does_not_stop_the_event_loop_and_then_answers_all(process_and_client):
    owner, engine = process_and_client

    async def main():
        os.kill(owner.pid, signal.SIGSTOP)
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
            os.kill(owner.pid, signal.SIGCONT)
        for (event,) in await asyncio.wait_for(asyncio.gather(*runs), 30):
            assert tuple(event.token_ids) == (7, 7, 7) and event.finish_reason is FinishReason.LENGTH
        assert (await engine.stats()).num_running == 0

    asyncio.run(main())


def test_engine_that_stands_still_is_ended_at_close_and_its_streams_are_told(process_and_client, monkeypatch):
    owner, engine = process_and_client
    monkeypatch.setattr(process, "CLOSE_TIMEOUT_S", 0.3)

    async def main():
        os.kill(owner.pid, signal.SIGSTOP)
        runs = [asyncio.create_task(run(engine, request(str(i), num_prompt=100_000))) for i in range(50)]
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.to_thread(owner.close), 5)
        for error in await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 5):
            assert isinstance(error, EngineDead)

    asyncio.run(main())


def test_second_request_of_one_id_is_refused_and_the_first_goes_on(process_and_client):
    _, engine = process_and_client

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


def test_events_of_a_request_go_to_its_front_end_alone_even_under_one_id(start):
    process = start(2)
    clients = [process.client(), process.client()]

    async def main():
        first = asyncio.create_task(run(clients[0], request("a", max_tokens=ENDLESS)))
        await asyncio.sleep(0.05)
        (refused,) = await run(clients[1], request("a"))
        assert refused.finish_reason is FinishReason.ERROR and "'a' is unfinished" in refused.error
        (event,) = await run(clients[1], request("b", num_prompt=1))
        assert tuple(event.token_ids) == (7,) and event.request_id == "b"
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        for client in clients:
            assert (await client.stats()).num_running == 0

    asyncio.run(main())


def test_front_end_that_is_gone_takes_its_requests_and_no_others(start):
    process = start(2)
    leaves, stays = process.client(), process.client()

    async def main():
        runs = [asyncio.create_task(run(leaves, request(str(i), max_tokens=ENDLESS))) for i in range(3)]
        kept = asyncio.create_task(run(stays, request("kept", max_tokens=ENDLESS)))
        await asyncio.sleep(0.05)
        assert (await stays.stats()).num_running == 4
        leaves.close()
        while (await stays.stats()).num_running != 1:
            await asyncio.sleep(0.005)
        assert not kept.done() and len(await run(stays, request("new"))) == 1
        for task in [*runs, kept]:
            task.cancel()
        await asyncio.gather(*runs, kept, return_exceptions=True)

    asyncio.run(main())


def test_front_end_that_reads_nothing_does_not_hold_up_the_engine_and_gets_all_later(start):
    process = start(2)
    (slow, quick) = (process.client(), process.client())

    async def main():
        receivers = [Events() for _ in range(20_000)]  # 1 MB of events: more than a socket holds
        for i, receiver in enumerate(receivers):
            slow.submit(request(str(i)), receiver)
        asyncio.get_running_loop().remove_reader(slow._channel.fileno())
        for i in range(100):
            assert len(await asyncio.wait_for(run(quick, request(f"q{i}")), 5)) == 1
        asyncio.get_running_loop().add_reader(slow._channel.fileno(), slow._read)
        for receiver in receivers:
            assert len(await asyncio.wait_for(receiver.all(), 10)) == 1

    asyncio.run(main())


def test_fault_in_one_stream_ends_it_alone(process_and_client):
    _, engine = process_and_client

    class Broken(Events):
        def push(self, event):
            raise ZeroDivisionError(event.request_id)

    async def main():
        broken = Broken()
        engine.submit(request("broken"), broken)
        assert len(await run(engine, request("whole"))) == 1
        with pytest.raises(ZeroDivisionError, match="broken"):
            await broken.all()

    asyncio.run(main())


def test_end_of_the_owner_ends_the_engine_with_all_its_front_ends(start):
    process = start(2)
    clients = [process.client(), process.client()]

    async def main():
        runs = [
            asyncio.create_task(run(client, request("a" * (i + 1), max_tokens=ENDLESS)))
            for i, client in enumerate(clients)
        ]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(process.close)
        for error in await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 5):
            assert isinstance(error, EngineDead) and str(error) == "the engine was shut down (exit code 0)"

    asyncio.run(main())


def test_engine_whose_step_never_returns_says_so_to_all_its_streams_and_ends(start, capfd):
    process = start(2, HANGING)
    clients = [process.client(), process.client()]
    reason = "a step of the engine did not return within 0.6 s"

    async def main():
        assert len(await run(clients[0], request("quick"))) == 1
        start_s = time.monotonic()
        runs = [asyncio.create_task(run(clients[0], request("kept", max_tokens=ENDLESS)))]
        await asyncio.sleep(0.05)
        runs.append(asyncio.create_task(run(clients[1], request("hangs", max_tokens=HANGS))))
        for error in await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 5):
            assert isinstance(error, EngineDead) and str(error) == reason
        assert time.monotonic() - start_s > 0.6
        assert process.failure == reason

    asyncio.run(main())
    shown = capfd.readouterr().err
    assert f"{reason}; this is what its threads do:" in shown and "in step" in shown


def test_engine_that_was_stopped_for_longer_than_a_step_may_take_has_not_hung(start):
    process = start(1, HANGING.replace("sleep(999)", "sleep(0.4)"))
    engine = process.client()

    async def main():
        hanging = asyncio.create_task(run(engine, request("hangs", max_tokens=HANGS)))
        await asyncio.sleep(0.1)
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(1)
        os.kill(process.pid, signal.SIGCONT)
        assert len(await asyncio.wait_for(hanging, 5)) == 1

    asyncio.run(main())
