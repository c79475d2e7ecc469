"""scripts/bench_cache.py: what it measures of a server whose tiers are known, and what it refuses to call a figure."""

import collections
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import bench_cache
import cache_cases
import pinned_bandwidth
import pytest
from bench_cache import main, parse, workload_key
from cache_cases import Copy

PAGE = 16
QUICK = ["--vocab-size", "1000", "--repeats", "3", "--restore-repeats", "2"]
DECODE = (
    "--streams 2 --stream-len 40 --window-seconds 0.4 --settle-seconds 0.05 --rate 20 --decode-len 64 --cases decode"
).split()


class Tiers:
    """Prompts in the order of their last use, on the device and on the host; sizes in pages. None: there is none."""

    def __init__(self, device_pages=40, host_pages=1000, *, forgets=0):
        self.sizes = [device_pages, host_pages or 0]
        self.caching = device_pages is not None
        self.has_host = host_pages is not None
        self.forgets = forgets  # tokens of every prompt that it has
        self.held = collections.OrderedDict(), collections.OrderedDict()
        self.counts = collections.Counter()
        self.lock = threading.Lock()

    def ask(self, prompt):
        """How many tokens were cached."""
        with self.lock:
            device, host = self.held
            key = tuple(prompt)
            found = key in device or key in host
            if key not in device and key in host:
                self.counts["kv_restored_pages_total"] += host.pop(key)
            device[key] = device.pop(key, -(-len(prompt) // PAGE))
            while sum(device.values()) > self.sizes[0]:
                old, num_pages = device.popitem(last=False)
                host[old] = num_pages
                self.counts["kv_offloaded_pages_total"] += num_pages
            while sum(host.values()) > self.sizes[1]:
                host.popitem(last=False)
            return (len(prompt) - 1 - self.forgets) * found

    def metrics(self):
        with self.lock:
            values = {"prefix_cache_pages": sum(self.held[0].values()), "num_requests_running": 0}
            values["generation_tokens_total"] = self.counts["generated"]
            names = ("kv_restored_pages_total", "kv_offloaded_pages_total")
            if self.has_host:
                values |= {name: self.counts[name] for name in names} | {"kv_host_pages": self.sizes[1]}
        return "# HELP x y\n" + "".join(
            f'jaxinfer:{name}{{engine="0"}} {float(value)}\n' for name, value in values.items()
        )


@pytest.fixture
def serve():
    """Serves Tiers over HTTP: an event a token, a millisecond apart."""
    servers = []

    def make(tiers):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self._send("text/plain", [tiers.metrics().encode()])

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert body["stream"] and body["ignore_eos"] and max(body["prompt"]) < 1000
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
                num_cached = tiers.ask(body["prompt"]) if len(body["prompt"]) > cache_cases.STREAM_INPUT else 0
                if tiers.caching:
                    usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
                self._send("text/event-stream", self._events(body["max_tokens"], usage))

            def _events(self, num_tokens, usage):
                for _ in range(num_tokens):
                    time.sleep(0.001)
                    with tiers.lock:
                        tiers.counts["generated"] += 1
                    yield b'data: {"choices": [{"text": "a"}], "usage": null}\n\n'
                yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

            def _send(self, kind, parts):
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                try:
                    for part in (*parts, b""):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                except OSError:
                    self.close_connection = True  # the client has gone

        server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 128})(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def bench(capsys, *flags):
    """Exit status, rows, and what is said on standard error."""
    status = main([*QUICK, *flags])
    told = capsys.readouterr()
    return status, json.loads(told.out.splitlines()[-1]), told.err


def test_cached_prompts_are_told_with_the_first_time_and_the_times_after(serve, capsys, tmp_path):
    url, kept = serve(Tiers()), tmp_path / "gpu.json"
    flags = ["--base-url", url, "--cases", "cached", "--lengths", "20,33", "--label", "x", "--results", str(kept)]
    for _ in range(2):
        status, rows, told = bench(capsys, *flags, "--save-result", str(tmp_path / "rows.json"))
        assert (status, told) == (0, "")
        assert [(row["case"], row["prompt_tokens"], row["cached_tokens"]) for row in rows] == [
            ("cached", 20, 19),
            ("cached", 33, 32),
        ]
        for row in rows:
            assert 1 <= row["min_ttft_ms"] <= row["median_ttft_ms"] <= row["p99_ttft_ms"] <= row["max_ttft_ms"]
            assert row["cold_ttft_ms"] >= 1 and row["repeats"] == 3
        assert json.loads((tmp_path / "rows.json").read_text()) == rows
    content = json.loads(kept.read_text())
    assert [row["prompt_tokens"] for row in content["cache"]["x"]] == [20, 33]
    assert [row["seed"] for row in content["cache"]["x"]] == [row["seed"] for row in rows]


def test_a_prompt_that_is_not_all_cached_or_a_server_that_does_not_say_is_no_figure(serve, capsys):
    flags = ["--cases", "cached", "--lengths", "20"]
    status, rows, told = bench(capsys, "--base-url", serve(Tiers(forgets=1)), *flags)
    assert (status, rows) == (1, [])
    assert "of a prompt of 20 tokens that was sent before, 18 were cached, not all but the last" in told
    tiers = Tiers()
    tiers.caching = False
    status, rows, told = bench(capsys, "--base-url", serve(tiers), *flags)
    assert (status, rows) == (1, []) and "prefix caching is off there" in told


def test_a_restore_is_told_with_its_bytes_and_what_it_may_take(serve, capsys):
    flags = ["--cases", "restore", "--restore-len", "100", "--page-bytes", "1000000", "--bandwidth", "50"]
    status, rows, told = bench(capsys, "--base-url", serve(Tiers()), *flags)
    assert (status, told) == (0, "")
    (row,) = rows
    need = 7  # pages of 100 tokens
    assert (row["restored_pages"], row["bytes"], row["cached_tokens"]) == (need, need * 1_000_000, 99)
    assert (row["pool_pages"], row["fillers"]) == (35, 6)  # 5 prompts of 7 pages fit into 40
    assert row["allowed_ms"] == pytest.approx(1.4 * need * 1e6 / 50e9 * 1e3, abs=1e-3)
    assert row["within"] == (row["restore_ms"] <= row["allowed_ms"])
    assert row["restore_ms"] == pytest.approx(row["median_ttft_ms"] - row["median_hit_ttft_ms"], abs=2e-3)
    assert row["median_cold_ttft_ms"] >= 1


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (Tiers(host_pages=None), "the server has no host tier: start it with --kv-host-gib"),
        (Tiers(host_pages=20), "the host tier has 20 pages, and this case fills 49: more --kv-host-gib"),
        (Tiers(forgets=20), "7 of 7 pages were restored and 79 of 100 tokens cached"),
    ],
)
def test_a_restore_that_cannot_be_measured_is_told(serve, capsys, tiers, message):
    status, rows, told = bench(capsys, "--base-url", serve(tiers), "--cases", "restore", "--restore-len", "100")
    assert (status, rows) == (1, []) and message in told


