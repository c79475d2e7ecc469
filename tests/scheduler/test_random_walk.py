"""Whatever is submitted and aborted, whenever, in however small a pool: no request can tell that it was not alone."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from jaxinfer.types import InvalidRequest, SessionInfo
from tests.scheduler.fake_device import VOCAB
from tests.scheduler.harness import Harness, random_times

SESSIONS = ("s", "t", "u")
ACTIONS = ("save", "load", "delete")


def random_limits(rng: random.Random) -> dict[str, Any]:
    """From one slot and a pool of one page to comfort, so that preemption is common. Half of them have a host tier.

    And half have times of steps, by which these are cut."""
    num_seqs = rng.choice([1, 2, 3, 5, 8])
    max_mixed = num_seqs + rng.choice([0, 1, 3, 9])
    limits = {
        "page_size": rng.choice([1, 2, 4, 8]),
        "num_pages": rng.choice([1, 3, 7, 12, 20, 60]),
        "max_num_seqs": num_seqs,
        "max_mixed_tokens": max_mixed,
        "calm_mixed_tokens": rng.choice([None, 1, max_mixed]),
        "max_step_tokens": rng.choice([1, 4, 11, 32]),
        "max_model_len": rng.choice([9, 30, 64]),
        "prefix_caching": rng.choice([False, True, True]),
    }
    if limits["prefix_caching"] and rng.random() < 0.7:
        limits |= {
            "num_frames": rng.choice([1, 2, 5, 30]),
            "frame_pages": rng.choice([1, 2, 4]),
            "restore_ms": rng.choice([0.0, 3.0]),
            "compute_ms": rng.choice([0.0, 1.0, 9.0]),
            "num_disk_pages": rng.choice([0, 0, 4, 50]),
            "long_tokens": rng.choice([0, 0, 9, 40]),
            "long_chunk": rng.choice([1, 5]),
        }
    elif limits["prefix_caching"]:
        interval = limits["page_size"] * rng.choice([1, 2])
        limits |= rng.choice([{}, {"state_tokens": interval, "num_states": rng.choice([0, 1, 3, 20])}])
    if rng.random() < 0.5:
        limits |= random_times(rng, num_seqs, max(max_mixed, limits["max_step_tokens"]))
    return limits


def familiar_prompt(harness: Harness, rng: random.Random) -> list[int]:
    """A prompt that begins as an earlier request: the same, with a token more, cut and continued, or its next turn."""
    name = rng.choice([*harness.requests])
    prompt = list(harness.requests[name].prompt_ids)
    turn = prompt + harness.output(name)
    some = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
    fork = turn[: rng.randint(0, len(turn))] + some
    return rng.choice([prompt, prompt + some[:1], fork, fork, turn + some])[: harness.limits.max_model_len - 1]


def submit_random(harness: Harness, name: str, rng: random.Random, num_stop_ids: int | None = None) -> bool:
    """False if the request could never fit the pool; it must then have left no trace."""
    max_tokens = rng.choice([1, 2, 3, 7, 20, 40])
    num_stop_ids = rng.choice([0, 0, 1, 3]) if num_stop_ids is None else num_stop_ids
    longest = rng.choice([3, 8, harness.limits.max_model_len - 1])  # short prompts with long outputs make pools tight
    prompt = familiar_prompt(harness, rng) if harness.requests and rng.random() < 0.6 else None
    try:
        harness.submit(
            name,
            rng.randint(1, longest),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            stop_ids=tuple(rng.sample(range(VOCAB), num_stop_ids)),
            logprobs=rng.choice([None, None, 0, 2]),
            cache_salt=rng.choice(["", "", "", "pepper"]),
            priority=rng.choice([0, 0, 0, -1, 2]),
            session_id=rng.choice(["", *SESSIONS]),
            **({} if prompt is None else {"prompt_ids": prompt}),
        )
    except InvalidRequest as error:
        assert "pages of" in str(error)
        return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_scheduling_never_changes_the_output(seed: int):
    rng = random.Random(seed)
    harness = Harness(seed=seed, damaged_share=rng.choice([0, 0.3]), **random_limits(rng))
    load, abort_share, read_early_share = rng.choice([0.1, 0.5, 2.0]), rng.choice([0, 0.05]), rng.choice([0, 0.3])
    lost_share, session_share = rng.choice([0, 0.05]), rng.choice([0, 0.1, 0.5])
    for turn in range(150):
        for i in range(int(load + rng.random())):
            submit_random(harness, f"{turn}.{i}", rng)
        if harness.requests and rng.random() < abort_share:
            harness.abort(rng.choice([*harness.requests]))
        if rng.random() < 0.01:
            harness.scheduler.clear_prefix_cache()
        if rng.random() < session_share:
            harness.session(rng.choice(ACTIONS), rng.choice(SESSIONS))
        if harness.results and rng.random() < lost_share:
            harness.lose_state([slot for slot in range(8) if rng.random() < 0.3])
        harness.step()
        if harness.results and rng.random() < read_early_share:
            harness.apply()
    harness.drain()


def test_the_random_walks_preempt_and_waste_rows():
    """Guards the walks above against growing tame: what they are for must happen in them."""
    num_preemptions = num_wasted = 0
    for seed in range(10):
        rng = random.Random(seed)
        harness = Harness(num_pages=12, max_num_seqs=5)
        for i in range(40):
            submit_random(harness, str(i), rng)
        harness.drain()
        num_preemptions += harness.scheduler.num_preemptions
        num_sampled = sum(len(p.decodes) + sum(c.samples for c in p.prefills) for p in harness.plans)
        num_wasted += num_sampled - harness.scheduler.generation_tokens
    assert num_preemptions > 20
    assert num_wasted > 20


def test_the_random_walks_begin_with_states_that_were_kept():
    """Likewise: of those that begin alike, some begin with a state of a prompt's end, a fork, or a former answer."""
    num_kept = num_begun = num_cached = 0
    for seed in range(10):
        rng = random.Random(seed)
        harness = Harness(seed=seed, prefix_caching=True, state_tokens=4, num_states=20, num_pages=60, page_size=2)
        for i in range(40):
            submit_random(harness, str(i), rng)
            harness.step()
        harness.drain()
        num_kept += sum(len(plan.kept_states) for plan in harness.plans)
        num_begun += sum(len(plan.prefixes) for plan in harness.plans)
        num_cached += harness.scheduler.cached_prompt_tokens
    assert num_kept > 500 and num_begun > 20 and num_cached > 150, (num_kept, num_begun, num_cached)


