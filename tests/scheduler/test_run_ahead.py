"""Results are read one step late: what is planned in between, what is wasted, and how a sequence ends."""

from collections.abc import Sequence

import pytest

from jaxinfer.scheduler.plan import DecodeRow, StepPlan, StepResult
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.types import FinishReason, Request, TokenEvent, TokenLogprobs
from tests.scheduler.fake_device import make_limits
from tests.scheduler.harness import Harness


def make_request(name: str = "a", prompt_len: int = 3, **fields: object) -> Request:
    return Request(**{"request_id": name, "prompt_ids": list(range(prompt_len)), "max_tokens": 9} | fields)  # pyright: ignore


def must_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.next_plan()
    assert plan is not None
    return plan


def play(request: Request, tokens: Sequence[int]) -> list[TokenEvent]:
    """All events of a request, alone, if the device samples these tokens whatever the request says."""
    scheduler = Scheduler(make_limits())
    scheduler.submit(request)
    events: list[TokenEvent] = []
    for token in tokens:
        plan = scheduler.next_plan()
        if plan is None:
            break
        events += scheduler.apply(StepResult(plan.step, {0: token}, {}))
    scheduler.tidy()
    assert not scheduler.has_work
    return events


def test_a_decode_row_is_planned_before_its_token_is_known():
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request())
    first = must_plan(scheduler)
    assert first.prefills[0].samples
    second = must_plan(scheduler)
    assert (second.decodes, second.prefills) == ([DecodeRow(slot=0, position=3, new_page=None, plain=False)], [])
    assert scheduler.apply(StepResult(0, {0: 11}, {}))[0].token_ids == (11,)
    third = must_plan(scheduler)
    assert [row.position for row in third.decodes] == [4]


def test_no_row_is_planned_past_a_length_limit():
    harness = Harness(max_model_len=20)
    harness.submit("max_tokens", 5, max_tokens=6)
    harness.submit("context", 15, max_tokens=500)
    harness.submit("one", 3, max_tokens=1)
    harness.drain()
    num_sampled = sum(len(plan.decodes) + sum(c.samples for c in plan.prefills) for plan in harness.plans)
    assert num_sampled == 6 + 5 + 1
    for name in harness.requests:
        assert harness.events[name][-1].finish_reason is FinishReason.LENGTH


def test_a_stop_id_wastes_one_row_of_one_step():
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(stop_ids=(7,)))
    must_plan(scheduler)
    wasted = must_plan(scheduler)
    (event,) = scheduler.apply(StepResult(0, {0: 7}, {}))
    assert (event.finish_reason, event.stop_id, event.token_ids) == (FinishReason.STOP, 7, (7,))
    assert scheduler.next_plan() is None
    assert (scheduler.has_work, scheduler.num_in_flight) == (False, 1)
    assert scheduler.apply(StepResult(wasted.step, {0: 7}, {})) == []


def test_a_result_goes_to_the_sequence_that_held_the_slot_when_the_plan_was_made():
    scheduler = Scheduler(make_limits(max_num_seqs=1))
    scheduler.submit(make_request("a", stop_ids=(7,)))
    scheduler.submit(make_request("b"))
    must_plan(scheduler)
    must_plan(scheduler)
    scheduler.apply(StepResult(0, {0: 7}, {}))
    third = must_plan(scheduler)
    assert [(chunk.request.request_id, chunk.slot) for chunk in third.prefills] == [("b", 0)]
    assert scheduler.apply(StepResult(1, {0: 5}, {})) == []  # of a, which has ended, not of b
    assert [(e.request_id, e.token_ids) for e in scheduler.apply(StepResult(2, {0: 6}, {}))] == [("b", (6,))]


