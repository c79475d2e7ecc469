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

A step with a margin below 1e-4 counts as a tie in the tests; the script refuses a model whose steps come near it, and
one whose routers come near a tie between the last expert chosen and the next, or whose rounding would fill what the
tests allow: the gated delta rule normalises what can be nearly nothing.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers
from golden_families import FAMILIES

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
PROMPT_LENGTHS = (1, 13, 39)  # tokens: one alone, and two that end inside a page of 8 or 16
HYBRID_LENGTHS = (*PROMPT_LENGTHS, 150)  # the gated delta rule is computed in chunks of 64: two of them and a part
NEW_TOKENS = 16
MAX_FOLDER_BYTES = 400_000
MAX_HYBRID_FOLDER_BYTES = 680_000
MIN_MARGIN = 2e-3
MIN_ROUTER_MARGIN = 1e-4  # of the experts' probabilities, at every token and layer
MAX_ROUNDING = 3e-5  # of logits, between one pass and a pass per token: the tests allow 1e-4 in all
MIN_DISTINCT = 6  # of the 16 greedy tokens: a model that repeats itself hides errors of position and cache


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Moves every weight off its initial value, norms and biases too: at 1 and 0 they would hide an error."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                weight.copy_(torch.rand(weight.shape, generator=generator) * 2)
            elif name.endswith("dt_bias"):  # so that states last for tens of tokens, as they do in trained models
                weight.copy_(noise - 3)
            elif "conv1d" in name:
                weight.copy_(noise * 0.5)
            elif "norm" in name:
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


def published(weights: dict[str, torch.Tensor], config: transformers.PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The tensors of a composite Qwen3.5 as published, from those that transformers saves of its text model.

    The experts of a layer are one tensor a projection, (E, 2I, H) with the gate's rows first and (E, H, I). A tower for
    images and a layer that predicts a second token come along, for whoever loads the text to leave alone.
    """
    text, generator = config.text_config, torch.Generator().manual_seed(0)
    arrays = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    for layer in range(text.num_hidden_layers if "moe" in config.model_type else 0):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([arrays.pop(f"{experts}.{e}.{kind}_proj.weight") for e in range(text.num_experts)])
            for kind in ("gate", "up", "down")
        )
        arrays |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
    tower = transformers.AutoModel.from_config(config.vision_config).state_dict()
    shapes = {f"model.visual.{name}": weight.shape for name, weight in tower.items()}
    width = text.hidden_size
    shapes |= {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.layers.0.input_layernorm.weight": (width,),
        "mtp.norm.weight": (width,),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
    }
    return arrays | {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@torch.no_grad()
def token_by_token(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one pass per token over a cache."""
    cache, logits = None, []
    for token in prompt:
        output = model(token[None, None], cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits[0, 0])
    return torch.stack(logits)


def load(folder: pathlib.Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


def watch_routers(model: torch.nn.Module) -> list[float]:
    """A list that grows, with every router's every pass, by the least probability between a token's last and next."""
    margins = []

    def note(router: torch.nn.Module, _, output: tuple[torch.Tensor, ...]) -> None:
        top = output[0].softmax(-1).topk(router.top_k + 1).values
        margins.append(float((top[:, -2] - top[:, -1]).min()))

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(note)
    return margins


def expected(
    model: torch.nn.Module, lengths: tuple[int, ...], eos_ids: set[int], generator: torch.Generator
) -> dict[str, np.ndarray] | None:
    """What expected.npz holds; None where a choice nears a tie, or a continuation repeats itself or ends the text."""
    arrays = {}
    router_margins = watch_routers(model)
    for i, length in enumerate(lengths):
        prompt = torch.randint(3, 120, (length,), generator=generator)
        with torch.no_grad():
            logits = model(prompt[None], use_cache=False).logits[0]
        tokens, margins = greedy(model, prompt)
        chosen = set(tokens.tolist())
        if margins.min() < MIN_MARGIN or len(chosen) < MIN_DISTINCT or eos_ids & chosen:
            return None
        if router_margins and min(router_margins) < MIN_ROUTER_MARGIN:
            return None
        if (token_by_token(model, prompt) - logits).abs().max() > MAX_ROUNDING:
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
    text = config.get("text_config", config)
    eos_ids = set(np.atleast_1d(text["eos_token_id"]).tolist())
    hybrid = "linear_key_head_dim" in text
    lengths = HYBRID_LENGTHS if hybrid else PROMPT_LENGTHS
    for seed in range(1, 200):
        generator = torch.Generator().manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(parsed).float().eval()
        randomise(model, generator)
        with tempfile.TemporaryDirectory() as saved:
            model.save_pretrained(saved)
            shutil.copyfile(pathlib.Path(saved) / "model.safetensors", folder / "model.safetensors")
        if "text_config" in config:
            weights = published(safetensors.torch.load_file(folder / "model.safetensors"), parsed)
            safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
        arrays = expected(load(folder), lengths, eos_ids, generator)
        if arrays is not None:
            break
    else:
        raise SystemExit(f"{family}: no seed gives continuations that serve")
    np.savez(folder / "expected.npz", **arrays)
    size = sum(path.stat().st_size for path in folder.iterdir())
    limit = MAX_HYBRID_FOLDER_BYTES if hybrid else MAX_FOLDER_BYTES
    if size > limit:
        raise SystemExit(f"{family}: {size} bytes, more than {limit}")
    margin = min(float(arrays[f"margins_{i}"].min()) for i in range(len(lengths)))
    spread = float(np.concatenate([arrays[f"logits_{i}"] for i in range(len(lengths))]).std())
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
