"""Measures the KV cache of a server: hits, restores from the host's memory, and what they cost those who decode.

    python scripts/bench_cache.py --label qwen3-4b --measure-bandwidth --page-bytes 2359296 -- \
        --model FOLDER --num-pages 4096 --kv-host-gib 32 --max-model-len 40960

What follows the two dashes goes to `jaxinfer serve`; with --base-url, the server that runs there is measured instead.
Prompts are random token ids, new ones in every run. The cases, of which --cases names some:

cached   a prompt of each length, sent once and then again: the time to the first token (TTFT), cold and cached. All
         tokens but the last must have been cached.
restore  a prompt that others push out to the host tier, sent again. Needs --kv-host-gib, and few --num-pages.
         `restore_ms` is what its TTFT takes longer than a hit's, `allowed_ms` 1.4 times the bare copy of its bytes.
decode   streams that decode alone, beside requests that the device's cache has, and beside ones that the host tier has.
agent    the trace of bench_agent.py, with the cache and, on a second server (or --compare), without.

The last line of the output is JSON: a row for each figure. The exit status is 1 if a case could not be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bench_agent
import uvloop
from cache_cases import CaseError, Client, Copy, DecodeCase, cached, decode, restore
from measure_serving import running, server_command
from results_file import Results, default_path, describe, write_json

CASES = ("cached", "restore", "decode", "agent")
BANDWIDTH_SCRIPT = Path(__file__).with_name("pinned_bandwidth.py")
KEYS = {
    "cached": ("prompt_tokens",),
    "restore": ("prompt_tokens",),
    "decode": ("streams", "length", "rate"),
    "agent": ("agents", "num_turns"),
}
"""What rows of the same measurement have in common, by case."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, or an exit with what is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--label", help="keep the figures in the results file, under this label")
    add("--results", type=Path, help="that file (default: scripts/results/<device>.json)")
    add("--save-result", type=Path, metavar="FILE", help="write the rows to a file, too")
    add("--cases", type=_names, default=CASES, help=f"some of {','.join(CASES)} (default: all)")
    add("--base-url", help="measure the server that runs here, and start none")
    add("--compare", metavar="URL", help="of the same server without prefix caching, for the agents")
    add("--model-name", help="name that requests ask for; without it they name none")
    add("--vocab-size", type=int, default=32000, help="prompts are of ids below this (default: %(default)s)")
    add("--page-size", type=int, default=16, help="tokens of a page of the server (default: %(default)s)")
    add("--seed", type=int, help="of the prompts (default: another one in every run)")
    add("--port", type=int, default=8017, help="that the server is told to use (default: %(default)s)")
    add("--cache-dir", type=Path, help="folder of the server's compiled steps (default: a temporary one)")
    add("--start-limit-s", type=float, default=1800.0, help="seconds that a start may take (default: %(default)s)")
    add("--log", type=Path, default=Path(tempfile.gettempdir()) / "jaxinfer-serve.log", help="what it prints "
        "(default: %(default)s)")  # fmt: skip
    add("--lengths", type=_lengths, default="1024,4096,16384,32768", help="of cached prompts (default: %(default)s)")
    add("--repeats", type=int, default=20, help="of each cached prompt (default: %(default)s)")
    add("--restore-len", type=int, default=16384, help="of the prompt that is pushed out (default: %(default)s)")
    add("--restore-repeats", type=int, default=10, help="(default: %(default)s)")
    add("--page-bytes", type=int, help="of a page: 2 x layers x heads x width x item size x --page-size")
    add("--bandwidth", type=float, metavar="GB_S", help="of a copy from pinned memory to the device")
    add("--measure-bandwidth", action="store_true", help="measure it, before the server starts or beside it")
    add("--streams", type=int, default=32, help="that decode (default: %(default)s)")
    add("--stream-len", type=int, default=2048, help="tokens of their outputs (default: %(default)s)")
    add("--window-seconds", type=float, default=10.0, help="of each part of the decode case (default: %(default)s)")
    add("--settle-seconds", type=float, default=3.0, help="before the first part (default: %(default)s)")
    add("--rate", type=float, default=2.0, help="requests a second beside the streams (default: %(default)s)")
    add("--decode-len", type=int, default=4096, help="tokens of their prompts (default: %(default)s)")
    add("--agent-flags", default="", help="flags of bench_agent.py, in one string")
    add("server", nargs=argparse.REMAINDER, help="flags of jaxinfer serve, after --")
    args = parser.parse_args(argv)
    positive = ("vocab_size", "page_size", "repeats", "restore_len", "restore_repeats", "page_bytes", "bandwidth")
    for name in (*positive, "streams", "stream_len", "window_seconds", "rate", "decode_len"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    args.server = [flag for flag in args.server if flag != "--"]
    if args.base_url is not None and args.server:
        parser.error("--base-url names a server that runs; the flags after -- are for one that is started")
    if args.seed is None:
        args.seed = random.SystemRandom().getrandbits(32)
    return args


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in CASES]:
        raise argparse.ArgumentTypeError(f"case {unknown[0]!r} is not known; known: {', '.join(CASES)}")
    return names


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = [0]
    if min(lengths) < 2:
        raise argparse.ArgumentTypeError(f"lengths {text!r} are not numbers from 2 on, between commas")
    return lengths


@contextmanager
def serving(args: argparse.Namespace, steps: Path, *more: str) -> Iterator[str]:
    """The base URL of the server to measure, which runs for the length of the block. more: flags for it."""
    if args.base_url is not None:
        yield args.base_url
        return
    command = server_command([*args.server, *more], args.port, steps)
    with running(command, args.port, {}, args.log, args.start_limit_s) as seconds:
        print(f"ready after {seconds:.1f} s", flush=True)
        yield f"http://127.0.0.1:{args.port}"