def test_a_restore_without_bytes_or_bandwidth_is_held_against_nothing():
    assert Copy(None, 50.0).allowed_ms(3) is None and Copy(1000, None).allowed_ms(3) is None
    assert Copy(2_359_296, 50.0).allowed_ms(1024) == pytest.approx(67.646, abs=1e-3)


def test_streams_are_counted_alone_and_beside_both_kinds_of_requests(serve, capsys):
    status, rows, told = bench(capsys, "--base-url", serve(Tiers()), *DECODE)
    assert (status, told) == (0, "")
    (row,) = rows
    assert row["streams"] == 2
    for kind in ("quiet", "device", "host", "quiet_after"):
        assert row[kind]["tokens_per_s"] > 0
    assert (row["device"]["requests"], row["host"]["requests"]) == (8, 8)
    assert row["device"]["restored_pages"] == 0 and row["host"]["restored_pages"] == 8 * 4
    assert row["device"]["cached_share"] == row["host"]["cached_share"] == round(63 / 64, 4)
    quiet = (row["quiet"]["tokens_per_s"] + row["quiet_after"]["tokens_per_s"]) / 2
    assert row["host_ratio"] == pytest.approx(row["host"]["tokens_per_s"] / quiet, abs=1e-3)
    ratio = row["host"]["tokens_per_s"] / row["device"]["tokens_per_s"]
    assert row["host_to_device_ratio"] == pytest.approx(ratio, abs=1e-3)


def test_without_a_host_tier_the_streams_are_measured_beside_hits_alone(serve, capsys):
    status, rows, told = bench(capsys, "--base-url", serve(Tiers(host_pages=None)), *DECODE)
    assert (status, told) == (0, "")
    (row,) = rows
    assert "device_ratio" in row
    assert "host" not in row and "host_ratio" not in row


