"""Compares log-probabilities on this machine's GPU in bfloat16 with those of the same weights in float32 on its CPU.

    python scripts/check_accuracy.py [--record LABEL]

Tiny models of every family (tests/golden) and a Qwen3 of full depth and small width, with random weights that bfloat16
holds exactly. Sequences are prefilled in odd chunks, then decoded token by token, one at a time and eight together.
Reports the mean and the 99th percentile of the absolute difference of the log-probabilities of all tokens, and of the
regret: how much likelier, in float32, the likeliest token is than the one that the GPU would choose. Exits with 1 when
a figure is over its limit.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import results_file
from model_run import ModelRun, sharding

from jaxinfer.models import registry
from jaxinfer.params import random_params

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
DEEP = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
NUM_SEQUENCES, PROMPT, DECODED = 8, 150, 40
ALONE = 2
"""Sequences that are decoded alone."""
CHUNKS = (64, 1, 37, 48)  # of PROMPT tokens
LIMITS = {"mean": 0.02, "p99": 0.1, "regret_mean": 0.005}
"""Of bfloat16 against float32, in nats."""


def compare(config: dict[str, Any], cpu: jax.Device, gpu: jax.Device) -> dict[str, dict[str, float]]:
    """Figures of prefill and of decoding, alone and together."""
    model = registry.from_config(config)
    sizes = {"num_sequences": NUM_SEQUENCES, "max_len": PROMPT + DECODED}
    with jax.default_device(cpu):
        params = random_params(model.specs, jnp.bfloat16, dict.fromkeys(model.specs, sharding(cpu)), seed=0)
        runs = [ModelRun(config, d, params, t, **sizes) for d, t in ((cpu, jnp.float32), (gpu, jnp.bfloat16))]
    tokens = np.random.default_rng(0).integers(0, model.vocab_rows, (NUM_SEQUENCES, PROMPT + DECODED))
    found: dict[str, list[list[np.ndarray]]] = {"prefill": [], "decode, 1 row": [], "decode, 8 rows": []}
    for sequence in range(NUM_SEQUENCES):
        start = 0
        for size in CHUNKS:
            chunk = tokens[sequence : sequence + 1, start : start + size]
            found["prefill"].append([run([sequence], chunk, start) for run in runs])
            start += size
    for position in range(PROMPT, PROMPT + DECODED):
        step = tokens[:, position : position + 1]
        for sequence in range(ALONE):
            alone = step[sequence : sequence + 1]
            found["decode, 1 row"].append([run([sequence], alone, position, is_trial=True) for run in runs])
        found["decode, 8 rows"].append([run(range(NUM_SEQUENCES), step, position) for run in runs])
    return {kind: figures(*map(np.concatenate, zip(*pairs, strict=True))) for kind, pairs in found.items()}


def figures(expected: np.ndarray, got: np.ndarray) -> dict[str, float]:
    """Of log-probabilities [N, V] each, in nats."""
    difference = np.abs(got - expected)
    regret = expected.max(1) - np.take_along_axis(expected, got.argmax(1)[:, None], 1)[:, 0]
    return {
        "mean": float(difference.mean()),
        "p99": float(np.quantile(difference, 0.99)),
        "regret_mean": float(regret.mean()),
        "same_choice": float((expected.argmax(1) == got.argmax(1)).mean()),
    }


def main() -> int:
    """Prints a line a model and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="check the models whose names contain this")
    results_file.add_flags(parser)
    args = parser.parse_args()
    configs = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/config.json"))}
    configs["qwen3, 36 layers"] = DEEP
    chosen = {name: config for name, config in configs.items() if args.only in name}
    if not chosen:
        parser.error(f"no model's name contains {args.only!r}; there are {', '.join(configs)}")
    cpu, gpu = jax.devices("cpu")[0], jax.devices()[0]
    results = results_file.from_flags(args, device=gpu.device_kind, limits=LIMITS)
    failed = False
    for name, config in chosen.items():
        for kind, values in compare(config, cpu, gpu).items():
            over = [key for key, limit in LIMITS.items() if values[key] > limit]
            failed |= bool(over)
            shown = ", ".join(f"{key} {value:.2g}" for key, value in values.items())
            print(f"{name:18s} {kind:15s} {shown}{'  OVER ' + ', '.join(over) if over else ''}", flush=True)
            if results is not None:
                row = {"model": name, "kind": kind} | {key: float(f"{value:.4g}") for key, value in values.items()}
                results.row("accuracy", row, operator.itemgetter("model", "kind"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
