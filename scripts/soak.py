"""Mixed traffic at full load against a server that this starts: does its memory stay flat?

    python scripts/soak.py --minutes 30 --out soak.json -- --max-model-len 512

What follows the two dashes goes to `jaxinfer serve`, whose default is the embedded model. Clients without a pause ask
for all that there is: chats, completions, streams, several choices, structured output, tools, responses, messages,
sessions, embeddings (which this model refuses), bodies that are nonsense, and some leave before they have their answer.

Once a second the memory and the open files of every process of the server are sampled. A process is flat where, after
the warm-up (the first third of the time), a line through its proportional memory (PSS, by Theil and Sen: the median of
the slopes between two samples) rises by less than --limit-mib in 10 minutes, and the median of its open files in the
last tenth is at most --limit-files above that at the warm-up's end. After the last request no page may be held and no
request be open. The figures are written as JSON; the exit status is 1 where anything is not flat, or a reply was none
of those that its request may have.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from results_file import describe, write_json

MIB = 2**20
START_LIMIT_S = 900
STOP_LIMIT_S = 60
REPLY_LIMIT_S = 300
WORDS = "the cat sat on a mat and said what is the capital of France or of Italy in one word please".split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NONSENSE = (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": ' + b"[" * 5000, b'{"messages": 5}', b'{"surprise": 1}')
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Ask(NamedTuple):
    """One request, and the statuses that it may have."""

    kind: str
    path: str
    body: bytes
    statuses: tuple[int, ...] = (200,)
    leaves: bool = False  # closes the connection before it has read all


class Sample(NamedTuple):
    """A process at a time: seconds since the start, bytes, open files."""

    at_s: float
    rss: int
    pss: int
    files: int


def requests(rng: random.Random) -> Iterator[Ask]:
    """Requests without end."""
    made = [_chat, _complete, _choices, _structured, _tools, _responses, _messages, _session, _embed, _bad]
    while True:
        ask = rng.choice(made)(rng)
        yield ask._replace(leaves=True) if ask.statuses == (200,) and rng.random() < 0.15 else ask


def _text(rng: random.Random, most: int = 60) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def _ask(kind: str, path: str, body: dict[str, Any], *statuses: int) -> Ask:
    return Ask(kind, path, json.dumps(body).encode(), statuses or (200,))


def _turn(rng: random.Random) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(rng)}]


def _some(rng: random.Random) -> dict[str, Any]:
    """Fields that most routes have."""
    stream = rng.random() < 0.6
    return {"max_tokens": rng.randint(1, 48), "stream": stream, "temperature": rng.choice([0, 0.8])}


def _chat(rng: random.Random) -> Ask:
    body = {"messages": _turn(rng), "logprobs": rng.random() < 0.3} | _some(rng)
    return _ask("chat", "/v1/chat/completions", body)


def _complete(rng: random.Random) -> Ask:
    prompts: Any = rng.choice([_text(rng), [_text(rng), _text(rng)], [rng.randrange(1000) for _ in range(20)]])
    return _ask("completion", "/v1/completions", {"prompt": prompts, "stop": ["Paris"]} | _some(rng))


def _choices(rng: random.Random) -> Ask:
    return _ask("n", "/v1/chat/completions", {"messages": _turn(rng), "n": rng.randint(2, 4)} | _some(rng))


def _structured(rng: random.Random) -> Ask:
    form = rng.choice(
        [
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"guided_regex": rf"[a-z]{{{rng.randint(1, 9)}}}"},
            {"guided_choice": [_text(rng, 3), _text(rng, 3)]},
        ]
    )
    return _ask("structured", "/v1/chat/completions", {"messages": _turn(rng)} | form | _some(rng))


def _tools(rng: random.Random) -> Ask:
    """The default model's template shows no tools: then it is a 400."""
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    return _ask("tools", "/v1/chat/completions", {"messages": _turn(rng), "tools": [tool]} | _some(rng), 200, 400)


def _responses(rng: random.Random) -> Ask:
    body = {"input": _text(rng), "max_output_tokens": rng.randint(1, 48), "stream": rng.random() < 0.5}
    return _ask("responses", "/v1/responses", body)


def _messages(rng: random.Random) -> Ask:
    return _ask("messages", "/v1/messages", {"messages": _turn(rng)} | _some(rng))


def _session(rng: random.Random) -> Ask:
    """A session takes one request at a time, so that another client may be refused."""
    body = {"prompt": _text(rng), "session_id": f"session-{rng.randrange(40)}"} | _some(rng)
    return _ask("session", "/v1/completions", body, 200, 400, 409)


def _embed(rng: random.Random) -> Ask:
    return _ask("embeddings", "/v1/embeddings", {"input": _text(rng)}, 200, 400)


def _bad(rng: random.Random) -> Ask:
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"])
    return Ask("nonsense", path, rng.choice(NONSENSE), (400,))


class Client(threading.Thread):
    """Asks until it is stopped."""

    def __init__(self, address: tuple[str, int], seed: str, stop: threading.Event):
        super().__init__(daemon=True)
        self.done: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._address = address
        self._rng = random.Random(seed)
        self._stop_event = stop

    def run(self) -> None:
        for ask in requests(self._rng):
            if self._stop_event.is_set():
                return
            try:
                self._one(ask)
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(f"{ask.kind}: {type(error).__name__}: {error}")
                if len(self.wrong) > 20:
                    return

    def _one(self, ask: Ask) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=REPLY_LIMIT_S)
        try:
            connection.request("POST", ask.path, ask.body, {"Content-Type": "application/json"})
            if ask.leaves:
                assert connection.sock is not None
                connection.sock.settimeout(self._rng.uniform(0.001, 2))
                try:
                    connection.sock.recv(self._rng.randint(1, 4000))
                except TimeoutError:
                    pass
                self.done[f"{ask.kind}, left"] += 1
                return
            reply = connection.getresponse()
            content = reply.read()
            if reply.status not in ask.statuses:
                self.wrong.append(f"{ask.kind}: status {reply.status}: {content[:300]!r}")
            self.done[ask.kind] += 1
        finally:
            connection.close()


