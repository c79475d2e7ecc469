"""Pages on their way between the device, the host and disk: each comes back as it left, in the order of the plans."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.runner.host_pages import MAX_ARRIVING, MAX_LEAVING, HostPages
from jaxinfer.scheduler.plan import (
    Delete,
    DiskPage,
    Fetch,
    Offload,
    Restore,
    Save,
    SaveSession,
    Transferred,
    page_key,
)

NUM_PAGES, FRAME_PAGES = 40, 3
PAGE = (4, 2, 8)  # tokens, heads, numbers
MODEL = "0" * 64


class State(NamedTuple):
    """The pools alone."""

    k_pages: jax.Array  # [L, pages, ...]
    v_pages: jax.Array


def filled() -> State:
    """Every number differs from all others. Page 0 is that of padding."""
    numbers = jnp.arange(2 * (NUM_PAGES + 1) * 64, dtype=jnp.float32).reshape(2, NUM_PAGES + 1, *PAGE)
    return State(numbers, -numbers)


def gather(k_pages: Any, v_pages: Any, pages: np.ndarray) -> jax.Array:
    return jnp.stack([k_pages[:, pages], v_pages[:, pages]])


def scatter(state: State, frame: jax.Array, pages: np.ndarray) -> State:
    return State(state.k_pages.at[:, pages].set(frame[0]), state.v_pages.at[:, pages].set(frame[1]))


class Tier(HostPages):
    """With the state that it fills."""

    def __init__(self, disk: DiskPages | None = None):
        mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
        sharding = NamedSharding(mesh, PartitionSpec())
        frame = jax.ShapeDtypeStruct((2, 2, FRAME_PAGES, *PAGE), jnp.float32, sharding=sharding)
        super().__init__(gather, scatter, frame, disk)
        self.state: Any = filled()
        self.done: list[Transferred] = []

    def ask(self, *transfers: Any) -> None:
        self.begin(self.state, transfers)

    def wait_for(self, *tickets: int) -> list[Transferred]:
        """The ends of these, once they are told."""
        limit_s = time.monotonic() + 20
        while not {*tickets} <= {one.ticket for one in self.done}:
            assert time.monotonic() < limit_s, f"of {tickets} only {self.done} ended"
            self.wait(1.0)
            self.state, done = self.finish(self.state)
            self.done += done
        return [one for one in self.done if one.ticket in tickets]

    def clear(self, *pages: int) -> None:
        """Other requests write to these pages."""
        self.state = State(*(pool.at[:, np.array(pages)].set(7) for pool in self.state))

    def check(self, **origin: int) -> None:
        """Page by page, which of the first state's it has; the others are as they were."""
        expected, was = filled(), {int(page.removeprefix("p")): source for page, source in origin.items()}
        for mine, first in zip(self.state, expected, strict=True):
            for page in range(1, NUM_PAGES + 1):
                np.testing.assert_array_equal(mine[:, page], first[:, was.get(page, page)], err_msg=f"page {page}")


@pytest.fixture
def tier():
    made = Tier()
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path):
    return DiskPages.open(tmp_path, fingerprint=MODEL, page_shape=(2, 2, *PAGE), dtype="float32")


@pytest.fixture
def on_disk(disk):
    made = Tier(disk)
    yield made
    made.close()


def page(number: int) -> DiskPage:
    return DiskPage(page_key(MODEL, "", None, (number,)), None, "", (number,))


def test_pages_come_back_to_where_they_are_wanted(tier):
    tier.ask(Offload(5, [3, 1, 2]), Offload(0, [9]))
    tier.clear(1, 2, 3, 9)
    tier.ask(Restore(1, 5, [(0, 3), (1, 1), (2, 9)]), Restore(1, 0, [(0, 2)]))
    assert tier.wait_for(1) == [Transferred(1)]
    tier.check(p9=2, p2=9)


def test_what_is_not_asked_for_of_a_frame_is_written_nowhere(tier):
    tier.ask(Offload(0, [3, 1, 2]))
    tier.clear(2)
    tier.ask(Restore(4, 0, [(2, 2)]))
    tier.wait_for(4)
    tier.check()


def test_a_transfer_of_more_frames_than_travel_at_once_ends_when_all_have_arrived(tier):
    num = 2 * MAX_ARRIVING + 1
    tier.ask(*(Offload(i, [3 * i + 1, 3 * i + 2, 3 * i + 3]) for i in range(num)))
    pages = range(1, 3 * num + 1)
    tier.clear(*pages)
    tier.ask(*(Restore(7, i, [(j, 3 * i + 1 + j) for j in range(3)]) for i in range(num)))
    assert tier.wait_for(7) == [Transferred(7)]
    tier.check()
    assert len(tier.done) == 1


def test_transfers_of_one_plan_are_done_in_their_order(tier):
    tier.ask(Offload(0, [1]))
    tier.ask(Restore(1, 0, [(0, 10)]), Offload(0, [2]), Restore(2, 0, [(0, 11)]))
    tier.wait_for(1, 2)
    tier.check(p10=1, p11=2)


