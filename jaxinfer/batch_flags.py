"""Flags of `jaxinfer batch`. Never loads JAX before the command runs."""

from __future__ import annotations

import argparse
from typing import Any

from jaxinfer import ray_flags
from jaxinfer.config import REASONING_PARSERS, TOOL_CALL_PARSERS


def add(parser: argparse.ArgumentParser) -> None:
    """All but those of the engine, of sampling and of a cluster."""
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
    group.add_argument(
        "--arrange-rows", action=argparse.BooleanOptionalAction, help="run rows out of turn (default: yes)"
    )
    group.add_argument("--max-rows-ahead", type=int, help="rows that may be read before the first of them is done")
    group.add_argument("--checkpoint-s", type=float, help="time between two checkpoints, in seconds (default 2)")
    group.add_argument("--no-progress", action="store_true", help="show nothing")


def run(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Runs the command. `options` are the fields of EngineConfig that were given."""
    from jaxinfer import offline

    names = ("tool_call_parser", "reasoning_parser")
    names += ("shuffle_seed", "shard_index", "shard_count", "max_rows_ahead", "checkpoint_s", "arrange_rows")
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    given |= {"seed": args.job_seed, "served_model_names": args.served_model_name}
    if args.chat_template is not None:
        with open(args.chat_template, encoding="utf-8") as file:
            given["chat_template"] = file.read()
    defaults = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p")}
    defaults["seed"] = args.sampling_seed
    job = _given(given) | {"defaults": _given(defaults)}
    result = offline.run_batch(
        args.input,
        args.output,
        job=job,
        ray=ray_flags.given(args),
        restart=args.restart,
        show_progress=not args.no_progress,
        **options,
    )
    print(f"{result.output}: {result.num_rows} rows, {result.num_failed} failed, {result.output_tokens} tokens")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """What the command line gave."""
    return {name: value for name, value in options.items() if value is not None}
