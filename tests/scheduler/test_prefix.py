"""The radix tree alone: what it finds, and what it gives up first."""

import random
from collections.abc import Sequence
from itertools import takewhile

import pytest

from jaxinfer.scheduler.disk_tier import DiskTier
from jaxinfer.scheduler.host_tier import HostTier
from jaxinfer.scheduler.pages import PageError, PagePool
from jaxinfer.scheduler.prefix import PrefixCache
from jaxinfer.scheduler.states import States
from jaxinfer.scheduler.tiers import Tiers
from jaxinfer.scheduler.tree import Tree, pack

NOW = 100  # a plan after all that filled pages


class Colliding(int):
    """A token with one of 16 hashes."""

    def __hash__(self) -> int:
        return int(self) & 15


class Cache(PrefixCache):
    """With the sequences that hold its pages, to check it after every change."""

    def __init__(self, num_pages: int = 20, page_size: int = 2):
        tree = Tree(page_size)
        super().__init__(PagePool(num_pages), tree, Tiers(tree, HostTier(0, 1), DiskTier(0)), States(0, 0))
        self.holders: list[tuple[str, Sequence[int], list[int]]] = []

    def begin(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """A sequence takes what is cached of all its tokens, and other pages for the rest."""
        hit = self.match(salt, tokens, NOW)
        pages = self.take(hit, -(-len(tokens) // self.page_size) - len(hit.pages)).pages
        self.holders.append((salt, tokens, pages))
        self.check_integrity(self.holders)
        return pages

    def end(self) -> None:
        """The sequence that began first leaves its pages to the cache."""
        salt, tokens, pages = self.holders.pop(0)
        self.release(salt, tokens, pages, 0)
        self.check_integrity(self.holders)

    def keep(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Pages that hold the tokens, or held them until the tree had them on another page."""
        pages = self.begin(tokens, salt)
        self.holders.insert(0, self.holders.pop())
        self.end()
        return pages

    def num_found(self, tokens: Sequence[int], salt: str = "") -> int:
        return self.match(salt, tokens, NOW).num_tokens


def test_an_empty_cache_has_nothing():
    assert Cache().num_found([1, 2, 3]) == 0


def test_full_pages_are_shared_and_a_page_that_agrees_in_part_is_copied():
    cache = Cache(page_size=4)
    pages = cache.keep([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.match("", [1, 2, 3, 4, 5, 6, 0], NOW)[:4] == (6, pages[:1], pages[1], 1)
    assert cache.match("", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], NOW)[:4] == (9, pages[:2], pages[2], 2)
    assert cache.match("", [1, 2, 3, 4], NOW)[:4] == (4, pages[:1], None, 1)
    assert cache.match("", [1, 2], NOW)[:4] == (2, [], pages[0], 0)
    assert cache.num_found([2, 2]) == 0


def test_the_page_that_agrees_longest_is_copied_whatever_lies_beside_it():
    cache = Cache(page_size=4)
    for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5], [1, 3, 0, 0], [2, 9], [1, 2, 5, 9]):
        cache.keep(tokens)
    assert [cache.num_found(t) for t in ([1, 2, 5, 7], [1, 3, 9, 9], [1, 9, 9, 9], [2, 9, 9], [0])] == [3, 2, 1, 2, 0]


def test_pages_of_another_salt_are_not_found():
    cache = Cache()
    cache.keep([1, 2, 3, 4], salt="a")
    assert [cache.num_found([1, 2, 3, 4], salt) for salt in ("", "a", "b")] == [0, 4, 0]


def test_a_page_that_a_longer_one_begins_with_gives_way_to_it():
    cache = Cache(page_size=4)
    cache.keep([1, 2])
    cache.keep([1, 2, 3])
    assert cache.pool.num_cached == 1
    cache.keep([1, 2])
    assert (cache.pool.num_cached, cache.num_found([1, 2, 3, 4]), cache.num_evictions) == (1, 3, 0)


def test_least_recently_used_pages_are_evicted_first_and_leaves_before_what_they_hang_from():
    cache = Cache(num_pages=6)
    a = cache.keep([1, 2, 3, 4])
    (b,) = cache.keep([5, 6])
    c = cache.keep([1, 2, 7, 8])
    assert c[0] == a[0]
    cache.alloc(2)  # empty ones
    assert cache.num_evictions == 0
    evicted = [cache.alloc(1)[0] for _ in range(4)]
    assert evicted == [a[1], b, c[1], c[0]]
    assert (cache.num_evictions, cache.pool.num_cached) == (4, 0)
    with pytest.raises(PageError, match="1 pages asked for, but 0 of 6 are empty"):
        cache.alloc(1)


def test_a_hit_makes_pages_the_last_to_be_evicted_be_they_shared_or_copied():
    cache = Cache(num_pages=3)
    (a,), (b,), (c,) = (cache.keep(tokens) for tokens in ([1, 2], [3, 4], [5, 6]))
    cache.keep([1, 2])
    assert cache.take(cache.match("", [3, 9], NOW), 0).pages == []  # would copy b
    assert [cache.alloc(1) for _ in range(3)] == [[c], [a], [b]]


def test_a_page_in_use_is_never_evicted():
    cache = Cache(num_pages=4)
    cache.keep([1, 2, 3, 4])
    held = cache.begin([1, 2, 9])
    assert cache.pool.num_free == 2
    assert not set(cache.alloc(2)) & set(held)
    with pytest.raises(PageError, match="1 pages asked for, but 0 of 4 are empty"):
        cache.alloc(1)
    assert cache.num_found([1, 2, 3, 4]) == 2


def test_pages_of_a_sequence_that_runs_are_found_from_the_plan_on_that_fills_them_and_copied_after_it():
    cache = Cache()
    pages = cache.begin([1, 2, 3, 4, 5])
    cache.insert("", [1, 2, 3, 4, 5], pages, range(0, 1), 7)
    cache.insert("", [1, 2, 3, 4, 5], pages, range(1, 2), 8)
    cache.check_integrity(cache.holders)
    assert cache.match("", [1, 2, 3, 9], 8)[:4] == (2, pages[:1], None, 0)
    assert cache.match("", [1, 2, 3, 9], 9)[:4] == (3, pages[:1], pages[1], 0)
    assert cache.match("", [1, 2, 3, 4, 5], 8)[:4] == (4, pages[:2], None, 0)


def test_two_that_compute_the_same_leave_it_once():
    cache = Cache()
    tokens = [1, 2, 3, 4, 5, 6]
    first, second = cache.begin(tokens), cache.begin(tokens)
    assert not set(first) & set(second)
    for pages in (first, second):
        cache.insert("", tokens, pages, range(0, 2), 0)
        cache.check_integrity(cache.holders)
    assert cache.match("", tokens, NOW).pages == first[:2]
    cache.end()
    cache.end()
    assert (cache.pool.num_cached, cache.pool.num_used) == (3, 0)
    assert cache.match("", tokens, NOW).pages == first


def test_what_follows_pages_that_the_tree_has_twice_is_kept_once_they_are_given_back():
    cache = Cache()
    first, second = cache.begin([1, 2]), cache.begin([1, 2, 3, 4])
    cache.insert("", [1, 2], first, range(0, 1), 0)
    cache.insert("", [1, 2, 3, 4], second, range(0, 2), 0)
    cache.check_integrity(cache.holders)
    assert cache.num_found([1, 2, 3, 4]) == 2
    cache.insert("", [1, 2, 3, 4], second, range(1, 2), 1)
    assert cache.num_found([1, 2, 3, 4]) == 2
    cache.end()
    cache.end()
    assert cache.match("", [1, 2, 3, 4], NOW).pages == [first[0], second[1]]
    assert [cache.alloc(1)[0] for _ in range(20)][-2:] == [second[1], first[0]]


def test_clearing_forgets_all_and_takes_no_page_from_a_sequence():
    cache = Cache(num_pages=5)
    cache.keep([1, 2, 3, 4, 5])
    cache.begin([1, 2, 9])
    cache.clear()
    cache.check_integrity(cache.holders)
    assert (cache.num_found([1, 2, 3, 4]), cache.pool.num_cached, cache.pool.num_empty) == (0, 0, 3)
    cache.release("", (), cache.holders.pop()[2], 0)
    assert (cache.pool.num_empty, cache.num_evictions) == (5, 0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("token", [int, Colliding])
def test_what_is_found_is_the_longest_beginning_that_any_sequence_left(page_size: int, token: type[int]):
    rng = random.Random(page_size)
    cache = Cache(num_pages=2000, page_size=page_size)
    left: list[tuple[str, list[int]]] = [("", [])]
    for _ in range(150):
        salt, base = rng.choice(left)
        tokens = base[: rng.randint(0, len(base))] + [token(16 * rng.randrange(3)) for _ in range(rng.randint(1, 20))]
        salt = rng.choice([salt, salt, "other"])
        best = max(
            (i for s, other in left if s == salt for i in range(len(other) + 1) if other[:i] == tokens[:i]), default=0
        )
        assert cache.num_found(tokens, salt) == best
        cache.begin(tokens, salt)
        if rng.random() < 0.7:
            left.append(cache.holders[0][:2])
            cache.end()
    assert cache.num_evictions == 0


@pytest.mark.parametrize("seed", range(10))
def test_every_page_that_none_holds_can_be_had_whatever_was_shared(seed: int):
    rng = random.Random(seed)
    cache = Cache(num_pages=30)
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        while cache.pool.num_free < 6:
            cache.end()
        pages = cache.begin(tokens)
        if rng.random() < 0.5:
            cache.insert("", tokens, pages, range(0, len(tokens) // 2), 0)
            cache.check_integrity(cache.holders)
        rng.shuffle(cache.holders)
    assert cache.num_evictions > 50
    assert len(cache.alloc(cache.pool.num_free)) == 30 - len({page for *_, pages in cache.holders for page in pages})


@pytest.mark.parametrize("seed", range(5))
def test_as_many_pages_are_found_as_the_longest_of_all_prompts_that_begin_alike_has(seed):
    rng, page_size = random.Random(seed), 2
    tree, prompts = Tree(page_size), []
    for _ in range(40):
        cut = rng.randrange(12) * page_size
        tokens = (rng.choice(prompts)[:cut] if prompts else []) + rng.choices(range(3), k=rng.randrange(1, 12) * 2)
        found, _, _ = tree.walk("", tokens)
        pairs = (zip(tokens, prompt, strict=False) for prompt in prompts)
        alike = [len([*takewhile(lambda pair: pair[0] == pair[1], both)]) for both in pairs]
        assert len(found) == max(alike, default=0) // page_size
        assert pack(tokens[: len(found) * page_size]) == b"".join(node.packed for node in found)
        node = found[-1] if found else tree.root("")
        for start in range(len(found) * page_size, len(tokens), page_size):
            node = tree.add(node, pack(tokens[start : start + page_size]))
            node.page = 1
        prompts.append(tokens)
        if rng.random() < 0.3:  # what lies below some page of it is given up
            path = tree.path("", tokens)
            tree.detach(rng.choice(path))
            prompts = [p for p in (p[: page_size * len(tree.path("", p))] for p in prompts) if p]
        tree.check_integrity(PagePool(1))
