"""Starts a server here, times it to readiness, loads it, and keeps the figures in scripts/results/<gpu>.json.

    python scripts/measure_serving.py --label qwen3-4b-dummy --rows 1x16,64x1024 -- \
        --model FOLDER --load-format dummy --max-model-len 8192

What follows the two dashes goes to `jaxinfer serve`. The first start has an empty cache of compiled steps (cold), the
second finds them (warm); the second one is loaded. A row is CLIENTSxINPUT or CLIENTSxINPUTxOUTPUT: closed loop, 30
requests of one client (20 from 1024 tokens on), 4 per client above. The mixed case is streams that decode while long
prompts arrive. Every figure is on disk as soon as it is there, and replaces that of the same workload; results_file.py
says what is kept beside it.

Another server is measured with --base-url, which starts none.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench_serve import HEADER, is_sound, run, run_mixed, section, show, workload_key
from load_client import Workload
from results_file import Results, default_path, describe

ROWS = "1x16,8x16,32x16,64x16,128x16,256x16,1x1024,8x1024,32x1024,64x1024"
MIXED = "32x4096@2"
STOP_TIMEOUT_S = 60
CACHES = {"TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
"""Caches besides that of compiled steps: environment variable -> subfolder. Cold means that these are empty too."""


class Row(NamedTuple):
    """One closed-loop measurement. Lengths in tokens."""

    clients: int
    input_len: int
    output_len: int

    @property
    def num_prompts(self) -> int:
        if self.clients > 1:
            return 4 * self.clients
        return 20 if self.input_len >= 1024 else 30


class Mixed(NamedTuple):
    """Streams that decode while prompts of `input_len` tokens arrive at `rate` per second."""

    streams: int
    input_len: int
    rate: float


def parse_rows(text: str) -> list[Row]:
    """CLIENTSxINPUT or CLIENTSxINPUTxOUTPUT, between commas; an output is 128 tokens. ValueError for anything else."""
    rows = []
    for part in filter(None, text.split(",")):
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(x[1-9]\d*)?", part):
            raise ValueError(f"row {part!r} is not CLIENTSxINPUT or CLIENTSxINPUTxOUTPUT")
        clients, input_len, output_len = [*map(int, part.split("x")), 128][:3]
        rows.append(Row(clients, input_len, output_len))
    return rows


def parse_mixed(text: str) -> Mixed | None:
    """STREAMSxINPUT@RATE, or "none". ValueError for anything else."""
    if text == "none":
        return None
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@(\d+(?:\.\d+)?)", text)
    if found is None or float(found[3]) == 0:
        raise ValueError(f"mixed case {text!r} is neither STREAMSxINPUT@RATE nor none")
    return Mixed(int(found[1]), int(found[2]), float(found[3]))


@contextmanager
def running(
    server: Sequence[str], port: int, environment: dict[str, str], log: Path, limit_s: float
) -> Iterator[float]:
    """A server for the length of the block; gives the seconds from its start until /health answers."""
    start_s = time.perf_counter()
    with log.open("ab") as out:
        process = subprocess.Popen(server, stdout=out, stderr=out, env=os.environ | environment)
    try:
        while not is_healthy(f"http://127.0.0.1:{port}"):
            if process.poll() is not None or time.perf_counter() - start_s > limit_s:
                raise SystemExit(f"the server did not start (exit code {process.returncode}); see {log}")
            time.sleep(0.05)
        yield time.perf_counter() - start_s
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--label", required=True, help="what is measured: the model, and how it is loaded")
    add("--rows", default=ROWS, help="CLIENTSxINPUT[xOUTPUT],... in this order, or empty (default: %(default)s)")
    add("--mixed", default=MIXED, help="STREAMSxINPUT@REQUESTS_PER_SECOND or none (default: %(default)s)")
    add("--mixed-prompts", type=int, default=20, help="prompts that arrive in the mixed case (default: %(default)s)")
    add("--skip-cold", action="store_true", help="start once only, with the caches that --cache-dir has")
    add("--cache-dir", type=Path, help="folder of caches for the starts, emptied before a cold one (default: a "
        "temporary one)")  # fmt: skip
    add("--port", type=int, default=8017, help="that the server is told to use (default: %(default)s)")
    add("--base-url", help="measure the server that runs here, and start none")
    add("--model-name", help="name that requests ask for; without it they name none")
    add("--vocab-size", type=int, default=32000, help="prompts are of ids below this (default: %(default)s)")
    add("--client-processes", type=int, help="default: one per 32 streams, at most the cores less 4")
    add("--time-limit-s", type=float, default=3600.0, help="seconds for everything; rows for which no time is left are "
        "named and left out (default: %(default)s)")  # fmt: skip
    add("--results", type=Path, help="file to merge into (default: scripts/results/<device>.json)")
    add("--log", type=Path, default=Path(tempfile.gettempdir()) / "jaxinfer-serve.log", help="what the server prints "
        "(default: %(default)s)")  # fmt: skip
    add("server", nargs=argparse.REMAINDER, help="flags of jaxinfer serve, after --")
    args = parser.parse_args(argv)
    try:
        args.rows, args.mixed = parse_rows(args.rows), parse_mixed(args.mixed)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
    end_s = time.monotonic() + args.time_limit_s
    flags = [flag for flag in args.server if flag != "--"]
    results = Results(args.results or default_path(), args.label, describe(args.base_url))
    with ExitStack() as stack:
        url = args.base_url
        if url is None:
            start(stack, args, flags, results, end_s)
            url = f"http://127.0.0.1:{args.port}"
        return load(args, url, results, end_s)


def start(stack: ExitStack, args: argparse.Namespace, flags: Sequence[str], results: Results, end_s: float) -> None:
    """Starts the server, cold and warm or once, and leaves the last one running until the stack ends."""
    cache = args.cache_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    steps = cache / "steps"
    command = server_command(flags, args.port, steps)
    environment = {name: str(cache / folder) for name, folder in CACHES.items()}

    def server() -> Any:
        return running(command, args.port, environment, args.log, end_s - time.monotonic())

    if not args.skip_cold:
        for folder in ("steps", *CACHES.values()):
            shutil.rmtree(cache / folder, ignore_errors=True)
        with server() as seconds:
            results.start(cold_s=seconds)
            print(f"ready after {seconds:.1f} s, cold", flush=True)
    kind = "warm" if steps.is_dir() and any(steps.iterdir()) else "cold"
    seconds = stack.enter_context(server())
    results.start(**{f"{kind}_s": seconds})
    print(f"ready after {seconds:.1f} s, {kind}", flush=True)


def server_command(flags: Sequence[str], port: int, steps: Path) -> list[str]:
    """Of `jaxinfer serve`. steps: folder of compiled steps."""
    own = ["--port", str(port), "--compile-cache-dir", str(steps)]
    return [sys.executable, "-m", "jaxinfer.cli", "serve", *flags, *own]


def load(args: argparse.Namespace, url: str, results: Results, end_s: float) -> int:
    """Measures the rows and the mixed case; returns the exit status."""
    planned: list[Row | Mixed] = [*args.rows, *([args.mixed] if args.mixed else [])]
    sound, missing = True, []
    print(HEADER)
    for one in planned:
        left_s = end_s - time.monotonic()
        try:
            row = measure(one, args, url, left_s) if left_s > 1 else None
        except RuntimeError as error:  # the rows after it may still be measured
            print(f"      {'x'.join(map(str, one))}: {error}", file=sys.stderr, flush=True)
            sound = False
            continue
        if row is None or "out of time" in row.get("error_counts", {}) or "never sent" in row.get("error_counts", {}):
            missing.append(one)
            continue
        show(row)
        if is_sound(row):
            results.row(section(row), row, workload_key)
        sound &= is_sound(row)
    if missing:
        names = ", ".join("x".join(map(str, one)) for one in missing)
        print(f"not measured, as {args.time_limit_s:.0f} s were over: {names}", flush=True)
    return 0 if sound else 1


def measure(one: Row | Mixed, args: argparse.Namespace, url: str, left_s: float) -> dict[str, Any]:
    """One row of results. RuntimeError where a client process failed."""
    row = one if isinstance(one, Row) else Row(one.streams, one.input_len, 16)
    workload = Workload(
        base_url=url,
        model=args.model_name,
        input_len=row.input_len,
        output_len=row.output_len,
        num_prompts=row.num_prompts,
        warmup=row.clients,
        concurrency=row.clients,
        request_rate=None,
        vocab_size=args.vocab_size,
        seed=0,
        max_seconds=left_s,
        extra_body={},
    )
    if isinstance(one, Row):
        return run(workload, args.client_processes)
    streams = dataclasses.replace(workload, input_len=16, output_len=512, num_prompts=None, seed=1)
    arriving = dataclasses.replace(
        workload, concurrency=None, request_rate=one.rate, num_prompts=args.mixed_prompts, warmup=1, start_delay_s=6.0
    )
    return run_mixed(streams, arriving, args.client_processes, settle_s=2.0)


if __name__ == "__main__":
    sys.exit(main())
