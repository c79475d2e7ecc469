"""A batch job on many engines, through Ray Data: the rows go out in tasks and come back in the order of the output.

The program that starts the job writes the output and its checkpoints, as it does alone; it runs no row. An engine is an
actor that finds the model and the input by their names, so both have to lie where every machine sees them. Ray Data
keeps the engines supplied, holds tasks back while results wait to be written, starts an engine anew that has died, and
runs its tasks again. A row's reply depends on none of this: its seed follows from its place in the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy
import pyarrow
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayError

from checkpoints.fingerprint import fingerprint
from jaxinfer.batch.arranging import arrange
from jaxinfer.batch.config import BatchConfig
from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.job import AHEAD, Progress, make_rows, shard_range
from jaxinfer.batch.journal import Counts, Journal
from jaxinfer.batch.rows import JobFacts, Row, RowMaker
from jaxinfer.batch.running import Answer, RowRunner, extent, failure
from jaxinfer.batch.sources import open_rows
from jaxinfer.build import build_engine
from jaxinfer.cluster.config import RayConfig
from jaxinfer.cluster.connection import connected, share
from jaxinfer.config import EngineConfig
from jaxinfer.engine.driven import DrivenEngine
from jaxinfer.found import find_model
from jaxinfer.job_slots import JOB_NUM_SEQS
from jaxinfer.offline import engine_facts, make_maker
from jaxinfer.types import EngineDead

COUNTS = [field.name for field in dataclasses.fields(Counts)]
EXIT_ENGINE_DEAD = 70
"""Exit code of an actor whose engine has died."""


def run_rows(
    config: EngineConfig,
    batch_config: BatchConfig,
    ray_config: RayConfig,
    source: Any,
    num_rows: int,
    facts: JobFacts,
    journal: Journal,
    progress: Progress,
) -> None:
    """The rows that are not written yet, on the engines of a cluster. What is done is kept whatever happens.

    source: the input, as `run_batch` takes it: what is no path is sent to every engine. max_rows_ahead counts for each
    engine; what all of them have done and may not be written yet is held back by Ray Data, by the memory it takes.
    Raises BatchError where the cluster cannot go on, or where an engine's input or model is another one.
    """
    start, end = shard_range(num_rows, batch_config)
    done = journal.counts.num_rows
    if isinstance(source, str | os.PathLike):
        source = os.path.abspath(source)
    with connected(ray_config), _context():
        workers = share(ray_config, config)
        given = {"config": config, "batch_config": batch_config, "facts": facts}
        given["source"] = source if isinstance(source, str) else ray.put(source)
        max_ahead = batch_config.max_rows_ahead or AHEAD * (config.max_num_seqs or JOB_NUM_SEQS)
        in_flight = max(2, math.ceil(max_ahead / ray_config.rows_per_task))
        # A block for every task, made here: tasks that read them would each need a process and a core.
        step, length = ray_config.rows_per_task, end - start
        tasks = [{"start": at, "end": min(at + step, length)} for at in range(done, length, step)]
        dataset = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
            RowWorker,
            fn_constructor_kwargs=given,
            batch_size=1,  # task: with none Ray Data refuses GPUs
            compute=ActorPoolStrategy(
                size=workers.num_workers,
                max_tasks_in_flight_per_actor=in_flight,
                max_concurrent_calls_per_actor=in_flight,
                enable_true_multi_threading=True,
            ),
            num_cpus=workers.num_cpus,
            num_gpus=workers.num_gpus,
            max_restarts=ray_config.max_restarts,
            max_task_retries=-1,
        )
        try:
            _write(dataset, done, journal, batch_config.checkpoint_s, progress)
        except RayError as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise BatchError(
                f"the cluster could not go on ({reason[-1]}); {journal.counts.num_rows} rows are written: run the same "
                "job again to go on"
            ) from error
        finally:
            if journal.can_write:
                journal.checkpoint()


def _write(dataset: Any, done: int, journal: Journal, checkpoint_s: float, progress: Progress) -> None:
    journal.checkpoint()
    saved_s = time.monotonic()
    for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for row in batch.to_pylist():
            if row["engine"]:
                journal.describe(msgspec.json.decode(row["engine"]))
            if row["place"] != done:
                raise BatchError(f"row {row['place']} came where {done} was due; nothing is lost: run the job again")
            done += 1
            counts = Counts(**{name: row[name] for name in COUNTS})
            journal.append(row["line"], counts, {"next_index": done})
        if time.monotonic() >= saved_s + checkpoint_s:
            journal.checkpoint()
            progress.show(journal.counts)
            saved_s = time.monotonic()


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Ray Data as this job needs it, and then as it was."""
    context = DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    try:
        yield
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before


