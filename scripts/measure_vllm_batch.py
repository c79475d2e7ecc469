"""Runs the rows of measure_batch.py through vLLM's offline `LLM.generate`, and keeps the figures beside the job's.

    python scripts/measure_vllm_batch.py --label qwen3-4b-dummy --rows 20000 --time-limit-s 3600 --model FOLDER

Where vLLM is installed, and under the label, the rows and the lengths of the job that it is compared with. All rows go
into one call with their own number of output tokens, at temperature 0 and past the end-of-sequence token. The call is
what is timed, and `ready_s` is what came before it: import, weights, compiling. The engine has vLLM's defaults but for
the dtype and the flags below; what they came to is kept as `settings`.

A call that the time limit cuts is recorded as far as it came, with "cut": true: the tokens of the rows that had ended
and of those that had not, over the time until then.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from make_batch_rows import make_rows
from measure_batch import SECTION, GpuUse, against_vllm, row_key
from results_file import Results, default_path, describe, read_json, versions

KIND = "vllm"
DTYPE = "bfloat16"
END_S = 15.0
"""What is left of the time limit for the engine's end."""
MEASURED = ("vllm", "torch", "triton", "flashinfer-python")
"""Packages whose versions the figures depend on."""


class OutOfTime(Exception):
    """The call has not ended when its time was over."""


class Watched:
    """What an engine of vLLM has made of the rows of one call, which ends with OutOfTime at a time by the clock."""

    def __init__(self, engine: Any, end_s: float):
        self._engine = engine
        self._end_s = end_s
        self._step = engine.step
        self.tokens_by_row: list[int] = []  # of rows that have ended
        engine.step = self.step

    def step(self) -> Any:
        outputs = self._step()
        self.tokens_by_row += [len(output.outputs[0].token_ids) for output in outputs if output.finished]
        if time.monotonic() > self._end_s and self._engine.has_unfinished_requests():
            raise OutOfTime
        return outputs

    def unfinished_tokens(self) -> int:
        """Output tokens of rows that have not ended."""
        states = self._engine.output_processor.request_states.values()
        return sum(state.detokenizer.num_output_tokens() for state in states)


def settings(llm: Any) -> dict[str, Any]:
    """What the engine's defaults came to."""
    config = llm.llm_engine.vllm_config
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "enforce_eager": config.model_config.enforce_eager,
    }


def measure(args: argparse.Namespace, rows: Sequence[dict[str, Any]], end_s: float) -> dict[str, Any] | None:
    """The figures of the rows through one call; None if there is no time left for it once the engine is ready."""
    start_s = time.monotonic()
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        model=str(args.model),
        load_format=args.load_format,
        dtype=DTYPE,
        max_model_len=args.max_model_len,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
    prompts = [{"prompt_token_ids": row["prompt"]} for row in rows]
    kept = ("max_tokens", "temperature", "ignore_eos")
    sampling = [SamplingParams(**{name: row[name] for name in kept}) for row in rows]
    watched = Watched(llm.llm_engine, end_s)
    with GpuUse() as use:
        first_s = time.monotonic()
        if first_s > end_s:
            return None
        try:
            llm.generate(prompts, sampling)
            cut = False
        except OutOfTime:
            cut = True
        last_s = time.monotonic()
        busy = use.share(first_s, last_s)
    num_tokens = sum(watched.tokens_by_row) + (watched.unfinished_tokens() if cut else 0)
    figures = {
        "duration": round(last_s - first_s, 3),
        "completed": len(watched.tokens_by_row),
        "failed": 0 if cut else len(rows) - len(watched.tokens_by_row),
        "total_output_tokens": num_tokens,
        "output_throughput": round(num_tokens / (last_s - first_s), 3),
        "gpu_busy_share": busy,
        "ready_s": round(first_s - start_s, 1),
        "settings": settings(llm),
    }
    asked = sum(row["max_tokens"] for row in rows)
    if not cut and num_tokens != asked:
        print(f"{num_tokens} output tokens where the rows ask for {asked}", file=sys.stderr)
        figures["wrong_length"] = True
    return figures | ({"cut": True} if cut else {})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--label", required=True, help="what is measured: the model, and how it is loaded")
    add("--model", type=Path, required=True, help="folder with the model's config.json and its tokenizer")
    add("--load-format", default="dummy", help="vLLM's: auto for the folder's weights (default: %(default)s)")
    add("--max-model-len", type=int, default=4096, help="in tokens (default: %(default)s)")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the memory (default: %(default)s)")
    add("--rows", type=int, default=20_000, help="(default: %(default)s)")
    add("--prompt", type=int, nargs=2, default=(32, 2048), help="shortest and longest, in tokens (default: 32 2048)")
    add("--output", type=int, nargs=2, default=(16, 512), help="shortest and longest, in tokens (default: 16 512)")
    add("--vocab-size", type=int, default=151_643, help="prompts are of ids below this (default: %(default)s)")
    add("--time-limit-s", type=float, default=3600.0, help="seconds for everything (default: %(default)s)")
    add("--results", type=Path, help="file to merge into (default: scripts/results/<device>.json)")
    args = parser.parse_args(argv)
    if args.rows < 1:
        parser.error(f"--rows is {args.rows}; at least 1 is needed")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model is {args.model}, which has no config.json; it is to be a model's folder")
    longest = args.prompt[1] + args.output[1]
    if longest > args.max_model_len:
        parser.error(f"--max-model-len is {args.max_model_len}; the longest row may have {longest} tokens")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end_s = time.monotonic() + args.time_limit_s - END_S
    run = describe()
    path = args.results or default_path()
    results = Results(path, args.label, run | {"versions": run["versions"] | versions(MEASURED)})
    lengths = tuple(args.prompt), tuple(args.output)
    rows = [row["body"] for row in make_rows(args.rows, *lengths, args.vocab_size, 0)]
    figures = measure(args, rows, end_s)
    if figures is None:
        print(f"{KIND}: not measured", flush=True)
        return 1
    print(f"{KIND}: {json.dumps(figures)}", flush=True)
    shape = {"rows": args.rows, "prompt": list(args.prompt), "output": list(args.output)}
    results.row(SECTION, {"kind": KIND} | shape | figures, row_key)
    for line in against_vllm(read_json(path)[SECTION][args.label]):
        print(line, flush=True)
    return 1 if figures.keys() & {"cut", "wrong_length"} or figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
