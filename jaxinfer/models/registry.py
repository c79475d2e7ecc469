"""From a published config to a model. An unknown or half-matching config is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.models import decoder, llama, qwen2, qwen3, qwen3_moe, qwen3_next
from jaxinfer.models.hf_config import HfConfig
from jaxinfer.models.model import Model, ModelError
from jaxinfer.sharding import rules

FAMILIES = {
    "LlamaForCausalLM": llama.decoder,
    "Qwen2ForCausalLM": qwen2.decoder,
    "Qwen3ForCausalLM": qwen3.decoder,
    "MixtralForCausalLM": qwen3_moe.mixtral,
    "Qwen2MoeForCausalLM": qwen3_moe.qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe.decoder,
    "Qwen3NextForCausalLM": qwen3_next.decoder,
    "Qwen3_5ForCausalLM": qwen3_next.qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_next.qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_next.qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_next.qwen3_5_moe,
}


def from_config(config: Mapping[str, Any], tensors: Collection[str] = (), *, kv_shards: int = 1) -> Model:
    """The model of a config.json. ModelError for an architecture or a value that is not implemented.

    tensors: names in the checkpoint: of some families there are several published forms. kv_shards: devices that the
    KV heads are split over; where these are more, or no multiple, devices share KV heads if the queries can be shared
    out.
    """
    names = config.get("architectures") or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"architectures is {names!r}; a list of names is needed")
    architecture = next((name for name in names if name in FAMILIES), None)
    if architecture is None:
        found = ", ".join(names) or f"none named (model_type {config.get('model_type')!r})"
        raise ModelError(f"architecture not supported: {found}; known: {', '.join(sorted(FAMILIES))}")
    hf = HfConfig(config, tensors)
    if quantization := hf.get("quantization_config"):
        method = quantization.get("quant_method", quantization) if isinstance(quantization, Mapping) else quantization
        hf.problem(f"quantization_config {method!r} is not implemented")
    sizes = FAMILIES[architecture](hf)
    hf.finish(architecture)
    copies = kv_shards // math.gcd(kv_shards, sizes.num_kv_heads)
    if sizes.group % copies == 0:
        sizes = dataclasses.replace(sizes, kv_copies=copies)
    return decoder.build(architecture, sizes)


def for_mesh(
    config: Mapping[str, Any], tensors: Collection[str], mesh: rules.AnyMesh, axis_rules: rules.Rules
) -> Model:
    """The model of a config.json as a mesh runs it: with a copy of a KV head for each of the devices that share it.

    Raises as `from_config`; ShardingError for sizes that do not divide, with those that would work, for a mesh axis
    that splits nothing, for one that splits an array twice, and for one that splits a step and what it sums.
    """
    model = from_config(config, tensors, kv_shards=rules.num_shards("kv_heads", mesh, axis_rules))
    rules.check_used(model.specs, mesh, axis_rules, model.architecture)
    rules.check_divisible(model.specs, mesh, axis_rules, model.lengths)
    rules.partitions(model.specs, mesh, axis_rules)
    rules.check_apart(mesh, axis_rules)
    return model
