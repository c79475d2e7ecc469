import pytest

from jaxinfer.scheduler.pages import PageError, PagePool


def test_pool_gives_every_page_once_and_never_page_zero():
    pool = PagePool(5)
    assert sorted(pool.alloc(2) + pool.alloc(3)) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_pool_refuses_more_pages_than_are_free_and_gives_none():
    pool = PagePool(3)
    pool.alloc(2)
    with pytest.raises(PageError, match="2 pages asked for, but 1 of 3 are free"):
        pool.alloc(2)
    assert pool.num_free == 1


def test_freed_pages_can_be_taken_again():
    pool = PagePool(3)
    pages = pool.alloc(3)
    pool.free(pages[:2])
    assert sorted(pool.alloc(2)) == sorted(pages[:2])


def test_double_free_names_the_page():
    pool = PagePool(3)
    pages = pool.alloc(2)
    pool.free([pages[1]])
    with pytest.raises(PageError, match=f"page {pages[1]} was freed twice"):
        pool.free([pages[1]])


@pytest.mark.parametrize("page", [0, 4, -1])
def test_a_page_of_another_pool_is_not_taken_back(page: int):
    with pytest.raises(PageError, match=f"page {page} was freed, but the pool has pages 1..3"):
        PagePool(3).free([page])


def test_a_pool_has_at_least_one_page():
    with pytest.raises(PageError, match="num_pages is 0"):
        PagePool(0)


def test_integrity_holds_when_free_and_owned_are_all():
    pool = PagePool(6)
    pool.check_integrity([])
    pool.check_integrity(pool.alloc(4))


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([1], "1 pages are neither free nor owned, the first is page 2"),
        ([1, 2, 2], "page 2 is owned, and owned as well"),
        ([1, 2, 3], "page 3 is owned, and free as well"),
        ([1, 2, 9], "page 9 is owned, but the pool has pages 1..4"),
    ],
)
def test_integrity_finds_lost_and_doubled_pages(owned: list[int], message: str):
    pool = PagePool(4)
    assert pool.alloc(2) == [1, 2]
    with pytest.raises(PageError, match=message):
        pool.check_integrity(owned)
