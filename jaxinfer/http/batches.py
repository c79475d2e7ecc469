"""The routes of batches, and what runs them: jobs of jaxinfer.batch over the server's own engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.batch.config import BatchConfig
from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.job import Job, RowReader, split_lines
from jaxinfer.batch.journal import Counts, Journal
from jaxinfer.batch.rows import KINDS, JobFacts, RowMaker
from jaxinfer.batch.sources import Rows, find_duplicates, open_rows
from jaxinfer.http.batch_store import ENDED, BatchStore, Fields, file_fields, new_id
from jaxinfer.http.bodies import json_response
from jaxinfer.http.counters import Counters
from jaxinfer.http.errors import HttpError
from jaxinfer.http.files import file_routes, list_response, page_of, refuse
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.types import EngineDead, EngineHandle

logger = logging.getLogger(__name__)

WINDOWS_S = {"24h": 24 * 3600}
"""Times in which a batch may be asked to end, in seconds; what is not begun by then gets an error."""
POLL_S = 0.5
"""How often a new batch and a wish to cancel are looked for: another front end may have taken them."""
RETRY_S = 10.0
"""How long a batch waits whose output could not be written."""
PRIORITY = 1
"""Of rows that give none: those who wait for an answer come first."""
MAX_METADATA = 16
"""Entries of a batch's metadata, as the OpenAI API has it."""
MAX_BODY_BYTES = 2**16


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class Batches:
    """The batches of a server: their routes, and the one that runs."""

    def __init__(self, folder: Path, engine: EngineHandle, prompts: PromptMaker):
        self._store = BatchStore(folder)
        self._engine = engine
        self._prompts = prompts
        # Not those of the server: the rows of a batch wait for each other, and nobody for them.
        self._metrics = ServerMetrics(prompts.model_names[0], Counters(), engine.info)

    def routes(self) -> list[Route]:
        """Of files and of batches."""
        return [
            *file_routes(self._store),
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list, methods=["GET"]),
            Route("/v1/batches/{id}", self.show, methods=["GET"]),
            Route("/v1/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: HttpRequest) -> Response:
        body = await _read_body(request)
        if body.endpoint not in KINDS:
            refuse(f"endpoint is {body.endpoint!r}; supported: {', '.join(KINDS)}", param="endpoint")
        if body.completion_window not in WINDOWS_S:
            known = ", ".join(WINDOWS_S)
            refuse(f"completion_window is {body.completion_window!r}; supported: {known}", param="completion_window")
        if len(body.metadata or {}) > MAX_METADATA:
            refuse(f"metadata has {len(body.metadata or {})} entries; at most {MAX_METADATA}", param="metadata")
        file = self._store.file(body.input_file_id)
        if file is None or file["purpose"] != "batch":
            refuse(f"there is no file {body.input_file_id!r} with the purpose 'batch'", param="input_file_id")
        now_s = int(time.time())
        fields = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now_s,
            "in_progress_at": None,
            "expires_at": now_s + WINDOWS_S[body.completion_window],
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }
        self._store.add_batch(fields)
        return json_response(fields)

    async def list(self, request: HttpRequest) -> Response:
        after, limit = page_of(request)
        return list_response(self._store.batches(after, limit), limit)

    async def show(self, request: HttpRequest) -> Response:
        return json_response(self._found(request))

    async def cancel(self, request: HttpRequest) -> Response:
        batch_id = self._found(request)["id"]
        now = {"status": "cancelling", "cancelling_at": int(time.time())}
        batch = self._store.change_batch(batch_id, unless=(*ENDED, "cancelling", "finalizing"), **now)
        if batch["status"] != "cancelling":
            raise HttpError(409, f"the batch is {batch['status']} and cannot be cancelled", code="batch_ended")
        return json_response(batch)

    def _found(self, request: HttpRequest) -> Fields:
        batch_id = request.path_params["id"]
        fields = self._store.batch(batch_id)
        if fields is None:
            raise HttpError(404, f"there is no batch {batch_id!r}", code="batch_not_found", param="id")
        return fields

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it lasts, batches are run, one after the other; what is done of one is kept for the next time."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("batches are run no more", exc_info=error)
            self._store.close()

    async def _run(self) -> None:
        while True:
            batch = self._store.next_batch() if self._store.take_work() else None
            if batch is None:
                await asyncio.sleep(POLL_S)
                continue
            try:
                await self._run_batch(batch)
            except EngineDead:
                return  # whoever starts the server again goes on with it
            except _Refused as refused:
                errors = {"object": "list", "data": [{"code": refused.code, "message": str(refused), "line": None}]}
                now_s = int(time.time())
                self._store.change_batch(batch["id"], status="failed", failed_at=now_s, errors=errors)
            except (BatchError, OSError) as error:
                logger.error("%s waits for %g s: %s", batch["id"], RETRY_S, error)
                await asyncio.sleep(RETRY_S)

    async def _run_batch(self, batch: Fields) -> None:
        """Up to the end, from wherever it was."""
        rows = await asyncio.to_thread(self._open, batch)
        path, config = self._store.job(batch["id"]), BatchConfig(defaults={"priority": PRIORITY})
        identity = {"input": rows.digest, "model": self._engine.info.model, "endpoint": batch["endpoint"]}
        try:
            journal = Journal.open(path, identity, batch["created_at"])
        except BatchError as error:
            raise _Refused("batch_changed", _named(error, path, batch["id"])) from error
        with journal:
            if journal.counts.num_rows < len(rows) and batch["status"] != "cancelling":
                await self._run_job(batch, rows, journal, config)
            elif journal.counts.num_rows == len(rows):
                journal.finish()
        await asyncio.to_thread(self._finish, batch["id"], len(rows))

    def _open(self, batch: Fields) -> Rows:
        path = self._store.content(batch["input_file_id"])
        try:
            rows = open_rows(path)
        except (OSError, BatchError) as error:
            reason = _named(error, path, batch["input_file_id"])
            raise _Refused("invalid_file", f"the input file cannot be read: {reason}") from error
        if not len(rows):
            raise _Refused("empty_file", "the input file has no rows")
        return rows

    async def _run_job(self, batch: Fields, rows: Rows, journal: Journal, config: BatchConfig) -> None:
        facts = JobFacts(
            key=batch["id"],
            created_s=batch["created_at"],
            seed=config.seed,
            defaults=config.defaults,
            duplicates=await asyncio.to_thread(find_duplicates, rows),
            url=batch["endpoint"],
        )
        maker = RowMaker(self._prompts, self._metrics, facts)
        reader = await asyncio.to_thread(RowReader, rows, config, maker, journal.iterator)
        progress = _StoredProgress(self._store, batch["id"], len(rows))
        progress.begin()
        job = asyncio.create_task(
            Job(reader, maker, journal, config, progress).run(self._engine, deadline_s=batch["expires_at"])
        )
        try:
            while not job.done():
                await asyncio.wait([job], timeout=POLL_S)
                now = self._store.batch(batch["id"])
                if now is not None and now["status"] == "cancelling":
                    break
        finally:
            job.cancel()
            await asyncio.wait([job])
        if not job.cancelled():
            job.result()

    def _finish(self, batch_id: str, num_rows: int) -> None:
        """Makes the files of what was written, and the batch's last state with them: all at once."""
        batch = self._store.change_batch(batch_id, unless=("cancelling",), status="finalizing")
        if batch["finalizing_at"] is None:
            batch = self._store.change_batch(batch_id, finalizing_at=int(time.time()))
        path = self._store.job(batch_id)
        source = path if path.exists() else path.with_name(path.name + ".partial")
        names = {
            True: f"{batch_id.replace('batch_', 'file-')}-output",
            False: f"{batch_id.replace('batch_', 'file-')}-error",
        }
        made = {answered: self._store.content(name) for answered, name in names.items()}
        counts = {True: 0, False: 0}
        with source.open("rb") as lines, made[True].open("wb") as answers, made[False].open("wb") as errors:
            for answered, line in split_lines(iter(lines)):
                (answers if answered else errors).write(line)
                counts[answered] += 1
            for file in (answers, errors):
                file.flush()
                os.fsync(file.fileno())
        files = {}
        for answered, kept in made.items():
            if counts[answered]:
                name = f"{batch_id}_{'output' if answered else 'error'}.jsonl"
                files[answered] = file_fields(names[answered], kept, name, "batch_output")
            else:
                kept.unlink()
        status = _last_state(batch, sum(counts.values()), num_rows)
        ended: Fields = {
            "status": status,
            f"{status}_at": int(time.time()),
            "output_file_id": names[True] if True in files else None,
            "error_file_id": names[False] if False in files else None,
            "request_counts": {"total": num_rows, "completed": counts[True], "failed": counts[False]},
        }
        self._store.change_batch(batch_id, files=tuple(files.values()), unless=(), **ended)
        for left in path.parent.glob(f"{batch_id}.*"):
            left.unlink()


