"""Files and batches of a server, in one folder: what is known of them in SQLite, their content beside it.

Several front ends may have it open, and what is in it survives them all.

    FOLDER/batches.sqlite3   a row for each file and each batch
    FOLDER/files/ID          content
    FOLDER/jobs/ID.jsonl...  a batch at work: see jaxinfer.batch.journal
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from jaxinfer.config import ConfigError

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (place INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, fields TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    place INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, status TEXT NOT NULL, fields TEXT NOT NULL
);
"""
BUSY_S = 10.0
"""How long one front end waits for another that writes."""
ENDED = ("completed", "failed", "expired", "cancelled")
"""States that a batch does not leave."""

Fields = dict[str, Any]


class BatchStore:
    """Threads may share it. Of the front ends that have the folder open, `take_work` lets one in to run batches."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            for path in (folder / "files", folder / "jobs"):
                path.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(folder / "batches.sqlite3", timeout=BUSY_S, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"batch_dir is {str(folder)!r}, and cannot be used: {error}") from error
        self._lock = threading.Lock()
        self._work_lock: int | None = None

    def close(self) -> None:
        """Lets another front end run the batches."""
        with self._lock:
            self._database.close()
            if self._work_lock is not None:
                os.close(self._work_lock)
                self._work_lock = None

    def take_work(self) -> bool:
        """Whether this process is the one that runs the batches. The system takes the lock from one that dies."""
        if self._work_lock is None:
            lock = os.open(self.folder / "work.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._work_lock = lock
            self._sweep()
        return True

    def _sweep(self) -> None:
        """Removes what a process that was killed has left of batches that have ended."""
        for path in (self.folder / "jobs").iterdir():
            batch = self.batch(path.name.split(".")[0])
            if batch is None or batch["status"] in ENDED:
                path.unlink()

    def content(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self.folder / "files" / file_id

    def job(self, batch_id: str) -> Path:
        """The output of a batch at work."""
        return self.folder / "jobs" / f"{batch_id}.jsonl"

    def add_file(self, unnamed: Path, filename: str, purpose: str) -> Fields:
        """Makes a file of what lies at `unnamed`, in the store's folder."""
        fields = file_fields(new_id("file-"), unnamed, filename, purpose)
        os.replace(unnamed, self.content(fields["id"]))
        with self._changing() as database:
            _insert_file(database, fields)
        return fields

    def file(self, file_id: str) -> Fields | None:
        return self._one("SELECT fields FROM files WHERE id = ?", file_id)

    def files(self, after: str | None, limit: int, purpose: str | None) -> list[Fields]:
        """The newest first, those behind `after`; one more than `limit` if there are more."""
        found = self._page("files", after, -1 if purpose is not None else limit + 1)
        return [fields for fields in found if purpose in (None, fields["purpose"])][: limit + 1]

    def remove_file(self, file_id: str) -> bool:
        """Whether there was one."""
        with self._changing() as database:
            removed = database.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount > 0
        self.content(file_id).unlink(missing_ok=True)
        return removed

    def add_batch(self, fields: Fields) -> None:
        with self._changing() as database:
            database.execute(
                "INSERT INTO batches (id, status, fields) VALUES (?, ?, ?)",
                (fields["id"], fields["status"], _text(fields)),
            )

    def batch(self, batch_id: str) -> Fields | None:
        return self._one("SELECT fields FROM batches WHERE id = ?", batch_id)

    def batches(self, after: str | None, limit: int) -> list[Fields]:
        """The newest first, those behind `after`; one more than `limit` if there are more."""
        return self._page("batches", after, limit + 1)

    def next_batch(self) -> Fields | None:
        """The oldest that has not ended."""
        marks = ", ".join("?" * len(ENDED))
        return self._one(f"SELECT fields FROM batches WHERE status NOT IN ({marks}) ORDER BY place LIMIT 1", *ENDED)

    def change_batch(
        self, batch_id: str, *, files: Iterable[Fields] = (), unless: Iterable[str] = (), **fields: Any
    ) -> Fields:
        """Sets fields of a batch, and adds files, at once. Does nothing in one of the states `unless`.

        Returns the batch as it is then.
        """
        with self._changing() as database:
            (text,) = database.execute("SELECT fields FROM batches WHERE id = ?", (batch_id,)).fetchone()
            batch = msgspec.json.decode(text)
            if batch["status"] in tuple(unless):
                return batch
            batch |= fields
            for one in files:
                _insert_file(database, one)
            database.execute(
                "UPDATE batches SET status = ?, fields = ? WHERE id = ?", (batch["status"], _text(batch), batch_id)
            )
            return batch

    def _one(self, query: str, *values: str) -> Fields | None:
        with self._lock:
            row = self._database.execute(query, values).fetchone()
        return None if row is None else msgspec.json.decode(row[0])

    def _page(self, table: str, after: str | None, count: int) -> list[Fields]:
        where = "" if after is None else f"WHERE place < (SELECT place FROM {table} WHERE id = ?)"
        query = f"SELECT fields FROM {table} {where} ORDER BY place DESC LIMIT ?"
        values = (count,) if after is None else (after, count)
        with self._lock:
            rows = self._database.execute(query, values).fetchall()
        return [msgspec.json.decode(row[0]) for row in rows]

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing; no other front end comes between reading and writing."""
        with self._lock, self._database:
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database


def file_fields(file_id: str, content: Path, filename: str, purpose: str) -> Fields:
    """A file as the OpenAI API shows it."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": content.stat().st_size,
        "created_at": int(time.time()),
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def _insert_file(database: sqlite3.Connection, fields: Fields) -> None:
    database.execute("INSERT OR REPLACE INTO files (id, fields) VALUES (?, ?)", (fields["id"], _text(fields)))


def _text(fields: Fields) -> str:
    return msgspec.json.encode(fields).decode()
