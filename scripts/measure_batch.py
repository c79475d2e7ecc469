"""Runs a batch job and then the same rows through the server, and keeps both in scripts/results/<gpu>.json.

    python scripts/measure_batch.py --label qwen3-4b-dummy --rows 20000 --time-limit-s 3600 -- \
        --model FOLDER --load-format dummy --max-model-len 4096

What follows the two dashes goes to `jaxinfer batch` and `jaxinfer serve` alike. The rows are those of
make_batch_rows.py: random token ids, lengths spread by logarithm. The job is timed from the start of its first step to
the end of its last one, and so is what share of that the GPU was busy: of the time by nvidia-smi's samples, in which it
counts any kernel, and by the engine's own: the time that a step was in flight on the device and not yet looked for
cannot be told apart, so `waited_share`, the time in which the host waited for the device, is a lower bound. The server
has --clients connections, each of which sends its next row when the last one is answered.

--only job or --only server does one of them, so that each fits into a limit of its own. A run that is cut by the time
limit is recorded as far as it came, with "cut": true. Where measure_vllm_batch.py has been through the same rows, what
the two make of them is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_serve import run_together
from load_client import Workload, default_processes
from load_summary import summary
from make_batch_rows import make_rows
from measure_serving import running, server_command
from results_file import Results, default_path, describe, read_json

SECTION = "batch"
SAMPLE_MS = 100
"""Between two samples of the GPU's use."""
TELL_S = 1.0
"""How often the job's process says where it stands: what is left of one that is cut."""
END_S = 30.0
"""What the job's process gets to end once it is asked to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenRows(Workload):
    """Requests that are the rows of a file, in its order."""

    path: str

    def payload(self, number: int, *, short: bool = False) -> bytes:
        body = json.loads(_lines(self.path)[abs(number) % self.num_prompts])["body"]  # pyright: ignore
        if short:
            body |= {"prompt": body["prompt"][:16], "max_tokens": 4}
        return json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()


@functools.cache
def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


class GpuUse:
    """Samples of the use of the first GPU that CUDA_VISIBLE_DEVICES leaves, while it is a context."""

    def __enter__(self) -> GpuUse:
        self._samples: list[tuple[float, float]] = []  # monotonic seconds, share
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
        query = ["nvidia-smi", "-i", first, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        try:
            self._process = subprocess.Popen([*query, f"--loop-ms={SAMPLE_MS}"], stdout=subprocess.PIPE, text=True)
        except OSError:
            self._process = None
            return self
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdecimal():
                self._samples.append((time.monotonic(), int(line) / 100))

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._reader.join()
            self._process.communicate()

    def share(self, start_s: float, end_s: float) -> float | None:
        """Mean over a time by the monotonic clock; None without samples in it."""
        inside = [share for at_s, share in self._samples if start_s <= at_s <= end_s]
        return round(statistics.fmean(inside), 4) if inside else None


@dataclasses.dataclass(slots=True)
class Steps:
    """What the engine of a job did. Times in seconds by the monotonic clock."""

    num_steps: int = 0
    output_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    waited_s: float = 0.0  # for results

    def watch(self, engine: Any) -> Any:
        """The engine, whose steps are counted from now on."""
        step, runner = engine.step, engine._runner
        collect = runner.collect

        def timed_step() -> Any:
            self.first_s = self.first_s or time.monotonic()
            events = step()
            self.last_s = time.monotonic()
            self.num_steps += 1
            self.output_tokens += sum(len(event.token_ids) for event in events)
            return events

        def timed_collect(*args: Any) -> Any:
            start_s = time.monotonic()
            try:
                return collect(*args)
            finally:
                self.waited_s += time.monotonic() - start_s

        engine.step, runner.collect = timed_step, timed_collect
        return engine

    def figures(self, use: GpuUse) -> dict[str, Any]:
        """So far."""
        duration_s = max(self.last_s - self.first_s, 1e-9)
        return {
            "duration": round(duration_s, 3),
            "num_steps": self.num_steps,
            "total_output_tokens": self.output_tokens,
            "output_throughput": round(self.output_tokens / duration_s, 3),
            "waited_share": round(self.waited_s / duration_s, 4),
            "gpu_busy_share": use.share(self.first_s, self.last_s),
        }


def job_process(argv: Sequence[str]) -> int:
    """The job, in a process of its own: flags of `jaxinfer batch`, after the file that takes the figures."""
    from jaxinfer import cli, offline

    told, steps, build = Path(argv[0]), Steps(), offline.build_engine
    start_s = time.monotonic()

    def build_and_watch(*args: Any, **kwargs: Any) -> Any:
        return steps.watch(build(*args, **kwargs))

    offline.build_engine = build_and_watch  # pyright: ignore[reportAttributeAccessIssue]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def tell(use: GpuUse, **more: Any) -> None:
        figures = steps.figures(use) | {"ready_s": round(max(steps.first_s - start_s, 0.0), 1)} | more
        partial = told.with_suffix(".tmp")
        partial.write_text(json.dumps(figures))
        os.replace(partial, told)

    ended = threading.Event()
    with GpuUse() as use:

        def keep_telling() -> None:
            while not ended.wait(TELL_S):
                tell(use, cut=True)

        teller = threading.Thread(target=keep_telling, daemon=True)
        teller.start()
        status = cli.main(["batch", *argv[1:]])
        ended.set()
        teller.join()
        tell(use)
    return status


def measure_job(args: argparse.Namespace, rows: Path, folder: Path, left_s: float) -> dict[str, Any] | None:
    """The figures of a job over the rows; None if it did not come to its first step."""
    told = folder / "figures.json"
    paths = ["--input", str(rows), "--output", str(folder / "out.jsonl"), "--compile-cache-dir", str(args.cache_dir)]
    command = [sys.executable, __file__, "--job-process", str(told), *paths, *args.flags, "--restart"]
    process = subprocess.Popen(command)
    try:
        process.wait(left_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    figures = json.loads(told.read_text()) if told.exists() else None
    if process.returncode not in (0, 143, -signal.SIGTERM, -signal.SIGKILL) or not figures or not figures["num_steps"]:
        print(f"the job ended with status {process.returncode} before it could be measured", file=sys.stderr)
        return None
    if "cut" not in figures:
        with (folder / "out.jsonl").open() as lines:
            figures["failed"] = sum('"status_code":200' not in line for line in lines)
    return figures


def measure_server(args: argparse.Namespace, rows: Path, folder: Path, left_s: float) -> dict[str, Any] | None:
    """The figures of the same rows through the server; None if a client process failed."""
    end_s = time.monotonic() + left_s
    command = server_command(args.flags, args.port, args.cache_dir)
    with running(command, args.port, {}, folder / "serve.log", left_s) as ready_s, GpuUse() as use:
        workload = GivenRows(
            base_url=f"http://127.0.0.1:{args.port}",
            model=None,
            input_len=0,
            output_len=0,
            num_prompts=args.rows,
            warmup=min(args.clients, args.rows),
            concurrency=args.clients,
            request_rate=None,
            vocab_size=args.vocab_size,
            seed=0,
            max_seconds=max(end_s - time.monotonic() - END_S, 1.0),
            extra_body={},
            path=str(rows),
        )
        try:
            (parts,) = run_together([(workload, args.client_processes or default_processes(args.clients))])
        except RuntimeError as error:
            print(f"the server could not be measured: {error}", file=sys.stderr)
            return None
        measured = [one for part in parts for one in part.measured if one.events_s]
        if not measured:
            return None
        busy = use.share(min(one.events_s[0] for one in measured), max(one.events_s[-1] for one in measured))
    whole = summary(workload, parts)
    kept = ("duration", "completed", "failed", "total_output_tokens", "output_throughput", "median_ttft_ms")
    figures = {name: whole[name] for name in kept} | {"gpu_busy_share": busy, "ready_s": round(ready_s, 1)}
    if whole["failed"]:
        figures |= {"cut": "out of time" in whole.get("error_counts", {}), "errors": whole.get("error_counts", {})}
    return figures


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What two rows of the same measurement have in common."""
    return row["kind"], row["rows"], tuple(row["prompt"]), tuple(row["output"]), row.get("clients")


