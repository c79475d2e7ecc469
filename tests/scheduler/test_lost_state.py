"""A step without tokens for some rows: who is to blame ends, and all that others have known is computed again."""

import pytest

from jaxinfer.types import FinishReason
from tests.scheduler.harness import Harness


def under_way(**limits: int) -> Harness:
    """Three sequences that decode, and one that waits, with two plans in flight."""
    harness = Harness(max_num_seqs=3, max_mixed_tokens=16, **limits)
    for name in "abcd":
        harness.submit(name, max_tokens=9)
    for _ in range(3):
        harness.step()
    harness.plan()
    assert harness.scheduler.num_in_flight == 2 and harness.scheduler.num_running == 3
    return harness


def test_the_sequence_of_a_bad_slot_ends_with_the_reason_and_the_tokens_of_the_others_count():
    harness = under_way()
    before = {name: len(harness.output(name)) for name in "abc"}
    events = {event.request_id: event for event in harness.lose_state({1})}
    assert events["b"].finish_reason is FinishReason.ERROR and events["b"].error == "lost"
    assert [len(harness.output(name)) for name in "abc"] == [before["a"] + 1, before["b"], before["c"] + 1]
    harness.drain()
    assert [len(harness.output(name)) for name in "acd"] == [9, 9, 9]


def test_those_that_ran_are_admitted_again_in_their_order_and_before_those_that_waited():
    harness = under_way()
    harness.lose_state({2})
    harness.plan()
    admitted = [chunk.request.request_id for plan in harness.plans[-1:] for chunk in plan.prefills]
    assert admitted == ["a", "b"]  # of what they know by now, 8 tokens each, two fill the step
    harness.drain()


def test_a_step_behind_the_bad_one_has_no_result():
    harness = under_way()
    harness.lose_state({0})
    assert not harness.scheduler.num_in_flight
    with pytest.raises(RuntimeError, match="the oldest plan in flight is None"):
        harness.scheduler.apply(harness.device.run(harness.plans[0]))
    harness.drain()


def test_a_bad_row_of_a_sequence_that_was_aborted_is_nobodys():
    harness = under_way()
    harness.abort("a")
    assert {event.request_id for event in harness.lose_state({0})} == {"b", "c"}
    harness.drain()


def test_a_sequence_that_began_with_pages_of_another_is_blamed_the_second_time_and_shares_nothing_meanwhile():
    harness = Harness(prefix_caching=True, max_num_seqs=2)
    prompt = tuple(range(9))
    harness.submit("first", prompt_ids=prompt)
    harness.drain()
    harness.submit("second", prompt_ids=prompt)
    harness.submit("third", prompt_ids=prompt)
    assert [prefix.slot for prefix in harness.plan().prefixes] == [0, 1]
    assert harness.lose_state({0, 1}) == []
    harness.plan()
    assert not harness.plans[-1].prefixes
    harness.plan()
    (event, *_) = harness.lose_state({0})
    assert (event.request_id, event.finish_reason) == ("second", FinishReason.ERROR)
    harness.drain()
    assert harness.events["third"][-1].finish_reason is FinishReason.LENGTH


def test_all_that_run_and_wait_may_be_failed_at_once():
    harness = under_way()
    events = harness.scheduler.fail("lost", waiting_too=True)
    assert {(event.request_id, event.error) for event in events} == {(name, "lost") for name in "abcd"}
    assert not harness.scheduler.has_work and harness.scheduler.cache.pool.num_empty == harness.limits.num_pages
    harness.scheduler.check_integrity()


def test_the_description_names_who_runs_who_waits_and_what_is_in_flight():
    text = under_way().scheduler.describe()
    assert text.startswith("3 sequences run, 1 wait; 6 of 40 pages are held, 0 cached\n")
    assert "step 2 is in flight, and samples for slots [0, 1, 2]" in text
    assert "\nruns: 'b', slot 1, 2 pages; 5 tokens of prompt, 2 of 9 of output; 8 positions planned, 2 tokens" in text
    assert "\nwaits: 'd', slot None, 0 pages; 5 tokens of prompt, 0 of 9 of output" in text
    many = Harness(max_num_seqs=1)
    for i in range(30):
        many.submit(str(i))
    many.plan()
    assert many.scheduler.describe().endswith("\n13 more wait")
