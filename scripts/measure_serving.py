"""Starts a server here, times it to readiness, loads it, and keeps the figures in scripts/results/<gpu>.json.

    python scripts/measure_serving.py --label qwen3-4b-dummy --workload 16/128:1,8,64 -- \
        --model FOLDER --load-format dummy --max-model-len 1024

What follows the two dashes goes to `jaxinfer serve`. The first start has an empty cache of compiled steps (cold), the
second finds them (warm); the second one is loaded. The workload is that of `bench_serve.py`: input / output tokens and
the numbers of clients.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
START_TIMEOUT_S = 540


@contextmanager
def running(server: Sequence[str], port: int, cache: str, log: Path) -> Iterator[float]:
    """A server for the length of the block; gives the seconds from its start until /health answers."""
    command = [sys.executable, "-m", "jaxinfer.cli", "serve", *server]
    command += ["--port", str(port), "--compile-cache-dir", cache]
    start_s = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        while not is_healthy(port):
            if process.poll() is not None or time.perf_counter() - start_s > START_TIMEOUT_S:
                raise SystemExit(f"the server did not start (exit code {process.returncode}); see {log}")
            time.sleep(0.05)
        yield time.perf_counter() - start_s
    finally:
        process.terminate()
        process.wait(60)


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def device_name() -> str:
    """A name for the results file: h200, or cpu."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True, help="what is measured")
    parser.add_argument("--workload", nargs="+", default=["16/128:1,8,64"], help="INPUT/OUTPUT:CLIENTS,CLIENTS,...")
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--results", type=Path, help="file to merge into (default: scripts/results/<device>.json)")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "jaxinfer-serve.log")
    parser.add_argument("server", nargs=argparse.REMAINDER, help="flags of jaxinfer serve, after --")
    args = parser.parse_args()
    server = [flag for flag in args.server if flag != "--"]
    results = args.results or HERE / "results" / f"{device_name()}.json"
    with tempfile.TemporaryDirectory() as cache:
        with running(server, args.port, cache, args.log) as cold_s:
            print(f"ready after {cold_s:.1f} s, cold", flush=True)
        with running(server, args.port, cache, args.log) as warm_s:
            print(f"ready after {warm_s:.1f} s, warm", flush=True)
            for workload in args.workload:
                load(workload, args.port, results, args.label)
    content = json.loads(results.read_text()) if results.exists() else {}
    content.setdefault("start", {})[args.label] = {"cold_s": round(cold_s, 1), "warm_s": round(warm_s, 1)}
    results.write_text(json.dumps(content, indent=1) + "\n")


def load(workload: str, port: int, results: Path, label: str) -> None:
    lengths, clients = workload.split(":")
    input_len, output_len = lengths.split("/")
    command = [sys.executable, str(HERE / "bench_serve.py"), "--base-url", f"http://127.0.0.1:{port}"]
    command += ["--input-len", input_len, "--output-len", output_len, "-c", *clients.split(",")]
    subprocess.run([*command, "--record", str(results), "--label", label], check=True)


if __name__ == "__main__":
    main()
