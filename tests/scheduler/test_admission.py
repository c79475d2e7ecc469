"""Who starts when, and how prompts are cut."""

import itertools
import random

import pytest

from jaxinfer.scheduler.queue import MAX_OVERTAKEN
from tests.scheduler.harness import Harness, random_times
from tests.scheduler.test_random_walk import random_limits, submit_random


def test_a_prompt_is_cut_at_the_token_limit_and_its_last_chunk_samples():
    harness = Harness(max_step_tokens=16)
    harness.submit("a", 37)
    chunks = [plan.prefills[0] for _ in range(3) if (plan := harness.step())]
    assert [(chunk.start, len(chunk.token_ids), chunk.samples) for chunk in chunks] == [
        (0, 16, False),
        (16, 16, False),
        (32, 5, True),
    ]
    harness.drain()


def test_a_chunk_brings_the_pages_it_begins_and_the_first_brings_the_history():
    harness = Harness(page_size=4)
    request = harness.submit("a", 37)
    first, *later = [plan.prefills[0] for _ in range(3) if (plan := harness.step())]
    assert (len(first.new_pages), first.first_new_page) == (4, 0)
    assert first.history is not None and tuple(first.history) == tuple(request.prompt_ids)
    assert [(len(chunk.new_pages), chunk.first_new_page) for chunk in later] == [(4, 4), (2, 8)]
    assert all(chunk.history is None for chunk in later)


def test_what_one_prompt_leaves_of_a_step_goes_to_the_next():
    harness = Harness(max_step_tokens=16)
    for name in "abc":
        harness.submit(name, 7)
    plan = harness.step()
    assert plan is not None
    assert [len(chunk.token_ids) for chunk in plan.prefills] == [7, 7, 2]
    harness.drain()


