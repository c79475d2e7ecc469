import pytest

from jaxinfer.config import ConfigError
from jaxinfer.scheduler.scheduler import Scheduler
from jaxinfer.types import FinishReason, InvalidRequest, QueueFull
from tests.scheduler.fake_device import make_limits
from tests.scheduler.harness import Harness


def test_a_full_queue_refuses_with_the_number_that_waits():
    harness = Harness(max_waiting=2)
    harness.submit("a")
    harness.submit("b")
    with pytest.raises(QueueFull, match="2 requests wait already; the limit is 2"):
        harness.submit("c")
    harness.step()
    harness.submit("d")
    harness.drain()


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (64, 1, "the prompt has 64 tokens; with 1 token of output that is more than the context of 64"),
        (0, 1, "the prompt has no tokens"),
        (3, 0, "max_tokens is 0"),
        (30, 12, "30 tokens of prompt and 12 of output need 11 pages of 4 tokens; the cache has 10"),
    ],
)
def test_a_request_that_can_never_run_is_refused_and_leaves_no_trace(prompt_len: int, max_tokens: int, message: str):
    harness = Harness(num_pages=10)
    with pytest.raises(InvalidRequest, match=message):
        harness.submit("a", prompt_len, max_tokens=max_tokens)
    assert not harness.scheduler.has_work
    harness.submit("a")
    harness.drain()


@pytest.mark.parametrize("prompt_len", [1, 30, 40])
def test_a_request_that_fits_the_pool_to_the_last_token_runs(prompt_len: int):
    harness = Harness(num_pages=10)
    harness.submit("a", prompt_len, max_tokens=41 - prompt_len)  # the last token is sampled, never computed
    harness.drain()
    assert len(harness.output("a")) == 41 - prompt_len


def test_an_id_can_be_used_again_only_after_its_request_ended():
    harness = Harness()
    harness.submit("a")
    with pytest.raises(InvalidRequest, match="a request with id 'a' is unfinished"):
        harness.submit("a")
    harness.drain()
    harness.submit("a", 7)
    harness.drain()


def test_a_step_must_hold_a_row_of_every_sequence():
    with pytest.raises(ConfigError, match="max_mixed_tokens is 3, less than max_num_seqs 4"):
        Scheduler(make_limits(max_mixed_tokens=3))
    with pytest.raises(ConfigError, match="max_step_tokens is 0"):
        Scheduler(make_limits(max_step_tokens=0))


def test_without_work_there_is_no_plan():
    scheduler = Scheduler(make_limits())
    assert scheduler.next_plan() is None
    assert (scheduler.has_work, scheduler.num_in_flight, scheduler.num_steps) == (False, 0, 0)


@pytest.mark.parametrize("turns", range(7))
def test_abort_frees_slot_and_pages_at_once_and_ends_the_request_once(turns: int):
    """B9.1."""
    harness = Harness()
    harness.submit("a", 20, max_tokens=9)
    for _ in range(turns):
        harness.step()
    event = harness.abort("a")
    assert event is not None
    assert (event.finish_reason, event.token_ids, event.logprobs) == (FinishReason.ABORT, (), None)
    assert harness.scheduler.cache.pool.num_free == harness.limits.num_pages
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 0)
    assert harness.abort("a") is None
    while harness.results:
        assert harness.apply() == []
    harness.drain()


def test_abort_of_an_unknown_or_finished_request_does_nothing():
    """B9.2."""
    harness = Harness()
    assert harness.abort("nobody") is None
    harness.submit("a")
    harness.drain()
    assert harness.abort("a") is None


def test_an_aborted_id_used_again_gets_no_token_of_its_former_rows():
    harness = Harness()
    harness.submit("a", 3, max_tokens=9)
    harness.step()
    harness.step()
    harness.abort("a")
    assert harness.results
    harness.submit("a", 5, max_tokens=9)
    harness.drain()


def test_counters_count_admitted_prompts_and_emitted_tokens():
    harness = Harness()
    harness.submit("a", 5, max_tokens=3)
    harness.submit("b", 30, max_tokens=2)
    assert (harness.scheduler.prompt_tokens, harness.scheduler.num_waiting) == (0, 2)
    harness.drain()
    scheduler = harness.scheduler
    assert (scheduler.prompt_tokens, scheduler.generation_tokens, scheduler.num_preemptions) == (35, 5, 0)
    assert scheduler.num_steps == len(harness.plans)
