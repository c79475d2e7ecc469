"""The checkpoint: at every moment either the one before or the one after, and never half of one."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.batch.errors import BatchError
from jaxinfer.batch.formats import finisher
from jaxinfer.batch.journal import Counts, Journal

ROOT = Path(__file__).parents[2]
ONE = Counts(num_rows=1, output_tokens=2)


def open_journal(output: Path, **options) -> Journal:
    return Journal.open(output, {"input": "x"}, 1, finish=finisher(output), **options)


def line(number: int) -> bytes:
    body = b'{"id":"i","custom_id":"%d","response":{"status_code":200,"body":{}},"error":null}\n'
    return body % number


def write(output: Path, num_rows: int) -> None:
    """Rows from where the journal stands up to `num_rows`, a checkpoint behind each, and then the end."""
    with open_journal(output) as journal:
        for number in range((journal.iterator or {"next": 0})["next"], num_rows):
            journal.append(line(number), ONE, {"next": number + 1})
            journal.checkpoint()
        journal.finish()


def killed_at(output: Path, call: str, number: int, num_rows: int) -> None:
    """`write`, by a process that is killed when it makes this system call for this time."""
    real, count = getattr(os, call), 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)

    setattr(os, call, counted)
    write(output, num_rows)
    os._exit(0)


def content(output: Path) -> bytes:
    """Where it is packed, each checkpoint is a part of its own, and there may be more of them."""
    data = output.read_bytes()
    return gzip.decompress(data) if output.suffix == ".gz" else data


# A worker of the tests may have imported JAX, which warns of every fork.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.parquet"])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_process_killed_at_any_step_of_a_checkpoint_leaves_one_that_is_whole(tmp_path, name, call):
    """Each process is killed one step later than the one before; the last is killed by none."""
    write(tmp_path / ("whole-" + name), 4)
    spawn = multiprocessing.get_context("fork")
    deaths = 0
    for number in range(1, 30):
        output = tmp_path / f"{number}-{name}"
        process = spawn.Process(target=killed_at, args=(output, call, number, 4))
        process.start()
        process.join()
        deaths += process.exitcode == -9
        write(output, 4)
        assert content(output) == content(tmp_path / ("whole-" + name))
        assert not output.with_name(output.name + ".partial").exists()
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert deaths >= 5


def test_two_processes_do_not_write_one_output(tmp_path):
    with open_journal(tmp_path / "out.jsonl"), pytest.raises(BatchError, match="another process is at work on"):
        open_journal(tmp_path / "out.jsonl")
    open_journal(tmp_path / "out.jsonl").close()


def test_an_output_that_no_job_wrote_is_not_overwritten(tmp_path):
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(BatchError, match="exists and no job has written it"):
        open_journal(tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_rows_that_are_gone_are_not_taken_for_written(tmp_path):
    with open_journal(tmp_path / "out.jsonl") as journal:
        journal.append(line(0), ONE, {"next": 1})
        journal.checkpoint()
    (tmp_path / "out.jsonl.partial").write_bytes(b"")
    with pytest.raises(BatchError, match="rows are lost; restart"):
        open_journal(tmp_path / "out.jsonl")
    open_journal(tmp_path / "out.jsonl", restart=True).close()


def test_a_state_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "out.jsonl.state").write_text("{")
    with pytest.raises(BatchError, match="is no state of a job"):
        open_journal(tmp_path / "out.jsonl")


def test_what_is_known_late_must_be_what_it_was(tmp_path):
    with open_journal(tmp_path / "out.jsonl") as journal:
        journal.describe({"max_model_len": 64})
        journal.checkpoint()
    with open_journal(tmp_path / "out.jsonl") as journal:
        journal.describe({"max_model_len": 64})
        with pytest.raises(BatchError, match="max_model_len was 64 and is 32"):
            journal.describe({"max_model_len": 32})


FULL = """
import resource, sys
from pathlib import Path
from tests.batch.test_journal import write
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
write(Path(sys.argv[1]), 50)
"""


def test_a_file_that_can_grow_no_further_ends_with_a_clear_error_and_the_job_is_resumed(tmp_path):
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    output = tmp_path / "out.jsonl"
    write(tmp_path / "whole.jsonl", 50)
    command = [sys.executable, "-c", FULL, str(output), "1000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "out.jsonl cannot be written (File too large); 12 rows are safe: make room, and run" in done.stderr
    assert output.with_name("out.jsonl.partial").stat().st_size == 1000, "the last write was no part of a row"
    write(output, 50)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
