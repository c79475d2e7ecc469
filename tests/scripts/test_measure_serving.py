"""scripts/measure_serving.py: what it starts, what it asks for, and what it keeps."""

import json
import sys
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import measure_serving
import pytest
from measure_serving import Mixed, Row, parse, parse_mixed, parse_rows
from results_file import Results

SERVER = """
import http.server, pathlib, sys
steps = pathlib.Path(sys.argv[2])
steps.mkdir(parents=True, exist_ok=True)
(steps / "compiled").touch()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port():
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return server.server_port


def row(clients, **fields):
    keys = {"input_len": 16, "output_len": 128, "max_concurrency": clients, "request_rate": None}
    return keys | fields


def test_rows_have_the_requests_of_the_workload():
    assert parse_rows("1x16,64x1024,8x16x32") == [Row(1, 16, 128), Row(64, 1024, 128), Row(8, 16, 32)]
    assert parse_rows("") == []
    prompts = {text: parse_rows(text)[0].num_prompts for text in ("1x16", "1x1024", "8x16", "256x16")}
    assert prompts == {"1x16": 30, "1x1024": 20, "8x16": 32, "256x16": 1024}


@pytest.mark.parametrize("text", ["1", "0x16", "1x16x", "ax16", "1x16 "])
def test_a_row_that_is_none_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=f"row '{text}' is not"):
        parse_rows(text)


def test_the_mixed_case_is_streams_and_prompts_at_a_rate():
    assert parse_mixed("32x4096@2.5") == Mixed(32, 4096, 2.5)
    assert parse_mixed("none") is None
    with pytest.raises(ValueError, match="mixed case '32x4096@0' is neither"):
        parse_mixed("32x4096@0")


def test_flags_after_the_dashes_are_the_servers():
    args = parse(["--label", "x", "--rows", "1x16", "--", "--model", "m", "--max-model-len", "64"])
    assert args.rows == [Row(1, 16, 128)]
    assert [flag for flag in args.server if flag != "--"] == ["--model", "m", "--max-model-len", "64"]


@pytest.mark.parametrize(("flags", "kinds"), [((), {"cold_s", "warm_s"}), (("--skip-cold",), {"cold_s"})])
def test_a_start_is_warm_only_with_the_caches_of_one_before(tmp_path, monkeypatch, flags, kinds):
    script = tmp_path / "server.py"
    script.write_text(SERVER)

    def command(flags, port, steps):
        return [sys.executable, str(script), str(port), str(steps), *flags]

    monkeypatch.setattr(measure_serving, "server_command", command)
    port = free_port()
    args = parse(["--label", "x", "--port", str(port), "--log", str(tmp_path / "log"), *flags])
    results = Results(tmp_path / "gpu.json", "x", {})
    end_s = measure_serving.time.monotonic() + 30
    with ExitStack() as stack:
        measure_serving.start(stack, args, [], results, end_s)
        assert measure_serving.is_healthy(f"http://127.0.0.1:{port}")
    assert not measure_serving.is_healthy(f"http://127.0.0.1:{port}")
    start = json.loads((tmp_path / "gpu.json").read_text())["start"]["x"]
    assert {name for name in start if name.endswith("_s")} == kinds


def test_a_server_that_ends_is_told_with_its_log(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(SystemExit, match=r"exit code 3\); see .*log"):
        with measure_serving.running(command, free_port(), {}, tmp_path / "log", 20):
            pass


class Kept:
    """Results that are looked at."""

    def __init__(self):
        self.rows = []

    def row(self, section, row, key):
        self.rows.append((section, key(row)))


def test_rows_without_time_are_left_out_and_named(monkeypatch, capsys):
    clock = iter([0.0, 0.0, 50.0, 100.0])
    monkeypatch.setattr(measure_serving, "time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    good = row(1, failed=0, wrong_length=0, output_throughput=1, request_throughput=1, median_ttft_ms=1, p99_ttft_ms=1)
    good |= {"median_tpot_ms": 1, "total_output_events": 1, "total_output_tokens": 1, "client_cpu_share": 0.1}
    asked = []

    def measure(one, *rest):
        asked.append((one.clients, rest[-1]))
        return good | {"max_concurrency": one.clients}

    monkeypatch.setattr(measure_serving, "measure", measure)
    args = parse(["--label", "x", "--rows", "1x16,8x16,32x16", "--mixed", "none", "--time-limit-s", "60"])
    kept = Kept()
    assert measure_serving.load(args, "http://x", kept, next(clock) + 60) == 0
    assert asked == [(1, 60.0), (8, 10.0)]
    assert kept.rows == [("serve", (None, 16, 128, clients, None)) for clients in (1, 8)]
    assert "not measured, as 60 s were over: 32x16x128" in capsys.readouterr().out


def test_a_row_that_cannot_be_measured_does_not_keep_the_others_from_it(monkeypatch, capsys):
    def measure(*_):
        raise RuntimeError("a warm-up request failed: HTTP 503")

    monkeypatch.setattr(measure_serving, "measure", measure)
    kept = Kept()
    args = parse(["--label", "x", "--rows", "1x16,8x16", "--mixed", "2x4@1"])
    assert measure_serving.load(args, "http://x", kept, measure_serving.time.monotonic() + 60) == 1
    assert not kept.rows
    told = capsys.readouterr().err
    assert all(f"{name}: a warm-up request failed: HTTP 503" in told for name in ("1x16x128", "8x16x128", "2x4x1.0"))