def family(root: int) -> list[int]:
    """A process and those that it has started, and so on."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def sample(pid: int, at_s: float) -> Sample | None:
    """What the process has; None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(Rss|Pss):\s+(\d+) kB", text, re.M)}
    return Sample(at_s, sizes["Rss"], sizes["Pss"], files) if sizes.keys() == {"Rss", "Pss"} else None


def slope(samples: Sequence[Sample], value: Callable[[Sample], float], most: int = 300) -> float:
    """Per second: the median of the slopes between any two of `most` evenly spread samples."""
    few = samples[:: max(1, len(samples) // most)]
    pairs = ((a, b) for i, a in enumerate(few) for b in few[i + 1 :] if b.at_s > a.at_s)
    slopes = [(value(b) - value(a)) / (b.at_s - a.at_s) for a, b in pairs]
    return statistics.median(slopes) if slopes else 0.0


def judge(samples: Sequence[Sample], limit_mib: float, limit_files: int) -> dict[str, Any]:
    """The figures of one process over the whole time, and whether it is flat."""
    settled = samples[len(samples) // 3 :]
    tenth = max(1, len(samples) // 10)
    rise_mib = slope(settled, lambda one: one.pss) * 600 / MIB
    files = [statistics.median(one.files for one in part) for part in (settled[:tenth], samples[-tenth:])]
    return {
        "samples": len(samples),
        "rss_mib": [round(one.rss / MIB, 1) for one in (samples[0], settled[0], samples[-1])],
        "pss_mib": [round(one.pss / MIB, 1) for one in (samples[0], settled[0], samples[-1])],
        "pss_max_mib": round(max(one.pss for one in samples) / MIB, 1),
        "pss_rise_mib_per_10_min": round(rise_mib, 2),
        "files": files,
        "flat": rise_mib < limit_mib and files[1] - files[0] <= limit_files,
    }


def gauges(address: tuple[str, int]) -> dict[str, float]:
    """Of the server's metrics, those that are 0 where nothing runs."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(r"^jaxinfer:(\w+)\{[^}]*\} ([0-9.e+]+)$", text, re.M)
    return {name: float(value) for name, value in found if name in GAUGES}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the server, loads it, and gives the figures."""
    log = tempfile.TemporaryFile()
    command = [sys.executable, "-m", "jaxinfer.cli", "serve", "--port", "0", "--access-log", "off", *args.server]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    try:
        timer = threading.Timer(START_LIMIT_S, server.kill)
        timer.start()
        assert server.stdout is not None
        line = server.stdout.readline().decode()
        timer.cancel()
        if " serves " not in line:
            log.seek(0)
            raise SystemExit(f"the server did not start: {log.read().decode(errors='replace')[-2000:]}")
        host, _, port = line.split()[-1].rpartition("/")[2].partition(":")
        return _load(args, server.pid, (host, int(port)))
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def _load(args: argparse.Namespace, pid: int, address: tuple[str, int]) -> dict[str, Any]:
    stop = threading.Event()
    clients = [Client(address, f"{args.seed}/{i}", stop) for i in range(args.clients)]
    for client in clients:
        client.start()
    samples: dict[int, list[Sample]] = collections.defaultdict(list)
    start_s = time.monotonic()
    while (at_s := time.monotonic() - start_s) < 60 * args.minutes and any(map(Client.is_alive, clients)):
        for process in family(pid):
            if (found := sample(process, at_s)) is not None:
                samples[process].append(found)
        if int(at_s) % 60 == 0:
            total = sum(one[-1].pss for one in samples.values()) / MIB
            num_done = sum(sum(client.done.values()) for client in clients)
            print(f"{at_s:6.0f} s: {num_done} requests, PSS {total:.0f} MiB", file=sys.stderr)
        time.sleep(max(0.0, 1 - (time.monotonic() - start_s - at_s)))
    stop.set()
    for client in clients:
        client.join(REPLY_LIMIT_S)
    left = gauges(address)
    for _ in range(60):
        if not any(left.values()):
            break
        time.sleep(0.5)
        left = gauges(address)
    done = sum((client.done for client in clients), collections.Counter())
    wrong = [text for client in clients for text in client.wrong]
    processes = {
        str(process): judge(found, args.limit_mib, args.limit_files)
        for process, found in samples.items()
        if found[-1].at_s > 0.9 * at_s
    }
    return {
        "seconds": round(at_s, 1),
        "requests": dict(sorted(done.items())),
        "wrong": wrong[:20],
        "left": left,
        "processes": processes,
        "flat": bool(processes) and all(one["flat"] for one in processes.values()) and not any(left.values()),
        "ok": not wrong and left.keys() >= {"num_requests_running", "num_requests_waiting"},
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of load (default: %(default)g)")
    parser.add_argument("--clients", type=int, default=24, help="that ask at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--limit-mib", type=float, default=8.0, help="rise in 10 minutes (default: %(default)g)")
    parser.add_argument("--limit-files", type=int, default=2, help="more open files (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON (default: standard output)")
    parser.add_argument("server", nargs="*", help="flags of jaxinfer serve, behind two dashes")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    figures = {"run": describe(), "limits": {"mib_per_10_min": args.limit_mib, "files": args.limit_files}} | run(args)
    if args.out is not None:
        write_json(args.out, figures)
    print(json.dumps(figures, indent=1))
    return 0 if figures["flat"] and figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
