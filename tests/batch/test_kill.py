"""`jaxinfer batch` as a process that is killed: run again, it ends as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.api.test_serve_process import ROOT, environment, save_tiny_model
from tests.batch.made import batch_row, read_lines, write_lines

FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--page-size", "8", "--checkpoint-s", "0.1")
MODEL = "smollm2-135m"
DEFAULT_FLAGS = (
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "64", "--page-size", "8"),
    *("--checkpoint-s", "0.1"),
)
LOOK_S = 0.001
"""How often the job is looked at: a checkpoint is written in some milliseconds."""


def make_rows(count: int) -> list[dict]:
    """Prompts and outputs of many lengths, a third of them sampled."""
    rows = []
    for i in range(count):
        prompt = f"{i} " + "ab" * (i % 30)
        rows.append(batch_row(f"row-{i}", prompt=prompt, max_tokens=2 + i % 9, temperature=float(i % 3 == 0)))
    return rows


def command(source: Path, output: Path, model: str, cache: Path) -> list[str]:
    paths = ("--input", str(source), "--output", str(output), "--model", model, "--compile-cache-dir", str(cache))
    return [sys.executable, "-m", "jaxinfer.cli", "batch", *paths, *(DEFAULT_FLAGS if model == MODEL else FLAGS)]


def job_environment(model: str) -> dict[str, str]:
    """The tests' own; a real model takes three times as long in steps that LLVM has not optimised."""
    return environment(XLA_FLAGS="") if model == MODEL else environment()


