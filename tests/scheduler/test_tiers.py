"""What goes where when the device, the host or the disk is full, what comes back, and what is in whose way."""

import pytest

from jaxinfer.scheduler.host_tier import HostTier
from jaxinfer.scheduler.pages import PageError
from jaxinfer.scheduler.plan import Delete, Fetch, Offload, Restore, Save
from jaxinfer.scheduler.tree import Node, pack
from jaxinfer.types import InvalidRequest
from tests.scheduler.cached import Cache, of_kind, page
from tests.scheduler.harness import Harness

A, B, C, D = ([10 * i + j for j in range(1, 9)] for i in range(1, 5))
"""Tokens of four pages each: two of them fill the device."""


def on_the_host(**limits: int) -> Cache:
    """A on the host alone, whose frames are of two of its pages; C and D fill the device."""
    cache = Cache(**limits)
    for tokens in (A, C, D):
        cache.keep(tokens)
    cache.settle()
    assert [cache.where(A[:num]) for num in (2, 4, 6, 8)] == ["H"] * 4
    return cache


def on_disk(**limits: int) -> Cache:
    """A on disk alone."""
    cache = Cache([page(A[i : i + 2], A[:i]) for i in range(0, 8, 2)], **limits)
    assert cache.where(A) == "F" and cache.hit(A).num_tokens == 0
    return cache


def test_what_the_device_gives_up_is_copied_to_the_host_before_its_pages_are_given_away():
    cache = Cache()
    cache.keep(A)
    cache.keep(B)
    assert cache.pool.num_cached == 8
    cache.settle()
    held, tickets = cache.begin(C)
    assert not tickets
    assert cache.where(A[:2]) in ("H", "DH") and cache.where(B) != ""
    cache.end(held)


def test_a_frame_is_copied_leaves_first_and_once():
    cache = Cache(num_frames=8)
    held, _ = cache.begin(A)
    cache.end(held)
    pages = [*reversed(held[2])]
    for tokens in (B, C):
        cache.keep(tokens)
    offloads = of_kind(cache.log, Offload)
    assert [tuple(one.pages) for one in offloads][:2] == [tuple(pages[:2]), tuple(pages[2:])]
    copied = [p for one in offloads for p in one.pages]
    assert len(offloads) == len({one.frame for one in offloads})
    assert cache.tiers.num_offloaded == len(copied)


def test_nothing_is_copied_early_ahead_of_somebody_who_found_all_else_in_the_cache():
    cache = Cache(num_frames=8)
    for tokens in (A, B):
        cache.end(cache.begin(tokens)[0])
    assert cache.take_transfers(10**9, is_awaited=True) == [] and cache.has_work
    assert len(of_kind(cache.begun(), Offload)) == 1


def test_what_is_restored_is_held_until_it_has_arrived_whoever_gave_up_waiting():
    cache = on_the_host()
    held, (ticket,) = cache.begin(A)
    cache.end(held)  # aborted
    assert cache.pool.num_used == 4
    with pytest.raises(PageError):
        cache.prefix.alloc(5)
    cache.done(ticket)
    assert cache.pool.num_used == 0
    assert cache.hit(A).num_tokens == 8 and len(cache.hit(A).pages) == 4


def test_a_transfer_holds_the_pages_above_it_too():
    cache = Cache(num_frames=8)
    for tokens in (A, C, D):
        cache.keep(tokens)
    cache.settle()
    upper, tickets = cache.begin(A[:4])
    cache.settle()
    cache.end(upper)
    assert cache.where(A[:4]) == "DH" and cache.where(A[:6]) == "H"
    held, (ticket,) = cache.begin(A)
    assert len(of_kind(cache.begun(), Restore)) == 1
    cache.end(held)
    above = [cache.node(A[:num]).page for num in (2, 4)]
    assert all(cache.pool.is_held(one) for one in above)
    cache.done(ticket)
    assert not any(cache.pool.is_held(one) for one in above)


def test_another_that_hits_pages_on_their_way_waits_for_the_same_transfer():
    cache = on_the_host()
    first, tickets = cache.begin(A)
    second, others = cache.begin([*A[:6], 0])
    assert len(tickets) == 1 and tickets <= others
    assert len(of_kind(cache.begun(), Restore)) == 2  # by frame, of one ticket: nobody restores it twice
    cache.end(first)
    for ticket in tickets:
        cache.done(ticket)
    assert cache.pool.num_used == 4
    cache.end(second)


