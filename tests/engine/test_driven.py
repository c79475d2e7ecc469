"""DrivenEngine: every request ends in an event, whatever the engine does."""

from __future__ import annotations

import asyncio

import pytest

from jaxinfer.engine.driven import DrivenEngine
from jaxinfer.types import EngineDead, QueueFull, Request
from tests.engine.test_local import CountingEngine


class Receiver:
    def __init__(self):
        self.events, self.error = [], None
        self.ended = asyncio.Event()

    def push(self, event):
        self.events.append(event)
        if event.finish_reason is not None:
            self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()


def request(name, max_tokens=3):
    return Request(request_id=name, prompt_ids=[1], max_tokens=max_tokens)


def run(engine, use):
    """`use(handle)` while the engine is driven."""

    async def both():
        driving = asyncio.create_task(engine.drive())
        try:
            await asyncio.wait_for(use(engine), 10)
        finally:
            driving.cancel()

    asyncio.run(both())


def test_requests_run_side_by_side_and_an_idle_engine_is_not_stepped():
    counting = CountingEngine()
    engine = DrivenEngine(counting)

    async def use(handle):
        receivers = [Receiver() for _ in range(3)]
        for number, receiver in enumerate(receivers):
            handle.submit(request(f"r{number}", 2 + number), receiver)
        for receiver in receivers:
            await receiver.ended.wait()
        assert [sum(len(e.token_ids) for e in receiver.events) for receiver in receivers] == [2, 3, 4]
        steps = counting.num_steps
        await asyncio.sleep(0.02)
        assert counting.num_steps == steps
        late = Receiver()
        handle.submit(request("late"), late)
        await late.ended.wait()

    run(engine, use)


def test_a_request_that_is_refused_or_cancelled_gets_no_events():
    counting = CountingEngine(num_slots=1)
    engine = DrivenEngine(counting)

    async def use(handle):
        receivers = [Receiver() for _ in range(3)]
        for number, receiver in enumerate(receivers):
            handle.submit(request(f"r{number}"), receiver)
        with pytest.raises(QueueFull):
            handle.submit(request("r3"), Receiver())
        handle.cancel("r1")
        handle.cancel("r3")
        await receivers[0].ended.wait()
        await receivers[2].ended.wait()
        assert receivers[1].events == []
        assert counting.aborted == ["r1"]

    run(engine, use)


def test_an_error_of_the_engine_ends_every_request_and_refuses_further_ones():
    counting = CountingEngine()
    engine = DrivenEngine(counting)

    def broken():
        raise RuntimeError("CUDA error 700")

    counting.step = broken

    async def use(handle):
        receivers = [Receiver() for _ in range(2)]
        for number, receiver in enumerate(receivers):
            handle.submit(request(f"r{number}"), receiver)
        for receiver in receivers:
            await receiver.ended.wait()
            assert isinstance(receiver.error, EngineDead)
            assert str(receiver.error) == "RuntimeError: CUDA error 700"
        with pytest.raises(EngineDead, match="CUDA error 700"):
            handle.submit(request("r2"), Receiver())

    run(engine, use)
    assert engine.failure == "RuntimeError: CUDA error 700"


def test_closing_ends_what_runs_before_the_device_goes():
    counting = CountingEngine()
    closed_with = []
    counting.close = lambda: closed_with.append(dict(counting.unfinished))
    engine = DrivenEngine(counting)
    engine.submit(request("r0", 100), object())
    engine.close()
    assert (counting.aborted, closed_with) == (["r0"], [{}])
