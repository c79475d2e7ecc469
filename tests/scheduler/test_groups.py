"""Groups of devices with sequences of their own: who gets a request, and that one step is that of all."""

import dataclasses
from collections import deque

import pytest

from jaxinfer.scheduler.groups import MAX_LEAD, Groups, group_of
from jaxinfer.scheduler.plan import StepPlan, StepResult
from jaxinfer.types import FinishReason, InvalidRequest, QueueFull, Request
from tests.scheduler.fake_device import FakeDevice, make_limits, run_alone


class Run:
    """Groups, with a device for each."""

    def __init__(self, num_groups: int = 2, **limits: int):
        self.limits = make_limits(prefix_caching=True, **limits)
        self.groups = Groups(self.limits, num_groups)
        self.devices = [FakeDevice(self.limits) for _ in range(num_groups)]
        self.results: deque[StepResult] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}

    def submit(self, name: str, prompt_ids=(1, 2, 3), **fields) -> None:
        request = Request(request_id=name, prompt_ids=prompt_ids, **{"max_tokens": 4} | fields)
        self.groups.submit(request)
        self.requests[name], self.outputs[name] = request, []

    def home(self, name: str) -> int:
        return self.groups.schedulers.index(self.groups._owners[name])

    def plan(self) -> StepPlan | None:
        plan = self.groups.next_plan()
        if plan is not None and plan.num_rows:
            parts = [device.run(part) for device, part in zip(self.devices, plan.groups, strict=True)]
            self.results.append(StepResult(plan.step, {}, {}, parts))
        self.groups.check_integrity()
        return plan

    def take(self, events) -> None:
        for event in events:
            self.outputs[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                assert event.request_id not in self.ends
                self.ends[event.request_id] = event.finish_reason
        self.groups.check_integrity()

    def drain(self) -> None:
        while self.groups.has_work:
            self.plan()
            if len(self.results) == 2 or not self.groups.has_work or self.results:
                self.take(self.groups.apply(self.results.popleft()))
        while self.results:
            self.take(self.groups.apply(self.results.popleft()))
        assert self.ends.keys() == self.requests.keys() and not self.groups._owners

    def check_outputs(self) -> None:
        for name, request in self.requests.items():
            assert self.outputs[name] == run_alone(request, self.limits.max_model_len)[0], name


def test_requests_go_to_the_group_that_has_the_fewest_and_all_end_with_the_tokens_they_have_alone():
    run = Run(3)
    for i in range(7):
        run.submit(f"r{i}", prompt_ids=(i, i + 1, i + 2), max_tokens=2 + i)
    assert [run.home(f"r{i}") for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    run.drain()
    run.check_outputs()


def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_group_is_far_ahead():
    run = Run(2)
    shared = tuple(range(9))
    run.submit("other", prompt_ids=(5, 5, 5))
    run.submit("first", prompt_ids=shared)
    home = run.home("first")
    run.drain()
    for i in range(MAX_LEAD + 2):
        run.submit(f"like it {i}", prompt_ids=(*shared, 20 + i))
    homes = [run.home(f"like it {i}") for i in range(MAX_LEAD + 2)]
    assert homes == [home] * (MAX_LEAD + 1) + [1 - home]
    run.drain()
    run.check_outputs()
    assert sum(scheduler.cached_prompt_tokens for scheduler in run.groups.schedulers) >= 8 * (MAX_LEAD + 1)


def test_a_session_stays_with_its_group_however_busy_that_is():
    run = Run(2)
    for i in range(6):
        run.submit(f"r{i}", session_id="talk")
    assert {run.home(f"r{i}") for i in range(6)} == {group_of("talk", 2)}
    assert {group_of(f"session {i}", 2) for i in range(9)} == {0, 1}
    run.drain()


def test_a_group_without_rows_has_no_part_in_a_step_and_gets_none_of_its_tokens():
    run = Run(2)
    run.submit("alone", max_tokens=5)
    plan = run.plan()
    assert plan is not None and [part.num_rows for part in plan.groups] == [1, 0]
    run.drain()
    assert run.groups.schedulers[1].num_steps == 0
    run.check_outputs()


def test_waiting_requests_are_limited_in_all_groups_together_and_ids_must_differ():
    run = Run(2, max_waiting=3)
    run.submit("a")
    with pytest.raises(InvalidRequest, match="a request with id 'a' is unfinished"):
        run.submit("a")
    run.submit("b")
    run.submit("c")
    with pytest.raises(QueueFull, match="3 requests wait already; the limit is 3"):
        run.submit("d")
    run.drain()
    run.submit("a again")
    run.drain()


def test_an_aborted_request_leaves_nothing_in_any_group():
    run = Run(2)
    for name in "abc":
        run.submit(name, max_tokens=9)
    run.plan()
    event = run.groups.abort("b")
    assert event is not None and event.finish_reason is FinishReason.ABORT
    run.take([event])
    assert run.groups.abort("b") is None and run.groups.abort("unknown") is None
    run.drain()
    del run.requests["b"]
    run.check_outputs()


def test_a_failed_step_ends_what_runs_in_every_group():
    run = Run(2)
    for name in "abc":
        run.submit(name)
    run.plan()
    run.plan()
    run.results.clear()
    for device in run.devices:
        device.reset()
    run.take(run.groups.fail("it broke"))
    assert run.ends == dict.fromkeys("abc", FinishReason.ERROR)
    run.submit("later")
    run.drain()
    assert run.ends["later"] is FinishReason.LENGTH


def test_a_bad_row_costs_all_groups_their_state_and_only_its_own_request_ends():
    run = Run(3)
    run.submit("bad", max_tokens=9)
    run.submit("beside it", max_tokens=9)
    run.plan()
    # Its first row is in the second plan, so that the bad one, the first, has none of its group's.
    run.submit("behind it", max_tokens=9)
    run.plan()
    result = run.results.popleft()
    parts = list(result.groups)
    parts[0] = dataclasses.replace(parts[0], token_ids={0: -1})
    run.results.clear()
    for device in run.devices:
        device.reset()
    run.take(run.groups.lose_state(StepResult(result.step, {}, {}, parts), "not numbers"))
    assert run.ends == {"bad": FinishReason.ERROR}
    assert all(not scheduler.num_running for scheduler in run.groups.schedulers)
    run.drain()
    del run.requests["bad"]
    run.check_outputs()


def test_too_few_pages_in_a_group_preempt_its_own_sequences_alone():
    run = Run(2, num_pages=7, max_model_len=28)
    run.submit("here, too", prompt_ids=tuple(range(8)), max_tokens=16)
    run.submit("there", prompt_ids=(1,), max_tokens=3)
    run.submit("here", prompt_ids=tuple(range(3, 11)), max_tokens=16)
    run.submit("there too", prompt_ids=(2,), max_tokens=3)
    run.drain()
    run.check_outputs()
    assert [scheduler.num_preemptions > 0 for scheduler in run.groups.schedulers] == [True, False]
