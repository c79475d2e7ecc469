"""HostPages: the KV pages that are not on the device, and their way there and back. The scheduler says which go where.

Pages travel in frames, arrays of [2, L, G, S, K, E]: keys and values of G pages. Copies of 38 MB run at 52 GB/s on an
H200 (PCIe 5 x16, plain copies of pinned memory 52 to 55), those of single pages of 2.4 MB at 40, and the host spends
7 microseconds a page on them instead of 50. No copy is part of a step, and none is waited for: what comes back is put
into the pools once it has arrived. A copy begins when what was launched before it is done, which it does not hold up.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxinfer.runner.cache import DeviceState
from jaxinfer.runner.disk_pages import DiskPages
from jaxinfer.scheduler.plan import (
    Delete,
    DeleteSession,
    DiskPage,
    Fetch,
    Offload,
    Restore,
    Save,
    SaveSession,
    Transfer,
    Transferred,
)

MAX_ARRIVING = 4
"""Frames on their way to the device at once: the next copy waits behind the one that runs."""
MAX_LEAVING = 4
"""Frames on their way from the device at once: each takes memory of the device until it has left."""
MAX_MOVING = MAX_ARRIVING + MAX_LEAVING
"""Frames on the device at once."""
POLL_S = 5e-5
WARM_UP_FRAMES = 8
"""Copied to measure what a frame takes."""

log = logging.getLogger(__name__)


class _Arrival(NamedTuple):
    ticket: int
    frame: jax.Array  # on the host while it waits for its turn, then on the device
    pages: np.ndarray  # [G] int32: where its pages go; 0 for those that nobody asked for


class _Read(NamedTuple):
    """What became of a transfer to or from disk."""

    done: Transferred
    frame: int | None
    content: jax.Array | None


def take_memory(frame: jax.ShapeDtypeStruct, num_frames: int) -> None:
    """Has JAX pin the memory of all frames of the host, and keep it: later a step would wait for it.

    A GiB takes 0.85 s, in which nothing else runs in Python (H200, 56 GiB).
    """
    assert isinstance(frame.sharding, NamedSharding)
    empty = np.zeros(frame.shape, frame.dtype)
    on_host = frame.sharding.with_memory_kind("pinned_host")
    jax.block_until_ready([jax.device_put(empty, on_host) for _ in range(num_frames)])


class HostPages:
    """Owner of the frames in pinned host memory, and of the files behind them.

    gather: (k_pages, v_pages, pages [G]) -> frame; scatter: (state, frame, pages [G]) -> state, which is donated.
    """

    def __init__(self, gather: Any, scatter: Any, frame: jax.ShapeDtypeStruct, disk: DiskPages | None = None):
        """frame: shape, dtype and sharding of a frame on the device."""
        self._gather = gather
        self._scatter = scatter
        self._frame = frame
        assert isinstance(frame.sharding, NamedSharding)
        self._on_device = frame.sharding
        self._on_host = frame.sharding.with_memory_kind("pinned_host")
        self._frames: dict[int, jax.Array] = {}
        self._waiting: deque[_Arrival] = deque()
        self._arriving: deque[_Arrival] = deque()
        self._leaving: deque[tuple[int | None, jax.Array]] = deque()  # with the ticket of those whose end is told
        self._num_left: dict[int, int] = {}  # by ticket: frames that are still to be put into the pools
        self._ended: list[int] = []  # tickets that are to be told
        self._disk = disk
        self._jobs: queue.SimpleQueue[Callable[[], _Read | None] | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self.num_disk_writes = 0  # pages
        self.num_disk_reads = 0  # pages
        self._worker = None if disk is None else threading.Thread(target=self._work, name="kv-disk", daemon=True)
        if self._worker is not None:
            self._worker.start()

    @property
    def frame_pages(self) -> int:
        """G."""
        return self._frame.shape[2]

    def warm_up(self, state: DeviceState) -> tuple[DeviceState, float]:
        """Runs all of it once. Returns the state and the milliseconds that it takes to restore a frame."""
        padding = np.zeros(self.frame_pages, np.int32)
        made = self._gather(state.k_pages, state.v_pages, padding)
        held = jax.block_until_ready(jax.device_put(made, self._on_host))
        frame_ms = 0.0
        for _ in range(2):  # the first runs are slower
            start_s = time.perf_counter()
            for _ in range(WARM_UP_FRAMES):
                state = self._scatter(state, jax.device_put(held, self._on_device), padding)
            jax.block_until_ready(state)
            frame_ms = (time.perf_counter() - start_s) * 1e3 / WARM_UP_FRAMES
        return state, frame_ms

    def begin(self, state: DeviceState, transfers: Sequence[Transfer]) -> None:
        """Begins transfers, in their order; the pages that leave the device may be written to by what comes next."""
        for i, transfer in enumerate(transfers):
            try:
                self._begin(state, transfer)
            except Exception:
                self._give_up(state, transfers[i:])
                raise
        self._start_arrivals()

    def _give_up(self, state: DeviceState, transfers: Sequence[Transfer]) -> None:
        """Tells the end of transfers that did not begin, since others wait for it; the disk's begin all the same."""
        for transfer in transfers:
            match transfer:
                case Offload(_, _, ticket) | Restore(ticket, _, _):
                    self._ended += [] if ticket is None else [ticket]
                case Save(ticket, _, pages):
                    failed = frozenset(page.key for _, page in pages)
                    self._read.put(_Read(Transferred(ticket, failed), None, None))
                case _:
                    self._begin(state, transfer)

    def _begin(self, state: DeviceState, transfer: Transfer) -> None:
        match transfer:
            case Offload():
                self._offload(state, transfer)
            case Restore(ticket, number, places):
                pages = np.zeros(self.frame_pages, np.int32)
                for index, page in places:
                    pages[index] = page
                self._waiting.append(_Arrival(ticket, self._frames[number], pages))
                self._num_left[ticket] = self._num_left.get(ticket, 0) + 1
            case Save(ticket, number, pages):
                self._jobs.put(functools.partial(self._save, ticket, self._frames[number], pages))
            case Fetch(ticket, number, pages):
                self._jobs.put(functools.partial(self._fetch, ticket, number, pages))
            case Delete(pages):
                self._jobs.put(functools.partial(self._delete, pages))
            case SaveSession():
                self._jobs.put(functools.partial(self._save_session, transfer))
            case DeleteSession(session_id):
                assert self._disk is not None
                self._jobs.put(functools.partial(self._disk.remove_manifest, session_id))

    def _offload(self, state: DeviceState, transfer: Offload) -> None:
        while len(self._leaving) >= MAX_LEAVING:
            ticket, oldest = self._leaving.popleft()
            jax.block_until_ready(oldest)
            self._ended += [] if ticket is None else [ticket]
        padded = np.zeros(self.frame_pages, np.int32)
        padded[: len(transfer.pages)] = transfer.pages
        made = self._gather(state.k_pages, state.v_pages, padded)
        self._frames[transfer.frame] = frame = jax.device_put(made, self._on_host)
        self._leaving.append((transfer.ticket, frame))

    def finish(self, state: DeviceState) -> tuple[DeviceState, list[Transferred]]:
        """Puts what has arrived into the pools. Returns the state and the transfers that have ended."""
        while self._leaving and self._leaving[0][1].is_ready():
            ticket, _ = self._leaving.popleft()
            self._ended += [] if ticket is None else [ticket]
        done = [Transferred(ticket) for ticket in self._ended]
        self._ended.clear()
        while self._arriving and self._arriving[0].frame.is_ready():
            arrival = self._arriving.popleft()
            state = self._scatter(state, arrival.frame, arrival.pages)
            self._num_left[arrival.ticket] -= 1
            if not self._num_left[arrival.ticket]:
                del self._num_left[arrival.ticket]
                done.append(Transferred(arrival.ticket))
        self._start_arrivals()
        while not self._read.empty():
            read = self._read.get()
            if read.frame is not None and read.content is not None:
                self._frames[read.frame] = read.content
            done.append(read.done)
        return state, done

    def wait(self, timeout_s: float) -> None:
        """Returns when `finish` has something to do, or after that time."""
        limit_s = time.monotonic() + timeout_s
        while time.monotonic() < limit_s:
            if self._ended or not self._read.empty():
                return
            if self._arriving and self._arriving[0].frame.is_ready():
                return
            if self._leaving and self._leaving[0][1].is_ready():
                return
            time.sleep(POLL_S)

    def lose_device(self) -> None:
        """What was to go to the device will not; frames that came from it may be what a failed step left.

        What is being read from disk still comes.
        """
        self._ended += self._num_left
        self._ended += (ticket for ticket, _ in self._leaving if ticket is not None)
        self._leaving.clear()
        self._num_left.clear()
        self._waiting.clear()
        self._arriving.clear()
        self._frames.clear()

    def close(self) -> None:
        """Waits for what is being written."""
        self.lose_device()
        if self._worker is not None and self._disk is not None:
            self._jobs.put(None)
            self._worker.join()
            self._disk.close()

    def _start_arrivals(self) -> None:
        while self._waiting and len(self._arriving) < MAX_ARRIVING:
            arrival = self._waiting.popleft()
            self._arriving.append(arrival._replace(frame=jax.device_put(arrival.frame, self._on_device)))

    # On the thread of the disk

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if (read := job()) is not None:
                self._read.put(read)

    def _save(self, ticket: int, frame: jax.Array, pages: Sequence[tuple[int, DiskPage]]) -> _Read:
        assert self._disk is not None
        failed: set[str] = set()
        try:
            content = np.asarray(frame)
        except Exception as error:  # the step that computed it failed
            log.warning("%d pages are not written to disk: %s", len(pages), error)
            return _Read(Transferred(ticket, frozenset(page.key for _, page in pages)), None, None)
        for index, page in pages:
            try:
                self._disk.write(page, content[:, :, index])
                self.num_disk_writes += 1
            except OSError as error:
                log.warning("page %s is not written to %s: %s", page.key, self._disk.folder, error)
                failed.add(page.key)
        return _Read(Transferred(ticket, frozenset(failed)), None, None)

    def _fetch(self, ticket: int, number: int, pages: Sequence[DiskPage]) -> _Read:
        assert self._disk is not None
        content, failed = np.zeros(self._frame.shape, self._frame.dtype), set()
        for index, page in enumerate(pages):
            found = self._disk.read(page.key)
            if found is None:
                failed.add(page.key)
            else:
                content[:, :, index] = found
                self.num_disk_reads += 1
        return _Read(Transferred(ticket, frozenset(failed)), number, jax.device_put(content, self._on_host))

    def _save_session(self, transfer: SaveSession) -> _Read:
        assert self._disk is not None
        failed = {key for key in transfer.keys if not self._disk.has(key)}
        if failed:
            log.warning("session %s is not saved: %d of its pages are gone", transfer.session_id, len(failed))
            return _Read(Transferred(transfer.ticket, frozenset(failed)), None, None)
        try:
            self._disk.write_manifest(transfer.session_id, dict(transfer.manifest))
        except OSError as error:
            log.warning("session %s is not written to %s: %s", transfer.session_id, self._disk.folder, error)
            failed.add(transfer.session_id)
        return _Read(Transferred(transfer.ticket, frozenset(failed)), None, None)

    def _delete(self, pages: Sequence[DiskPage]) -> None:
        assert self._disk is not None
        for page in pages:
            self._disk.remove(page.key)