def test_whoever_restores_behind_pages_that_are_on_their_way_waits_for_both():
    cache = on_the_host()
    _, first = cache.begin(A[:4])
    _, both = cache.begin(A)
    assert len(first) == 1 and len(both) == 2 and first < both


def test_a_page_that_is_on_its_way_is_not_copied():
    cache = on_the_host()
    _, (ticket,) = cache.begin(A)
    hit = cache.hit([*A[:7], 0])
    assert (hit.num_tokens, hit.source) == (6, None)
    cache.done(ticket)
    hit = cache.hit([*A[:7], 0])
    assert (hit.num_tokens, hit.source) == (7, cache.node(A).page)


def test_a_page_that_is_being_read_is_not_copied():
    cache = Cache([page(A[:2])])
    (ticket,) = cache.fetch([cache.node(A[:2])])
    assert cache.hit([A[0], 0]).num_tokens == 0
    cache.done(ticket)
    hit = cache.hit([A[0], 0])
    assert (hit.num_tokens, hit.tail) == (1, cache.node(A[:2]))


def test_a_page_that_agrees_in_part_is_restored_for_its_sequence_alone():
    cache = on_the_host()
    other = [*A[:7], 0]
    held, (ticket,) = cache.begin(other)
    assert cache.hit(A).num_tokens >= 6
    assert [cache.where(A[:num]) for num in (2, 4, 6)] == ["DH"] * 3
    assert cache.where(A) == "H", "the page of A's last tokens is not the copy that is to be written to"
    cache.done(ticket)
    cache.end(held)
    assert cache.where(A) == "H" and cache.has(other)


def test_a_frame_is_not_given_up_while_room_is_made_for_what_is_in_it():
    cache = Cache(num_frames=1, num_disk_pages=0)
    for tokens in (A[:4], C, B[:4]):
        cache.keep(tokens)
    cache.begin(D[:4])  # takes the pages of A, which was copied
    assert cache.where(A[:4]) == "H" and not cache.pool.num_empty
    _, (ticket,) = cache.begin(A[:4])
    begun = cache.begun()
    (restore,) = of_kind(begun, Restore)
    assert restore.frame == 0 and sorted(index for index, _ in restore.places) == [0, 1]
    assert not any(isinstance(one, Offload) for one in begun[: begun.index(restore)])
    cache.done(ticket)


def test_restored_pages_come_from_their_own_places_in_the_frame():
    cache = on_the_host()
    places = {num: (cache.node(A[:num]).frame.number, cache.node(A[:num]).index) for num in (2, 4, 6, 8)}
    held, _ = cache.begin(A)
    found = {
        target: (restore.frame, index)
        for restore in of_kind(cache.begun(), Restore)
        for index, target in restore.places
    }
    assert [found[target] for target in held[2]] == [places[num] for num in (2, 4, 6, 8)]


def test_the_host_gives_up_the_frame_that_was_used_least_recently():
    cache = Cache(num_pages=4, num_frames=8, num_disk_pages=0)
    for tokens in (A, B, C):
        cache.keep(tokens)
    assert cache.host.oldest() is cache.node(A).frame and cache.where(A[:2]) == "H"
    cache.begin(A)
    assert cache.host.oldest() in (cache.node(B[:2]).frame, cache.node(B).frame)


def test_what_the_host_gives_up_goes_to_disk_and_then_the_page_used_least_recently_is_deleted():
    cache = Cache(num_pages=4, num_frames=2, num_disk_pages=4)
    for i in range(8):
        cache.keep([token + 100 * i for token in A])
    cache.settle()
    saved = [page for save in of_kind(cache.log, Save) for _, page in save.pages]
    deleted = [page for delete in of_kind(cache.log, Delete) for page in delete.pages]
    assert len(saved) - len(deleted) == cache.disk.num_used == 4
    assert {one.key for one in deleted} == {one.key for one in saved[: len(deleted)]}


def test_a_page_that_is_on_disk_already_is_not_written_again():
    cache = on_disk(num_pages=4, num_frames=2)
    for ticket in cache.fetch(cache.hit(A).fetched):
        assert ticket
    cache.settle()
    cache.keep(A)
    for i in range(1, 6):
        cache.keep([token + 100 * i for token in A])
    cache.settle()
    written = [page.tokens for save in of_kind(cache.log, Save) for _, page in save.pages]
    assert written and not any(tokens[0] in A for tokens in written)