MUST_HAPPEN = (
    *("Offload", "Restore", "Save", "Fetch", "Delete", "restoring", "long"),
    *("SaveSession", "DeleteSession", "saved", "not saved", "session 's' is being saved"),
)


def test_the_random_walks_use_all_tiers():
    """Likewise: pages go to the host and to disk and come back, some damaged, and sequences wait for them."""
    kinds: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        harness = Harness(seed=seed, damaged_share=0.2, num_pages=12, num_frames=4, frame_pages=2, compute_ms=1.0)
        limits = dataclasses.replace(
            harness.limits, prefix_caching=True, num_disk_pages=40, long_tokens=9, long_chunk=4
        )
        harness = Harness(seed=seed, damaged_share=0.2, **dataclasses.asdict(limits))
        for i in range(60):
            submit_random(harness, str(i), rng)
            harness.session(rng.choice(["save", "save", "load", "delete"]), rng.choice(SESSIONS))
            harness.step()
            kinds["restoring"] += harness.scheduler.num_restoring
        harness.drain()
        kinds.update(type(transfer).__name__ for plan in harness.plans for transfer in plan.transfers)
        kinds["long"] += sum(plan.long is not None for plan in harness.plans)
        kinds.update("saved" if isinstance(found, SessionInfo) else "not saved" for _, found in harness.outcomes)
        kinds.update(harness.refused.keys())
    assert all(kinds[name] > 20 for name in MUST_HAPPEN), kinds


class Client(RuleBasedStateMachine):
    """Submits, aborts and steps in any order; Hypothesis looks for the shortest order that breaks a promise."""

    @initialize(seed=st.integers(0, 10_000))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.harness = Harness(seed=seed, damaged_share=0.2, **random_limits(self.rng))

    @rule()
    def submit(self) -> None:
        submit_random(self.harness, f"r{len(self.harness.requests)}", self.rng)

    @rule(i=st.integers(0, 30))
    def abort(self, i: int) -> None:
        self.harness.abort(f"r{i}")

    @rule(slots=st.sets(st.integers(0, 4)))
    def lose_state(self, slots: set[int]) -> None:
        if self.harness.results:
            self.harness.lose_state(slots)

    @rule(action=st.sampled_from(ACTIONS), session_id=st.sampled_from(SESSIONS))
    def session(self, action: str, session_id: str) -> None:
        self.harness.session(action, session_id)

    @rule()
    def clear_cache(self) -> None:
        self.harness.scheduler.clear_prefix_cache()
        self.harness.scheduler.check_integrity()

    @rule(num=st.integers(1, 5))
    def step(self, num: int) -> None:
        for _ in range(num):
            self.harness.step()

    @rule()
    def read_early(self) -> None:
        if self.harness.results:
            self.harness.apply()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


def test_no_order_of_submits_aborts_and_losses_breaks_a_promise():
    run_state_machine_as_test(
        Client,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
