"""A batch job on a Ray cluster of this machine: the same output as without one, whatever dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxinfer.config import ConfigError
from tests.api.test_serve_process import ROOT, children, environment, run_cli, save_tiny_model
from tests.batch.made import batch_row, read_lines, write_lines
from tests.batch.test_kill import FLAGS, make_rows, progress, same_output

pytest.importorskip("ray", reason="Ray is not installed; the extra 'ray' has it")
RAY = ("--ray", "--ray-workers", "2", "--no-progress")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def command(source: Path, output: Path, model: str, cache: Path, *flags: str) -> list[str]:
    paths = ("--input", str(source), "--output", str(output), "--model", model, "--compile-cache-dir", str(cache))
    return ["batch", *paths, *FLAGS, *flags]


def run(*args) -> None:
    done = run_cli(*command(*args), timeout_s=500)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def started(*args):
    """The job as a process, with its cluster in its process group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxinfer.cli", *command(*args)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return found + [child for one in found for child in descendants(one)]


def workers(pid: int) -> list[int]:
    """Processes of the job's engines."""
    found = []
    for one in descendants(pid):
        with contextlib.suppress(OSError):
            if b"RowWorker" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
    return found


def wait_until(condition, process, limit_s=500):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end_s, f"it is not so after {limit_s} s"
        time.sleep(0.02)


@pytest.mark.timeout(1200)
def test_two_thousand_rows_are_the_same_when_a_worker_is_killed_in_the_middle(model, cache, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", make_rows(2000))
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(source, whole, model, cache)
    with started(source, output, model, cache, *RAY) as process:
        wait_until(lambda: 200 < progress(output), process)
        killed = workers(process.pid)
        assert len(killed) == 2
        os.kill(killed[0], signal.SIGKILL)
        at = progress(output)
        assert at < 1800, "there was nothing left to do"
        assert process.wait(500) == 0, process.stderr.read()
    same_output(output, whole)
    assert [line["custom_id"] for line in read_lines(output)] == [f"row-{i}" for i in range(2000)]


@pytest.mark.timeout(1200)
def test_a_job_begun_on_a_cluster_goes_on_without_it_and_the_reverse(model, cache, tmp_path):
    rows = make_rows(1200)
    rows[7], rows[20] = '{"custom_id": "broken"', batch_row("row-3", prompt="again")
    rows[30] = batch_row("long", prompt="x" * 300)
    source, whole, output = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    shuffled = ("--shuffle-seed", "5")
    run(source, whole, model, cache, *shuffled)
    with started(source, output, model, cache, *RAY, *shuffled) as process:
        wait_until(lambda: 30 < progress(output), process)
        process.kill()
    before = progress(output)
    assert 30 < before < 1200
    with started(source, output, model, cache, *shuffled) as process:
        wait_until(lambda: progress(output) > before + 20, process)
        process.kill()
    assert before + 20 < progress(output) < 1200
    run(source, output, model, cache, *RAY, *shuffled)
    same_output(output, whole)
    assert sorted(line["error"]["code"] for line in read_lines(output) if line["error"]) == [
        "duplicate_custom_id",
        "invalid_json",
    ]


OTHER_INPUT = """
import sys
import ray
import jaxinfer
from jaxinfer.cluster import job

source, output, model, other, cache = sys.argv[1:]
ray.init(num_cpus=2, num_gpus=2, include_dashboard=False)
options = dict(max_num_seqs=4, max_num_batched_tokens=64, page_size=8, compile_cache_dir=cache, show_progress=False)
result = jaxinfer.run_batch(source, output, model, ray={"num_gpus": 2}, **options)
print(result.num_rows, ray.is_initialized(), flush=True)
real = job.run_rows
job.run_rows = lambda config, batch_config, ray_config, source, *rest: real(
    config, batch_config, ray_config, other, *rest
)
jaxinfer.run_batch(source, output, model, ray={}, restart=True, **options)
"""


@pytest.mark.timeout(1200)
def test_an_engine_that_sees_another_input_ends_the_job_and_a_cluster_with_gpus_gives_each_its_own(
    model, cache, tmp_path
):
    """The GPUs are in Ray's books alone."""
    source, other = (write_lines(tmp_path / f"{count}.jsonl", make_rows(count)) for count in (70, 71))
    output = tmp_path / "out.jsonl"
    args = [str(path) for path in (source, output, model, other, cache)]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_INPUT, *args],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.stdout.splitlines()[:1] == ["70 True"], done.stderr
    assert done.returncode == 1
    assert "was begun otherwise: input was" in done.stderr
    assert json.loads((tmp_path / "out.jsonl.state").read_text())["counts"]["num_rows"] == 0


@pytest.mark.timeout(600)
def test_more_engines_than_the_cluster_has_room_for_are_refused(model, cache, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", make_rows(3))
    args = command(source, tmp_path / "out.jsonl", model, cache, "--ray", "--ray-workers", "4000")
    done = run_cli(*args, timeout_s=500)
    assert done.returncode == 1
    assert "4000 engines of 0 GPUs and 1 cores each do not fit into a cluster of 0 GPUs" in done.stderr


def test_settings_of_a_cluster_that_cannot_be_are_refused():
    from jaxinfer.cluster.config import RayConfig

    for name, value, message in (
        ("num_workers", 0, "num_workers is 0; it must be from 1"),
        ("num_gpus", 1.5, "num_gpus is 1.5; above 1 it must be a whole number"),
        ("num_gpus", -1, "num_gpus is -1; it must be at least 0"),
        ("rows_per_task", 0, "rows_per_task is 0; it must be at least 1"),
        ("max_restarts", -1, "max_restarts is -1; it must be at least 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            RayConfig(**{name: value})
