"""Rows through an engine: tried again where that may help, answered with an error where it does not."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine
from typing import Any, NamedTuple

from jaxinfer.batch.arranging import Extent
from jaxinfer.batch.journal import Counts
from jaxinfer.batch.rows import Row, RowMaker
from jaxinfer.http.errors import RequestFailed, problem
from jaxinfer.http.streams import whole_reply
from jaxinfer.types import EngineDead, EngineHandle, QueueFull

MAX_ATTEMPTS = 2
"""Tries of a row whose step failed: another request may have been at fault."""
REFUSED_S, MAX_REFUSED_S = 0.1, 5.0
"""First and longest wait of a row that the engine had no room for, in seconds."""
MAX_REFUSALS = 20
"""A row that runs alone and is refused so often asks for more than there will ever be."""


class Answer(NamedTuple):
    """What a row gave."""

    line: bytes  # of the output
    counts: Counts


def failure(line: bytes) -> Answer:
    """Of a row that was not answered."""
    return Answer(line, Counts(num_rows=1, num_failed=1))


class RowRunner:
    """The rows that are in an engine at a time, for one event loop."""

    def __init__(self, engine: EngineHandle, maker: RowMaker):
        self._engine = engine
        self._maker = maker
        self._num_running = 0  # sequences
        # As many wait as run, so that the engine never looks for work that is not there yet.
        self._max_running = 2 * engine.info.max_num_seqs

    def has_room(self, row: Row) -> bool:
        """Whether it may run now; one that is too large for the engine may once it is alone."""
        return not self._num_running or self._num_running + row.num_sequences <= self._max_running

    def start(self, row: Row) -> Coroutine[Any, Any, Answer]:
        """Counts the row as running from now on; what is returned has to be awaited. It raises EngineDead alone."""
        self._num_running += row.num_sequences
        return self._run(row, row.num_sequences)

    async def _run(self, row: Row, size: int) -> Answer:
        try:
            return await self._answer(row, size)
        finally:
            self._num_running -= size

    async def _answer(self, row: Row, size: int) -> Answer:
        """A failed step is tried again, a full queue waited for."""
        num_attempts = num_refusals = 0
        while True:
            if row.failure is not None:
                return failure(row.failure)
            assert row.generation is not None
            try:
                body = await whole_reply(self._engine, row.generation)
                return _success(row, body)
            except QueueFull as error:
                alone = self._num_running == size
                num_refusals = num_refusals + 1 if alone else 0
                if num_refusals > MAX_REFUSALS:
                    return failure(row.refusal(problem(error)))
                await asyncio.sleep(min(REFUSED_S * 2 ** min(num_refusals, 10), MAX_REFUSED_S))
            except EngineDead:
                raise
            except RequestFailed as error:
                num_attempts += 1
                if num_attempts >= MAX_ATTEMPTS:
                    return failure(row.refusal(problem(error)))
            row = await asyncio.to_thread(self._maker.make, row.raw, num_attempts + num_refusals + 1)


def _success(row: Row, body: bytes) -> Answer:
    generation = row.generation
    assert generation is not None
    counts = Counts(
        num_rows=1,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=sum(choice.output.num_cached_tokens for choice in generation.choices[:: generation.n]),
        output_tokens=sum(choice.output.num_tokens for choice in generation.choices),
    )
    return Answer(row.success(body), counts)


def extent(row: Row) -> Extent:
    """By its first sequence: the others have the same prompt."""
    request = row.generation.choices[0].request if row.generation is not None and row.generation.choices else None
    if request is None:
        return Extent(array("I"), 0)
    ids = request.prompt_ids
    return Extent(ids if isinstance(ids, array) else array("I", ids), request.max_tokens)
