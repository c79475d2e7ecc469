"""Flags of `jaxinfer shard-report`. Never loads JAX."""

from __future__ import annotations

import argparse

from jaxinfer.config import DTYPES


def add(parser: argparse.ArgumentParser) -> None:
    """Adds them to the parser of the command."""
    flag = parser.add_argument
    flag("--model", required=True, help="folder, config.json, GGUF file, Hub id or alias; only its config is read")
    flag("--revision", help="branch, tag or commit of a Hub id")
    flag("--mesh", help="devices by axis, as in tensor=2,expert=4")
    flag("--sweep", type=int, metavar="DEVICES", help="rank all meshes of so many devices by the time of a decode step")
    flag("--rules", help="what is split over which axis, by the name of a preset (default: tensor)")
    flag("--gpu", default="h200", help="card whose figures the times follow from (default: %(default)s)")
    flag("--seqs", type=int, default=64, help="sequences that decode at once (default: %(default)s)")
    flag("--len", type=int, default=4096, help="tokens of each (default: %(default)s)")
    flag("--dtype", choices=DTYPES[1:], default="bfloat16", help="of weights and cache (default: %(default)s)")
    flag("--compile", metavar="TARGET_CONFIG", help="compile the steps for the card that this file of XLA's describes")
    flag("--json", action="store_true", help="print the report as JSON")
    flag("--png", metavar="FILE", help="write a chart, too; needs matplotlib")
