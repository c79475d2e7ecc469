"""What the disk tier is asked to write, and what of it a restart finds."""

from jaxinfer.scheduler.plan import Delete, Save
from jaxinfer.scheduler.tiers import MAX_SAVING
from tests.scheduler.cached import Cache, of_kind, page

PROMPTS = [[10 * i + j for j in range(8)] for i in range(1, 30)]


def test_what_comes_faster_than_the_disk_takes_it_is_forgotten():
    cache = Cache(num_pages=4, num_frames=2)
    saves = []
    for tokens in PROMPTS:
        held, tickets = cache.begin(tokens)
        saves += of_kind(cache.begun(), Save)
        for ticket in tickets:
            cache.done(ticket)
        cache.end(held)
    assert len(saves) == MAX_SAVING
    cache.done(saves[0].ticket)
    held, _ = cache.begin([1, 2, 3, 4, 5, 6, 7, 8])
    assert of_kind(cache.begun(), Save), "there is room for another"


def test_all_that_pages_on_disk_hang_from_is_on_disk_too():
    cache = Cache(num_pages=8, num_frames=2)
    for tokens in PROMPTS:
        cache.keep([1, 2, 3, 4, *tokens[:4]])  # all share the first two pages, which are used all the time
        cache.settle()
    on_disk = [node for node in cache._tree.nodes() if node.on_disk]
    assert len(on_disk) > 10
    assert all(above.on_disk for node in on_disk for above in node.upwards())


def test_a_smaller_limit_at_a_restart_costs_no_saved_session():
    old, saved = PROMPTS[0], PROMPTS[1]
    pages = [page(tokens[i : i + 2], tokens[:i]) for tokens in (old, saved) for i in range(0, 8, 2)]
    manifests = {"s": {"salt": "", "tokens": saved, "saved_at_s": 1}}
    cache = Cache(pages, num_disk_pages=1, manifests=manifests)
    assert cache.has(saved) and not cache.has(old[:2])
    info = cache.sessions.info("s")
    assert (info.saved, info.num_cached_tokens) == (True, 8)
    deleted = [one for delete in of_kind(cache.begun(), Delete) for one in delete.pages]
    assert {one.key for one in deleted} == {one.key for one in pages[:4]}
