"""Responses that clients may ask for again or go on with: in memory, and shared by all front ends of a server.

SQLite keeps them, in this process or in a file that the front ends share, which nobody but them sees: what is asked of
one may have been answered by another.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from typing import Any, NamedTuple

import msgspec

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20
"""Most that is kept, and what is kept the longest goes first. A response counts with the conversation before it."""
BUSY_TIMEOUT_S = 10.0

_encode = msgspec.json.encode
_decode = msgspec.json.decode

SETUP = """
PRAGMA journal_mode = MEMORY;
PRAGMA synchronous = OFF;
PRAGMA temp_store = MEMORY;
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    cancel INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL,
    messages BLOB NOT NULL,
    num_bytes INTEGER NOT NULL
);
"""


class Stored(NamedTuple):
    """A response, and the conversation that it ends."""

    status: str
    body: bytes  # JSON
    messages: list[dict[str, Any]]  # as openai.Message has them


class ResponseStore:
    """path: of a file that several front ends open; None: in the memory of this one.

    max_responses, max_bytes: beyond them the oldest are given up; a response that alone has more is not kept.
    """

    def __init__(self, path: str | None = None, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            path or ":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        weakref.finalize(self, self._database.close)
        self._database.executescript(SETUP)

    def put(self, response_id: str, stored: Stored) -> None:
        """Keeps a response under its id, in place of what was there."""
        messages = _encode(stored.messages)
        num_bytes = len(stored.body) + len(messages)
        with self._lock, self._transaction():
            self._run("DELETE FROM responses WHERE id = ?", response_id)
            if num_bytes > self._max_bytes:
                return
            self._run(
                "INSERT INTO responses (id, status, body, messages, num_bytes) VALUES (?, ?, ?, ?, ?)",
                *(response_id, stored.status, stored.body, messages, num_bytes),
            )
            self._shrink()

    def replace(self, response_id: str, stored: Stored) -> bool:
        """As `put`, unless the response has been deleted meanwhile; whether it was there."""
        with self._lock:
            found = self._run("SELECT 1 FROM responses WHERE id = ?", response_id)
        if found:
            self.put(response_id, stored)
        return bool(found)

    def get(self, response_id: str) -> Stored | None:
        """None: it was never kept, is deleted, or was given up."""
        with self._lock:
            rows = self._run("SELECT status, body, messages FROM responses WHERE id = ?", response_id)
        return Stored(rows[0][0], rows[0][1], _decode(rows[0][2])) if rows else None

    def delete(self, response_id: str) -> bool:
        """Whether it was there."""
        with self._lock:
            return bool(self._run("DELETE FROM responses WHERE id = ? RETURNING 1", response_id))

    def wish_to_cancel(self, response_id: str) -> None:
        """Whichever front end runs it will see that."""
        with self._lock:
            self._run("UPDATE responses SET cancel = 1 WHERE id = ?", response_id)

    def is_to_be_cancelled(self, response_id: str) -> bool:
        """Whether somebody has wished it."""
        with self._lock:
            rows = self._run("SELECT cancel FROM responses WHERE id = ?", response_id)
        return bool(rows and rows[0][0])

    def __len__(self) -> int:
        with self._lock:
            return self._run("SELECT count(*) FROM responses")[0][0]

    def _shrink(self) -> None:
        """Gives up the oldest, until what is left fits."""
        while True:
            ((count, num_bytes),) = self._run("SELECT count(*), coalesce(sum(num_bytes), 0) FROM responses")
            if count <= self._max_responses and num_bytes <= self._max_bytes:
                return
            self._run("DELETE FROM responses WHERE number = (SELECT min(number) FROM responses)")

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database)

    def _run(self, statement: str, *values: Any) -> list[Any]:
        return self._database.execute(statement, values).fetchall()


class _Transaction:
    """One that takes the write lock at once: two that read first and then write would wait for each other."""

    def __init__(self, database: sqlite3.Connection):
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")
