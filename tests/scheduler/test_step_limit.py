"""Steps that are cut: as many tokens as take the prompts the least time, and never more than before."""

import dataclasses
import random

import pytest

from jaxinfer.config import ConfigError, SchedulerLimits
from jaxinfer.scheduler.queue import WaitingQueue
from jaxinfer.scheduler.step_limit import cut_limit
from tests.scheduler.fake_device import make_limits
from tests.scheduler.harness import Harness, random_times

MIXED_MS = {16: 3.1, 64: 3.3, 128: 3.7, 256: 4.6, 512: 7.3, 1024: 13.2, 2048: 25.5, 4096: 50.5, 8192: 101.0}
DECODE_MS = {2**i: 2.6 + 0.0045 * 2**i for i in range(9)}
H200 = make_limits(
    max_num_seqs=256, max_step_tokens=8192, max_mixed_tokens=2048, mixed_ms=MIXED_MS, decode_ms=DECODE_MS
)
"""Qwen3-4B, as measured at warm-up."""


def mixed_ms(limits: SchedulerLimits, num_tokens: int) -> float:
    """Of the smallest size that holds a step."""
    return limits.mixed_ms[min(size for size in limits.mixed_ms if size >= num_tokens)]


def prompt_ms(limits: SchedulerLimits, limit: int, num_decodes: int, num_tokens: int) -> float:
    """Until prompts are done that nobody joins, beyond what decode steps take."""
    rows = min((rows for rows in limits.decode_ms if rows >= num_decodes), default=0)
    decode_ms = limits.decode_ms[rows] if num_decodes else 0.0
    total_ms = 0.0
    while num_tokens:
        taken = min(cut_limit(limits, limit, num_decodes, num_tokens, 0) - num_decodes, num_tokens)
        total_ms += mixed_ms(limits, num_decodes + taken) - decode_ms
        num_tokens -= taken
    return total_ms


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_step_is_a_compiled_size_below_the_limit_and_takes_prompts_less_time(seed: int):
    rng = random.Random(seed)
    num_cut = 0
    for _ in range(300):
        num_seqs = rng.choice([1, 4, 30, 100])
        most = 2 * num_seqs + rng.randint(1, 500)
        times = random_times(rng, num_seqs, most)
        limits = make_limits(max_num_seqs=num_seqs, max_step_tokens=most, max_mixed_tokens=most, **times)
        num_decodes = rng.randint(0, num_seqs)
        limit = rng.randint(num_decodes + 1, most)
        num_tokens = rng.randint(0, 2 * most)
        num_begun = rng.randint(0, num_tokens)
        cut = cut_limit(limits, limit, num_decodes, num_tokens, num_begun)
        assert num_decodes < cut <= limit
        if cut == limit:
            continue
        num_cut += 1
        known, room = min(num_tokens, limit - num_decodes), cut - num_decodes
        assert cut in limits.mixed_ms and known / 2 <= room < known
        assert not num_decodes or room >= num_begun
        rows = min((rows for rows in limits.decode_ms if rows >= num_decodes), default=0)
        padded_ms = mixed_ms(limits, num_decodes + known) - (limits.decode_ms[rows] if num_decodes else 0.0)
        assert prompt_ms(limits, limit, num_decodes, known) < padded_ms
    assert num_cut > 20


@pytest.mark.parametrize(
    ("num_decodes", "num_tokens", "limit"),
    [
        (0, 300, 8192),  # 7.3 ms, less than 4.6 and 3.3
        (0, 1100, 1024),  # 25.5, more than 13.2 and 3.7
        (0, 1900, 8192),  # 25.5, less than 13.2 and what 876 take: 13.2, or 7.3 and 7.3
        (0, 1600, 1024),
        (200, 1400, 1024),
        (200, 100, 256),
        (255, 200, 2048),  # room for one token in 256, so each of 200 would wait for a step
        (200, 1848, 2048),
        (0, 0, 8192),
    ],
)
def test_on_an_h200_a_step_is_cut_where_the_next_size_would_be_half_empty(num_decodes, num_tokens, limit):
    most = H200.max_mixed_tokens if num_decodes else H200.max_step_tokens
    assert cut_limit(H200, most, num_decodes, num_tokens, 0) == limit


def test_as_many_tokens_as_the_limit_has_are_never_cut_and_without_times_nothing_is():
    for limit in MIXED_MS:
        for num_decodes in range(0, min(limit, 257), 5):
            for more in (0, 1, 10_000):
                assert cut_limit(H200, limit, num_decodes, limit - num_decodes + more, 0) == limit
    assert cut_limit(dataclasses.replace(H200, mixed_ms={}), 8192, 0, 1100, 0) == 8192


