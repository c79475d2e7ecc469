"""Measures a server that speaks the OpenAI API: streamed completions of random token ids, many at once.

    python scripts/bench_serve.py --base-url http://127.0.0.1:8000 --input-len 1024 --output-len 128 -c 1 8 64

Closed loop: each of C clients sends its next request when the last one has ended. With --request-rate instead, requests
arrive as a Poisson process. With --mixed-streams too, that many streams run beside the requests that arrive, and it is
told how the time between their tokens fares before and while prompts arrive:

    python scripts/bench_serve.py --input-len 4096 --output-len 16 --request-rate 2 --mixed-streams 32

The time to the first token (TTFT) ends with the first event that the client sees; the time per output token (TPOT) is
(last event - first event) / (tokens - 1), and tokens are what the server's usage says, so that an event may carry
several. Keys of the output are those of `vllm bench serve`. The exit status is 1 if a request failed, or was answered
with another number of tokens than it asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import queue
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_client import Part, Workload, client_process, default_processes
from load_summary import detail, mixed_summary, summary
from results_file import Results, describe, write_json

MAX_REQUESTS = 1_000_000
BUSY_CLIENT = 0.7
"""Share of a core from which a client process may have been what was measured."""
HEADER = "    C     in/out     tok/s    req/s   TTFT p50/p99 ms  TPOT ms failed client"
"""client: CPU time of the busiest client process as a share of a core."""


def run(workload: Workload, num_processes: int | None = None, *, with_detail: bool = False) -> dict[str, Any]:
    """Runs the workload and sums it up. Raises RuntimeError where a client process failed."""
    assert workload.num_prompts is not None
    (parts,) = run_together([(workload, _num_processes(workload, num_processes))])
    return summary(workload, parts) | (detail(parts) if with_detail else {})


def run_mixed(
    background: Workload, arriving: Workload, num_processes: int | None = None, *, settle_s: float
) -> dict[str, Any]:
    """Runs streams without end, and `arriving` beside them. Raises RuntimeError where a client process failed."""
    groups = [(one, _num_processes(one, num_processes)) for one in (arriving, background)]
    arriving_parts, background_parts = run_together(groups)
    return mixed_summary((background, background_parts), (arriving, arriving_parts), settle_s)


def _num_processes(workload: Workload, asked: int | None) -> int:
    streams = min(workload.concurrency or MAX_REQUESTS, workload.num_prompts or MAX_REQUESTS)
    return min(asked or default_processes(streams), streams)


def run_together(groups: Sequence[tuple[Workload, int]]) -> list[list[Part]]:
    """Starts (workload, processes) each and returns their parts. Ends those without an end after the first group."""
    spawn = multiprocessing.get_context("spawn")
    shared = spawn.Barrier(sum(count for _, count in groups)), spawn.Event()
    queues = [spawn.Queue() for _ in groups]
    processes = [
        spawn.Process(target=client_process, args=(workload, rank, count, shared, results), daemon=True)
        for (workload, count), results in zip(groups, queues, strict=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    end_s = time.monotonic() + 2 * max(workload.max_seconds for workload, _ in groups) + 60
    try:
        parts = []
        for (_, count), results in zip(groups, queues, strict=True):
            parts.append([_result(results, processes, end_s) for _ in range(count)])
            shared[1].set()
        return parts
    except RuntimeError as error:
        # The process that failed breaks the barrier for all: what it says itself comes before what the others say.
        raise RuntimeError(_first_reason(queues) or str(error)) from error
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _result(results: Any, processes: Sequence[Any], end_s: float) -> Part:
    while True:
        try:
            part = results.get(timeout=0.5)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("a client process ended without a result") from None
            if time.monotonic() > end_s:
                raise RuntimeError("the client processes are out of time") from None
            continue
        if isinstance(part, Exception):
            raise RuntimeError(str(part))
        return part


def _first_reason(queues: Sequence[Any]) -> str:
    """What a failed process says, of all that have not been read; empty where none says anything."""
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        for results in queues:
            try:
                part = results.get(timeout=0.05)
            except queue.Empty:
                continue
            if isinstance(part, Exception) and str(part):
                return str(part)
    return ""


def problems(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, or doubtful; those that make it worthless come from `is_sound`."""
    found = [f"{count} x {error}" for error, count in row.get("error_counts", {}).items()]
    if row["wrong_length"]:
        tokens = f"{row['total_input_tokens']} in and {row['total_output_tokens']} out"
        asked = f"{row['input_len']} in and {row['output_len']} out"
        found.append(f"{row['wrong_length']} requests have other lengths than {asked}: {tokens} in all")
    if row["total_output_events"] != row["total_output_tokens"]:
        found.append(
            f"{row['total_output_events']} events for {row['total_output_tokens']} tokens: times between events are "
            "not quite times between tokens"
        )
    if row["client_cpu_share"] > BUSY_CLIENT:
        found.append(f"a client process used {row['client_cpu_share']:.0%} of a core: it may have been the limit")
    background = row.get("background", {})
    found += [f"background: {count} x {error}" for error, count in background.get("error_counts", {}).items()]
    if background.get("wrong_length"):
        found.append(f"background: {background['wrong_length']} requests have other lengths than asked")
    return found