def test_every_decoding_sequence_advances_in_every_step_while_a_long_prompt_is_prefilled():
    harness = Harness(max_model_len=150, num_pages=100)
    for name in "abc":
        harness.submit(name, 2, max_tokens=60)
    harness.step()
    harness.submit("long", 101)
    num_steps = 0
    while True:
        plan = harness.step()
        assert plan is not None
        num_steps += 1
        assert len(plan.decodes) == 3
        assert plan.num_tokens == 8 or plan.prefills[0].samples
        if plan.prefills[0].samples:
            break
    assert num_steps == -(-101 // (8 - 3))
    harness.drain()


def test_a_decode_page_is_taken_exactly_when_the_position_is_the_first_on_it():
    harness = Harness(page_size=4)
    harness.submit("a", 7, max_tokens=20)
    harness.drain()
    rows = [row for plan in harness.plans for row in plan.decodes]
    assert [row.position for row in rows] == list(range(7, 26))
    assert [row.position for row in rows if row.new_page is not None] == [8, 12, 16, 20, 24]


def admitted(harness: Harness) -> list[str]:
    """Request ids in the order of their admissions."""
    return [c.request.request_id for plan in harness.plans for c in plan.prefills if c.history is not None]


def test_a_light_request_goes_before_a_heavy_one_that_has_to_wait():
    harness = Harness(num_pages=10, max_num_seqs=3)
    harness.submit("a", 15, max_tokens=4)
    harness.submit("large", 36, max_tokens=2)  # 9 of 10 pages: has to wait for a
    harness.submit("small", 1, max_tokens=1)
    harness.drain()
    assert admitted(harness) == ["a", "small", "large"]


def test_equal_requests_are_admitted_first_come_first_served():
    harness = Harness(num_pages=10, max_num_seqs=2)
    for i in range(10):
        harness.submit(f"r{i}", 5, max_tokens=3 + i % 2)
    harness.drain()
    assert admitted(harness) == [f"r{i}" for i in range(10)]


def test_lower_priorities_come_first_and_equal_ones_in_their_order():
    harness = Harness(num_pages=40, max_num_seqs=1)
    for i, priority in enumerate([0, 5, 0, -3, 5, -3]):
        harness.submit(f"r{i}", 3, max_tokens=2, priority=priority)
    harness.drain()
    assert admitted(harness) == ["r3", "r5", "r0", "r2", "r1", "r4"]


def test_of_two_that_need_the_last_page_the_one_of_lower_priority_gives_way():
    harness = Harness(num_pages=10, max_num_seqs=2)
    harness.submit("patient", 4, max_tokens=28, priority=1)
    harness.step()
    harness.submit("urgent", 4, max_tokens=28)
    harness.drain()
    assert admitted(harness) == ["patient", "urgent", "patient"]


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_nobody_is_overtaken_more_often_than_the_bound_says(first: int):
    """In 1,000 random schedules: while a request waits, at most MAX_OVERTAKEN that came later are admitted."""
    most = 0
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        times = random_times(random.Random(seed), 4, 16) if seed % 2 else {}
        sizes = {"num_pages": rng.choice([12, 20]), "max_num_seqs": rng.choice([1, 2, 4]), "max_model_len": 48}
        harness = Harness(**sizes, **times)
        names: list[str] = []
        for turn in range(60):
            heavy = rng.random() < 0.1
            names.append(f"r{turn}")
            prompt_len = rng.randint(30, 40) if heavy else rng.randint(1, 4)
            harness.submit(names[-1], prompt_len, max_tokens=rng.randint(1, 4), priority=rng.choice([0, 0, 0, 3, -2]))
            if rng.random() < 0.6:
                harness.step()
        harness.drain()
        order = [int(name[1:]) for name in dict.fromkeys(admitted(harness))]
        for i, name in enumerate(order):
            most = max(most, sum(other > name for other in order[:i]))
    assert most <= MAX_OVERTAKEN
    assert most > 10  # or these schedules show nothing


def test_a_request_with_room_starts_within_a_bounded_number_of_steps():
    """Requests ahead of it in the queue are prefilled at no less than max_mixed_tokens - max_num_seqs tokens a step."""
    harness = Harness(max_num_seqs=8, max_mixed_tokens=12, num_pages=400)
    for i in range(4):
        harness.submit(f"old{i}", 2, max_tokens=50)
    harness.step()
    for i in range(3):
        harness.submit(f"ahead{i}", 17, max_tokens=30)
    harness.submit("last", 17, max_tokens=30)
    bound = -(-3 * 17 // (12 - 8)) + 1
    for _ in range(bound):
        plan = harness.step()
        assert plan is not None
        if any(chunk.request.request_id == "last" for chunk in plan.prefills):
            break
    else:
        pytest.fail(f"not started within {bound} steps")
    harness.drain()


def test_a_stream_of_short_requests_does_not_keep_a_long_one_waiting():
    harness = Harness(num_pages=12, max_num_seqs=4)
    harness.submit("s0", 3, max_tokens=6)
    harness.submit("long", 44, max_tokens=2)
    for i in range(1, 150):
        harness.submit(f"s{i}", 3, max_tokens=6)
        harness.step()
    order = admitted(harness)
    assert order.index("long") == 1 + MAX_OVERTAKEN
    assert harness.events["long"][-1].finish_reason is not None
    harness.drain()


@pytest.mark.parametrize("seed", range(30))
def test_no_admission_is_undone_before_it_gave_a_token_and_had_a_decode_row(seed: int):
    rng = random.Random(seed)
    harness = Harness(**random_limits(rng) | {"num_pages": rng.choice([12, 20, 30]), "num_frames": 0, "long_tokens": 0})
    for i in range(40):
        submit_random(harness, str(i), rng, num_stop_ids=0)
    harness.drain()
    chunks = [chunk for plan in harness.plans for chunk in plan.chunks if chunk.token_ids]
    assert sum(chunk.history is not None for chunk in chunks) == sum(chunk.samples for chunk in chunks)
    for plan, following in itertools.pairwise(harness.plans):
        for chunk in plan.prefills:
            num_known = chunk.start + len(chunk.token_ids)
            last = num_known + 1 in (chunk.prompt_len + chunk.request.max_tokens, harness.limits.max_model_len)
            if chunk.samples and not last:
                rows = (*following.decodes, *([following.long] if following.long else []))
                assert chunk.slot in {row.slot for row in rows}, f"step {following.step} preempts it"


def test_few_that_wait_get_small_chunks_beside_decode_rows_and_many_get_large_ones():
    harness = Harness(max_num_seqs=16, max_mixed_tokens=64, calm_mixed_tokens=12, num_pages=400, max_step_tokens=64)
    for i in range(8):
        harness.submit(f"old{i}", 2, max_tokens=50)
    harness.step()
    for i in range(4):
        harness.submit(f"new{i}", 60, max_tokens=2)
    calm = harness.step()  # half as many wait as decode: twice as many tokens as decode rows
    harness.submit("one more", 60, max_tokens=2)
    hurried = harness.step()
    assert calm is not None and hurried is not None
    assert (len(calm.decodes), calm.num_tokens) == (8, 16)
    assert (len(hurried.decodes), hurried.num_tokens) == (8, 64)
    harness.drain()


def test_a_lone_prompt_fills_the_largest_step_and_the_first_of_several_decodes_before_the_last_is_computed():
    harness = Harness(max_num_seqs=16, max_mixed_tokens=16, calm_mixed_tokens=12, num_pages=400, max_step_tokens=64)
    harness.submit("alone", 60, max_tokens=1)
    assert (plan := harness.step()) is not None and plan.num_tokens == 60
    harness.drain()
    for i in range(4):
        harness.submit(f"new{i}", 15, max_tokens=20)
    first, second = harness.step(), harness.step()
    assert first is not None and second is not None
    assert (first.num_tokens, len(second.decodes)) == (16, 1)
    harness.drain()


def test_a_context_beyond_the_pool_waits_for_all_others_and_then_all_others_wait_for_it():
    harness = Harness(num_pages=4, long_tokens=20, long_chunk=4, prefix_caching=True)
    harness.submit("before", prompt_len=5, max_tokens=6)
    harness.submit("long", prompt_len=18, max_tokens=4)  # of 21 positions: the pool has 16
    harness.submit("behind", prompt_len=3, max_tokens=6)
    together = set()
    while harness.scheduler.has_work:
        harness.step()
        scheduler = harness.scheduler
        together.add(tuple(sorted(seq.request_id for seq in (*scheduler._running, *scheduler._admission))))
        if len(harness.plans) == 8:
            harness.submit("last", prompt_len=3, max_tokens=6)
    harness.drain()
    assert ("long",) in together and not any("long" in names and len(names) > 1 for names in together)


def test_a_context_that_may_outgrow_the_pool_runs_beside_others_until_it_does():
    harness = Harness(num_pages=6, long_tokens=20, long_chunk=4, prefix_caching=True)
    harness.submit("chat", prompt_len=3, max_tokens=30)  # of 32 positions: the pool has 24
    harness.submit("other", prompt_len=3, max_tokens=30)
    beside = 0
    while harness.scheduler.has_work:
        harness.step()
        beside += harness.scheduler.num_running == 2
    harness.drain()
    assert beside >= 8
    longs = [plan.long.request.request_id for plan in harness.plans if plan.long]
    assert set(longs) == {"chat", "other"}
