"""Measures a server under agents: conversations that grow by a tool's output with every turn, several at once.

    python scripts/bench_agent.py --base-url http://127.0.0.1:8000 --compare http://127.0.0.1:8001

Every agent has the same system prompt and a task of its own. A turn sends all that was said so far and asks for an
answer; an answer and a tool's output then make the next turn longer. Prompts are token ids, random but the same for a
seed: in them stand made-up answers, since a server does not return the ids of its own. So a prefix cache can have all
that an earlier turn sent, and none of what it answered.

With --loop MODEL the agent's own loop runs instead, over an engine in this process, with the prefix cache and then
without it (scripts/agent_loop.py): the engine generates the replies, and tools are called by a script. So it runs with
random weights, too:

    python scripts/bench_agent.py --loop FOLDER --engine '{"load_format": "dummy"}'

Run against a server that has just started, or with another seed: what an earlier run sent may be in the cache. With
--compare the same trace runs against a second server afterwards, one without prefix caching for instance. The last line
of the output is JSON. The exit status is 1 if a request failed or was answered with another number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from load_client import Connection, Measured
from results_file import write_json

HEADER = "turn  prompt tokens  cached tokens  TTFT p50/max ms"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What all agents say. Lengths in tokens."""

    agents: int
    turns: int
    system_len: int  # of the system prompt, which all agents share
    task_len: int
    answer_len: int
    tool_len: tuple[int, int]  # least and most of a tool's output
    vocab_size: int
    seed: int

    def prompts(self, agent: int) -> list[list[int]]:
        """Token ids of every turn of one agent."""
        prompt = self._ids("system", self.system_len) + self._ids(f"task {agent}", self.task_len)
        prompts = [prompt]
        for turn in range(1, self.turns):
            output_len = random.Random(f"{self.seed}/length {agent} {turn}").randint(*self.tool_len)
            prompt = prompt + self._ids(f"turn {agent} {turn}", self.answer_len + output_len)
            prompts.append(prompt)
        return prompts

    def _ids(self, what: str, count: int) -> list[int]:
        return random.Random(f"{self.seed}/{what}").choices(range(self.vocab_size), k=count)


async def run(trace: Trace, base_url: str, model: str | None, *, tool_s: float) -> dict[str, Any]:
    """Runs the trace: an agent sends its next turn `tool_s` seconds after the last event of the one before."""
    bodies = [[_payload(prompt, trace.answer_len, model) for prompt in trace.prompts(i)] for i in range(trace.agents)]
    connections = [Connection(base_url) for _ in bodies]

    async def agent(connection: Connection, payloads: Sequence[bytes]) -> list[Measured]:
        measured = []
        for payload in payloads:
            if measured:
                await asyncio.sleep(tool_s)
            measured.append(await connection.complete(payload))
            if measured[-1].error is not None:
                break
        return measured

    start_s = time.monotonic()
    agents = await asyncio.gather(*map(agent, connections, bodies))
    total_s = time.monotonic() - start_s
    for connection in connections:
        connection.close()
    return {"base_url": base_url, "total_s": round(total_s, 4)} | summary(trace, agents)


def _payload(prompt: list[int], max_tokens: int, model: str | None) -> bytes:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body | ({"model": model} if model else {})).encode()


def summary(trace: Trace, agents: Sequence[Sequence[Measured]]) -> dict[str, Any]:
    """Sums over all agents, and a row for every turn. TTFT: from the request to the first event, in ms."""
    good = [one for agent in agents for one in agent if one.error is None]
    errors = collections.Counter(one.error for agent in agents for one in agent if one.error is not None)
    return {
        "prompt_tokens": _sum(good, "prompt_tokens"),
        "cached_tokens": _sum(good, "cached_tokens"),
        "completion_tokens": _sum(good, "completion_tokens"),
        "failed": trace.agents * trace.turns - len(good),
        "wrong_length": sum(one.num_tokens != trace.answer_len for one in good),
        "error_counts": dict(errors),
        "turns": [_turn([agent[i] for agent in agents if i < len(agent)]) for i in range(trace.turns)],
    }


def _turn(measured: Sequence[Measured]) -> dict[str, Any]:
    good = [one for one in measured if one.error is None]
    ttft_ms = [round((one.events_s[0] - one.sent_s) * 1e3, 3) for one in good]
    return {
        "prompt_tokens": _sum(good, "prompt_tokens"),
        "cached_tokens": _sum(good, "cached_tokens"),
        "median_ttft_ms": round(statistics.median(ttft_ms), 3) if ttft_ms else None,
        "max_ttft_ms": max(ttft_ms, default=None),
    }


