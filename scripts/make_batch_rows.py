"""Rows for a batch job of a benchmark: prompts of random token ids; lengths and outputs are spread by logarithm.

    python scripts/make_batch_rows.py rows.jsonl --rows 20000 --prompt 32 2048 --output 16 512 --vocab-size 151643
    jaxinfer batch --input rows.jsonl --output out.jsonl --model FOLDER --load-format dummy

The job's last line on standard error has its output tokens per second, from when the engine was ready.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FIRST_ID = 100
"""Lower ids are special tokens in many vocabularies."""


def make_rows(
    num_rows: int, prompt_lens: tuple[int, int], output_lens: tuple[int, int], vocab_size: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Rows in the OpenAI API's batch format, each with as many output tokens as it asks for."""
    rng = np.random.default_rng(seed)
    for number in range(num_rows):
        prompt = rng.integers(FIRST_ID, vocab_size, _length(rng, prompt_lens)).tolist()
        body = {"prompt": prompt, "max_tokens": _length(rng, output_lens), "temperature": 0, "ignore_eos": True}
        yield {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def _length(rng: np.random.Generator, lens: tuple[int, int]) -> int:
    low, high = lens
    return min(int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))), high)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write rows for a batch job of a benchmark.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--prompt", type=int, nargs=2, default=(32, 2048), help="shortest and longest, in tokens")
    parser.add_argument("--output", type=int, nargs=2, default=(16, 512), help="shortest and longest, in tokens")
    parser.add_argument("--vocab-size", type=int, default=151_643)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    num_tokens = 0
    with args.path.open("w") as file:
        for row in make_rows(args.rows, tuple(args.prompt), tuple(args.output), args.vocab_size, args.seed):
            num_tokens += row["body"]["max_tokens"]
            file.write(json.dumps(row) + "\n")
    print(f"{args.path}: {args.rows} rows, {num_tokens} output tokens")


if __name__ == "__main__":
    main()
