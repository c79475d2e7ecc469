"""A job: keeps the engine full with rows, and writes what they give in the order in which they were read."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from jaxinfer.batch.arranging import arrange
from jaxinfer.batch.config import BatchConfig
from jaxinfer.batch.journal import Counts, Journal
from jaxinfer.batch.rows import Row, RowMaker, failed_line
from jaxinfer.batch.running import Answer, RowRunner, extent, failure
from jaxinfer.batch.sources import Rows
from jaxinfer.types import EngineHandle

READ_ROWS = 32
"""Rows that are read at once; fewer at the start would let the engine wait, more the first of them."""
READ_THREADS, READ_AHEAD = 2, 64
"""Of Grain: threads that render and tokenise, which let go of the interpreter while they do, and rows they may keep."""
AHEAD = 16
"""Rows that may be read before the first of them is done, for each sequence of the engine."""


@dataclasses.dataclass(slots=True)
class _Slot:
    """A row that was read and is not written yet."""

    row: Row
    iterator: dict[str, Any]  # behind it
    answer: Answer | None = None


class RowReader:
    """Rows in the order of the job, through Grain: read, rendered and tokenised ahead of time, in threads."""

    def __init__(self, rows: Rows, config: BatchConfig, maker: RowMaker, state: Mapping[str, Any] | None):
        dataset = make_rows(rows, config, maker)
        options = _load_grain().ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=READ_AHEAD)
        self._iterator = iter(dataset.to_iter_dataset(options)) if len(dataset) else None
        if state and self._iterator is not None:
            self._iterator.set_state(dict(state))

    def read(self, count: int) -> list[_Slot]:
        """The next rows; fewer only at the end."""
        slots = []
        while self._iterator is not None and len(slots) < count:
            try:
                row = next(self._iterator)
            except StopIteration:
                self._iterator = None
                break
            slots.append(_Slot(row, dict(self._iterator.get_state())))
        return slots


def make_rows(rows: Rows, config: BatchConfig, maker: RowMaker) -> Any:
    """A data set of Grain: the job's rows, ready to run or failed, by their places in the output."""
    dataset = _load_grain().MapDataset.source(rows)
    if config.shuffle_seed is not None and len(rows):
        dataset = dataset.shuffle(seed=config.shuffle_seed)
    start, end = shard_range(len(rows), config)
    return dataset[start:end].map(maker.make)


def _load_grain() -> Any:
    """Without the handler that it gives to Python's log, by which lines of a server's own would be written twice."""
    before = list(logging.root.handlers)
    import grain

    logging.root.handlers[:] = before
    return grain


def shard_range(num_rows: int, config: BatchConfig) -> tuple[int, int]:
    """First row of a shard, and the one behind its last: shards differ by one row at most."""
    index, count = config.shard_index, config.shard_count
    return num_rows * index // count, num_rows * (index + 1) // count


class Progress(Protocol):
    """Is told where a job stands, about as often as there are checkpoints."""

    def show(self, counts: Counts, *, last: bool = False) -> None: ...


