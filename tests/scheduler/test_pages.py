import pytest

from jaxinfer.scheduler.pages import PageError, PagePool


def test_pool_gives_every_page_once_and_never_page_zero():
    pool = PagePool(5)
    assert sorted(pool.alloc(2) + pool.alloc(3)) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_pool_refuses_more_pages_than_are_empty_and_gives_none():
    pool = PagePool(3)
    pool.alloc(2)
    with pytest.raises(PageError, match="2 pages asked for, but 1 of 3 are empty"):
        pool.alloc(2)
    assert pool.num_free == 1


def test_emptied_pages_can_be_taken_again():
    pool = PagePool(3)
    pages = pool.alloc(3)
    pool.empty(pool.release(pages[:2]))
    assert sorted(pool.alloc(2)) == sorted(pages[:2])


def test_a_page_is_used_once_until_the_last_that_holds_it_lets_go():
    pool = PagePool(3)
    first, second = pool.alloc(2)
    pool.share([first])
    assert (pool.num_used, pool.num_free) == (2, 1)
    assert pool.release([first, second]) == [second]
    assert (pool.num_used, pool.is_held(first), pool.is_held(second)) == (1, True, False)
    assert pool.release([first]) == [first]
    assert (pool.num_used, pool.num_free, pool.num_empty) == (0, 3, 1)


def test_a_page_that_none_holds_is_cached_until_it_is_emptied_and_can_be_shared_again():
    pool = PagePool(3)
    (page,) = pool.release(pool.alloc(1))
    assert (pool.num_cached, pool.num_free, pool.num_empty) == (1, 3, 2)
    pool.share([page])
    assert (pool.num_cached, pool.num_used) == (0, 1)
    pool.empty(pool.release([page]))
    assert (pool.num_cached, pool.num_empty) == (0, 3)


def test_what_is_not_held_cannot_be_released_and_what_is_held_or_empty_not_emptied_or_shared():
    pool = PagePool(3)
    (page,) = pool.alloc(1)
    with pytest.raises(PageError, match=f"page {page} was emptied, but it is held"):
        pool.empty([page])
    pool.empty(pool.release([page]))
    with pytest.raises(PageError, match=f"page {page} was released, but no sequence holds it"):
        pool.release([page])
    with pytest.raises(PageError, match=f"page {page} was emptied, but it is empty"):
        pool.empty([page])
    with pytest.raises(PageError, match=f"page {page} was shared, but it is empty"):
        pool.share([page])


@pytest.mark.parametrize("page", [0, 4, -1])
def test_a_page_of_another_pool_is_not_taken_back(page: int):
    with pytest.raises(PageError, match=f"page {page} is released, but the pool has pages 1..3"):
        PagePool(3).release([page])
    with pytest.raises(PageError, match=f"page {page} is emptied, but the pool has pages 1..3"):
        PagePool(3).empty([page])


def test_a_pool_has_at_least_one_page():
    with pytest.raises(PageError, match="num_pages is 0"):
        PagePool(0)


def test_integrity_holds_when_empty_held_and_cached_are_all():
    pool = PagePool(6)
    pool.check_integrity([], [])
    pages = pool.alloc(4)
    pool.share(pages[:2])
    pool.check_integrity([*pages, *pages[:2]], [])
    cached = pool.release(pages)
    pool.check_integrity(pages[:2], cached)


@pytest.mark.parametrize(
    ("held", "cached", "message"),
    [
        ([1], [], "page 1 has 1 holders, but 2 are counted"),
        ([1, 1], [], "2 pages are neither empty, held nor cached, the first is page 2"),
        ([1, 1, 2, 2], [3], "page 2 has 2 holders, but 1 are counted"),
        ([1, 1, 2], [2, 3], "page 2 is cached, and held as well"),
        ([1, 1, 2], [3, 4], "page 4 is cached, and empty as well"),
        ([1, 1, 2, 9], [3], "page 9 is held, but the pool has pages 1..4"),
        ([1, 1], [2, 3], "page 2 has 0 holders, but 1 are counted"),
    ],
)
def test_integrity_finds_lost_doubled_and_miscounted_pages(held: list[int], cached: list[int], message: str):
    pool = PagePool(4)
    assert pool.alloc(3) == [1, 2, 3]
    pool.share([1])
    pool.release([3])
    with pytest.raises(PageError, match=message):
        pool.check_integrity(held, cached)
