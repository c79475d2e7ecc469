"""A step that never ends, and work that nothing comes of, end in errors within their bound; then serving goes on."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import msgspec
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import MAX_FAILURES
from jaxinfer.engine.local import LocalEngine
from jaxinfer.engine.process import EngineProcess
from jaxinfer.runner.runner import StuckStep
from jaxinfer.types import EngineDead, FinishReason
from tests.engine.drive import GOLDEN, build, drive, requests
from tests.engine.test_process import Events

TIMEOUT_S = 0.5
PROGRAM = """
import sys, time
from jaxinfer import engine_process
from jaxinfer.engine import loop
from jaxinfer.runner.runner import ModelRunner

def launch(self, plan):
    time.sleep(1000)

ModelRunner.launch = launch
loop.STEP_MARGIN_S = 0.2
engine_process.main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def engine():
    options = {"num_pages": 24, "max_num_seqs": 2, "max_num_batched_tokens": 16, "step_timeout_s": TIMEOUT_S}
    engine = build(GOLDEN / "qwen3", page_size=8, **options)
    yield engine
    engine.close()


def tokens(outputs) -> dict[str, list[int]]:
    return {name: output.tokens for name, output in outputs.items()}


class NeverReady:
    """An array of a step that hangs."""

    def is_ready(self) -> bool:
        return False

    def __array__(self, *_):
        raise AssertionError("to read it would never return")


def hang(engine, monkeypatch, *, at: int, times: int = 1) -> None:
    """The results of some launches from number `at` on, counted from 1, never come."""
    real, launches = engine._runner.launch, 0

    def launch(plan):
        nonlocal launches
        launches += 1
        in_flight = real(plan)
        return in_flight._replace(tokens=NeverReady()) if at <= launches < at + times else in_flight

    monkeypatch.setattr(engine._runner, "launch", launch)


def run(engine, submitted) -> tuple[dict[str, list[int]], dict[str, str]]:
    found, errors = {request.request_id: [] for request in submitted}, {}
    for request in submitted:
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] += event.token_ids
            if event.finish_reason is FinishReason.ERROR:
                errors[event.request_id] = event.error
        engine._scheduler.check_integrity()
    return found, errors


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_hangs_ends_what_it_held_and_what_waits_is_served(engine, monkeypatch, caplog, at):
    expected, before = tokens(drive(engine, requests(4))), engine.stats()
    hang(engine, monkeypatch, at=at)
    start_s = time.monotonic()
    with caplog.at_level(logging.ERROR):
        found, errors = run(engine, requests(4))
    assert TIMEOUT_S < time.monotonic() - start_s < 8 * TIMEOUT_S
    assert set(errors) == {"r0", "r1"}
    step = before.num_steps + at - 1
    message = f"the step that computed it failed: StuckStep: step {step} was not done within 0.5 s (step_timeout_s)"
    assert set(errors.values()) == {message}
    assert f"step {step} is in flight" in caplog.text and "runs: 'r0', slot " in caplog.text
    assert {name: found[name] for name in ("r2", "r3")} == {name: expected[name] for name in ("r2", "r3")}
    after = engine.stats()
    assert after.num_stuck_steps == before.num_stuck_steps + 1
    monkeypatch.undo()
    assert tokens(drive(engine, requests(4))) == expected


def test_a_device_on_which_every_step_hangs_ends_the_engine(engine, monkeypatch):
    hang(engine, monkeypatch, at=1, times=100)
    for _ in range(MAX_FAILURES):
        assert len(run(engine, requests(1))[1]) == 1
    with pytest.raises(StuckStep):
        run(engine, requests(1))
    monkeypatch.undo()
    engine._in_flight = None
    engine._scheduler.fail("")
    engine._runner.reset()
    drive(engine, requests(1))


def test_work_that_nothing_comes_of_ends_in_errors_those_that_wait_too(engine, monkeypatch, caplog):
    expected, before = tokens(drive(engine, requests(4))), engine.stats()
    for request in requests(4):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    real, looks, events = engine._scheduler.next_plan, 0, []

    def never():
        nonlocal looks
        looks += 1

    monkeypatch.setattr(engine._scheduler, "next_plan", never)
    start_s = time.monotonic()
    with caplog.at_level(logging.ERROR):
        while engine.has_work:
            events += [event for event in engine.step() if event.finish_reason]
    assert TIMEOUT_S < time.monotonic() - start_s < 4 * TIMEOUT_S
    assert looks < 2 * TIMEOUT_S * 1000  # it sleeps
    assert {event.request_id: event.error for event in events} == dict.fromkeys(
        expected, "nothing could be computed for 0.5 s (step_timeout_s)"
    )
    assert "2 sequences run, 2 wait" in caplog.text
    engine._scheduler.check_integrity()
    assert engine.stats().num_stuck_steps == before.num_stuck_steps + 1
    monkeypatch.setattr(engine._scheduler, "next_plan", real)
    assert tokens(drive(engine, requests(4))) == expected


def test_a_pause_shorter_than_the_bound_harms_nobody(engine, monkeypatch):
    expected = tokens(drive(engine, requests(2)))
    real, calls = engine._scheduler.next_plan, 0

    def hesitant():
        nonlocal calls
        calls += 1
        return real() if calls % 50 == 0 else None

    monkeypatch.setattr(engine._scheduler, "next_plan", hesitant)
    assert tokens(drive(engine, requests(2))) == expected


def test_an_engine_in_the_callers_process_is_bounded_as_well(engine, monkeypatch):
    hang(engine, monkeypatch, at=3)
    events = list(LocalEngine(engine).run(requests(3)))
    errors = {event.request_id for event in events if event.error}
    assert errors == {"r0", "r1"}
    assert [event.finish_reason for event in events if event.request_id == "r2"][-1] is FinishReason.LENGTH


def test_a_launch_that_never_returns_ends_the_engines_process_with_the_reason(capfd):
    options = {"page_size": 8, "num_pages": 24, "max_num_seqs": 2, "max_num_batched_tokens": 16, "step_timeout_s": 0.4}
    config = msgspec.json.encode(EngineConfig(model=str(GOLDEN / "qwen3"), compile_cache_dir="", **options)).decode()
    engine = EngineProcess([sys.executable, "-c", PROGRAM, config, "0"])

    async def main():
        events = Events()
        engine.client().submit(requests(1)[0], events)
        with pytest.raises(EngineDead, match="^a step of the engine did not return within 1 s$"):
            await asyncio.wait_for(events.all(), 10)

    try:
        engine.wait_until_ready()
        asyncio.run(main())
    finally:
        engine.close()
    assert "in launch" in capfd.readouterr().err