def against_vllm(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each row of the section that vLLM has a row of the same rows and lengths for."""
    lines = []
    theirs = {row_key(row)[1:4]: row for row in rows if row["kind"] == "vllm"}
    for row in rows:
        peer = theirs.get(row_key(row)[1:4])
        if peer is None or row is peer:
            continue
        cut = [name for name, part in ((row["kind"], row), ("vLLM", peer)) if part.get("cut")]
        ratio = row["output_throughput"] / peer["output_throughput"]
        told = f"{row['kind']}: {ratio:.3f} times vLLM's output tokens/s over {row['rows']} rows"
        lines.append(told + (f" (cut: {', '.join(cut)})" if cut else ""))
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--label", required=True, help="what is measured: the model, and how it is loaded")
    add("--rows", type=int, default=20_000, help="(default: %(default)s)")
    add("--prompt", type=int, nargs=2, default=(32, 2048), help="shortest and longest, in tokens (default: 32 2048)")
    add("--output", type=int, nargs=2, default=(16, 512), help="shortest and longest, in tokens (default: 16 512)")
    add("--vocab-size", type=int, default=151_643, help="prompts are of ids below this (default: %(default)s)")
    add("--clients", type=int, default=256, help="connections of the server's part (default: %(default)s)")
    add("--client-processes", type=int, help="default: one per 32 connections, at most the cores less 4")
    add("--only", choices=("job", "server"), help="measure one of them (default: both)")
    add("--time-limit-s", type=float, default=3600.0, help="seconds for everything (default: %(default)s)")
    add("--cache-dir", type=Path, help="folder of compiled steps (default: a temporary one, shared by both parts)")
    add("--port", type=int, default=8019, help="of the server (default: %(default)s)")
    add("--results", type=Path, help="file to merge into (default: scripts/results/<device>.json)")
    add("flags", nargs=argparse.REMAINDER, help="of the engine, after --")
    args = parser.parse_args(argv)
    args.flags = [flag for flag in args.flags if flag != "--"]
    if args.rows < 1:
        parser.error(f"--rows is {args.rows}; at least 1 is needed")
    return args


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        args.cache_dir = args.cache_dir or Path(name) / "compiled"
        yield Path(name)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end_s = time.monotonic() + args.time_limit_s
    path = args.results or default_path()
    results = Results(path, args.label, describe())
    shape = {"rows": args.rows, "prompt": list(args.prompt), "output": list(args.output)}
    sound = True
    with _folder(args) as folder:
        rows = folder / "rows.jsonl"
        with rows.open("w") as file:
            for row in make_rows(args.rows, tuple(args.prompt), tuple(args.output), args.vocab_size, 0):
                file.write(json.dumps(row) + "\n")
        for kind, measure in (("job", measure_job), ("server", measure_server)):
            if args.only not in (None, kind):
                continue
            left_s = end_s - time.monotonic()
            figures = measure(args, rows, folder, left_s) if left_s > 1 else None
            sound &= figures is not None and not figures.get("failed")
            if figures is None:
                print(f"{kind}: not measured", flush=True)
                continue
            clients = {"clients": args.clients} if kind == "server" else {}
            print(f"{kind}: {json.dumps(figures)}", flush=True)
            results.row(SECTION, {"kind": kind} | shape | clients | figures, row_key)
    for line in against_vllm(read_json(path).get(SECTION, {}).get(args.label, [])):
        print(line, flush=True)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(job_process(sys.argv[2:]) if sys.argv[1:2] == ["--job-process"] else main())
