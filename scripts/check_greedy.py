"""Compares the greedy answers of this machine's GPU with what the same weights choose in float32 on its CPU.

    JAX_PLATFORMS=cuda,cpu python scripts/check_greedy.py [--model FOLDER] [--record LABEL]

The engine answers the prompts of the demo and the README in bfloat16 and in float32, one at a time and all together.
The CPU then reads each answer in float32: until the first token that it would not have chosen, its own greedy answer is
the same. The gap of a token is how much likelier, in nats and in float32, the likeliest token is in its place; below
--tie the choice counts as one between equals. Exits with 1 when a gap, of any token of an answer, is not below it.
Where JAX has no GPU, the engine runs on the CPU, too.
"""

from __future__ import annotations

import argparse
import gc
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import results_file
from model_run import ModelRun, sharding

from checkpoints.resolve import resolve
from jaxinfer import LLM, SamplingParams, build
from jaxinfer.config import DEFAULT_MODEL
from jaxinfer.models import registry

PROMPTS = {
    "Write one sentence about the moon.": True,
    "What is a page table?": True,
    "The capital of France is": False,
    "Water boils at": False,
    "Once upon a time": False,
}
"""Whether the chat template goes around it."""
MAX_LEN = 256
"""Tokens of prompt and answer."""
ENGINE = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 512, "num_pages": 8 * MAX_LEN // 16}


class Answer(NamedTuple):
    """What the engine made of a prompt."""

    prompt: str
    batch: str  # "alone" or "together"
    prompt_ids: list[int]
    token_ids: list[int]
    text: str


def answers(model: str, dtype: str, max_tokens: int) -> list[Answer]:
    """The greedy answers of an engine on JAX's first device. One of build.REFUSALS where it cannot run the model."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(model, dtype=dtype, show_progress=False, **ENGINE) as llm:
        prompts = [
            llm.chat_prompt([{"role": "user", "content": text}])
            if is_chat
            else llm.tokenizer.encode(text, add_special_tokens=True)
            for text, is_chat in PROMPTS.items()
        ]
        by_batch = {
            "alone": [llm.generate(prompt, sampling)[0] for prompt in prompts],
            "together": llm.generate(prompts, sampling),
        }
    return [
        Answer(text, batch, prompt, out.outputs[0].token_ids, out.outputs[0].text)
        for batch, outputs in by_batch.items()
        for text, prompt, out in zip(PROMPTS, prompts, outputs, strict=True)
    ]


def float32_reader(model: str) -> Callable[[Answer], np.ndarray]:
    """Gives the log-probabilities [N, V] from which an answer's N tokens are chosen, in float32 on the CPU."""
    checkpoint = resolve(model)
    described, cpu = registry.from_config(checkpoint.config), jax.devices("cpu")[0]
    with jax.default_device(cpu):
        places = dict.fromkeys(described.specs, sharding(cpu))
        params = build.load_params(
            checkpoint, described, jnp.dtype(jnp.float32), places, seed=0, progress=lambda *_: None
        )
        run = ModelRun(checkpoint.config, cpu, params, jnp.dtype(jnp.float32), num_sequences=1, max_len=MAX_LEN)

    def read(answer: Answer) -> np.ndarray:
        start, ids = len(answer.prompt_ids), [*answer.prompt_ids, *answer.token_ids]
        padded = np.zeros((1, MAX_LEN), np.int32)  # one size is compiled; what comes after a token does not change it
        padded[0, : len(ids)] = ids
        return run([0], padded, 0)[start - 1 : len(ids) - 1]

    return read


def compare(logprobs: np.ndarray, token_ids: Sequence[int], tie: float) -> dict[str, Any]:
    """Figures of an answer [N], from the float32 log-probabilities [N, V] of its places.

    first_difference: how many tokens come before the first one that float32 would not have chosen, None without one.
    """
    best = logprobs.argmax(1)
    gaps = logprobs.max(1) - logprobs[np.arange(len(token_ids)), token_ids]
    different = np.flatnonzero(best != token_ids)
    figures: dict[str, Any] = {"num_tokens": len(token_ids), "first_difference": None}
    if len(different):
        at = int(different[0])
        figures |= {
            "first_difference": at,
            "chosen": int(token_ids[at]),
            "float32_chooses": int(best[at]),
            "gap_nats": round(float(gaps[at]), 5),
            "is_tie": bool(gaps[at] < tie),
        }
    return figures | {"num_different": len(different), "largest_gap_nats": round(float(gaps.max()), 5)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="alias, or a folder with weights and tokenizer (default: %(default)s)")
    add("--dtypes", default="bfloat16,float32", help="of the engine, between commas (default: %(default)s)")
    add("--max-tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    add("--tie", type=float, default=0.05, metavar="NATS", help="choices closer than this are between equals (default: "
        "%(default)s)")  # fmt: skip
    results_file.add_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line for each answer."""
    args = parse(argv)
    found: dict[str, list[Answer]] = {}
    for dtype in args.dtypes.split(","):
        try:
            found[dtype] = answers(args.model, dtype, args.max_tokens)
        except (*build.REFUSALS, NotImplementedError) as error:
            print(f"check_greedy: {dtype} is not compared: {error}", file=sys.stderr, flush=True)
        gc.collect()  # the engine's arrays, before the next one asks for memory
    if not found:
        return 1
    device = jax.devices()[0].device_kind
    results = results_file.from_flags(args, device=device, model=args.model, tie_nats=args.tie)
    read, failed = float32_reader(args.model), False
    for dtype, of_dtype in found.items():
        for answer in of_dtype:
            figures = compare(read(answer), answer.token_ids, args.tie)
            failed |= figures["largest_gap_nats"] >= args.tie
            print(line(dtype, answer, figures), flush=True)
            if results is not None:
                row = {"prompt": answer.prompt, "dtype": dtype, "batch": answer.batch, **figures, "text": answer.text}
                results.row("greedy", row, operator.itemgetter("prompt", "dtype", "batch"))
    return int(failed)


def line(dtype: str, answer: Answer, figures: dict[str, Any]) -> str:
    told = f"{dtype:8s} {answer.batch:8s} {answer.prompt!r}: "
    if figures["first_difference"] is None:
        return told + f"all {figures['num_tokens']} tokens are float32's"
    tie = "a tie" if figures["is_tie"] else "no tie"
    return (
        f"{told}{figures['first_difference']} of {figures['num_tokens']} tokens until the first difference, "
        f"{figures['gap_nats']:.4f} nats ({tie}); largest gap {figures['largest_gap_nats']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