def test_a_prompt_is_not_divided_again_beside_decode_rows():
    assert cut_limit(H200, 2048, 200, 1400, 824) == 1024
    assert cut_limit(H200, 2048, 200, 1400, 825) == 2048
    assert cut_limit(H200, 8192, 0, 1400, 1400) == 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixed_ms": {16: 1.0, 4096: 9.0}}, "mixed_ms is of sizes up to 4096; a step may have 8192"),
        ({"decode_ms": {128: 1.0}}, "decode_ms is of sizes up to 128; a step may have 256"),
        ({"decode_ms": {}}, "decode_ms is of sizes up to 0; a step may have 256"),
    ],
)
def test_times_that_leave_out_the_largest_step_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(H200, **changes)


TIMES = {"mixed_ms": {size: 3 + size / 4 for size in (8, 16, 32, 64)}, "decode_ms": {8: 3.5}}
JOB = {"page_size": 4, "num_pages": 400, "max_num_seqs": 8, "max_step_tokens": 64, "max_mixed_tokens": 64}


def run_job(seed: int, **limits) -> tuple[float, dict[str, list[int]]]:
    """Milliseconds of all steps, and the tokens of all requests: a job that keeps twice as many there as may run."""
    rng = random.Random(seed)
    harness = Harness(**JOB, **limits)
    for i in range(60):
        harness.submit(f"r{i}", rng.randint(1, 40), max_tokens=rng.randint(1, 12))
        while harness.scheduler.num_waiting + harness.scheduler.num_running >= 16:
            harness.step()
    harness.drain()
    times = make_limits(**JOB, **TIMES)
    steps_ms = [mixed_ms(times, p.num_tokens) if p.prefills else 3.5 for p in harness.plans]
    return sum(steps_ms), {name: harness.output(name) for name in harness.requests}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("caching", [False, True])
def test_a_job_with_times_takes_less_time_and_gives_the_same_tokens(seed: int, caching: bool):
    with_times_ms, tokens = run_job(seed, **TIMES, prefix_caching=caching)
    without_ms, same = run_job(seed, prefix_caching=caching)
    assert tokens == same
    assert with_times_ms < 0.97 * without_ms, (with_times_ms, without_ms)


def test_prompts_of_those_that_wait_and_of_the_one_begun_are_counted_as_far_as_slots_go():
    harness = Harness(**JOB | {"max_num_seqs": 3}, **TIMES | {"decode_ms": {3: 3.0}})
    for i, prompt_len in enumerate([12, 12, 12, 40]):
        harness.submit(f"r{i}", prompt_len)
    plan = harness.step()  # of 36 tokens of three: 76 would fill a step of 64
    assert plan is not None and plan.num_tokens == 32
    harness.drain()
    harness = Harness(**JOB, **TIMES)
    harness.submit("a", 35)
    first, second = harness.step(), harness.step()  # 32, then the rest of a prompt
    assert first is not None and second is not None
    assert (first.num_tokens, second.num_tokens) == (32, 3)
    harness.drain()


def test_what_was_refused_for_want_of_pages_is_not_counted():
    harness = Harness(**JOB | {"num_pages": 16}, **TIMES, prefix_caching=True)
    harness.submit("runs", 4, max_tokens=30)
    harness.step()
    harness.submit("large", 60, max_tokens=2)
    harness.step()  # looks at it: 15 of 16 pages are not free
    admission = harness.scheduler._admission
    assert admission.step_limit(1, None) == 64
    harness.submit("small", 18, max_tokens=2)
    assert admission.step_limit(1, None) == cut_limit(harness.limits, 64, 1, 18, 0) == 16
    harness.drain()


def test_no_more_of_a_long_queue_is_looked_at_than_fills_a_step(monkeypatch):
    harness = Harness(**JOB | {"max_num_seqs": 50, "num_pages": 1000}, **TIMES | {"decode_ms": {50: 3.0}})
    for i in range(900):
        harness.submit(f"r{i}", 10, max_tokens=1)
    looked_at = []
    whole = WaitingQueue.__iter__
    monkeypatch.setattr(WaitingQueue, "__iter__", lambda queue: (looked_at.append(seq) or seq for seq in whole(queue)))
    assert harness.scheduler._admission.step_limit(0, None) == 64
    assert len(looked_at) == 8  # 7 have 70 tokens; the iterator is one ahead


@pytest.mark.parametrize("num_pages", range(60, 76))
def test_a_cut_undoes_no_admission_however_few_pages_are_left(num_pages: int):
    """In as many steps as were reckoned with, others take the pages that were left free for them, and no more."""
    times = {"mixed_ms": {size: 2.9 + size for size in (4, 8, 16, 32, 64)}, "decode_ms": {8: 3.0}}
    harness = Harness(**JOB | {"page_size": 1, "num_pages": num_pages}, **times)
    for i in range(6):
        harness.submit(f"r{i}", 1, max_tokens=40)
    harness.step()
    harness.submit("x", 40, max_tokens=2)
    harness.drain()
    chunks = [chunk for plan in harness.plans for chunk in plan.prefills if chunk.request.request_id == "x"]
    assert len(chunks) == 2 and sum(chunk.samples for chunk in chunks) == 1
