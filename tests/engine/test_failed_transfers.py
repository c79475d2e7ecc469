"""A plan whose transfers fail as they begin: nothing waits for them for ever, and every page comes back."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxinfer.runner.host_pages import HostPages
from jaxinfer.scheduler.plan import Fetch, Offload, Restore, Save
from jaxinfer.types import Request, SessionAction
from tests.engine.drive import GOLDEN, build, check_idle

OPTIONS = {"page_size": 8, "num_pages": 24, "max_num_seqs": 2, "max_num_batched_tokens": 16}
PAGE_GIB = 8 * 1024 / 2**30


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = build(
        GOLDEN / "qwen3",
        kv_host_gib=24 * PAGE_GIB,
        kv_disk_dir=str(tmp_path_factory.mktemp("kv")),
        kv_disk_gib=1,
        **OPTIONS,
    )
    cache = engine._scheduler.cache
    cache.limits = dataclasses.replace(cache.limits, restore_ms=0.0)
    yield engine
    engine.close()


def run(engine, name: str, first: int, stride: int = 7, session_id: str = "") -> tuple[int, ...]:
    """Tokens of a request of 100 tokens. Ends, whatever becomes of it."""
    prompt = tuple((first + stride * i) % 120 for i in range(100))
    engine.submit(Request(request_id=name, prompt_ids=prompt, max_tokens=4, temperature=0.0, session_id=session_id))
    tokens: tuple[int, ...] = ()
    for _ in range(2000):
        if not engine.has_work:
            break
        tokens += tuple(token for event in engine.step() for token in event.token_ids)
        engine._scheduler.check_integrity()
    assert not engine.has_work, "it waits for ever"
    check_idle(engine.stats())
    return tokens


@pytest.mark.parametrize(("kind", "stride"), [(Offload, 7), (Restore, 11), (Save, 13), (Fetch, 17)])
def test_what_a_failed_plan_was_to_move_is_given_up_and_serving_goes_on(engine, monkeypatch, kind, stride):
    expected = run(engine, "first", 1, stride)
    real, num_failed = HostPages._begin, 0

    def begin(self, state, transfer):
        nonlocal num_failed
        if not num_failed and isinstance(transfer, kind):
            num_failed += 1
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        real(self, state, transfer)

    monkeypatch.setattr(HostPages, "_begin", begin)
    for turn in range(3):
        for first in (20, 40, 60, 80, 1):
            run(engine, f"{turn}.{first}", first, stride)
    assert num_failed == 1
    assert run(engine, "again", 1, stride) == expected


def test_a_save_whose_plan_failed_ends_with_an_error(engine, monkeypatch):
    run(engine, "first", 100, session_id="s")

    def begin(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(HostPages, "_begin", begin)
        done = engine.session(SessionAction.SAVE, "s")
        engine.step()
    for _ in range(200):
        engine.step()
    assert done.done() and isinstance(done.exception(), RuntimeError)
    assert not engine.has_work