def is_sound(row: dict[str, Any]) -> bool:
    """Whether every request was answered with what it asked for."""
    background = row.get("background", {"failed": 0, "wrong_length": 0})
    return not (row["failed"] or row["wrong_length"] or background["failed"] or background["wrong_length"])


def workload_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows of the same workload have in common."""
    names = ("input_len", "output_len", "max_concurrency", "request_rate")
    return (row.get("background", {}).get("streams"), *(row[name] for name in names))


def section(row: dict[str, Any]) -> str:
    """Of the results file."""
    return "mixed" if "background" in row else "serve"


def show(row: dict[str, Any]) -> None:
    """A line for a row on standard output, and what is wrong with it on standard error."""
    lengths, ttft = "{input_len}/{output_len}".format(**row), "{median_ttft_ms}/{p99_ttft_ms}".format(**row)
    clients = "all" if row["max_concurrency"] is None else row["max_concurrency"]
    numbers = f"{row['output_throughput']:>9} {row['request_throughput']:>8} {ttft:>17} {row['median_tpot_ms']!s:>8}"
    print(f"{clients:>5} {lengths:>10} {numbers} {row['failed']:>6} {row['client_cpu_share']:>6.0%}", flush=True)
    for when in ("alone", "mixed"):
        if "background" in row:
            b = row["background"]
            itl = "{median_itl_ms} / {p99_itl_ms} / {max_itl_ms}".format(**b[when])
            lengths = f"{b['streams']} streams of {b['input_len']}/{b['output_len']}, {when}"
            print(f"      {lengths}: {b[when]['events_per_second']} tok/s, between tokens p50 / p99 / max {itl} ms")
    for problem in problems(row):
        print(f"      {problem}", file=sys.stderr, flush=True)


def workloads(args: argparse.Namespace) -> list[Workload]:
    """What the flags ask for: one workload for each number of clients."""
    clients = args.concurrency or ([None] if args.request_rate else [1])
    names = [field.name for field in dataclasses.fields(Workload) if hasattr(args, field.name)]
    given = {name: getattr(args, name) for name in names if name != "concurrency"}
    made = []
    for concurrency in clients:
        num_prompts = args.num_prompts or max(30, 4 * (concurrency or 1))
        warmup = min(concurrency or 32, num_prompts) if args.warmup is None else args.warmup
        made.append(Workload(**given | {"num_prompts": num_prompts, "warmup": warmup, "concurrency": concurrency}))
    return made


def mixed_workloads(args: argparse.Namespace, arriving: Workload) -> tuple[Workload, Workload]:
    """The streams and what arrives beside them, from the --mixed flags."""
    background = dataclasses.replace(
        arriving,
        input_len=args.mixed_input_len,
        output_len=args.mixed_output_len,
        num_prompts=None,
        concurrency=args.mixed_streams,
        request_rate=None,
        warmup=args.mixed_streams,
        seed=arriving.seed + 1,
    )
    delay_s = args.mixed_settle_seconds + args.mixed_alone_seconds
    return background, dataclasses.replace(arriving, start_delay_s=delay_s)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="of the server, without /v1 (default: %(default)s)")
    add("--model", help="name to ask for; without it the request names none")
    add("--input-len", type=int, default=16, help="tokens of each prompt (default: %(default)s)")
    add("--output-len", type=int, default=128, help="tokens of each answer (default: %(default)s)")
    add("--num-prompts", type=int, help="requests per run (default: 4 per client and at least 30)")
    add("-c", "--concurrency", type=int, nargs="+", help="clients, one run for each value (default: 1); with a request "
        "rate, the most open requests (default: no limit)")  # fmt: skip
    add("--request-rate", type=float, help="requests per second, Poisson, instead of a closed loop")
    add("--warmup", type=int, help="short requests before each run (default: one per client)")
    add("--vocab-size", type=int, default=32000, help="prompts are of ids below this (default: %(default)s)")
    add("--client-processes", type=int, help="for each load (default: one per 32 streams, at most the cores less 4)")
    add("--max-seconds", type=float, default=600.0, help="a run that takes longer is cut (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts and arrivals (default: %(default)s)")
    add("--extra-body", type=json.loads, default="{}", help="JSON fields added to each request")
    add("--save-result", type=Path, metavar="FILE", help="write the rows as JSON: one object, or a list of several")
    add("--save-detailed", action="store_true", help="with --save-result: also lengths, times and errors by request")
    add("--record", type=Path, metavar="FILE", help="results file to merge the rows into")
    add("--label", default="jaxinfer", help="what was measured, in the results file (default: %(default)s)")
    mixed = parser.add_argument_group("streams beside the requests (with --request-rate)").add_argument
    mixed("--mixed-streams", type=int, default=0, help="closed-loop streams that run without end (default: none)")
    mixed("--mixed-input-len", type=int, default=16, help="tokens of their prompts (default: %(default)s)")
    mixed("--mixed-output-len", type=int, default=512, help="tokens of their answers (default: %(default)s)")
    mixed("--mixed-settle-seconds", type=float, default=2.0, help="before they count (default: %(default)s)")
    mixed("--mixed-alone-seconds", type=float, default=4.0, help="before the first prompt (default: %(default)s)")
    args = parser.parse_args(argv)
    positive = ("input_len", "output_len", "vocab_size", "client_processes", "max_seconds", "request_rate")
    for name in (*positive, "mixed_input_len", "mixed_output_len"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    if min(args.concurrency or [1]) < 1 or (args.num_prompts or 1) not in range(1, MAX_REQUESTS + 1):
        parser.error(f"--concurrency must be at least 1, --num-prompts from 1 to {MAX_REQUESTS}")
    if args.mixed_streams and args.request_rate is None:
        parser.error("--mixed-streams needs a --request-rate at which the prompts arrive")
    if not args.base_url.startswith("http://"):
        parser.error(f"--base-url is {args.base_url!r}; it must begin with http://")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    rows = []
    print(HEADER)
    for workload in workloads(args):
        if args.mixed_streams:
            background, arriving = mixed_workloads(args, workload)
            row = run_mixed(background, arriving, args.client_processes, settle_s=args.mixed_settle_seconds)
        else:
            row = run(workload, args.client_processes, with_detail=args.save_detailed)
        rows.append(row)
        show(row)
    if args.save_result is not None:
        write_json(args.save_result, rows[0] if len(rows) == 1 else rows)
    short = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    print(json.dumps(short))
    if args.record is not None:
        results = Results(args.record, args.label, describe(args.base_url))
        for row in short:
            results.row(section(row), row, workload_key)
    return 0 if all(is_sound(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
