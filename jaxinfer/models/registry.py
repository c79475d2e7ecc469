"""From a published config to a model. An unknown or half-matching config is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models import decoder, llama, qwen2, qwen3
from jaxinfer.models.hf_config import HfConfig
from jaxinfer.models.model import Model, ModelError

FAMILIES = {
    "LlamaForCausalLM": llama.decoder,
    "Qwen2ForCausalLM": qwen2.decoder,
    "Qwen3ForCausalLM": qwen3.decoder,
}


def from_config(config: Mapping[str, Any]) -> Model:
    """The model of a config.json. ModelError for an architecture or a value that is not implemented."""
    names = config.get("architectures") or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"architectures is {names!r}; a list of names is needed")
    architecture = next((name for name in names if name in FAMILIES), None)
    if architecture is None:
        found = ", ".join(names) or f"none named (model_type {config.get('model_type')!r})"
        raise ModelError(f"architecture not supported: {found}; known: {', '.join(sorted(FAMILIES))}")
    hf = HfConfig(config)
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
        hf.problem(f"quantization_config {method!r} is not implemented")
    sizes = FAMILIES[architecture](hf)
    hf.finish(architecture)
    return decoder.build(architecture, sizes)