def test_a_write_that_fails_leaves_no_page_on_disk_and_loses_what_was_nowhere_else():
    cache = Cache(num_pages=4, num_frames=2)
    begun = []
    for tokens in (A, B, C):
        held, tickets = cache.begin(tokens)
        begun += cache.begun()
        for ticket in tickets:
            cache.done(ticket)
        cache.end(held)
    (save, *_) = of_kind(begun, Save)
    lost = [page.key for _, page in save.pages]
    on_disk = cache.disk.num_used
    cache.done(save.ticket, *lost)
    assert cache.disk.num_used == on_disk - len(lost)
    assert not any(node.key in lost and node.on_disk for node in cache._tree.nodes())


def test_pages_are_read_from_disk_a_frame_at_a_time_and_up_to_half_of_the_host():
    cache = on_disk(num_frames=2)
    tickets = cache.fetch(cache.hit(A).fetched)
    (fetch,) = of_kind(cache.begun(), Fetch)
    assert tickets == {fetch.ticket} and [one.tokens for one in fetch.pages] == [(11, 12), (13, 14)]
    assert cache.hit(A).num_tokens == 0, "nothing is there before it has been read"
    cache.done(fetch.ticket)
    hit = cache.hit(A)
    assert (hit.num_tokens, len(hit.restored), len(hit.fetched)) == (4, 2, 2)
    assert cache.tiers.num_fetched == 2


def test_whoever_wants_pages_that_are_read_already_waits_for_all_of_them():
    cache = on_disk()
    tickets = cache.fetch(cache.hit(A).fetched)
    assert len(tickets) == 2
    assert cache.fetch(cache.hit(A).fetched) == tickets
    assert len(of_kind(cache.begun(), Fetch)) == 2
    for ticket in tickets:
        cache.done(ticket)
    assert cache.hit(A).num_tokens == 8


def test_a_frame_that_is_being_filled_is_given_up_by_nobody():
    cache = on_disk(num_frames=1, num_pages=4)
    (ticket,) = cache.fetch(cache.hit(A).fetched)
    cache.begun()
    for tokens in (B, C):
        held, _ = cache.begin(tokens)
        cache.end(held)
    assert not of_kind(cache.begun(), Offload)
    cache.done(ticket)
    assert cache.where(A[:2]) == "HF"


def test_a_damaged_page_is_forgotten_with_all_below_it_and_deleted():
    cache = on_disk()
    tickets = sorted(cache.fetch(cache.hit(A).fetched))
    first, second = of_kind(cache.begun(), Fetch)
    cache.done(tickets[0], first.pages[1].key)
    assert cache.has(A[:2]) and not cache.has(A[:4])
    deleted = {one.key for delete in of_kind(cache.begun(), Delete) for one in delete.pages}
    assert deleted == {first.pages[1].key, *(one.key for one in second.pages)}
    cache.done(tickets[1])
    assert cache.hit(A).num_tokens == 2
    assert cache.host.num_pages_used == 1 and cache.disk.num_used == 1


def test_a_damaged_page_that_was_computed_meanwhile_stays():
    cache = on_disk()
    cache.fetch(cache.hit(A).fetched)
    first, second = of_kind(cache.begun(), Fetch)
    held, _ = cache.begin(A)
    cache.end(held)
    cache.done(first.ticket, *(one.key for one in first.pages))
    cache.done(second.ticket)
    assert cache.where(A[:2]) == "D" and cache.hit(A).num_tokens == 8


def test_losing_the_device_loses_the_host_too_but_neither_disk_nor_what_is_being_read():
    cache = on_disk()
    cache.keep(C)
    cache.keep(D)
    cache.keep(B)
    tickets = cache.fetch(cache.hit(A).fetched)
    cache.prefix.clear()
    cache.check()
    assert cache.has(A) and not (cache.has(B) or cache.has(C) or cache.has(D))
    for ticket in tickets:
        cache.done(ticket)
    cache.settle()
    assert cache.hit(A).num_tokens == 8


def test_the_beginning_of_a_page_that_is_on_disk_is_deleted_there():
    pages = [page(A[:2]), page(A[2:4], A[:2]), page(A[2:3], A[:2])]
    for order in (pages, [pages[0], pages[2], pages[1]]):
        cache = Cache(order)
        (delete,) = of_kind(cache.begun(), Delete)
        assert delete.pages == [order[2]] and cache.disk.num_used == 2