def test_freed_page_is_not_reused_before_the_step_that_reads_it():
    """A page is handed out in a plan after all plans in which a row of its former owner reads it."""
    harness = Harness(num_pages=12, max_num_seqs=2)
    scheduler = harness.scheduler
    harness.submit("a", 7, max_tokens=20, stop_ids=tuple(range(13)))  # ends with its first token
    harness.submit("b", 9, max_tokens=20)
    harness.submit("c", 8, max_tokens=20)
    first, second = harness.plan(), harness.plan()
    assert first is not None and second is not None
    pages = set(first.prefills[0].new_pages)
    wasted = second.decodes[0]
    assert (wasted.slot, wasted.position) == (0, 7)  # reads the pages of a
    harness.apply()
    assert scheduler.num_running == 1
    for plan in (first, second):
        assert not pages & {page for chunk in plan.prefills[1:] for page in chunk.new_pages}
    third = harness.plan()
    assert third is not None and third.step > second.step
    assert pages & {page for chunk in third.prefills for page in chunk.new_pages}
    harness.drain()


def test_results_are_taken_in_the_order_of_the_plans_only():
    scheduler = Scheduler(make_limits())
    with pytest.raises(RuntimeError, match="the result is of step 0, but the oldest plan in flight is None"):
        scheduler.apply(StepResult(0, {}, {}))
    scheduler.submit(make_request())
    must_plan(scheduler)
    must_plan(scheduler)
    with pytest.raises(RuntimeError, match="the result is of step 1, but the oldest plan in flight is 0"):
        scheduler.apply(StepResult(1, {0: 1}, {}))


def test_a_third_plan_in_flight_is_refused():
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request())
    must_plan(scheduler)
    must_plan(scheduler)
    with pytest.raises(RuntimeError, match="2 plans are in flight"):
        scheduler.next_plan()


def test_a_result_without_a_token_or_asked_logprobs_is_an_error():
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request())
    must_plan(scheduler)
    with pytest.raises(RuntimeError, match="the result of step 0 has no token for slot 0"):
        scheduler.apply(StepResult(0, {1: 5}, {}))
    with pytest.raises(RuntimeError, match="'a' asked for log-probabilities"):
        play(make_request(logprobs=1), [5])


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_no_stop_id_ends_the_output_before_min_tokens_other_tokens_are_out(min_tokens: int):
    request = make_request(min_tokens=min_tokens, stop_ids=(7,))
    events = play(request, [7] * 9)
    assert len(events) == min_tokens + 1
    assert (events[-1].finish_reason, events[-1].stop_id) == (FinishReason.STOP, 7)


def test_max_tokens_ends_an_output_that_has_just_its_min_tokens():
    events = play(make_request(min_tokens=2, max_tokens=2, stop_ids=(7,)), [7] * 9)
    assert [event.finish_reason for event in events] == [None, FinishReason.LENGTH]
    assert events[-1].stop_id is None


def test_a_stop_id_on_the_last_possible_token_counts_as_stop():
    events = play(make_request(max_tokens=3, stop_ids=(7, 8)), [1, 2, 8])
    assert [event.finish_reason for event in events] == [None, None, FinishReason.STOP]
    assert events[-1].stop_id == 8


@pytest.mark.parametrize("k", [None, 0, 2, 20])
def test_logprobs_are_those_that_the_request_asked_for(k: int | None):
    scheduler = Scheduler(make_limits())
    scheduler.submit(make_request(logprobs=k))
    must_plan(scheduler)
    top = [(5, -0.5), (6, -1.5), (7, -2.5)]
    (event,) = scheduler.apply(StepResult(0, {0: 6}, {0: TokenLogprobs(-1.5, top)}))
    assert event.logprobs == (None if k is None else (TokenLogprobs(-1.5, top[:k]),))


@pytest.mark.parametrize(("k", "wanted"), [(None, False), (0, True), (3, True)])
def test_decode_rows_say_whether_log_probabilities_are_wanted(k: int | None, wanted: bool):
    harness = Harness()
    harness.submit("a", logprobs=k)
    harness.drain()
    assert {row.logprobs for plan in harness.plans for row in plan.decodes} == {wanted}


def test_a_stored_plan_does_not_change_when_the_run_goes_on():
    harness = Harness(num_pages=14)
    for i in range(6):
        harness.submit(f"{i}", 3 + 5 * i, max_tokens=25)
    printed = []
    while harness.scheduler.has_work:
        plan = harness.step()
        printed += [repr(plan)] if plan else []
    assert [repr(plan) for plan in harness.plans] == printed
