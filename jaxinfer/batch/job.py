"""A job: keeps the engine full with rows, and writes what they give in the order in which they were read."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from jaxinfer.batch.config import BatchConfig
from jaxinfer.batch.journal import Counts, Journal
from jaxinfer.batch.rows import Row, RowMaker, failed_line
from jaxinfer.batch.sources import Rows
from jaxinfer.http.errors import RequestFailed, problem
from jaxinfer.http.streams import whole_reply
from jaxinfer.types import EngineDead, EngineHandle, QueueFull

READ_ROWS = 32
"""Rows that are read at once; fewer at the start would let the engine wait, more the first of them."""
READ_THREADS, READ_AHEAD = 2, 64
"""Of Grain: threads that render and tokenise, which let go of the interpreter while they do, and rows they may keep."""
MAX_ATTEMPTS = 2
"""Tries of a row whose step failed: another request may have been at fault."""
REFUSED_S, MAX_REFUSED_S = 0.1, 5.0
"""First and longest wait of a row that the engine had no room for, in seconds."""
MAX_REFUSALS = 20
"""A row that runs alone and is refused so often asks for more than there will ever be."""
AHEAD = 16
"""Rows that may be read before the first of them is done, for each sequence of the engine."""


@dataclasses.dataclass(slots=True)
class _Slot:
    """A row that was read and is not written yet."""

    row: Row
    iterator: dict[str, Any]  # behind it
    line: bytes | None = None
    counts: Counts = Counts()


class RowReader:
    """Rows in the order of the job, through Grain: read, rendered and tokenised ahead of time, in threads."""

    def __init__(self, rows: Rows, config: BatchConfig, maker: RowMaker, state: Mapping[str, Any] | None):
        grain = _load_grain()
        dataset = grain.MapDataset.source(rows)
        if config.shuffle_seed is not None and len(rows):
            dataset = dataset.shuffle(seed=config.shuffle_seed)
        start, end = shard_range(len(rows), config)
        options = grain.ReadOptions(num_threads=READ_THREADS, prefetch_buffer_size=READ_AHEAD)
        self._iterator = iter(dataset[start:end].map(maker.make).to_iter_dataset(options)) if end > start else None
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
        self._ready: collections.deque[_Slot] = collections.deque()  # of these, what does not run yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running = 0  # sequences
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
        # As many wait as run, so that the engine never looks for work that is not there yet.
        max_running = 2 * engine.info.max_num_seqs
        max_ahead = self._config.max_rows_ahead or AHEAD * engine.info.max_num_seqs
        reading: asyncio.Task[list[_Slot]] | None = None
        at_end = False
        saving: asyncio.Task[None] | None = None
        saved_s = time.monotonic()
        try:
            while not at_end or self._slots:
                self._moved.clear()
                room = max_ahead - len(self._slots)
                if reading is None and not at_end and room > 0 and len(self._ready) < max_running:
                    # Rows can only be grouped with what has been read: then with as much as may be.
                    count = room if self._config.group_prefixes else min(room, READ_ROWS)
                    reading = self._task(asyncio.to_thread(self._reader.read, count))
                if reading is not None and reading.done():
                    slots, reading = reading.result(), None
                    at_end = not slots
                    self._take(slots)
                    continue
                self._start(engine, max_running, deadline_s)
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
        runs = []
        for slot in slots:
            if slot.row.failure is not None:
                self._end(slot, slot.row.failure, failed=True)
            else:
                runs.append(slot)
        if self._config.group_prefixes:
            runs.sort(key=_prompt)
        self._ready.extend(runs)

    def _start(self, engine: EngineHandle, max_running: int, deadline_s: float | None) -> None:
        expired = deadline_s is not None and time.time() >= deadline_s
        while self._ready:
            slot = self._ready[0]
            size = slot.row.num_sequences
            if expired:
                self._ready.popleft()
                message = "the batch's time was over before this row was begun"
                self._end(slot, failed_line(slot.row.id, slot.row.custom_id, "batch_expired", message), failed=True)
                continue
            if self._num_running and self._num_running + size > max_running:
                return
            self._ready.popleft()
            self._num_running += size
            task = asyncio.create_task(self._run_slot(engine, slot, size))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_slot(self, engine: EngineHandle, slot: _Slot, size: int) -> None:
        try:
            await self._answer(engine, slot, size)
        except Exception as error:
            self._error = self._error or error
        finally:
            self._num_running -= size
            self._moved.set()

    async def _answer(self, engine: EngineHandle, slot: _Slot, size: int) -> None:
        """Runs a row to its end. A failed step is tried again, a full queue waited for."""
        num_attempts = num_refusals = 0
        while True:
            assert slot.row.generation is not None
            try:
                body = await whole_reply(engine, slot.row.generation)
                return self._end(slot, slot.row.success(body), failed=False)
            except QueueFull as error:
                alone = self._num_running == size
                num_refusals = num_refusals + 1 if alone else 0
                if num_refusals > MAX_REFUSALS:
                    return self._end(slot, slot.row.refusal(problem(error)), failed=True)
                await asyncio.sleep(min(REFUSED_S * 2 ** min(num_refusals, 10), MAX_REFUSED_S))
            except EngineDead:
                raise
            except RequestFailed as error:
                num_attempts += 1
                if num_attempts >= MAX_ATTEMPTS:
                    return self._end(slot, slot.row.refusal(problem(error)), failed=True)
            slot.row = await asyncio.to_thread(self._maker.make, slot.row.raw, num_attempts + num_refusals + 1)

    def _end(self, slot: _Slot, line: bytes, *, failed: bool) -> None:
        prompt = output = 0
        if not failed and slot.row.generation is not None:
            prompt = slot.row.generation.prompt_tokens
            output = sum(choice.output.num_tokens for choice in slot.row.generation.choices)
        slot.line = line
        slot.counts = Counts(num_rows=1, num_failed=int(failed), prompt_tokens=prompt, output_tokens=output)

    def _write(self) -> None:
        """What is done, up to the first row that is not."""
        while self._slots and (line := self._slots[0].line) is not None:
            slot = self._slots.popleft()
            self._journal.append(line, slot.counts, slot.iterator)


def _prompt(slot: _Slot) -> tuple[int, ...]:
    """What rows are sorted by: those that begin alike are then side by side."""
    generation = slot.row.generation
    request = generation.choices[0].request if generation is not None and generation.choices else None
    return () if request is None else tuple(request.prompt_ids)


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
