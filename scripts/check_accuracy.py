"""Compares log-probabilities on this machine's GPU in bfloat16 with those of the same weights in float32 on its CPU.

    python scripts/check_accuracy.py [--output FILE.json]

Tiny models of every family (tests/golden) and a Qwen3 of full depth and small width, with random weights that bfloat16
holds exactly. Sequences are prefilled in odd chunks, then decoded token by token, one at a time and eight together.
Reports the mean and the 99th percentile of the absolute difference of the log-probabilities of all tokens, and of the
regret: how much likelier, in float32, the likeliest token is than the one that the GPU would choose. Exits with 1 when
a figure is over its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.models import registry
from jaxinfer.models.model import Placement
from jaxinfer.params import Params, random_params
from jaxinfer.runner.step import paged_attend
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.api import PagedRows

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
PAGE, WIDTH = 16, 13  # tokens a page, pages a sequence
LIMITS = {"mean": 0.02, "p99": 0.1, "regret_mean": 0.005}
"""Of bfloat16 against float32, in nats."""


class Run:
    """A model on one device."""

    def __init__(self, config: dict[str, Any], device: jax.Device, params: Params, dtype: jnp.dtype):
        self.model = registry.from_config(config)
        sharding = NamedSharding(Mesh(np.array([device]), ("tensor",)), PartitionSpec())
        self.params = {name: jax.device_put(array.astype(dtype), sharding) for name, array in params.items()}
        c = self.model.cache
        pool = (c.num_layers, NUM_SEQUENCES * WIDTH + 1, PAGE, c.num_kv_heads, c.head_width)
        self.pools = tuple(jax.device_put(jnp.zeros(pool, dtype), sharding) for _ in range(2))
        self.target = Target.of(device)
        self.step = jax.jit(self._step, static_argnames="max_query_len", donate_argnums=1)
        rng = np.random.default_rng(1)
        self.tables = (rng.permutation(NUM_SEQUENCES * WIDTH) + 1).reshape(NUM_SEQUENCES, WIDTH).astype(np.int32)

    def _step(self, params, pools, tokens, rows, *, max_query_len):
        counters = None if self.target.platform == "cpu" else jax.new_ref(jnp.zeros(2**14, jnp.int32))
        refs, place = tuple(map(jax.new_ref, pools)), Placement(self.target, None, counters)
        heads = self.model.num_heads
        attend = paged_attend(refs, rows, place, num_heads=heads, max_query_len=max_query_len)
        hidden = self.model.forward(params, tokens, rows.token_position, attend, place)
        logits = self.model.logits(params, hidden, place)
        return tuple(map(jax.freeze, refs)), jax.nn.log_softmax(logits.astype(jnp.float32))

    def __call__(self, sequences: Sequence[int], tokens: np.ndarray, start: int) -> np.ndarray:
        """Log-probabilities [T, V] after tokens [number of sequences, new], the first of them at position `start`."""
        rows, new = tokens.shape
        index = np.repeat(np.arange(rows, dtype=np.int32), new)
        position = np.tile(start + np.arange(new, dtype=np.int32), rows)
        table = self.tables[list(sequences)]
        page = table[index, position // PAGE]
        ones = np.ones(rows, np.int32)
        first = np.arange(rows, dtype=np.int32) * new
        placed = PagedRows(table, first, ones * new, ones * start, index, position, page)
        query_len = 1 if new == 1 else rows * new
        flat = tokens.reshape(-1).astype(np.int32)
        self.pools, out = self.step(self.params, self.pools, flat, placed, max_query_len=query_len)
        return np.asarray(out)


def compare(config: dict[str, Any], cpu: jax.Device, gpu: jax.Device) -> dict[str, dict[str, float]]:
    """Figures of prefill and of decoding, alone and together."""
    model = registry.from_config(config)
    on_cpu = NamedSharding(Mesh(np.array([cpu]), ("tensor",)), PartitionSpec())
    with jax.default_device(cpu):
        params = random_params(model.specs, jnp.bfloat16, dict.fromkeys(model.specs, on_cpu), seed=0)
        runs = Run(config, cpu, params, jnp.float32), Run(config, gpu, params, jnp.bfloat16)
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
        found["decode, 8 rows"].append([run(range(NUM_SEQUENCES), step, position) for run in runs])
        # Once more, which writes the same to the cache again.
        for sequence in range(ALONE):
            found["decode, 1 row"].append([run([sequence], step[sequence : sequence + 1], position) for run in runs])
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


def main() -> None:
    """Prints a line a model and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    cpu, gpu = jax.devices("cpu")[0], jax.devices()[0]
    configs = {path.parent.name: json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/config.json"))}
    results, failed = {}, False
    for name, config in (configs | {"qwen3, 36 layers": DEEP}).items():
        results[name] = compare(config, cpu, gpu)
        for kind, values in results[name].items():
            over = [key for key, limit in LIMITS.items() if values[key] > limit]
            failed |= bool(over)
            shown = ", ".join(f"{key} {value:.2g}" for key, value in values.items())
            print(f"{name:18s} {kind:15s} {shown}{'  OVER ' + ', '.join(over) if over else ''}", flush=True)
    if args.output:
        record = {"device": gpu.device_kind, "limits": LIMITS, "models": results}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