class Job:
    """Runs once, in one event loop. Everything that waits for a disk or for text does so in a thread."""

    def __init__(self, reader: RowReader, maker: RowMaker, journal: Journal, config: BatchConfig, progress: Progress):
        self._reader = reader
        self._maker = maker
        self._journal = journal
        self._config = config
        self._progress = progress
        self._slots: collections.deque[_Slot] = collections.deque()  # in the order of the output
        self._gathered: list[_Slot] = []  # of these, what waits to be put in order
        self._ready: collections.deque[_Slot] = collections.deque()  # and what was, and does not run yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self, engine: EngineHandle, deadline_s: float | None = None) -> None:
        """Until every row is written, then gives the output its name. What is done is kept whatever happens.

        deadline_s: time.time() from which on no row is begun: what is left then gets an error. Raises BatchError where
        the output cannot be written, and EngineDead.
        """
        try:
            await asyncio.to_thread(self._journal.checkpoint)
            await self._run_rows(engine, deadline_s)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._journal.can_write:
                self._write()
                self._journal.checkpoint()
        await asyncio.to_thread(self._journal.finish)
        self._progress.show(self._journal.counts, last=True)

    async def _run_rows(self, engine: EngineHandle, deadline_s: float | None) -> None:
        runner = RowRunner(engine, self._maker)
        max_ahead = self._config.max_rows_ahead or AHEAD * engine.info.max_num_seqs
        # Half of them are put in order while the other half runs: what comes last in its half never holds up the next.
        max_gathered = max(max_ahead // 2, 1) if self._config.arrange_rows else 2 * engine.info.max_num_seqs
        reading: asyncio.Task[list[_Slot]] | None = None
        at_end = False
        saving: asyncio.Task[None] | None = None
        saved_s = time.monotonic()
        try:
            while not at_end or self._slots:
                self._moved.clear()
                room = max_ahead - len(self._slots)
                if reading is None and not at_end and room > 0 and len(self._gathered) < max_gathered:
                    reading = self._task(asyncio.to_thread(self._reader.read, min(room, READ_ROWS)))
                if reading is not None and reading.done():
                    slots, reading = reading.result(), None
                    at_end = not slots
                    self._take(slots)
                    continue
                self._start(runner, engine.info.page_size, deadline_s)
                self._write()
                if saving is not None and saving.done():
                    saving.result()
                    saving, saved_s = None, time.monotonic()
                    self._progress.show(self._journal.counts)
                if saving is None and time.monotonic() >= saved_s + self._config.checkpoint_s:
                    saving = self._task(asyncio.to_thread(self._journal.checkpoint))
                if self._error is not None:
                    raise self._error
                if at_end and not self._slots:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(self._config.checkpoint_s, 0.05)):
                        await self._moved.wait()
        finally:
            # Neither can be stopped half-way: the thread goes on, and the journal is not to be written by two.
            for task in (reading, saving):
                if task is not None:
                    await asyncio.wait([task])
            if saving is not None:
                saving.result()

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._moved.set())
        return task

    def _take(self, slots: Sequence[_Slot]) -> None:
        self._slots.extend(slots)
        for slot in slots:
            if slot.row.failure is not None:
                slot.answer = failure(slot.row.failure)
            else:
                self._gathered.append(slot)

    def _next(self, page_size: int) -> _Slot | None:
        """What is to run next; it stays where it is. What was gathered meanwhile is arranged once all before runs."""
        if not self._ready and self._gathered:
            slots, self._gathered = self._gathered, []
            if self._config.arrange_rows:
                slots = [slots[index] for index in arrange([extent(slot.row) for slot in slots], page_size)]
            self._ready.extend(slots)
        return self._ready[0] if self._ready else None

    def _start(self, runner: RowRunner, page_size: int, deadline_s: float | None) -> None:
        expired = deadline_s is not None and time.time() >= deadline_s
        while (slot := self._next(page_size)) is not None:
            if expired:
                message = "the batch's time was over before this row was begun"
                slot.answer = failure(failed_line(slot.row.id, slot.row.custom_id, "batch_expired", message))
                self._ready.popleft()
                continue
            if not runner.has_room(slot.row):
                return
            self._ready.popleft()
            task = asyncio.create_task(self._run_slot(slot, runner.start(slot.row)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_slot(self, slot: _Slot, running: Awaitable[Answer]) -> None:
        try:
            slot.answer = await running
        except Exception as error:
            self._error = self._error or error
        finally:
            self._moved.set()

    def _write(self) -> None:
        """What is done, up to the first row that is not."""
        while self._slots and (answer := self._slots[0].answer) is not None:
            self._journal.append(answer.line, answer.counts, self._slots.popleft().iterator)


def split_lines(lines: Iterator[bytes]) -> Iterator[tuple[bool, bytes]]:
    """Each line of an output, with whether its row was answered."""
    decoder = msgspec.json.Decoder(_Answered)
    for line in lines:
        response = decoder.decode(line).response
        yield response is not None and response.status_code == 200, line


class _Status(msgspec.Struct):
    status_code: int


class _Answered(msgspec.Struct):
    response: _Status | None
