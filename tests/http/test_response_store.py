"""What is kept of responses: within bounds, and the same for every front end."""

import threading

import pytest

from jaxinfer.http.response_store import ResponseStore, Stored


def stored(text="a", status="completed"):
    return Stored(status, text.encode(), [{"role": "user", "content": text}])


@pytest.fixture(params=["memory", "file"])
def path(request, tmp_path):
    return None if request.param == "memory" else str(tmp_path / "responses")


def test_response_is_found_as_it_was_put_until_it_is_deleted(path):
    store = ResponseStore(path)
    store.put("r", stored("äöü"))
    assert store.get("r") == stored("äöü") and len(store) == 1
    store.put("r", stored("b", "failed"))
    assert store.get("r") == stored("b", "failed") and len(store) == 1
    assert store.delete("r") and not store.delete("r")
    assert store.get("r") is None and len(store) == 0


def test_deleted_response_does_not_come_back_at_its_end(path):
    store = ResponseStore(path)
    assert not store.replace("r", stored())
    assert store.get("r") is None
    store.put("r", stored())
    assert store.replace("r", stored("b")) and store.get("r") == stored("b")


def test_oldest_are_given_up_beyond_the_count(path):
    store = ResponseStore(path, max_responses=3)
    for i in range(5):
        store.put(str(i), stored())
    assert [store.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    store.put("2", stored())
    store.put("5", stored())
    assert store.get("3") is None and store.get("2") is not None


def test_oldest_are_given_up_beyond_the_bytes_and_what_alone_is_too_large_is_not_kept(path):
    store = ResponseStore(path, max_bytes=1000)
    for i in range(5):
        store.put(str(i), stored("x" * 150))
    assert 0 < len(store) < 5 and store.get("4") is not None and store.get("0") is None
    num_kept = len(store)
    store.put("large", stored("x" * 1000))
    assert store.get("large") is None and len(store) == num_kept


def test_wish_to_cancel_is_seen_until_the_response_ends(path):
    store = ResponseStore(path)
    store.put("r", stored(status="in_progress"))
    assert not store.is_to_be_cancelled("r")
    store.wish_to_cancel("r")
    assert store.is_to_be_cancelled("r")
    store.put("r", stored(status="cancelled"))
    assert not store.is_to_be_cancelled("r") and not store.is_to_be_cancelled("other")


def test_front_ends_share_one_file_whose_name_may_be_gone(tmp_path):
    path = tmp_path / "responses"
    first, second = ResponseStore(str(path)), ResponseStore(str(path))
    path.unlink()
    first.put("r", stored())
    assert second.get("r") == stored()
    second.wish_to_cancel("r")
    assert first.is_to_be_cancelled("r") and first.delete("r") and second.get("r") is None
    assert list(tmp_path.iterdir()) == []


def test_front_ends_that_write_at_once_lose_nothing(tmp_path):
    stores = [ResponseStore(str(tmp_path / "responses")) for _ in range(3)]

    def write(number):
        for i in range(50):
            stores[number].put(f"{number}-{i}", stored())

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(store) == 150 for store in stores)
