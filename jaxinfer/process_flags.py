"""Flags of an engine over several processes, by their names in jax.distributed.initialize. Never loads JAX."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Adds them to the parser of a command that has an engine."""
    group = parser.add_argument_group(
        "several hosts", "the same command on each, which differs in its --process-id; others than 0 only do steps"
    )
    group.add_argument(
        "--coordinator",
        "--coordinator-address",
        metavar="HOST:PORT",
        help="of process 0, in a network of these hosts alone: whoever reaches it can join",
    )
    group.add_argument("--num-processes", type=int, help="processes, one on each host (default 1)")
    group.add_argument("--process-id", type=int, help="which of them this is, from 0")
    group.add_argument(
        "--initialization-timeout-s",
        "--initialization-timeout",
        type=float,
        help="how long they wait for each other at the start, in seconds (default 300)",
    )
