"""A step that fails ends the requests that run with its error; the others, and later ones, get what they always get."""

from __future__ import annotations

import jax
import pytest

from jaxinfer.engine.engine import MAX_FAILURES
from jaxinfer.types import FinishReason
from tests.engine.drive import GOLDEN, build, drive, requests


@pytest.fixture(scope="module")
def engine():
    engine = build(GOLDEN / "qwen3", page_size=8, num_pages=24, max_num_seqs=2, max_num_batched_tokens=16)
    yield engine
    engine.close()


def lose_state(runner) -> None:
    """What a step that fails after its inputs were donated leaves."""
    for array in jax.tree.leaves(runner._state):
        array.delete()


@pytest.mark.parametrize("at", ["launch", "collect"])
def test_what_runs_ends_with_the_error_and_what_waits_is_served(engine, monkeypatch, at):
    expected = drive(engine, requests(4))
    failed_before = engine.stats().num_failed_steps
    runner, steps = engine._runner, 0
    real = getattr(runner, at)

    def fail_once(*args):
        nonlocal steps
        steps += 1
        if steps == 4:
            lose_state(runner)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")
        return real(*args)

    monkeypatch.setattr(runner, at, fail_once)
    found, errors = {request.request_id: [] for request in requests(4)}, {}
    for request in requests(4):
        engine.submit(request)
    while engine.has_work:
        for event in engine.step():
            found[event.request_id] += event.token_ids
            if event.finish_reason is FinishReason.ERROR:
                errors[event.request_id] = event.error
        engine._scheduler.check_integrity()
    assert set(errors) == {"r0", "r1"}  # two slots: the others waited
    message = "the step that computed it failed: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert set(errors.values()) == {message}
    for name in ("r2", "r3"):
        assert found[name] == expected[name].tokens
    assert engine.stats().num_failed_steps == failed_before + 1
    again = drive(engine, requests(4))
    assert {name: output.tokens for name, output in again.items()} == {n: o.tokens for n, o in expected.items()}


def test_nothing_of_before_is_taken_for_cached(engine, monkeypatch):
    drive(engine, requests(1))
    monkeypatch.setattr(engine._runner, "launch", lambda _: 1 / 0)
    engine.submit(requests(1)[0])
    (event,) = engine.step()
    assert event.error == "the step that computed it failed: ZeroDivisionError: division by zero"
    monkeypatch.undo()
    engine.submit(requests(1)[0])
    events = []
    while engine.has_work:
        events += engine.step()
    assert events[0].cached_tokens == 0


def test_an_engine_whose_steps_always_fail_ends(engine, monkeypatch):
    monkeypatch.setattr(engine._runner, "launch", lambda _: 1 / 0)
    for i in range(MAX_FAILURES):
        engine.submit(requests(1)[0])
        assert [event.finish_reason for event in engine.step()] == [FinishReason.ERROR], i
    engine.submit(requests(1)[0])
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.abort("r0")
    while engine.has_work:
        engine.step()
