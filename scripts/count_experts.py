"""Counts the experts that a decode step of a sparse model reads, with the tokens that its engine makes.

    python scripts/count_experts.py --clients 1,8,64,256 [--record LABEL] -- --model FOLDER --load-format dummy

What a step of a sparse model takes is what its tokens' experts take to read. With random weights a router may like few
of them, and then a benchmark flatters: so for each number of clients the engine completes as many random prompts, and
their tokens go through the model once more, beside which the experts of each layer are counted that the tokens of one
position have together. The figure to compare with is what a router without preferences would hit.
"""

from __future__ import annotations

import argparse
import dataclasses
import operator
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import results_file
from model_run import ModelRun
from profile_step import engine_config

import jaxinfer.models.experts as experts_part
from checkpoints.resolve import resolve
from jaxinfer.build import build_engine
from jaxinfer.engine.engine import Engine
from jaxinfer.types import Request
from pallas_kernels.moe.api import moe, route

TOKENS_AT_ONCE = 8192
NEAR = 0.05
"""Share by which the count may miss that of a router without preferences."""


class Recorder(ModelRun):
    """A model whose forward pass tells the experts of every token."""

    def chosen(self, sequences: list[int], tokens: np.ndarray, top_k: int) -> np.ndarray:
        """[L, sequences, tokens, k] int32 of tokens [sequences, tokens], from the beginning of each."""
        placed, query_len = self.place(sequences, tokens, 0)
        run = jax.jit(self._chosen, static_argnames=("max_query_len", "top_k"))
        found = run(self.params, self.pools, placed, max_query_len=query_len, top_k=top_k)
        return np.asarray(found).reshape(found.shape[0], *tokens.shape, top_k)

    def _chosen(self, params, pools, placed, *, max_query_len, top_k):
        shape = (params["router"].shape[0], placed.tokens.shape[0], top_k)
        kept = jax.new_ref(jnp.zeros(shape, jnp.int32))

        def recording(x: jax.Array, experts: Any, layer: jax.Array, *, residual: Any = None, **how: Any) -> jax.Array:
            kept[layer] = route(x, experts.router, layer, **how).expert
            return moe(x, experts, layer, residual=residual, **how)

        usual, experts_part.moe = experts_part.moe, recording
        try:
            self.hidden(params, {name: jax.new_ref(pool) for name, pool in pools.items()}, placed, max_query_len)
        finally:
            experts_part.moe = usual
        return jax.freeze(kept)


def complete(engine: Engine, prompts: np.ndarray, num_tokens: int) -> np.ndarray:
    """Prompts [C, P] and what the engine makes of them, greedy: [C, P + num_tokens]."""
    outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(outputs, prompts, strict=True):
        engine.submit(Request(request_id=name, prompt_ids=prompt.tolist(), max_tokens=num_tokens, temperature=0.0))
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
    return np.concatenate([prompts, np.array(list(outputs.values()), np.int32)], axis=1)


def count(chosen: np.ndarray) -> float:
    """Distinct experts of [L, sequences, tokens, k] at one layer and one position: the mean over both."""
    per_place = chosen.transpose(0, 2, 1, 3).reshape(-1, chosen.shape[1] * chosen.shape[3])
    return float(np.mean([len(np.unique(place)) for place in per_place]))


def main() -> int:
    """Prints a line for each number of clients; 1 if one is far from a router without preferences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,8,64,256", help="how many, between commas (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=16, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    results_file.add_flags(parser)
    parser.add_argument("engine", nargs=argparse.REMAINDER, help="fields of EngineConfig, after --")
    args = parser.parse_args()
    config = engine_config(args.engine)
    checkpoint = resolve(config.model, revision=config.revision, load_format=config.load_format)
    length = args.input_len + args.output_len
    most = max(map(int, args.clients.split(",")))
    if config.num_pages is None:  # no more than they need: the second pass needs memory, too
        config = dataclasses.replace(config, num_pages=most * (length // config.page_size + 2))
    engine = build_engine(config)
    results = results_file.from_flags(args)
    params, rng, far = engine._runner._params, np.random.default_rng(0), False
    num_experts = params["router"].shape[1]
    text = checkpoint.config.get("text_config") or checkpoint.config
    top_k = text["num_experts_per_tok"]
    for clients in map(int, args.clients.split(",")):
        prompts = rng.integers(0, engine.info.vocab_size, (clients, args.input_len)).astype(np.int32)
        tokens = complete(engine, prompts, args.output_len)[:, :-1]  # the last one is computed by no step
        dtype, device = params["router"].dtype, jax.devices()[0]
        run = Recorder(checkpoint.config, device, params, dtype, num_sequences=clients, max_len=length)
        group = max(1, TOKENS_AT_ONCE // length)
        parts = [list(range(i, min(i + group, clients))) for i in range(0, clients, group)]
        chosen = np.concatenate([run.chosen(part, tokens[part], top_k) for part in parts], axis=1)
        hit = count(chosen[:, :, args.input_len :])
        uniform = num_experts * (1 - (1 - top_k / num_experts) ** clients)
        far |= abs(hit / uniform - 1) > NEAR
        print(f"{clients} clients: {hit:.1f} of {num_experts} experts a layer; without preferences {uniform:.1f}")
        if results is not None:
            row = {"clients": clients, "experts_hit": round(hit, 2), "uniform": round(uniform, 2)}
            results.row("experts", row, operator.itemgetter("clients"))
    engine.close()
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