def bandwidth(args: argparse.Namespace) -> float | None:
    """Of a copy from pinned memory to the device, in GB/s; SystemExit where it was to be measured and cannot be."""
    if not args.measure_bandwidth:
        return args.bandwidth
    done = subprocess.run([sys.executable, BANDWIDTH_SCRIPT], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the bandwidth cannot be measured: {done.stderr.strip()}")
    print(f"pinned memory: {done.stdout.strip()}", flush=True)
    return json.loads(done.stdout)["to_device_gb_s"]


def plan(args: argparse.Namespace, copy: Copy) -> list[tuple[str, Callable[[Client], Coroutine[Any, Any, Any]]]]:
    """The cases that one server is asked for, and their names."""
    case = DecodeCase(
        args.streams, args.stream_len, args.window_seconds, args.settle_seconds, args.decode_len, args.rate
    )
    planned: list[tuple[str, Callable[[Client], Coroutine[Any, Any, Any]]]] = []
    if "cached" in args.cases:
        for length in args.lengths:
            planned.append((f"cached, {length} tokens", lambda client, n=length: cached(client, n, args.repeats)))
    if "restore" in args.cases:
        planned.append(
            ("restore", lambda client: restore(client, args.restore_len, args.restore_repeats, copy)),
        )
    if "decode" in args.cases:
        planned.append(("decode", lambda client: decode(client, case)))
    return planned


class Bench:
    """The rows so far, and whether all cases were measured."""

    def __init__(self, args: argparse.Namespace, results: Results | None):
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.sound = True
        self._results = results

    def add(self, row: dict[str, Any]) -> None:
        """Prints a row, and keeps it."""
        row = {**row, "seed": self.args.seed}
        self.rows.append(row)
        told = {name: value for name, value in row.items() if name not in ("turns", "without_cache")}
        print("  ".join(f"{name} {value}" for name, value in told.items()), flush=True)
        if self._results is not None:
            self._results.row("cache", row, workload_key)

    def measure(self, url: str, copy: Copy) -> None:
        """The cases of one server. What cannot be measured is told, and the others are measured all the same."""
        args = self.args
        for number, (name, case) in enumerate(plan(args, copy)):
            client = Client(
                url,
                model=args.model_name,
                vocab_size=args.vocab_size,
                page_size=args.page_size,
                seed=args.seed + number,
            )
            try:
                self.add(asyncio.run(_closing(client, case), loop_factory=uvloop.new_event_loop))
            except (CaseError, OSError) as error:
                self.sound = False
                print(f"{name}: {error}", file=sys.stderr, flush=True)

    def agents(self, url: str) -> dict[str, Any]:
        """The trace of bench_agent.py on one server."""
        args = self.args
        own = ["--base-url", url, "--vocab-size", str(args.vocab_size), "--seed", str(args.seed)]
        given = bench_agent.parse([*own, *shlex.split(args.agent_flags)])
        names = bench_agent.Trace.__dataclass_fields__
        said: dict[str, Any] = {name: getattr(given, name) for name in names}
        said["tool_len"] = tuple(given.tool_len)
        trace = bench_agent.Trace(**said)
        work = bench_agent.run(trace, url, args.model_name, tool_s=given.tool_seconds)
        run = asyncio.run(work, loop_factory=uvloop.new_event_loop)
        bench_agent.show(run)
        self.sound &= not (run["failed"] or run["wrong_length"])
        return {"agents": trace.agents, "num_turns": trace.turns, **run}


async def _closing(client: Client, case: Callable[[Client], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    try:
        return await case(client)
    finally:
        client.close()


def workload_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows of the same measurement have in common."""
    return (row["case"], *(row[name] for name in KEYS.get(row["case"], ())))


def agent_row(with_cache: dict[str, Any], without: dict[str, Any] | None) -> dict[str, Any]:
    """Two runs of the same trace in a row; without: None where there is no server without the cache."""
    row = {"case": "agent", **with_cache}
    if without is None:
        return row
    speedup = round(without["total_s"] / with_cache["total_s"], 3)
    return row | {"without_cache": without, "speedup": speedup}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    copy = Copy(args.page_bytes, bandwidth(args))
    results = None
    if args.label:
        results = Results(args.results or default_path(), args.label, describe(args.base_url))
    bench = Bench(args, results)
    with tempfile.TemporaryDirectory() as temporary:
        steps, with_cache = args.cache_dir or Path(temporary), None
        with serving(args, steps) as url:
            bench.measure(url, copy)
            if "agent" in args.cases:
                with_cache = bench.agents(url)
        if with_cache is not None:
            without = None
            if args.compare is not None:
                without = bench.agents(args.compare)
            elif args.base_url is None:
                # The host tier needs the prefix cache; of a flag that is given twice, the last counts.
                with serving(args, steps, "--no-enable-prefix-caching", *_without_tiers(args.server)) as url:
                    without = bench.agents(url)
            bench.add(agent_row(with_cache, without))
    if args.save_result is not None:
        write_json(args.save_result, bench.rows)
    print(json.dumps(bench.rows))
    return 0 if bench.sound else 1


def _without_tiers(flags: Sequence[str]) -> list[str]:
    """What turns the tiers off that `flags` turn on."""
    return ["--kv-host-gib", "0"] if any(flag.startswith("--kv-host-gib") for flag in flags) else []


if __name__ == "__main__":
    sys.exit(main())
