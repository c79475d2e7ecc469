"""The same rows, whatever they lie in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import grain
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.sources import find_duplicates, open_rows
from tests.batch.made import batch_row, read_lines, run_job, write_lines

ROWS = [{"custom_id": f"row-{i}", "prompt": f"the cat {i}", "max_tokens": 2} for i in range(10)]


def save(kind: str, folder: Path):
    """ROWS as something of this kind."""
    table = pyarrow.Table.from_pylist(ROWS)
    if kind == "jsonl":
        return write_lines(folder / "in.jsonl", ROWS)
    if kind == "gzip":
        path = folder / "in.jsonl.gz"
        path.write_bytes(gzip.compress(write_lines(folder / "plain", ROWS).read_bytes()))
        return path
    if kind == "gzip without its suffix":
        path = folder / "in.jsonl"
        path.write_bytes(gzip.compress(write_lines(folder / "plain", ROWS).read_bytes()))
        return path
    if kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "in.parquet", row_group_size=1)
        return folder / "in.parquet"
    if kind == "arrow file":
        with pyarrow.ipc.new_file(folder / "in.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        return folder / "in.arrow"
    if kind == "folder of a saved data set":
        data = folder / "data"
        data.mkdir()
        (data / "dataset_info.json").write_text("{}")
        for number, part in enumerate((table.slice(0, 4), table.slice(4))):
            with pyarrow.ipc.new_stream(data / f"data-{number:05d}-of-00002.arrow", table.schema) as writer:
                writer.write_table(part)
        return data
    if kind == "sequence":
        return ROWS
    if kind == "lines":
        return [json.dumps(row) for row in ROWS]
    if kind == "numpy values":
        return [row | {"max_tokens": np.int64(row["max_tokens"])} for row in ROWS]
    assert kind == "grain"
    return grain.MapDataset.source(ROWS)


KINDS = (
    "jsonl",
    "gzip",
    "gzip without its suffix",
    "parquet",
    "arrow file",
    "folder of a saved data set",
    "sequence",
    "lines",
    "numpy values",
    "grain",
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_every_kind_of_source_are_answered_in_order(tmp_path, kind):
    run_job(save(kind, tmp_path), tmp_path / "out.jsonl")
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["custom_id"] for line in lines] == [row["custom_id"] for row in ROWS]
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in lines} == {2}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "sequence"])
def test_a_changed_row_changes_the_digest(tmp_path, kind, monkeypatch):
    before = open_rows(save(kind, tmp_path)).digest
    assert open_rows(save(kind, tmp_path)).digest == before
    monkeypatch.setitem(ROWS[9], "prompt", "another")
    assert open_rows(save(kind, tmp_path)).digest != before


def test_blank_lines_are_no_rows_and_count_in_the_numbers_of_lines(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", ["", ROWS[0], "  ", "{", ""])
    rows = open_rows(source)
    assert len(rows) == 2
    assert [rows[i].place for i in range(2)] == ["line 2", "line 4"]


def test_the_last_line_needs_no_end(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]))
    assert json.loads(open_rows(tmp_path / "in.jsonl")[1].data) == ROWS[1]


def test_a_gzip_that_is_cut_off_is_refused_whole(tmp_path):
    path = save("gzip", tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BatchError, match="is no whole gzip file"):
        open_rows(path)


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
def test_a_file_that_is_not_what_its_suffix_says_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"PAR0" * 10)
    with pytest.raises(BatchError, match="is no (Parquet|Arrow) file"):
        open_rows(tmp_path / name)


@pytest.mark.parametrize("source", [7, b"rows", {"a": 1}, iter([])])
def test_what_has_no_rows_under_numbers_is_refused(source):
    with pytest.raises(BatchError, match="a source with a length and rows under numbers, is needed"):
        open_rows(source)


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(BatchError, match="has no file of rows"):
        open_rows(tmp_path)


def test_duplicates_are_found_over_all_rows_and_name_the_first():
    names = ["a", "b", "a", None, "c", "b", "a", None]
    rows = [batch_row(name) if name else {"prompt": "x"} for name in names]
    assert find_duplicates(open_rows(rows)) == {2: 0, 6: 0, 5: 1}


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.parquet"])
def test_an_output_of_another_kind_has_the_same_lines(tmp_path, name):
    run_job(ROWS, tmp_path / "plain.jsonl")
    plain = read_lines(tmp_path / "plain.jsonl")
    run_job(ROWS, tmp_path / name)
    if name.endswith(".gz"):
        assert gzip.decompress((tmp_path / name).read_bytes()) == (tmp_path / "plain.jsonl").read_bytes()
        return
    rows = pyarrow.parquet.read_table(tmp_path / name).to_pylist()
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in plain]
    assert [json.loads(row["body"]) for row in rows] == [line["response"]["body"] for line in plain]
    assert {row["error"] for row in rows} == {None}
    assert {row["status_code"] for row in rows} == {200}


def test_an_output_with_another_suffix_is_refused(tmp_path):
    with pytest.raises(BatchError, match=r"has the suffix '\.csv'; known: "):
        run_job(ROWS, tmp_path / "out.csv")