def test_what_leaves_the_device_is_what_was_there_when_the_plan_began(tier):
    tier.ask(Offload(0, [1, 2]))
    tier.clear(1, 2)
    tier.ask(Offload(1, [1], 3))
    tier.ask(Restore(1, 0, [(0, 1), (1, 2)]))
    tier.wait_for(1)
    tier.check()


def test_the_end_of_a_copy_to_the_host_is_told_where_it_is_asked_for_however_many_leave(tier):
    num = MAX_LEAVING + 3
    tier.ask(*(Offload(i, [i + 1], i + 1 if i % 2 else None) for i in range(num)))
    tier.wait_for(*(i + 1 for i in range(num) if i % 2))
    assert len(tier.done) == num // 2


def test_what_is_lost_with_the_device_is_told_and_brings_nothing(tier):
    tier.ask(Offload(0, [1, 2], 8))
    tier.clear(1, 2)
    before = tier.state
    tier.ask(*(Restore(ticket, 0, [(0, 1)]) for ticket in range(1, 8)))
    tier.lose_device()
    assert {one.ticket for one in tier.wait_for(*range(1, 9))} == {*range(1, 9)}
    assert all((mine == first).all() for mine, first in zip(tier.state, before, strict=True))


def test_pages_of_a_frame_are_written_to_disk_and_read_into_another(on_disk):
    on_disk.ask(Offload(0, [4, 5, 6]), Save(1, 0, [(2, page(6)), (0, page(4))]))
    assert on_disk.wait_for(1) == [Transferred(1)]
    on_disk.clear(4, 6)
    on_disk.ask(Offload(0, [7]), Fetch(2, 1, [page(4), page(6)]))
    assert on_disk.wait_for(2) == [Transferred(2)]
    assert (on_disk.num_disk_writes, on_disk.num_disk_reads) == (2, 2)
    on_disk.ask(Restore(3, 1, [(0, 4), (1, 6)]))
    on_disk.wait_for(3)
    on_disk.check()


def test_a_frame_that_is_read_replaces_what_the_frame_had(on_disk):
    on_disk.ask(Offload(0, [4]), Save(1, 0, [(0, page(4))]), Offload(1, [9]), Fetch(2, 1, [page(4)]))
    on_disk.wait_for(1, 2)
    on_disk.ask(Restore(3, 1, [(0, 20)]))
    on_disk.wait_for(3)
    on_disk.check(p20=4)


def test_pages_that_cannot_be_read_or_written_are_told_by_their_keys(on_disk, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    on_disk.ask(Offload(0, [1, 2, 3]), Save(1, 0, [(0, page(1)), (1, page(2))]))
    on_disk.wait_for(1)
    on_disk.ask(Delete([page(1)]), Fetch(2, 1, [page(1), page(2), page(3)]))
    assert on_disk.wait_for(2) == [Transferred(2, frozenset({page(1).key, page(3).key}))]
    on_disk.ask(Restore(3, 1, [(1, 30)]))
    on_disk.wait_for(3)
    on_disk.check(p30=2)
    monkeypatch.setattr(DiskPages, "write", full)
    monkeypatch.setattr(DiskPages, "write_manifest", full)
    on_disk.ask(Save(4, 0, [(0, page(1)), (2, page(3))]), SaveSession(5, "s", {}, ()))
    ends = on_disk.wait_for(4, 5)
    assert ends == [Transferred(4, frozenset({page(1).key, page(3).key})), Transferred(5, frozenset({"s"}))]
    assert on_disk.num_disk_writes == 2


def test_a_session_whose_files_are_gone_is_not_listed(on_disk, tmp_path):
    on_disk.ask(Offload(0, [1, 2]), Save(1, 0, [(0, page(1)), (1, page(2))]))
    on_disk.wait_for(1)
    (gone,) = tmp_path.rglob(page(2).key)
    gone.unlink()
    on_disk.ask(SaveSession(2, "s", {}, [page(1).key, page(2).key]))
    assert on_disk.wait_for(2) == [Transferred(2, frozenset({page(2).key}))]
    assert not list(tmp_path.rglob("s.json"))


def test_closing_waits_for_what_is_being_written(on_disk, tmp_path, monkeypatch):
    real = DiskPages.write

    def slowly(*args: Any) -> None:
        time.sleep(0.05)
        real(*args)

    monkeypatch.setattr(DiskPages, "write", slowly)
    on_disk.ask(
        Offload(0, [1, 2, 3]),
        Save(1, 0, [(i, page(i + 1)) for i in range(3)]),
        SaveSession(2, "s", {"a": 1}, [page(i + 1).key for i in range(3)]),
    )
    on_disk.close()
    again = DiskPages.open(tmp_path, fingerprint=MODEL, page_shape=(2, 2, *PAGE), dtype="float32")
    assert {one.key for one in again.pages()} == {page(i + 1).key for i in range(3)}
    assert again.manifests() == {"s": {"a": 1}}
    np.testing.assert_array_equal(again.read(page(2).key)[0], filled().k_pages[:, 2])
    again.close()
    on_disk._worker = None  # closed already
