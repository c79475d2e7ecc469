"""Makes the pictures of the page at / for README.md: idle, under load, and after the server has gone.

    python scripts/shoot_playground.py                      # the default model, on this machine -> scripts/results
    python scripts/shoot_playground.py --out DIR -- FLAGS   # a server with these flags of `jaxinfer serve`

Needs Chromium (see chromium.py). What the pictures show is what the server did: every number in them is of that run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from chromium import Chromium, Page, find_chromium

RESULTS = Path(__file__).parent / "results"
NAMES = ("playground_idle.png", "playground_load.png", "playground_error.png")
MAX_BYTES = 150_000
"""Of a picture: the repository keeps every one that there ever was."""
FLAGS = ("--max-num-seqs", "4", "--max-model-len", "1024", "--access-log", "off")
QUESTION = "What is a page table? Answer in three sentences."
STORY = "Tell me a long story about a lighthouse keeper who finds a letter in a bottle, and what he does next."
ANSWER_WAIT_S = 120.0


class Picture(NamedTuple):
    png: bytes
    text: str
    """All that it shows."""


def shoot(
    browser: Chromium, url: str, end_server: Callable[[], object], *, num_clients: int, load_s: float
) -> tuple[Page, list[Picture]]:
    """The page, and the three pictures. Ends the server.

    num_clients: more than the server has slots, so that some wait. load_s: how long they are watched, in seconds.
    """
    page = browser.open(f"{url}/", width=1280, height=760)
    page.wait_for("document.querySelector('#state').textContent === 'ready'")
    page.wait_for("document.querySelector('#output').textContent === '0'")
    pictures = [take(page)]
    page.evaluate("document.querySelector('#temperature').value = '0'")
    with clients(url, num_clients):
        page.wait_for("Number(document.querySelector('#waiting').textContent) > 0", ANSWER_WAIT_S)
        ask(page, QUESTION)
        page.wait_for("document.querySelector('.answer .note') !== null", ANSWER_WAIT_S)
        page.wait_for(f"performance.now() > {1000 * load_s}", ANSWER_WAIT_S + load_s)
        ask(page, STORY)
        page.wait_for("document.querySelector('.running .text')?.textContent.length > 80", ANSWER_WAIT_S)
        pictures.append(take(page))
        end_server()
    page.wait_for("document.querySelector('.failure') !== null && document.body.classList.contains('stale')")
    pictures.append(take(page))
    return page, pictures


def take(page: Page) -> Picture:
    return Picture(page.screenshot(), page.text("body"))


def ask(page: Page, question: str) -> None:
    """As a user does: with the keyboard."""
    page.focus("#question")
    page.type(question)
    page.press("Enter")


@contextlib.contextmanager
def clients(url: str, count: int) -> Iterator[None]:
    """As many clients, each of which asks again once it is answered, until the block or the server ends.

    RuntimeError where the server refused one.
    """
    is_over, refusals = threading.Event(), []

    def run(number: int) -> None:
        for turn in range(1000):
            messages = [{"role": "user", "content": f"{STORY} He is called number {number}, in chapter {turn}."}]
            body = {"messages": messages, "max_tokens": 96, "ignore_eos": True, "stream": True}
            asked = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(asked, timeout=ANSWER_WAIT_S) as reply:
                    for _ in reply:
                        if is_over.is_set():
                            return
            except urllib.error.HTTPError as error:
                refusals.append(f"{error}: {error.read().decode()}")
                return
            except OSError:
                return  # the server has gone
            if is_over.is_set():
                return

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(ANSWER_WAIT_S)
    if refusals:
        raise RuntimeError(f"the server refused {len(refusals)} clients: {refusals[0]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 where there is no browser or no server."""
    parser = argparse.ArgumentParser(description="Makes the pictures of the page at / for README.md.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="clients beside the page (default: %(default)s)")
    parser.add_argument("--load-s", type=float, default=90.0, help="seconds of load (default: %(default)s)")
    parser.add_argument("flags", nargs="*", help="flags of `jaxinfer serve`, after --")
    args = parser.parse_args(argv)
    command = find_chromium()
    if command is None:
        print("shoot_playground: no Chromium found; install the package chromium", file=sys.stderr)
        return 1
    serve = [sys.executable, "-m", "jaxinfer.cli", "serve", "--port", "0", *(args.flags or FLAGS)]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def end_server() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if " serves " not in line:
            print(f"shoot_playground: the server did not start: {line!r}", file=sys.stderr)
            return 1
        with Chromium(command) as browser:
            _, pictures = shoot(browser, line.split()[-1], end_server, num_clients=args.clients, load_s=args.load_s)
    finally:
        end_server()
    for name, picture in zip(NAMES, pictures, strict=True):
        (args.out / name).write_bytes(picture.png)
        print(f"{args.out / name}: {len(picture.png)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