def _named(error: Exception, path: Path, name: str) -> str:
    """What is wrong with a file, for a client, who knows its name and not where the server keeps it."""
    if isinstance(error, OSError):
        return f"{name}: {error.strerror}"
    return str(error).replace(str(path), name)


class _Refused(Exception):
    """A batch that cannot be run at all."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class _StoredProgress:
    """Where a batch stands, in the store."""

    def __init__(self, store: BatchStore, batch_id: str, total: int):
        self._store = store
        self._batch_id = batch_id
        self._total = total

    def begin(self) -> None:
        batch = self._store.batch(self._batch_id)
        if batch is not None and batch["in_progress_at"] is None:
            now = {"status": "in_progress", "in_progress_at": int(time.time())}
            counts = {"total": self._total, "completed": 0, "failed": 0}
            self._store.change_batch(self._batch_id, unless=("cancelling",), request_counts=counts, **now)

    def show(self, counts: Counts, *, last: bool = False) -> None:
        del last
        completed = counts.num_rows - counts.num_failed
        shown = {"total": self._total, "completed": completed, "failed": counts.num_failed}
        self._store.change_batch(self._batch_id, request_counts=shown)


def _last_state(batch: Fields, num_written: int, num_rows: int) -> str:
    if batch["status"] == "cancelling" or num_written < num_rows:
        return "cancelled"
    return "expired" if time.time() >= batch["expires_at"] else "completed"


async def _read_body(request: HttpRequest) -> _Body:
    data = await request.body()
    if len(data) > MAX_BODY_BYTES:
        message = f"the body has {len(data)} bytes; at most {MAX_BODY_BYTES} are read"
        raise HttpError(413, message, code="request_too_large")
    try:
        return msgspec.json.decode(data, type=_Body)
    except (msgspec.DecodeError, RecursionError) as error:
        refuse(f"the body cannot be read: {error}", code="invalid_json")
