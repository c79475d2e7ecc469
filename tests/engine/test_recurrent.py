"""States of slots: a sequence has its own from its first token to its last, whatever shares its steps or its slot."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest

from jaxinfer import build as build_module
from jaxinfer.config import ConfigError
from jaxinfer.types import FinishReason, Request
from tests.engine.drive import GOLDEN, build, drive, num_equal

# A pool of 12 pages for four sequences of up to 8 pages each, so that preemption is common.
OPTIONS = {"page_size": 8, "num_pages": 12, "max_num_seqs": 4, "max_num_batched_tokens": 16}
NUM_BATCHES = 8


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.long)])
def engine(request):
    engine = build(GOLDEN / request.param, **OPTIONS)
    yield engine
    engine.close()


def make_batch(seed: int) -> tuple[list[Request], list[int], dict[str, int]]:
    """Requests, the steps at which they arrive, and those at which some are aborted."""
    rng = random.Random(seed)
    requests = [
        Request(
            request_id=str(i),
            prompt_ids=tuple(rng.choices(range(128), k=rng.randint(1, 40))),
            max_tokens=rng.randint(1, 24),
            temperature=0.0,
            logprobs=2,
        )
        for i in range(6)
    ]
    aborts = {str(rng.randrange(6)): rng.randint(0, 30) for _ in range(2)}
    return requests, [rng.randint(0, 15) for _ in requests], aborts


def spoil_slots(engine) -> None:
    """As if the last sequence of every slot had left the worst. Copies of states stay as they are."""
    state, slots = engine._runner._state, engine.info.max_num_seqs + 1
    spoilt = {name: getattr(state, name).at[:, :slots].set(np.nan) for name in ("recurrent", "conv")}
    engine._runner._state = state.replace(**spoilt)


def test_tokens_do_not_depend_on_company_preemption_or_what_a_slot_held(engine):
    before, ties, compared = engine.stats().num_preemptions, 0, 0
    for seed in range(NUM_BATCHES):
        requests, arrivals, aborts = make_batch(seed)
        spoil_slots(engine)
        together = drive(engine, requests, arrivals=arrivals, aborts=aborts)
        for request in requests:
            spoil_slots(engine)
            alone = drive(engine, [request])[request.request_id]
            tokens = together[request.request_id].tokens
            if together[request.request_id].finish_reason != FinishReason.ABORT:
                assert len(tokens) == len(alone.tokens)
            margins = [logprobs.top[0][1] - logprobs.top[1][1] for logprobs in alone.logprobs]
            equal, tied = num_equal(tokens, alone.tokens[: len(tokens)], margins)
            ties, compared = ties + tied, compared + equal
    assert engine.stats().num_preemptions - before >= 3
    assert compared > 300 and ties <= 1


def test_states_lost_with_a_failed_step_are_begun_anew(engine, monkeypatch):
    request = Request(request_id="r", prompt_ids=tuple(range(20)), max_tokens=12, temperature=0.0)
    expected = drive(engine, [request])["r"].tokens
    real, steps = engine._runner.launch, 0

    def fail_once(plan):
        nonlocal steps
        steps += 1
        if steps == 3:
            for array in jax.tree.leaves(engine._runner._state):
                array.delete()
            raise jax.errors.JaxRuntimeError("INTERNAL: lost")
        return real(plan)

    monkeypatch.setattr(engine._runner, "launch", fail_once)
    assert drive(engine, [request])["r"].finish_reason is FinishReason.ERROR
    assert drive(engine, [request])["r"].tokens == expected


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.long)])
def roomy(request):
    """Copies of states every 16 tokens, of which the test needs all places, in a pool with room for conversations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build_module.STATE_TOKENS, "cpu", 16)
        sizes = {"num_pages": 60, "max_num_batched_tokens": 64, "num_state_copies": 4}
        engine = build(GOLDEN / request.param, **OPTIONS | sizes)
    yield engine
    engine.close()


def test_a_prefix_is_used_again_up_to_the_last_copy_of_its_state(roomy):
    prompt = tuple((7 * i) % 120 for i in range(70))

    def run(name: str, ids: tuple[int, ...], num: int = 8) -> tuple[list[int], int]:
        before = roomy.stats().cached_prompt_tokens
        spoil_slots(roomy)
        request = Request(request_id=name, prompt_ids=ids, max_tokens=num, temperature=0.0)
        return drive(roomy, [request])[name].tokens, roomy.stats().cached_prompt_tokens - before

    cold, cached = run("cold", prompt)
    assert cached == 0
    assert run("again", prompt) == (cold, 64)  # of 69 tokens that need not be computed
    answer, _ = run("long answer", prompt, 40)
    assert answer[:8] == cold
    turn = (*prompt, *answer, 5, 6, 7)
    following, cached = run("next turn", turn)
    assert cached == 96  # of 109 with keys and values in the cache: an answer's state is kept as it grows
    fork = (*prompt[:40], 9, 9, 9, *prompt[43:])
    forked, cached = run("fork", fork)
    assert cached == 0  # nobody had stopped there
    other_fork = (*fork[:60], 1, 2)
    again, cached = run("fork again", other_fork)
    assert cached == 32  # now somebody has, in the last of the places
    roomy._scheduler.clear_prefix_cache()
    assert run("cold turn", turn) == (following, 0)
    roomy._scheduler.clear_prefix_cache()
    assert run("cold fork", fork) == (forked, 0)
    roomy._scheduler.clear_prefix_cache()
    assert run("cold other fork", other_fork) == (again, 0)


@pytest.mark.long
def test_without_copies_no_prefix_is_kept():
    engine = build(GOLDEN / "qwen3_5", num_state_copies=0, **OPTIONS)
    request = Request(request_id="r", prompt_ids=tuple(range(30)), max_tokens=4, temperature=0.0)
    first, second = (drive(engine, [request])["r"].tokens for _ in range(2))
    assert first == second
    assert not engine.info.prefix_caching
    assert engine.stats().cached_prompt_tokens == 0
    engine.close()


def test_a_tier_that_could_keep_nothing_is_refused():
    message = "kv_host_gib is 1; Qwen3NextForCausalLM has a recurrent state, whose copies are kept .*: 0 would work"
    with pytest.raises(ConfigError, match=message):
        build(GOLDEN / "qwen3_next", kv_host_gib=1, **OPTIONS)
