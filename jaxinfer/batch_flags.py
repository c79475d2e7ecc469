"""Flags of `jaxinfer batch`. Never loads JAX."""

from __future__ import annotations

import argparse

from jaxinfer.config import REASONING_PARSERS, TOOL_CALL_PARSERS


def add(parser: argparse.ArgumentParser) -> None:
    """Adds them to the parser of the command."""
    group = parser.add_argument_group("job")
    group.add_argument("--input", required=True, help="JSONL, also gzipped, Parquet, Arrow, or a folder of such")
    group.add_argument("--output", required=True, help="new file: .jsonl, .jsonl.gz or .parquet")
    group.add_argument("--restart", action="store_true", help="begin anew, and delete what there is of the output")
    group.add_argument("--job-seed", type=int, help="of rows that sample and give no seed (default 0)")
    group.add_argument("--shuffle-seed", type=int, help="read and write the rows in a random order")
    group.add_argument("--shard-index", type=int, help="part of the rows that this process takes, from 0")
    group.add_argument("--shard-count", type=int, help="parts of the rows, each with a file of its own")
    group.add_argument("--served-model-name", nargs="+", help="names of the model that rows may give")
    group.add_argument("--chat-template", help="file with a Jinja template, in place of the model's own")
    group.add_argument("--tool-call-parser", choices=TOOL_CALL_PARSERS, help="how the model writes tool calls")
    group.add_argument("--reasoning-parser", choices=REASONING_PARSERS, help="how the model marks its thought")
    group.add_argument("--group-prefixes", action="store_true", help="run rows together whose prompts begin alike")
    group.add_argument("--max-rows-ahead", type=int, help="rows that may be read before the first of them is done")
    group.add_argument("--checkpoint-s", type=float, help="time between two checkpoints, in seconds (default 2)")
    group.add_argument("--no-progress", action="store_true", help="show nothing")
