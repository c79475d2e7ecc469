"""A pool that runs dry: the youngest gives way, is computed again, and its client cannot tell."""

import pytest

from jaxinfer.scheduler.plan import StepPlan
from jaxinfer.types import FinishReason
from tests.scheduler.harness import Harness


def run_until_preempted(harness: Harness) -> StepPlan:
    """The plan that preempted for the first time; its predecessor is in flight then."""
    while True:
        plan = harness.plan()
        assert plan is not None
        if harness.scheduler.num_preemptions:
            return plan
        if len(harness.results) == 2:
            harness.apply()


def tight() -> Harness:
    """Two sequences of 4 tokens that grow to 32 in 10 pages of 4: together they need 16."""
    harness = Harness(num_pages=10, max_num_seqs=2, max_mixed_tokens=8)
    harness.submit("old", 4, max_tokens=28)
    harness.submit("young", 4, max_tokens=28)
    return harness


def test_the_youngest_gives_way_and_the_oldest_advances_in_the_same_step():
    harness = tight()
    plan = run_until_preempted(harness)
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (1, 1)
    assert [row.slot for row in plan.decodes] == [0]
    harness.drain()


def test_a_preempted_sequence_emits_nothing_twice_and_loses_nothing():
    harness = tight()
    harness.drain()
    assert harness.scheduler.num_preemptions >= 1
    assert [len(harness.output(name)) for name in ("old", "young")] == [28, 28]


def test_a_preempted_sequence_takes_its_token_in_flight_while_it_waits_and_returns_with_it():
    harness = tight()
    run_until_preempted(harness)
    before = len(harness.output("young"))
    harness.apply()
    assert len(harness.output("young")) == before + 1
    assert harness.scheduler.num_waiting == 1
    harness.drain()
    again = [c for p in harness.plans for c in p.prefills if c.request.request_id == "young" and c.history][1]
    assert again.prompt_len == 4
    assert again.history is not None
    assert list(again.history[4:]) == harness.output("young")[: len(again.history) - 4]
    assert len(again.history) == 4 + before + 1


def test_a_preempted_sequence_is_not_admitted_before_its_token_in_flight_is_known():
    harness = tight()
    run_until_preempted(harness)
    harness.abort("old")  # all pages are free, but the token of the young one is still on the device
    harness.apply()
    assert len(harness.results) == 1
    known = len(harness.output("young"))
    plan = harness.plan()
    assert plan is not None
    assert plan.prefills[0].history is not None
    assert len(plan.prefills[0].history) == 4 + known
    harness.drain()


def test_a_preempted_sequence_returns_before_those_that_never_ran():
    harness = tight()
    harness.submit("new", 1, max_tokens=1)
    harness.drain()
    order = [c.request.request_id for plan in harness.plans for c in plan.prefills if c.history]
    assert order == ["old", "young", "young", "new"]


def test_several_preempted_sequences_return_in_the_order_of_their_admission():
    harness = Harness(num_pages=12, max_num_seqs=3)
    for name in "abc":
        harness.submit(name, 4, max_tokens=40)
    harness.drain()
    order = [c.request.request_id for plan in harness.plans for c in plan.prefills if c.history]
    assert order[:3] == ["a", "b", "c"]
    assert harness.scheduler.num_preemptions >= 2
    ends = [
        max(i for i, p in enumerate(harness.plans) if any(c.request.request_id == n for c in p.prefills)) for n in "abc"
    ]
    assert ends == sorted(ends)


def test_the_youngest_gives_way_even_if_it_is_the_one_that_needs_the_page():
    harness = Harness(num_pages=10, max_num_seqs=2, max_mixed_tokens=8)
    harness.submit("old", 4, max_tokens=28)
    harness.submit("young", 5, max_tokens=28)  # reaches the end of its page first
    plan = run_until_preempted(harness)
    assert [row.slot for row in plan.decodes] == [0]
    assert plan.decodes[0].new_page is None
    harness.drain()


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_preempted_sequence_may_end_with_its_token_in_flight(reason: FinishReason):
    probe = tight()
    run_until_preempted(probe)
    length = len(probe.output("young")) + 1
    harness = Harness(num_pages=10, max_num_seqs=2, max_mixed_tokens=8)
    harness.submit("old", 4, max_tokens=28)
    stop = {"min_tokens": length - 1, "stop_ids": tuple(range(12))}  # all ids but one
    harness.submit("young", 4, **(stop | {"max_tokens": 28} if reason is FinishReason.STOP else {"max_tokens": length}))
    run_until_preempted(harness)
    while harness.results:
        harness.apply()
    assert harness.events["young"][-1].finish_reason is reason
    assert harness.scheduler.num_waiting == 0
    harness.drain()


def test_a_preempted_sequence_can_be_aborted_with_its_token_in_flight():
    harness = tight()
    run_until_preempted(harness)
    num = len(harness.output("young"))
    assert harness.abort("young") is not None
    harness.drain()
    assert len(harness.output("young")) == num


def test_the_prompt_of_a_preempted_sequence_is_counted_once():
    harness = tight()
    harness.drain()
    assert harness.scheduler.prompt_tokens == 8


def test_a_sequence_alone_never_gives_way():
    harness = Harness(num_pages=10, max_num_seqs=2)
    harness.submit("a", 1, max_tokens=40)
    harness.drain()
    assert harness.scheduler.num_preemptions == 0