def _sum(measured: Sequence[Measured], name: str) -> int | None:
    """Of what the server's usage says; None where it says nothing."""
    counts = [getattr(one, name) for one in measured]
    return None if None in counts else sum(counts)


def show(row: dict[str, Any]) -> None:
    """A run in a table on standard output, and what is wrong with it on standard error."""
    print(f"{row['base_url']}: {row['total_s']} s, {row['cached_tokens']} of {row['prompt_tokens']} tokens cached")
    print(HEADER)
    for number, turn in enumerate(row["turns"], 1):
        ttft = f"{turn['median_ttft_ms']}/{turn['max_ttft_ms']}"
        print(f"{number:>4} {turn['prompt_tokens']!s:>14} {turn['cached_tokens']!s:>14} {ttft:>16}")
    for error, count in row["error_counts"].items():
        print(f"{count} x {error}", file=sys.stderr)
    if row["wrong_length"]:
        print(f"{row['wrong_length']} answers have another length than asked", file=sys.stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags, or an exit with what is wrong with them."""
    parser = argparse.ArgumentParser(description="Measures a server under agents.")
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="of the server, without /v1 (default: %(default)s)")
    add("--compare", metavar="URL", help="a second server, which runs the same trace afterwards")
    add("--model", help="name to ask for (default: none)")
    add("--loop", metavar="MODEL", help="run the agent's own loop over this model, in this process, instead")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="with --loop: fields of EngineConfig")
    add("--agents", type=int, default=8, help="agents at once (default: %(default)s)")
    add("--turns", type=int, default=10, help="turns of each (default: %(default)s)")
    add("--system-len", type=int, default=1000, help="tokens of the shared system prompt (default: %(default)s)")
    add("--task-len", type=int, default=200, help="tokens of an agent's own task (default: %(default)s)")
    add("--answer-len", type=int, default=100, help="tokens of every answer (default: %(default)s)")
    add("--tool-len", type=int, nargs=2, default=(200, 2000), metavar=("LEAST", "MOST"), help="tokens of an output")
    add("--tool-seconds", type=float, default=0.0, help="that a tool takes (default: %(default)s)")
    add("--vocab-size", type=int, default=32000, help="token ids are below this (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--save-result", type=Path, metavar="FILE", help="writes the JSON to a file, too")
    args = parser.parse_args(argv)
    for name in ("agents", "turns", "task_len", "answer_len", "vocab_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    for name in ("system_len", "tool_seconds"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 0")
    if not 0 <= args.tool_len[0] <= args.tool_len[1]:
        parser.error(f"--tool-len is {args.tool_len[0]} {args.tool_len[1]}; give the least, then the most")
    if args.loop is not None and (args.compare or args.model):
        parser.error("--loop runs no server; leave out --compare and --model")
    if args.loop is None and args.engine:
        parser.error("--engine is for the engine of --loop; give that, too")
    if not isinstance(args.engine, dict):
        parser.error(f"--engine is {args.engine!r}; it must be a JSON object")
    for url in filter(None, (args.base_url, args.compare)):
        if not url.startswith("http://"):
            parser.error(f"{url!r} is no base URL; it must begin with http://")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    names = [field.name for field in dataclasses.fields(Trace)]
    trace = Trace(**{name: getattr(args, name) for name in names} | {"tool_len": tuple(args.tool_len)})
    if args.loop is not None:
        import agent_loop  # loads JAX, which the other mode does without

        result = agent_loop.compare(args.loop, trace, args.engine, tool_s=args.tool_seconds)
        if args.save_result is not None:
            write_json(args.save_result, result)
        print(json.dumps(result))
        return 0
    rows = []
    for url in filter(None, (args.base_url, args.compare)):
        work = run(trace, url, args.model, tool_s=args.tool_seconds)
        rows.append(asyncio.run(work, loop_factory=uvloop.new_event_loop))
        show(rows[-1])
    result: dict[str, Any] = {"trace": dataclasses.asdict(trace) | {"tool_seconds": args.tool_seconds}, "runs": rows}
    if args.compare:
        result["speedup"] = round(rows[1]["total_s"] / rows[0]["total_s"], 3)
        print(f"the first is {result['speedup']} times as fast")
    if args.save_result is not None:
        write_json(args.save_result, result)
    print(json.dumps(result))
    return 0 if not any(row["failed"] or row["wrong_length"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
