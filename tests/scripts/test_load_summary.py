"""scripts/load_summary.py: what a run of requests amounts to."""

import dataclasses
import json

import pytest
from bench_serve import is_sound, main, problems, workload_key
from load_client import Measured, Part, Workload, default_processes
from load_summary import detail, mixed_summary, percentile, summary
from results_file import merge_rows

WORKLOAD = Workload(
    base_url="http://127.0.0.1:1",
    model=None,
    input_len=8,
    output_len=3,
    num_prompts=2,
    warmup=0,
    concurrency=2,
    request_rate=None,
    vocab_size=100,
    seed=0,
    max_seconds=1.0,
    extra_body={},
)


def request(sent_s, *events_s, tokens=3, **fields):
    return Measured(sent_s, list(events_s), prompt_tokens=8, completion_tokens=tokens, **fields)


def summed(*measured, **changes):
    parts = [Part([one], cpu_s=0.1, wall_s=2.0) for one in measured]
    return summary(dataclasses.replace(WORKLOAD, **changes), parts)


def test_times_are_those_that_the_client_saw():
    row = summed(request(10.0, 10.1, 10.2, 10.4), request(10.0, 10.3, 10.4, 10.5))
    assert row["duration"] == pytest.approx(0.5)
    assert (row["completed"], row["failed"], row["total_input_tokens"], row["total_output_tokens"]) == (2, 0, 16, 6)
    assert row["output_throughput"] == pytest.approx(12.0)
    assert row["total_token_throughput"] == pytest.approx(44.0)
    assert row["median_ttft_ms"] == pytest.approx(200.0)
    assert row["median_tpot_ms"] == pytest.approx((150 + 100) / 2)
    assert (row["median_itl_ms"], row["max_itl_ms"]) == (pytest.approx(100.0), pytest.approx(200.0))
    assert row["p99_e2el_ms"] == pytest.approx(499.0)
    assert row["max_concurrent_requests"] == 2
    assert row["client_cpu_us_per_event"] == pytest.approx(0.2e6 / 6, abs=0.01)
    assert is_sound(row) and not problems(row)


def test_keys_are_those_of_vllm_bench_serve():
    row = summed(request(0.0, 0.1, 0.2, 0.3))
    kinds = [
        f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "std", "p99")
    ]
    names = ["duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"]
    names += ["output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"]
    assert set(row) >= {*kinds, *names, "date", "num_prompts", "request_rate", "max_concurrency"}
    lists = detail([Part([request(0.0, 0.1, 0.2, 0.3)], 0.0, 1.0)])
    assert set(lists) == {"input_lens", "output_lens", "start_times", "ttfts", "itls", "errors"}
    assert lists["itls"] == [[pytest.approx(0.1), pytest.approx(0.1)]]


def test_requests_that_failed_were_cut_or_never_sent_all_count_as_failed():
    row = summed(request(0.0, 0.1, error="HTTP 500"), request(0.0, 0.1, cut=True), num_prompts=4)
    assert (row["completed"], row["failed"]) == (0, 4)
    assert row["error_counts"] == {"HTTP 500": 1, "out of time": 1, "never sent": 2}
    assert row["median_ttft_ms"] is None and row["output_throughput"] == 0.0
    assert not is_sound(row)


@pytest.mark.parametrize("wrong", [{"tokens": 2}, {"prompt": 9}])
def test_an_answer_of_another_length_is_a_problem(wrong):
    one = request(0.0, 0.1, 0.2, 0.3, tokens=wrong.get("tokens", 3))
    one.prompt_tokens = wrong.get("prompt", 8)
    row = summed(one, request(0.0, 0.1, 0.2, 0.3))
    assert row["wrong_length"] == 1 and not is_sound(row)
    assert any("other lengths than 8 in and 3 out" in problem for problem in problems(row))


def test_events_are_counted_where_the_server_says_no_usage():
    row = summed(Measured(0.0, [0.1, 0.2, 0.3]), Measured(0.0, [0.1, 0.2]))
    assert (row["total_output_tokens"], row["wrong_length"]) == (5, 1)


def test_events_that_carry_several_tokens_are_told_but_no_failure():
    row = summed(request(0.0, 0.1, 0.3), request(0.0, 0.1, 0.2, 0.3))
    assert is_sound(row)
    assert any("5 events for 6 tokens" in problem for problem in problems(row))


def test_percentiles_are_interpolated_as_numpy_does():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == pytest.approx(2.5)
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == pytest.approx(3.97)
    assert percentile([7.0], 99) == 7.0


def test_streams_are_looked_at_before_prompts_come_and_while_they_do():
    stream = Measured(0.0, [1.0, 2.0, 3.0, 4.0, 5.5, 7.0, 8.0, 9.0], cut=True)
    background = dataclasses.replace(WORKLOAD, num_prompts=None, concurrency=1)
    arriving = dataclasses.replace(WORKLOAD, num_prompts=1, request_rate=1.0)
    parts = [Part([stream], 0.0, 1.0)], [Part([request(4.5, 5.0, 6.0, 7.5)], 0.0, 1.0)]
    row = mixed_summary((background, parts[0]), (arriving, parts[1]), settle_s=1.5)
    alone, mixed = row["background"]["alone"], row["background"]["mixed"]
    assert (alone["events"], alone["median_itl_ms"], alone["seconds"]) == (3, 1000.0, 3.0)  # events at 2, 3 and 4
    assert (mixed["events"], mixed["median_itl_ms"], mixed["max_itl_ms"]) == (2, 1500.0, 1500.0)  # at 5.5 and 7
    assert row["completed"] == 1 and is_sound(row)  # a stream that is cut at the end has not failed


def test_a_row_replaces_that_of_the_same_workload_alone():
    old = [summed(request(0.0, 0.1, 0.2, 0.3)) | {"max_concurrency": clients, "mark": "old"} for clients in (1, 8)]
    merged = merge_rows(old, [old[1] | {"mark": "new"}, old[1] | {"request_rate": 2.0, "mark": "open"}], workload_key)
    assert [(row["max_concurrency"], row["mark"]) for row in merged] == [(1, "old"), (8, "new"), (8, "open")]


def test_rows_of_a_server_that_was_there_before_are_recorded_without_a_commit(tmp_path, monkeypatch):
    row = summed(request(0.0, 0.1, 0.2, 0.3), request(0.0, 0.1, 0.2, 0.3))
    monkeypatch.setattr("bench_serve.run", lambda *_, **__: row)
    path = tmp_path / "gpu.json"
    assert main(["--base-url", "http://127.0.0.1:1", "--record", str(path), "--label", "x"]) == 0
    content = json.loads(path.read_text())
    (kept,) = content["serve"]["x"]
    run = content["runs"][kept["run"]]
    assert kept["output_throughput"] == row["output_throughput"]
    assert (run["server"], run["commit"]) == ("http://127.0.0.1:1", None)


def test_a_client_process_has_at_most_32_streams_where_there_are_cores(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert [default_processes(streams) for streams in (1, 32, 33, 256, 1024)] == [1, 1, 2, 8, 12]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert default_processes(256) == 1
