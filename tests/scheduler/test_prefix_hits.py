"""Requests that begin alike: what is computed once, what clients are told of it, and what happens in a small pool."""

import itertools
import random

import pytest

from jaxinfer.scheduler.plan import CachedPrefix, PrefillChunk
from tests.scheduler.harness import Harness
from tests.scheduler.test_random_walk import submit_random


def caching(**changes: int) -> Harness:
    limits = {"prefix_caching": True, "page_size": 8, "max_model_len": 200, "num_pages": 100, "max_step_tokens": 64}
    return Harness(**limits | changes)


def num_cached(harness: Harness, name: str) -> int:
    """What the first token's event says; the later ones say nothing of it."""
    first, *others = harness.events[name]
    assert not any(event.cached_tokens for event in others)
    return first.cached_tokens


def run(harness: Harness, name: str, prompt: list[int], **fields: object) -> int:
    """Tokens of the prompt that were cached, for a request that runs with no other beside it."""
    harness.submit(name, prompt_ids=prompt, **fields)
    harness.drain()
    return num_cached(harness, name)


def prefixes(harness: Harness, name: str) -> list[CachedPrefix]:
    """Those of a request of which a single token was left to compute."""
    found = [prefix for plan in harness.plans for prefix in plan.prefixes]
    return [prefix for prefix in found if prefix.last is not None and prefix.last.request.request_id == name]


def first_chunks(harness: Harness, name: str) -> list[tuple[PrefillChunk, CachedPrefix | None]]:
    """The first chunk of every admission, and the prefix that came with it."""
    return [
        (chunk, next((prefix for prefix in plan.prefixes if prefix.slot == chunk.slot), None))
        for plan in harness.plans
        for chunk in plan.prefills
        if chunk.request.request_id == name and chunk.history is not None
    ]


PROMPT = [(7 * i * i + 3 * i) % 13 for i in range(60)]


# The first request leaves its prompt and 3 of its 4 tokens of output: the last one is sampled and never computed.
@pytest.mark.parametrize(
    ("page_size", "prompt_len", "cached", "num_shared", "is_copied"),
    [
        (8, 20, 19, 2, True),  # 8 + 8 shared, 3 of 4 copied
        (16, 20, 19, 1, True),  # 16 shared, 3 copied
        (8, 16, 15, 1, True),  # the last token is computed again, on a copy of the page that has it
        (16, 16, 15, 0, True),
        (8, 17, 16, 2, False),  # full pages alone
        (16, 33, 32, 2, False),
        (8, 5, 4, 0, True),
        (16, 2, 1, 0, True),
        (8, 1, 0, 0, False),
    ],
)
def test_the_same_prompt_again_is_cached_but_for_its_last_token(
    page_size: int, prompt_len: int, cached: int, num_shared: int, is_copied: bool
):
    harness = caching(page_size=page_size)
    assert run(harness, "a", PROMPT[:prompt_len]) == 0
    assert run(harness, "b", PROMPT[:prompt_len]) == cached
    ((a, _),) = first_chunks(harness, "a")
    if not cached:
        ((b, prefix),) = first_chunks(harness, "b")
        assert (b.start, list(b.token_ids), prefix) == (0, PROMPT[:prompt_len], None)
    else:  # the last token is a decode row
        (prefix,) = prefixes(harness, "b")
        assert prefix.last is not None and prefix.last.token_id == PROMPT[cached]
        assert list(prefix.last.history) == PROMPT[:prompt_len]
        assert list(prefix.pages[:num_shared]) == list(a.new_pages[:num_shared])
        assert len(prefix.pages) == num_shared + is_copied
        assert prefix.copied_from == (a.new_pages[num_shared] if is_copied else None)
        assert prefix.copied_from not in prefix.pages
        (plan,) = (plan for plan in harness.plans if prefix in plan.prefixes)
        assert [(row.slot, row.position) for row in plan.decodes] == [(prefix.slot, cached)] and not plan.prefills
    assert harness.scheduler.cached_prompt_tokens == cached
    assert harness.output("b") == harness.output("a")


@pytest.mark.parametrize("turns", range(1, 6))
def test_abort_of_one_that_shares_a_prefix_frees_no_page_of_the_others(turns: int):
    """B9.4."""
    harness = caching()
    expected = caching()
    run(expected, "b", PROMPT[:40], max_tokens=12)
    run(harness, "first", PROMPT[:32])
    for name in "abc":
        harness.submit(name, prompt_ids=PROMPT[:40], max_tokens=12)
    for _ in range(turns):
        harness.step()
    harness.abort("a")
    harness.scheduler.check_integrity()
    harness.drain()
    assert harness.output("b") == harness.output("c") == expected.output("b")
    assert num_cached(harness, "b") >= 32