def run_to_end(*args) -> None:
    env = job_environment(args[2])
    done = subprocess.run(command(*args), cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def progress(output: Path) -> int:
    """Rows in the last checkpoint; -1 before the first."""
    try:
        return json.loads(output.with_name(output.name + ".state").read_bytes())["counts"]["num_rows"]
    except FileNotFoundError:
        return -1


def kill_when(condition, *args, limit_s: float = 120) -> bool:
    """Starts the job and kills it once `condition` holds; whether it was still at work."""
    process = subprocess.Popen(
        command(*args), cwd=ROOT, env=job_environment(args[2]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end_s = time.monotonic() + limit_s
    while process.poll() is None and not condition():
        assert time.monotonic() < end_s, f"it is not so after {limit_s} s"
        time.sleep(LOOK_S)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def same_output(one: Path, other: Path) -> None:
    """But for the time at which the jobs began, which every reply has."""
    lines = [read_lines(path) for path in (one, other)]
    for line in (line for path in lines for line in path):
        if line["response"]:
            line["response"]["body"].pop("created", None)
    assert lines[0] == lines[1]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_killed_while_it_compiles_and_while_it_runs_writes_what_an_uninterrupted_one_does(tmp_path):
    model, cache = str(save_tiny_model(tmp_path / "model")), tmp_path / "cache"
    rows = make_rows(60)
    rows[7], rows[20] = '{"custom_id": "broken"', batch_row("row-3", prompt="again")
    rows[30] = batch_row("long", prompt="x" * 300)
    source, whole, output = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    partial = output.with_name("out.jsonl.partial")
    assert kill_when(lambda: partial.exists(), source, output, model, cache), "it had ended"  # before it compiles
    started_s = time.monotonic()
    assert kill_when(lambda: time.monotonic() > started_s + 4, source, output, model, cache)  # while it starts
    assert kill_when(lambda: progress(output) >= 0, source, output, model, cache)
    before = progress(output)
    assert kill_when(lambda: progress(output) > before + 5, source, output, model, cache)
    assert 0 < progress(output) < 60
    run_to_end(source, output, model, cache)
    run_to_end(source, whole, model, cache)
    same_output(output, whole)
    lines = read_lines(output)
    ids = [line["custom_id"] for line in lines]
    assert len(lines) == 60
    assert [ids[7], ids[20], ids[30]] == [None, "row-3", "long"]
    assert [line["error"]["code"] for line in lines if line["error"]] == ["invalid_json", "duplicate_custom_id"]
    assert lines[30]["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_thousand_rows_killed_ten_times_at_random_are_each_written_once(tmp_path):
    """The places are drawn anew in each run of the test, and named where it fails."""
    model, cache = str(save_tiny_model(tmp_path / "model")), tmp_path / "cache"
    source = write_lines(tmp_path / "in.jsonl", make_rows(2000))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_to_end(source, whole, model, cache)
    seed = int.from_bytes(os.urandom(4))
    places = random.Random(seed)
    kills = 0
    for number in range(10):
        at_row, wait_s = progress(output) + places.randrange(1, 160), places.uniform(0, 0.2)

        def there(at_row=at_row, wait_s=wait_s, number=number) -> bool:
            if number == 0:  # before there is anything, somewhere between the start and the first row
                time.sleep(10 * wait_s)
                return True
            if progress(output) < at_row:
                return False
            time.sleep(wait_s)  # about two checkpoints long: while one is written, too
            return True

        kills += kill_when(there, source, output, model, cache)
    assert kills == 10, f"seed {seed}: it ended before it was killed"
    run_to_end(source, output, model, cache)
    same_output(output, whole)
    assert [line["custom_id"] for line in read_lines(output)] == [f"row-{i}" for i in range(2000)], f"seed {seed}"


def writes_checkpoint(output: Path, at_row: int) -> bool:
    """Whether the file that is about to become the checkpoint is there, once `at_row` rows are written."""
    return progress(output) >= at_row and output.with_name(output.name + ".state.tmp").exists()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_thousand_rows_of_the_default_model_killed_ten_times_are_each_written_once(tmp_path):
    """Twice while it compiles, four times at any moment between two rows, four times while a checkpoint is written."""
    seed = int.from_bytes(os.urandom(4))
    places = random.Random(seed)
    rows = []
    for number in range(2000):
        prompt = [places.randrange(1000, 49000) for _ in range(1 + number % 3)]
        rows.append(batch_row(f"row-{number}", prompt=prompt, max_tokens=1 + number % 2, temperature=number % 4 // 3))
    source, cache = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "cache"
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    partial, args = output.with_name("out.jsonl.partial"), (source, output, MODEL, cache)
    for wait_s in (places.uniform(0.5, 2.5), places.uniform(2.5, 6)):  # a start takes 12 s where nothing is cached
        partial.unlink(missing_ok=True)
        begun_s: list[float] = []

        def compiles(wait_s=wait_s, begun_s=begun_s) -> bool:
            if partial.exists() and not begun_s:
                begun_s.append(time.monotonic())
            return bool(begun_s) and time.monotonic() > begun_s[0] + wait_s

        assert kill_when(compiles, *args), f"seed {seed}: it had ended"
        assert progress(output) <= 0, f"seed {seed}: it had compiled"
    for number in range(8):
        at_row, end_s = max(progress(output), 0) + places.randrange(1, 220), places.uniform(0, 0.3)

        def there(number=number, at_row=at_row, end_s=end_s) -> bool:
            if number % 2:
                return writes_checkpoint(output, at_row)
            if progress(output) < at_row:
                return False
            time.sleep(end_s)
            return True

        assert kill_when(there, *args), f"seed {seed}: it ended before kill {number}"
    run_to_end(*args)
    run_to_end(source, whole, MODEL, cache)
    same_output(output, whole)
    lines = read_lines(output)
    assert [line["custom_id"] for line in lines] == [f"row-{i}" for i in range(2000)], f"seed {seed}"
    assert all(line["response"]["status_code"] == 200 for line in lines)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_disk_that_fills_up_ends_the_job_with_what_to_do_and_with_room_it_goes_on(tmp_path):
    """A file system of 128 KiB for the output, which takes 200 rows of 600 bytes, and then one of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small file system")
    try:
        model, cache = str(save_tiny_model(tmp_path / "model")), tmp_path / "cache"
        source = write_lines(tmp_path / "in.jsonl", make_rows(600))
        whole, output = tmp_path / "whole.jsonl", disk / "out.jsonl"
        run_to_end(source, whole, model, cache)
        args = {"cwd": ROOT, "env": job_environment(model), "capture_output": True, "text": True, "timeout": 120}
        for _ in range(2):  # run again without room, it says so again, and loses nothing
            done = subprocess.run(command(source, output, model, cache), **args)
            assert done.returncode == 1
            last = done.stderr.strip().splitlines()[-1]
            assert "out.jsonl cannot be written (No space left on device)" in last
            assert "rows are safe: make room, and run the same job again to go on" in last
            assert 0 < progress(output) < 600
            assert not output.exists()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        run_to_end(source, output, model, cache)
        same_output(output, whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
