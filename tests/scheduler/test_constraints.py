"""Sequences that have to match a grammar, as the scheduler sees them: a matcher, and a mask for each step."""

from __future__ import annotations

import pytest

from jaxinfer.scheduler.plan import StepResult, TokenMask
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.types import FinishReason, QueueFull, Request
from tests.scheduler.fake_device import make_limits

EOS = 12


class Letters:
    """Matches `length` tokens, each one more than the one before, and may end from `may_end_at` on."""

    end_ids = frozenset({EOS})
    error = ""

    def __init__(self, length: int, may_end_at: int | None = None):
        self.length, self.least = length, length if may_end_at is None else may_end_at
        self.taken: list[int] = []

    @property
    def may_end(self) -> bool:
        return len(self.taken) >= self.least

    def accept(self, token: int) -> bool:
        assert token == len(self.taken), "a token that no mask has allowed"
        self.taken.append(token)
        return len(self.taken) == self.length

    def mask(self, barred=()) -> bytes | None:
        allowed = {len(self.taken)} | ({EOS} if self.may_end else set())
        return (
            sum(1 << token for token in allowed - set(barred)).to_bytes(4, "little") if allowed - set(barred) else None
        )


def request(name: str, **fields) -> Request:
    given = {"prompt_ids": [1, 2, 3], "max_tokens": 9, "stop_ids": (EOS,), "grammar": "letters"} | fields
    return Request(request_id=name, **given)


def free(name: str, **fields) -> Request:
    return request(name, grammar="", **fields)


@pytest.fixture
def scheduler():
    return Scheduler(make_limits())


def turn(scheduler, previous, token=0):
    """As the engine does it: plan, then read the plan before, then ask for the masks. Returns plan, events, masks."""
    plan = scheduler.next_plan()
    events = []
    if previous is not None:
        events = scheduler.apply(StepResult(previous.step, {slot: token for slot in slots(previous)}, {}))
    masks = scheduler.masks() if plan is not None and plan.constrained else None
    scheduler.check_integrity()
    return plan, events, masks


def slots(plan):
    return [row.slot for row in plan.decodes] + [chunk.slot for chunk in plan.prefills if chunk.samples]


def test_a_request_waits_in_no_queue_until_its_grammar_is_compiled(scheduler):
    scheduler.submit(request("bound"))
    scheduler.submit(free("free"))
    assert scheduler.num_waiting == 2
    plan = scheduler.next_plan()
    assert not plan.constrained and len(slots(plan)) == 1
    scheduler.constrain("bound", Letters(3))
    scheduler.constrain("nobody", Letters(3))
    assert scheduler.num_waiting == 1
    second, _, masks = turn(scheduler, plan)
    assert second.constrained and [mask.slot for mask in masks.rows] == [1]
    assert masks.rows[0] == TokenMask(1, b"\x01\0\0\0", {})


def test_masks_follow_from_the_tokens_of_the_step_before(scheduler):
    scheduler.submit(request("bound", logit_bias={4: 1.0}))
    scheduler.constrain("bound", Letters(4, may_end_at=2))
    plan, _, masks = turn(scheduler, None)
    seen = [masks.rows[0].words[0]]
    for token in (0, 1, 2):
        plan, events, masks = turn(scheduler, plan, token)
        assert events[0].token_ids == (token,)
        seen.append(int.from_bytes(masks.rows[0].words, "little"))
        assert masks.rows[0].logit_bias == {4: 1.0}
    assert seen == [1, 2, 4 | 1 << EOS, 8 | 1 << EOS]
    plan, events, masks = turn(scheduler, plan, 3)
    assert (events[0].finish_reason, events[0].stop_id) == (FinishReason.STOP, None)
    assert masks.rows == masks.events == []  # a wasted row needs no mask
    assert scheduler.apply(StepResult(plan.step, {0: 7}, {})) == []
    scheduler.check_integrity()
    assert not scheduler.has_work


def test_an_output_ends_where_all_that_may_follow_is_barred(scheduler):
    """Its grammar may end, but the request is to ignore EOS: the row that is under way is wasted."""
    scheduler.submit(request("bound", stop_ids=(1,), min_tokens=5))
    scheduler.constrain("bound", Letters(4, may_end_at=1))
    plan, _, _ = turn(scheduler, None)
    plan, events, masks = turn(scheduler, plan, 0)
    assert events[0].finish_reason is None
    (end,) = masks.events
    assert (end.finish_reason, end.token_ids, masks.rows) == (FinishReason.STOP, (), [])
    assert scheduler.apply(StepResult(plan.step, {0: 9}, {})) == []
    scheduler.check_integrity()
    assert not scheduler.has_work


def test_a_request_ends_with_an_error_where_its_grammar_goes_nowhere(scheduler):
    scheduler.submit(request("bound", stop_ids=(1,), min_tokens=5))
    scheduler.constrain("bound", Letters(4))
    plan, _, _ = turn(scheduler, None)
    plan, _, masks = turn(scheduler, plan, 0)
    (end,) = masks.events
    assert end.finish_reason is FinishReason.ERROR and "no token may follow" in end.error


def test_a_preempted_sequence_goes_on_in_its_grammar():
    scheduler = Scheduler(make_limits(num_pages=4))
    for name in ("first", "second"):
        scheduler.submit(request(name, prompt_ids=[1, 2, 3, 4, 5, 6], max_tokens=8))
        scheduler.constrain(name, Letters(8))
    plan, events = None, {"first": [], "second": []}
    while scheduler.has_work or plan is not None:
        counts = {
            slot: len(seq.matcher.taken) for slot, seq in (scheduler._in_flight[-1].samplers.items() if plan else ())
        }
        following = scheduler.next_plan()
        if plan is not None:
            for event in scheduler.apply(StepResult(plan.step, counts, {})):
                events[event.request_id] += event.token_ids
        if following is not None and following.constrained:
            scheduler.masks()
        scheduler.check_integrity()
        plan = following
    assert scheduler.num_preemptions > 0
    assert events == {name: list(range(8)) for name in events}


def test_requests_that_wait_for_a_grammar_count_are_aborted_and_fail_like_others():
    scheduler = Scheduler(make_limits(max_waiting=3))
    for name in "abc":
        scheduler.submit(request(name))
    with pytest.raises(QueueFull, match="3 requests wait already"):
        scheduler.submit(free("d"))
    assert scheduler.abort("a").finish_reason is FinishReason.ABORT
    (refused,) = scheduler.refuse("b", "no grammar")
    assert (refused.finish_reason, refused.error) == (FinishReason.ERROR, "no grammar")
    assert scheduler.refuse("a", "gone") == []
    assert scheduler.fail("step") == []
    assert [event.request_id for event in scheduler.fail("idle", waiting_too=True)] == ["c"]
    scheduler.check_integrity()
    assert not scheduler.has_work


def test_plans_without_such_a_row_are_not_constrained(scheduler):
    """Also while a sequence with a grammar computes its prompt, of which nothing is sampled yet."""
    scheduler.submit(request("bound", prompt_ids=list(range(12)) * 3))
    scheduler.constrain("bound", Letters(3))
    plans = [scheduler.next_plan(), scheduler.next_plan()]
    assert [plan.constrained for plan in plans] == [False, False]