class RowWorker:
    """An engine of a job. Ray Data calls it in threads, once for every task."""

    def __init__(self, config: EngineConfig, batch_config: BatchConfig, facts: JobFacts, source: Any):
        found = find_model(config)
        rows = open_rows(source if isinstance(source, str) else ray.get(source))
        self._engine = DrivenEngine(build_engine(config, found, show_progress=False, for_job=True))
        maker = make_maker(self._engine, found, batch_config, facts)
        known = {"input": rows.digest, "model": fingerprint(found.checkpoint, dtype=config.dtype, seed=config.seed)}
        self._described = msgspec.json.encode(engine_facts(self._engine.info) | known).decode()
        self._rows = make_rows(rows, batch_config, maker)
        self._page_size = self._engine.info.page_size if batch_config.arrange_rows else None
        self._loop = asyncio.new_event_loop()
        self._answering = _Answering(self._engine, maker)
        threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True).start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._engine.drive())
        self._loop.run_forever()

    def __call__(self, tasks: Mapping[str, numpy.ndarray]) -> dict[str, Any]:
        """The lines of the rows from `start` to `end`, and what they count."""
        places = [at for start, end in zip(tasks["start"], tasks["end"], strict=True) for at in range(start, end)]
        rows: list[Row] = [self._rows[place] for place in places]
        order = range(len(rows))
        if self._page_size is not None:
            order = arrange([extent(row) for row in rows], self._page_size)
        answered = asyncio.run_coroutine_threadsafe(self._answering.answer([rows[i] for i in order]), self._loop)
        try:
            answers = dict(zip(order, answered.result(), strict=True))
        except EngineDead as error:
            # With the process goes the device's memory; another one takes its place, and its tasks.
            print(f"the engine of this worker died: {error}", file=sys.stderr, flush=True)
            os._exit(EXIT_ENGINE_DEAD)
        ordered = [answers[index] for index in range(len(rows))]
        columns: dict[str, Any] = {name: [getattr(answer.counts, name) for answer in ordered] for name in COUNTS}
        columns |= {"place": places, "line": [answer.line for answer in ordered]}
        columns["engine"] = [self._described if not index else "" for index in range(len(rows))]
        return {name: pyarrow.array(values) for name, values in columns.items()}


class _Answering:
    """Rows of several tasks, which share what the engine has room for."""

    def __init__(self, engine: DrivenEngine, maker: RowMaker):
        self._runner = RowRunner(engine, maker)
        self._moved = asyncio.Event()  # set whenever a row has ended

    async def answer(self, rows: Sequence[Row]) -> list[Answer]:
        """In the order of the rows, which is that in which they are begun."""
        tasks: list[asyncio.Task[Answer]] = []
        try:
            for row in rows:
                if row.failure is not None:
                    tasks.append(asyncio.create_task(_failed(row.failure)))
                    continue
                while not self._runner.has_room(row):
                    self._moved.clear()
                    await self._moved.wait()
                task = asyncio.create_task(self._runner.start(row))
                task.add_done_callback(lambda _: self._moved.set())
                tasks.append(task)
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


async def _failed(line: bytes) -> Answer:
    return failure(line)