def test_ten_turns_of_a_chat_compute_each_token_once():
    harness = caching()
    prompt: list[int] = []
    known = 0
    for turn in range(10):
        name = f"turn{turn}"
        prompt = prompt + [(turn + i) % 13 for i in range(5)]
        assert run(harness, name, prompt, max_tokens=7) == known
        prompt = prompt + harness.output(name)
        known = len(prompt) - 1
    computed = sum(plan.num_tokens for plan in harness.plans)
    assert computed == len(prompt) - 1
    assert harness.scheduler.cache.pool.num_cached == -(-known // 8)


def test_prompts_that_part_in_the_middle_of_a_page_share_what_is_before_it_and_copy_the_page():
    harness = caching()
    run(harness, "a", PROMPT[:30])
    other = [*PROMPT[:13], PROMPT[13] + 1, *PROMPT[:9]]
    assert run(harness, "b", other) == 13
    ((a, _),), ((b, prefix),) = (first_chunks(harness, name) for name in "ab")
    assert prefix is not None
    assert (prefix.pages[0], prefix.copied_from) == (a.new_pages[0], a.new_pages[1])
    assert prefix.pages[1] not in a.new_pages
    assert (b.start, b.first_new_page) == (13, 2)
    assert run(harness, "c", [*PROMPT[:30], 1]) == 30  # the page that was copied is as it was
    assert run(harness, "d", other) == len(other) - 1


def test_requests_of_different_salts_share_nothing():
    harness = caching()
    cached = [run(harness, f"{i}", PROMPT[:20], cache_salt=salt) for i, salt in enumerate(["", "a", "b", "a", ""])]
    assert cached == [0, 0, 0, 19, 19]


def test_without_prefix_caching_nothing_is_kept_or_found():
    harness = caching(prefix_caching=False)
    assert [run(harness, name, PROMPT[:40]) for name in "abc"] == [0, 0, 0]
    assert (harness.scheduler.cache.pool.num_cached, harness.scheduler.cached_prompt_tokens) == (0, 0)
    assert not any(plan.prefixes for plan in harness.plans)


@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_at_least_the_last_known_token_is_computed(page_size: int):
    harness = caching(page_size=page_size)
    run(harness, "all", PROMPT)
    for length in range(1, len(PROMPT) + 1):
        assert run(harness, f"{length}", PROMPT[:length], max_tokens=1) == length - 1


def test_requests_of_one_plan_share_the_full_pages_of_the_first_and_copy_none():
    harness = caching()
    for name in "abc":
        harness.submit(name, prompt_ids=PROMPT[:20])
    plan = harness.step()
    assert plan is not None
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.prefills] == [(0, 20), (16, 4), (16, 4)]
    pages = plan.prefills[0].new_pages
    assert [(p.pages, p.copied_from) for p in plan.prefixes] == [(pages[:2], None)] * 2
    assert harness.scheduler.cache.pool.num_used == 2 + 3
    harness.drain()


def test_pages_of_a_prompt_that_is_still_computed_are_shared():
    harness = caching(max_num_seqs=2, max_step_tokens=20)
    harness.submit("a", prompt_ids=PROMPT)
    harness.step()
    harness.submit("b", prompt_ids=[*PROMPT[:40], 1, 2])
    harness.drain()
    assert num_cached(harness, "b") == 40


def test_output_is_found_too_but_not_the_token_of_a_row_in_flight():
    harness = caching()
    harness.submit("a", prompt_ids=PROMPT[:6], max_tokens=50)
    while len(harness.output("a")) < 12:
        harness.step()
    harness.abort("a")
    known = PROMPT[:6] + harness.output("a")
    harness.submit("b", prompt_ids=[*known, 1, 2, 3])
    harness.drain()
    assert num_cached(harness, "b") == len(known)


@pytest.mark.parametrize("turns", range(1, 12))
def test_whatever_a_request_had_computed_when_it_was_aborted_is_right_for_the_next(turns: int):
    harness = caching(page_size=4, max_step_tokens=16)
    harness.submit("a", prompt_ids=PROMPT[:35], max_tokens=30)
    for _ in range(turns):
        harness.step()
    known = [*PROMPT[:35], *harness.output("a")]
    harness.abort("a")
    harness.submit("b", prompt_ids=[*known, 5])  # at once: rows of a are in flight
    harness.drain()
    assert num_cached(harness, "b") == min(16 * turns, len(known))


def test_a_preempted_sequence_finds_its_own_pages():
    harness = caching(page_size=4, num_pages=11, max_num_seqs=2, max_mixed_tokens=8, max_model_len=64)
    harness.submit("old", 4, max_tokens=28)
    harness.submit("young", 4, max_tokens=28)
    harness.drain()
    assert harness.scheduler.num_preemptions >= 1
    again = [chunk for chunk, _ in first_chunks(harness, "young")[1:]]
    assert any(chunk.start > 4 for chunk in again)
    assert num_cached(harness, "young") == 0
    assert harness.scheduler.cached_prompt_tokens == 0


