"""How an output is written: lines of the OpenAI API's batch format, or a table of the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.journal import Finish

LINE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz")
ROWS_PER_GROUP = 4096
"""Of a Parquet file: what is in memory at once while it is written."""


def finisher(output: Path) -> Finish | None:
    """What turns JSON lines into `output`; None where they are it. BatchError for a suffix that is not known."""
    if output.suffix in LINE_SUFFIXES:
        return None
    if output.suffix == ".parquet":
        _pyarrow()
        return write_parquet
    known = ", ".join((*LINE_SUFFIXES, ".parquet"))
    raise BatchError(f"the output {output} has the suffix {output.suffix!r}; known: {known}")


def write_parquet(lines: Path, made: Path) -> None:
    """A table with the columns id, custom_id, status_code, body and error; the last two as JSON text."""
    pyarrow = _pyarrow()
    text = pyarrow.string()
    names = {"id": text, "custom_id": text, "status_code": pyarrow.int32(), "body": text, "error": text}
    schema = pyarrow.schema(list(names.items()))
    with pyarrow.parquet.ParquetWriter(made, schema) as writer:
        for rows in _groups(lines):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: dict[str, Any] | None


def _groups(lines: Path) -> Iterator[list[dict[str, Any]]]:
    decoder = msgspec.json.Decoder(_Line)
    rows: list[dict[str, Any]] = []
    with lines.open("rb") as file:
        for data in file:
            line = decoder.decode(data)
            response = line.response
            rows.append(
                {
                    "id": line.id,
                    "custom_id": line.custom_id,
                    "status_code": None if response is None else response.status_code,
                    "body": None if response is None else bytes(response.body).decode(),
                    "error": None if line.error is None else msgspec.json.encode(line.error).decode(),
                }
            )
            if len(rows) == ROWS_PER_GROUP:
                yield rows
                rows = []
    if rows:
        yield rows


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise BatchError("an output in Parquet needs pyarrow: pip install 'jaxinfer[parquet]'") from None
    return pyarrow