def test_requests_that_do_not_find_what_their_window_is_about_are_no_figure(serve, capsys):
    status, rows, told = bench(capsys, "--base-url", serve(Tiers(device_pages=4)), *DECODE)
    assert (status, rows) == (1, [])
    assert "of the device window's pages came from the host: more --num-pages" in told
    status, rows, told = bench(capsys, "--base-url", serve(Tiers(device_pages=4, host_pages=None)), *DECODE)
    assert (status, rows) == (1, [])
    assert "decode: the requests of the device window had 0% cached, not 90%" in told


def test_agents_run_with_and_without_the_cache(serve, capsys):
    urls = serve(Tiers(1000)), serve(Tiers(1000))
    agent = "--agents 2 --turns 2 --system-len 20 --task-len 5 --answer-len 3 --tool-len 5 5"
    flags = ["--cases", "agent", "--agent-flags", agent, "--base-url", urls[0], "--compare", urls[1]]
    status, (row,), _ = bench(capsys, *flags)
    assert status == 0
    assert (row["agents"], row["num_turns"], len(row["turns"])) == (2, 2, 2)
    assert row["prompt_tokens"] == row["without_cache"]["prompt_tokens"] == 2 * (25 + 33)
    assert row["speedup"] == pytest.approx(row["without_cache"]["total_s"] / row["total_s"], abs=1e-3)
    assert workload_key(row) == ("agent", 2, 2)


def test_no_two_prompts_are_alike_and_a_seed_gives_them_again():
    def some(seed):
        client = cache_cases.Client("http://x", model=None, vocab_size=1000, page_size=16, seed=seed)
        return [tuple(json.loads(client.payload(30))["prompt"]) for _ in range(5)]

    assert len({*some(1), *some(2)}) == 10 and some(1) == some(1)
    assert parse([]).seed != parse([]).seed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cases", "cached,warm"], "case 'warm' is not known; known: cached, restore, decode, agent"),
        (["--lengths", "1024,1"], "lengths '1024,1' are not numbers from 2 on"),
        (["--rate", "0"], "--rate is 0.0; it must be above 0"),
        (["--base-url", "http://x", "--", "--model", "m"], "the flags after -- are for one that is started"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(flags)
    assert message in capsys.readouterr().err


def test_the_second_server_of_the_agents_has_neither_cache_nor_tiers():
    assert bench_cache._without_tiers(["--model", "m"]) == []
    assert bench_cache._without_tiers(["--kv-host-gib", "8"]) == ["--kv-host-gib", "0"]


def test_a_bandwidth_that_cannot_be_measured_ends_the_run_with_the_reason(monkeypatch, tmp_path, capsys):
    script = tmp_path / "bandwidth.py"
    script.write_text("import sys; sys.exit('no libcudart')")
    monkeypatch.setattr(bench_cache, "BANDWIDTH_SCRIPT", script)
    with pytest.raises(SystemExit, match="the bandwidth cannot be measured: no libcudart"):
        main(["--measure-bandwidth", "--base-url", "http://x"])
    script.write_text("print('{\"to_device_gb_s\": 55.5}')")
    assert bench_cache.bandwidth(parse(["--measure-bandwidth"])) == 55.5
    assert bench_cache.bandwidth(parse(["--bandwidth", "40"])) == 40
    monkeypatch.setattr(pinned_bandwidth, "candidates", lambda: iter(()))
    assert pinned_bandwidth.main() == 1 and "no libcudart is installed" in capsys.readouterr().err


@pytest.mark.long
def test_a_server_of_a_tiny_model_is_started_measured_and_ended(golden, tmp_path):
    flags = (
        "--vocab-size 128 --page-size 8 --lengths 40,200 --repeats 3 --restore-len 64 --streams 2 --stream-len 100 "
        "--window-seconds 1 --settle-seconds 0.2 --rate 5 --decode-len 64"
    )
    agent = "--agents 2 --turns 2 --system-len 30 --task-len 10 --answer-len 6 --tool-len 5 20"
    server = "--page-size 8 --num-pages 200 --max-num-seqs 4 --max-num-batched-tokens 64"
    command = [sys.executable, bench_cache.__file__, *flags.split(), "--agent-flags", agent, "--log", tmp_path / "log"]
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
        command += ["--port", str(free.server_port)]
    command += ["--", "--model", golden("llama").folder, *server.split()]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=200)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["case"] for row in rows] == ["cached", "cached", "decode", "agent"], done.stderr
    assert done.returncode == 1 and "restore: the server has no host tier" in done.stderr
    assert rows[2]["device"]["cached_share"] > 0.9
    assert rows[3]["cached_tokens"] > 0 and rows[3]["without_cache"]["cached_tokens"] is None
