"""`jaxinfer shard-report`: from what a user names to plans, and these as text, JSON and a chart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from checkpoints.resolve import resolve
from checkpoints.source import CheckpointError
from jaxinfer.config import ConfigError
from jaxinfer.sharding import report, report_output
from jaxinfer.sharding.mesh import parse

EXIT_DOES_NOT_FIT = 2


def run(args: argparse.Namespace) -> int:
    """Prints what the flags ask for. Exit status 2 where no mesh holds the model and its cache."""
    if (args.mesh is None) == (args.sweep is None):
        raise ConfigError("shard-report needs one of --mesh, as in tensor=2,expert=4, and --sweep, a number of devices")
    jax.config.update("jax_platforms", "cpu")  # whatever the machine has, nothing runs on it
    how: dict[str, Any] = {
        "gpu": args.gpu,
        "load": report.Load(num_seqs=args.seqs, tokens_per_seq=args.len, dtype=args.dtype),
        "target_config": None if args.compile is None else Path(args.compile).read_text("utf-8"),
    }
    if args.rules is not None:
        how["axis_rules"] = args.rules
    config = read_config(args.model, args.revision)
    refused: Mapping[tuple[tuple[str, int], ...], str] = {}
    if args.sweep is None:
        reports = [report.plan(config, parse(args.mesh), **how)]
    else:
        reports, refused = report.sweep(config, args.sweep, **how)
        if not reports:
            raise report.ShardingError(f"no mesh of {args.sweep} devices works: {'; '.join(refused.values())}")
    if args.json:
        found = [report.as_json(one) for one in reports]
        reasons = {report_output.mesh_text(dict(sizes)): reason for sizes, reason in refused.items()}
        print(json.dumps(found[0] if args.sweep is None else {"reports": found, "refused": reasons}, indent=1))
    else:
        ranked = args.sweep is not None
        print(report_output.ranking(reports, refused) if ranked else report_output.text(reports[0], args.model))
    if args.png is not None:
        try:
            report_output.draw(reports, f"{args.model}, {args.seqs} x {args.len:,} tokens, {args.gpu}", Path(args.png))
        except ImportError as error:
            raise ConfigError(f"--png {args.png}: {error}; pip install matplotlib") from None
    return 0 if any(one.fits for one in reports) else EXIT_DOES_NOT_FIT


def read_config(model: str, revision: str | None = None) -> Mapping[str, Any]:
    """The config.json of a model's name, which may be that file itself. CheckpointError where there is none."""
    if model.endswith(".json"):
        try:
            config = json.loads(Path(model).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{model}: cannot be read as a config ({error})") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{model}: is no JSON object")
        return config
    return resolve(model, revision=revision, load_format="dummy").config