def test_pages_whose_parent_is_not_there_are_deleted_with_those_for_which_there_is_no_room():
    pages = [page(A[:2]), page(A[2:4], A[:2]), page(B[2:4], B[:2]), page(C[:2]), page(C[2:4], C[:2])]
    cache = Cache(pages, num_disk_pages=2)
    assert cache.has(A[:2]) and cache.has(C[:2]) and not cache.has(B[:4]), "leaves are deleted first"
    deleted = [one for delete in of_kind(cache.begun(), Delete) for one in delete.pages]
    assert {one.key for one in deleted} == {pages[i].key for i in (1, 2, 4)}


def test_salts_are_apart_on_disk_too():
    cache = Cache([page(A[:2], salt="x"), page(A[:2])])
    assert cache.where(A[:2]) == cache.where(A[:2], "x") == "F" and cache.where(A[:2], "y") == ""


def test_a_frame_is_free_when_nobody_wants_it_and_nobody_counts_on_it():
    host = HostTier(2, 2)
    frame, other = host.take(), host.take()
    with pytest.raises(PageError, match="all 2 are filled"):
        host.take()
    nodes = [Node("", None, pack([i])) for i in range(3)]
    host.put(frame, nodes[0])
    host.put(frame, nodes[1])
    with pytest.raises(PageError, match="frame 0 is full"):
        host.put(frame, nodes[2])
    host.put(other, nodes[2])
    assert host.oldest() is frame
    host.touch(frame)
    assert host.oldest() is other
    frame.num_locks += 1
    other.num_locks += 1
    assert host.oldest() is None
    host.drop(nodes[0])
    host.drop(nodes[1])
    assert not host.has_free
    frame.num_locks -= 1
    host.free_if_empty(frame)
    assert host.has_free and host.take().number == frame.number


def test_what_neither_pool_nor_host_holds_is_refused_with_what_is_needed_and_what_there_is():
    harness = Harness(num_pages=2, max_model_len=64, long_tokens=9, long_chunk=4, prefix_caching=True, num_frames=1)
    message = r"need 5 pages of 4 tokens; the cache has 2, and the host's memory holds 9 tokens behind them"
    with pytest.raises(InvalidRequest, match=message):
        harness.submit("a", prompt_len=15, max_tokens=4)
    harness.submit("b", prompt_len=14, max_tokens=4)
    harness.drain()


def test_a_request_waits_for_what_is_read_from_disk_and_begins_behind_all_of_it():
    harness = Harness(
        num_pages=12,
        num_frames=4,
        frame_pages=2,
        num_disk_pages=100,
        prefix_caching=True,
        restore_ms=0.0,
        compute_ms=1.0,
    )
    prompt = [1, 2] * 6
    harness.submit("a", prompt_ids=prompt)
    harness.drain()
    for i in range(6):
        harness.submit(f"other {i}", prompt_ids=[3 + i] * 20)
        harness.drain()
    path = harness.scheduler.cache._tree.path("", prompt)
    assert len(path) == 3 and all(node.on_disk and not node.page and not node.frame for node in path)
    harness.submit("b", prompt_ids=prompt)
    harness.drain()
    assert harness.events["b"][0].cached_tokens == 8  # the last page, of which one token is computed, is not read


def test_what_was_read_last_is_deleted_last():
    cache = Cache([page(tokens[i : i + 2], tokens[:i]) for tokens in (A, B) for i in range(0, 8, 2)])
    assert cache.disk.oldest() in (cache.node(A), cache.node(B)), "leaves first"
    for one, other in ((A, B), (B, A)):
        cache.fetch(cache.hit(one).fetched)
        assert cache.disk.oldest() is cache.node(other)


def test_one_that_ends_while_it_waits_leaves_no_page_of_its_own_that_has_not_arrived():
    harness = Harness(num_pages=8, num_frames=8, frame_pages=2, prefix_caching=True, restore_ms=0.0, compute_ms=1.0)
    prompt = [*range(10)]
    harness.submit("a", prompt_ids=[*prompt, 10, 11])
    harness.drain()
    for i in range(1):
        harness.submit(f"other {i}", prompt_ids=[5 - i] * 26)
        harness.drain()
    cache = harness.scheduler.cache
    path = cache._tree.path("", [*prompt, 10, 11])
    assert len(path) == 3 and all(node.frame and not node.page for node in path)
    harness.submit("b", prompt_ids=[*prompt, 1])
    plan = harness.plan()
    assert plan is not None and harness.scheduler.num_restoring == 1 and plan.prefixes[0].pages
    cache.tiers.give_up(path[2].frame)  # the page of which it has the first two tokens
    harness.abort("b")
    assert cache.find("", [*prompt, 1], harness.scheduler.num_steps).source is None
    harness.drain()
