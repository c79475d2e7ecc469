"""scripts/measure_batch.py: what it asks of job and server, and what it keeps of them."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from types import SimpleNamespace

import measure_batch
import pytest
from measure_batch import GivenRows, GpuUse, Steps, parse, row_key

from tests.batch.made import batch_row, write_lines

NO_USE = SimpleNamespace(share=lambda *_: None)


def workload(path, count):
    asked = {field.name: None for field in dataclasses.fields(GivenRows)} | {"extra_body": {}, "start_delay_s": 0.0}
    return GivenRows(**asked | {"path": str(path), "num_prompts": count})


def test_the_server_is_asked_for_the_rows_of_the_job_streamed_with_their_usage(tmp_path):
    rows = [batch_row(f"row-{i}", prompt=[100 + i] * 40, max_tokens=5 + i) for i in range(3)]
    asked = workload(write_lines(tmp_path / "rows.jsonl", rows), 3)
    bodies = [json.loads(asked.payload(number)) for number in range(3)]
    assert [body["prompt"] for body in bodies] == [row["body"]["prompt"] for row in rows]
    assert [body["max_tokens"] for body in bodies] == [5, 6, 7]
    assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in bodies)
    short = json.loads(asked.payload(-2, short=True))
    assert (len(short["prompt"]), short["max_tokens"]) == (16, 4)


def test_steps_are_timed_from_the_start_of_the_first_to_the_end_of_the_last():
    events = [SimpleNamespace(token_ids=(1, 2)), SimpleNamespace(token_ids=())]

    def collect(_):
        time.sleep(0.02)

    runner = SimpleNamespace(collect=collect)
    engine = SimpleNamespace(_runner=runner, step=lambda: runner.collect(0) or events)
    steps = Steps()
    watched = steps.watch(engine)
    for _ in range(3):
        assert watched.step() == events
    figures = steps.figures(NO_USE)
    assert (figures["num_steps"], figures["total_output_tokens"]) == (3, 6)
    assert 0.06 <= figures["duration"] < 5
    assert figures["output_throughput"] == pytest.approx(6 / figures["duration"], rel=0.05)
    assert 0.1 < figures["waited_share"] <= 1


def test_the_use_of_the_gpu_is_the_mean_of_its_samples_within_the_time(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    told = 'print(80 if sys.argv[1:3] == ["-i", "3"] else 10, flush=True)'
    tool.write_text(f"#!{sys.executable}\nimport sys, time\nfor _ in range(600):\n {told}\n time.sleep(0.01)\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with GpuUse() as use:
        end_s = time.monotonic() + 20
        while use.share(0.0, end_s) is None:
            assert time.monotonic() < end_s
            time.sleep(0.01)
    assert use.share(0.0, end_s) == 0.8
    assert use.share(end_s, end_s + 1) is None
    tool.unlink()
    with GpuUse() as use:
        assert use.share(0.0, end_s) is None


def test_a_part_is_not_begun_without_time_and_the_exit_status_says_so(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "results.json"
    asked = ["--label", "x", "--rows", "2", "--prompt", "4", "8", "--output", "2", "4", "--results", str(kept)]
    monkeypatch.setattr(measure_batch, "measure_job", lambda *_: {"duration": 1.0, "failed": 0})
    monkeypatch.setattr(measure_batch, "measure_server", lambda *_: None)
    assert measure_batch.main(asked) == 1
    assert "server: not measured" in capsys.readouterr().out
    (row,) = json.loads(kept.read_text())["batch"]["x"]
    assert (row["kind"], row["rows"], row["prompt"], row["output"]) == ("job", 2, [4, 8], [2, 4])
    assert measure_batch.main([*asked, "--only", "job"]) == 0
    assert measure_batch.main([*asked, "--only", "job", "--time-limit-s", "0"]) == 1


def test_what_is_measured_tells_rows_apart_and_flags_behind_the_dashes_are_the_engines():
    args = parse(["--label", "x", "--", "--model", "m", "--max-num-seqs", "8"])
    assert (args.rows, args.flags) == (20_000, ["--model", "m", "--max-num-seqs", "8"])
    job = {"kind": "job", "rows": 2, "prompt": [1, 2], "output": [3, 4]}
    assert row_key(job) == row_key(job | {"duration": 5})
    assert len({row_key(job), row_key(job | {"rows": 3}), row_key(job | {"kind": "server", "clients": 8})}) == 3
    with pytest.raises(SystemExit):
        parse(["--label", "x", "--rows", "0"])
