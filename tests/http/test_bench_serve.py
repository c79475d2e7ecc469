"""scripts/bench_serve.py against a server whose numbers are known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_serve.py"


def bench(server, *args):
    command = [
        sys.executable,
        SCRIPT,
        "--base-url",
        server.url,
        "--vocab-size",
        "300",
        "--client-processes",
        "2",
        *args,
    ]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)


def rows_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_bench_counts_tokens_exactly_when_an_event_has_several(server, engine, tmp_path):
    engine.tokens_per_event, engine.step_s = 3, 0.01
    record = tmp_path / "gpu.json"
    record.write_text('{"kernels": [1]}')
    args = ("--input-len", 8, "--output-len", 9, "--num-prompts", 6, "-c", 1, 2, "--record", record, "--label", "x")
    rows = rows_of(bench(server, *args))
    assert [row["max_concurrency"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["completed"], row["failed"]) == (6, 0)
        assert (row["total_input_tokens"], row["total_output_tokens"]) == (48, 54)
        assert 10 <= row["median_ttft_ms"] < 100
        assert 2 * 10 / 8 <= row["median_tpot_ms"] < 20
    results = json.loads(record.read_text())
    kept = [{key: value for key, value in row.items() if key != "run"} for row in results["serve"]["x"]]
    assert (results["kernels"], kept) == ([1], rows)
    assert {row["run"] for row in results["serve"]["x"]} == set(results["runs"])
    prompts = [tuple(request.prompt_ids) for request in engine.requests]
    assert len(set(prompts)) == len(prompts) == 2 * 6 + 1 + 2  # of both runs and their warm-ups, none twice


def test_bench_with_a_request_rate_sends_every_request_once(server, engine):
    args = ("--input-len", 4, "--output-len", 2, "--num-prompts", 20, "-c", 8, "--request-rate", 200, "--warmup", 0)
    (row,) = rows_of(bench(server, *args))
    assert row["completed"] == 20 == len(engine.requests)
    assert row["request_rate"] == 200


@pytest.mark.parametrize("broken", ["refuse", "fail"])
def test_bench_reports_failures_and_exits_with_1(server, engine, broken):
    if broken == "refuse":
        engine.refuse = True
    else:
        engine.fail_after = 2
    done = bench(server, "--input-len", 4, "--output-len", 4, "--num-prompts", 3, "--warmup", 0)
    assert done.returncode == 1
    assert "waits already" in done.stderr or "wait already" in done.stderr or "NaN in the logits" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])[0]["failed"] == 3


def test_bench_is_cut_when_its_time_is_over(server, engine):
    engine.gate.clear()
    args = ("--input-len", 4, "--output-len", 4, "--num-prompts", 3, "--warmup", 0, "--max-seconds", 0.5)
    done = bench(server, *args)
    engine.gate.set()
    assert done.returncode == 1
    assert "out of time" in done.stderr


def test_bench_says_how_streams_fare_before_prompts_come_and_beside_them(server, engine):
    engine.step_s = 0.01
    mixed = ("--mixed-streams", 2, "--mixed-input-len", 4, "--mixed-output-len", 20)
    times = ("--mixed-settle-seconds", 0.1, "--mixed-alone-seconds", 0.4)
    arriving = ("--input-len", 30, "--output-len", 2, "--num-prompts", 6, "--request-rate", 20)
    (row,) = rows_of(bench(server, *arriving, *mixed, *times))
    assert (row["input_len"], row["completed"], row["failed"]) == (30, 6, 0)
    background = row["background"]
    assert (background["streams"], background["failed"], background["output_len"]) == (2, 0, 20)
    for when in ("alone", "mixed"):
        assert 10 <= background[when]["median_itl_ms"] <= background[when]["max_itl_ms"]
        assert background[when]["events"] > 0
    assert 0.35 < background["alone"]["seconds"] < 1


def test_bench_refuses_answers_of_another_length(server):
    done = bench(server, "--input-len", 4, "--output-len", 100, "--num-prompts", 2, "--warmup", 0)  # of 64 at most
    assert done.returncode == 1
    assert "2 requests have other lengths than 4 in and 100 out" in done.stderr


def test_bench_saves_what_vllm_bench_serve_would(server, tmp_path):
    path = tmp_path / "result.json"
    args = ("--input-len", 4, "--output-len", 5, "--num-prompts", 3, "--save-result", path, "--save-detailed")
    rows_of(bench(server, *args))
    saved = json.loads(path.read_text())
    assert (saved["completed"], saved["output_lens"], saved["errors"]) == (3, [5, 5, 5], ["", "", ""])
    assert [len(gaps) for gaps in saved["itls"]] == [4, 4, 4]