def test_cached_pages_are_evicted_before_a_sequence_is_preempted():
    harness = caching(page_size=4, num_pages=10, max_model_len=64)
    run(harness, "a", PROMPT[:30])
    assert (harness.scheduler.cache.pool.num_cached, harness.scheduler.cache.prefix.num_evictions) == (9, 0)
    harness.submit("b", 4, max_tokens=30)
    harness.drain()
    assert harness.scheduler.num_preemptions == 0
    assert harness.scheduler.cache.prefix.num_evictions == 9 - 1


@pytest.mark.parametrize("num_pages", [1, 2, 3, 5])
def test_a_pool_of_a_few_pages_goes_on_with_the_same_and_other_prompts(num_pages: int):
    harness = caching(page_size=4, num_pages=num_pages, max_num_seqs=3, max_model_len=64)
    for i in range(30):
        harness.submit(f"{i}", prompt_ids=PROMPT[i % 3 * (i % 2) :][: 4 * num_pages - 1 - i % 2], max_tokens=2)
    harness.drain()
    assert harness.scheduler.cached_prompt_tokens > 0


def test_a_page_may_be_evicted_for_the_sequence_that_copies_it():
    harness = caching(page_size=4, num_pages=3, max_model_len=64)
    run(harness, "a", PROMPT[:11], max_tokens=1)
    assert run(harness, "b", PROMPT[:11], max_tokens=1) == 10
    (prefix,) = prefixes(harness, "b")
    assert prefix.pages[-1] == prefix.copied_from


def test_after_clearing_nothing_is_found_not_even_of_those_that_ran():
    harness = caching()
    run(harness, "a", PROMPT[:20])
    harness.submit("b", prompt_ids=PROMPT[:50], max_tokens=20)
    for _ in range(4):
        harness.step()
    harness.scheduler.clear_prefix_cache()
    harness.scheduler.check_integrity()
    assert harness.scheduler.cache.pool.num_cached == 0
    harness.drain()
    assert harness.scheduler.cache.pool.num_cached == 0
    assert [run(harness, name, PROMPT[:20]) for name in "cd"] == [0, 19]


def test_a_sequence_that_is_computed_again_after_clearing_leaves_its_pages_again():
    harness = caching(page_size=4, num_pages=10, max_num_seqs=2, max_mixed_tokens=8, max_model_len=64)
    harness.submit("old", 4, max_tokens=28)
    harness.submit("young", 4, max_tokens=28)
    harness.step()
    harness.scheduler.clear_prefix_cache()
    harness.drain()
    assert harness.scheduler.num_preemptions == 1
    known = [*harness.requests["young"].prompt_ids, *harness.output("young")]
    assert run(harness, "again", known) == len(known) - 1


def test_the_same_requests_give_the_same_plans():
    def plans() -> list[str]:
        rng = random.Random(5)
        harness = caching(page_size=4, num_pages=20, max_model_len=64)
        for i in range(60):
            submit_random(harness, f"{i}", rng)
            harness.step()
        harness.drain()
        return [repr(plan) for plan in harness.plans]

    assert plans() == plans()


def test_the_random_walks_share_copy_evict_and_preempt():
    """Guards the walks of test_random_walk against growing tame."""
    seen = dict.fromkeys(("shared", "copied", "same plan", "evicted", "preempted again", "source reused"), 0)
    for seed in range(20):
        rng = random.Random(seed)
        harness = caching(page_size=4, num_pages=rng.choice([12, 16, 20]), max_num_seqs=5, max_model_len=64)
        for i in range(60):
            submit_random(harness, f"{i}", rng)
            harness.step()
        harness.drain()
        seen["evicted"] += harness.scheduler.cache.prefix.num_evictions
        for plan in harness.plans:
            written = set(itertools.chain(*(chunk.new_pages for chunk in plan.prefills)))
            targets = {prefix.pages[-1] for prefix in plan.prefixes if prefix.copied_from}
            for prefix in plan.prefixes:
                seen["shared"] += len(prefix.pages) > (prefix.copied_from is not None)
                seen["copied"] += prefix.copied_from is not None
                seen["same plan"] += bool(written & set(prefix.pages))
                seen["source reused"] += prefix.copied_from in written | targets
        for name in harness.requests:
            seen["preempted again"] += any(prefix for _, prefix in first_chunks(harness, name)[1:])
    assert min(seen.values()) > 5, seen


def test_a_head_that_waits_for_pages_is_matched_again_only_when_there_is_more_for_it(monkeypatch):
    harness = caching(num_pages=14)
    harness.submit("runs", prompt_ids=PROMPT, max_tokens=40)
    for _ in range(4):
        harness.step()
    cache, calls = harness.scheduler.cache.prefix, []
    match = cache.match
    monkeypatch.setattr(cache, "match", lambda *args: calls.append(args) or match(*args))
    harness.submit("waits", prompt_ids=[(5 * i) % 11 for i in range(60)], max_tokens=2)
    for _ in range(20):
        harness.step()
    assert harness.scheduler.num_waiting == 1
    assert len(calls) == 1
    harness.drain()
    assert len(calls) <= 3
    assert len(harness.events["waits"]) == 2
