"""The results file, scripts/results/<gpu>.json: every figure with the run that it comes from.

A section holds rows by label, which says what was measured; a row replaces that of the same measurement. "runs" says,
for the date that a figure names, under which versions, card, driver, commit and command it was measured. Every change
is on disk at once, and what no script writes ("attempts") stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jaxinfer", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "triton")


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, content: Any) -> None:
    """All or nothing: a run that is killed leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def merge_rows(
    known: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], key: Callable[[dict[str, Any]], Any]
) -> list[dict[str, Any]]:
    """A new row takes the place of the known one with its key, or comes last."""
    return list(({key(row): row for row in known} | {key(row): row for row in new}).values())


class Results:
    """The figures of one run under one label. run: what `describe` says, and what else the figures depend on."""

    def __init__(self, path: Path, label: str, run: dict[str, Any]):
        self._path = path
        self._label = label
        self._run = run
        self._date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def start(self, **seconds: float) -> None:
        """Start-to-ready in seconds, by what it is: cold_s, warm_s."""
        content = read_json(self._path)
        starts = content.setdefault("start", {}).setdefault(self._label, {})
        starts |= {name: round(value, 1) for name, value in seconds.items()}
        starts |= {name.replace("_s", "_run"): self._date for name in seconds}
        self._write(content)

    def row(self, section: str, row: dict[str, Any], key: Callable[[dict[str, Any]], Any]) -> None:
        """key: what two rows of the same measurement have in common."""
        content = read_json(self._path)
        by_label = content.setdefault(section, {})
        by_label[self._label] = merge_rows(by_label.get(self._label, []), [row | {"run": self._date}], key)
        self._write(content)

    def _write(self, content: dict[str, Any]) -> None:
        """Without the runs of which no figure is left."""
        runs = content.setdefault("runs", {}) | {self._date: self._run}
        used = {*_runs_named(content)}
        content["runs"] = {date: runs[date] for date in sorted(runs) if date in used}
        write_json(self._path, content)


def _runs_named(content: Any) -> Iterator[str]:
    """The dates of runs that figures name, as "run", "cold_run" or "warm_run"."""
    if isinstance(content, dict):
        yield from (value for name, value in content.items() if name.split("_")[-1] == "run")
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for value in values:
        yield from _runs_named(value)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--record and --results, for `from_flags`."""
    parser.add_argument("--record", metavar="LABEL", help="keep the figures in the results file, under this label")
    parser.add_argument("--results", type=Path, help="that file (default: scripts/results/<device>.json)")


def from_flags(args: argparse.Namespace, **more: Any) -> Results | None:
    """Where the figures go; None if they are not to be kept. more: what they depend on besides `describe`."""
    return Results(args.results or default_path(), args.record, describe() | more) if args.record else None


def default_path() -> Path:
    """Of the results of the first GPU, or of the CPU where there is none."""
    card = gpu()
    return ROOT / "scripts" / "results" / f"{file_name(card[0]) if card else 'cpu'}.json"


def file_name(card: str) -> str:
    """Of the results: "h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower().replace("nvidia", "")).strip("-")


def gpu() -> tuple[str, str] | None:
    """Name and driver of the first GPU; None without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        name, driver = (
            subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].split(",")
        )
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None
    return name.strip(), driver.strip()


def commit(root: Path = ROOT) -> str | None:
    """What is measured: what $JAXINFER_COMMIT says of a copy, else the commit of the tree; None where neither is known.

    "-dirty" follows git's where a tracked file differs from it, but for the results, which every run changes.
    """
    if said := os.environ.get("JAXINFER_COMMIT"):
        return said
    if not (root / ".git").exists() or not (head := _git(root, "rev-parse", "--short=12", "HEAD")):
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)scripts/results")
    return head if changes == "" else f"{head}-dirty"


def _git(root: Path, *command: str) -> str | None:
    """What git prints; None where it fails or is missing."""
    git = ["git", "--no-optional-locks", "-C", str(root), *command]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def describe(server_url: str | None = None) -> dict[str, Any]:
    """Under what a run is measured. server_url: of a server that was there before, whose code is not known."""
    card = gpu()
    mine = {"commit": commit(), "versions": {"python": platform.python_version(), **versions(PACKAGES)}}
    return {
        "card": card[0] if card else "none",
        "driver": card[1] if card else None,
        "cores": os.cpu_count(),
        **(mine if server_url is None else {"commit": None, "server": server_url}),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
