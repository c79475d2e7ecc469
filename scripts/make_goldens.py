"""Writes tests/golden/<family>/: tiny random models in their published form, and what transformers makes of them.

It runs in an environment of its own, so that the test suite needs no torch:

    python3 -m venv oracle
    oracle/bin/pip install transformers==5.24.0 gguf 'torch==2.13.*'    # a CPU build of torch is enough
    oracle/bin/python scripts/make_goldens.py [family ...]

Each folder holds

    config.json         as the families are published: some in the old spelling of RoPE, some in the new
    model.safetensors   float32, published tensor names
    expected.npz        per prompt i: prompt_i [T] int32; logits_i [T, V] float32, of one full forward pass;
                        tokens_i [16] int32, the greedy continuation; margins_i [16] float32, first minus second logit

A step with a margin below 1e-4 counts as a tie in the tests; the script refuses a model whose steps come near it.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
PROMPT_LENGTHS = (1, 13, 39)  # tokens: one alone, and two that end inside a page of 8 or 16
NEW_TOKENS = 16
MAX_FOLDER_BYTES = 400_000
MIN_MARGIN = 2e-3
MIN_DISTINCT = 6  # of the 16 greedy tokens: a model that repeats itself hides errors of position and cache
EOS = 127

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
QWEN2 = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}
QWEN3 = {**SIZES, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6}

FAMILIES = {
    # Llama 3.1: frequencies scaled by wavelength, several ids that end the text.
    "llama": {
        **LLAMA,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "eos_token_id": [EOS, EOS - 1],
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    # SmolLM2: an odd number of heads per key-value head, no lm_head tensor.
    "llama_tied": {
        **LLAMA,
        "num_hidden_layers": 3,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "hidden_size": 48,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "llama_bias": {
        **LLAMA,
        "num_hidden_layers": 2,
        "intermediate_size": 80,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    # Qwen2.5 with its window switched on: layer 0 sees everything, layers 1 and 2 the last 8 tokens.
    "qwen2": {
        **QWEN2,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    # Qwen2.5 as its model card extends it: yarn by hand, and a window that is named but not used.
    "qwen2_yarn": {
        **QWEN2,
        "num_hidden_layers": 2,
        "intermediate_size": 80,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 1,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"},
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    # Qwen3: 4 heads of 32 are wider than the hidden size.
    "qwen3": {
        **QWEN3,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "head_dim": 32,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "qwen3_tied": {
        **QWEN3,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "head_dim": 16,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 3,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Moves every weight off its initial value, norms and biases too: at 1 and 0 they would hide an error."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.add_(noise * 0.1)
            elif "embed" in name or "lm_head" in name:
                weight.copy_(noise * 0.08)
            else:  # large beside the embeddings, so that tied models do not just repeat their last token
                weight.copy_(noise * 0.16)


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The greedy continuation and its margins, by a full forward pass per token; past any EOS id."""
    ids, margins = prompt[None], []
    for _ in range(NEW_TOKENS):
        top = model(ids, use_cache=False).logits[0, -1].topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        ids = torch.cat([ids, top.indices[None, :1]], dim=1)
    return ids[0, len(prompt) :].numpy().astype(np.int32), np.array(margins, np.float32)


def load(folder: pathlib.Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def expected(model: torch.nn.Module, eos_ids: set[int], generator: torch.Generator) -> dict[str, np.ndarray] | None:
    """What expected.npz holds; None where a continuation nears a tie, repeats itself or would end the text."""
    arrays = {}
    for i, length in enumerate(PROMPT_LENGTHS):
        prompt = torch.randint(3, 120, (length,), generator=generator)
        with torch.no_grad():
            logits = model(prompt[None], use_cache=False).logits[0]
        tokens, margins = greedy(model, prompt)
        chosen = set(tokens.tolist())
        if margins.min() < MIN_MARGIN or len(chosen) < MIN_DISTINCT or eos_ids & chosen:
            return None
        arrays |= {
            f"prompt_{i}": prompt.numpy().astype(np.int32),
            f"logits_{i}": logits.numpy(),
            f"tokens_{i}": tokens,
            f"margins_{i}": margins,
        }
    return arrays


def make(family: str, config: dict) -> None:
    """Writes one folder, from weights and prompts of the first seed that serves."""
    folder = GOLDEN / family
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    parsed = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    parsed._attn_implementation = "eager"
    eos_ids = set(np.atleast_1d(config["eos_token_id"]).tolist())
    for seed in range(1, 200):
        generator = torch.Generator().manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(parsed).float().eval()
        randomise(model, generator)
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            shutil.copyfile(pathlib.Path(saved) / "model.safetensors", folder / "model.safetensors")
        arrays = expected(load(folder), eos_ids, generator)
        if arrays is not None:
            break
    else:
        raise SystemExit(f"{family}: no seed gives continuations that serve")
    np.savez(folder / "expected.npz", **arrays)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_FOLDER_BYTES:
        raise SystemExit(f"{family}: {size} bytes, more than {MAX_FOLDER_BYTES}")
    margin = min(float(arrays[f"margins_{i}"].min()) for i in range(len(PROMPT_LENGTHS)))
    spread = float(np.concatenate([arrays[f"logits_{i}"] for i in range(len(PROMPT_LENGTHS))]).std())
    print(f"{family}: seed {seed}, {size} bytes, smallest margin {margin:.4f}, logits' standard deviation {spread:.2f}")


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # one order of summation on every machine
    names = sys.argv[1:] or list(FAMILIES)
    for family in names:
        if family not in FAMILIES:
            raise SystemExit(f"no family {family!r}; known: {', '.join(FAMILIES)}")
        make(family, FAMILIES[family])


if __name__ == "__main__":
    main()
