"""Whether this machine can serve a model: versions, devices, driver, memory, and the model's fit."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from checkpoints import load
from checkpoints.resolve import resolve
from jaxinfer.build import (
    REFUSALS,
    check_context,
    choose_mesh,
    choose_rules,
    find_devices,
    tensor_names,
)
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.kv_tiers import check_tiers
from jaxinfer.memory_plan import MemoryPart, plan_memory
from jaxinfer.models import registry
from jaxinfer.params import abstract_params, shard_bytes
from jaxinfer.runner.cache import token_bytes
from jaxinfer.sharding import rules

PACKAGES = ("jax", "jaxlib", "flax", "orbax-checkpoint", "tokenizers", "jax-triton", "triton")
DRIVER_TIMEOUT_S = 30.0
REQUIRED = ("jax", "jaxlib", "flax", "orbax-checkpoint", "tokenizers")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    ok: bool = True


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was looked at."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.ok for finding in self.findings)

    def to_json(self) -> str:
        """The report for programs."""
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return json.dumps({"healthy": self.healthy, "findings": findings}, indent=2)

    def __str__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        return "\n".join(f"{'ok  ' if f.ok else 'FAIL'} {f.name:{width}}  {f.value}" for f in self.findings)


def examine(config: EngineConfig, *, memory: bool = False) -> Report:
    """Looks at the machine, then at the model that `config` names; `memory`: and at where the bytes would go."""
    findings = [Finding("python", platform.python_version()), *_packages()]
    try:
        devices = find_devices()
    except ConfigError as error:
        return Report((*findings, _driver([]), Finding("devices", str(error), ok=False)))
    findings.append(_driver(devices))
    kinds = ", ".join(f"{device.device_kind} ({device.platform})" for device in devices)
    limit = _device_memory(devices[0])
    findings += [Finding("devices", kinds), Finding("memory per device", _gib(limit)), *_model(config, limit)]
    if memory and all(finding.ok for finding in findings):
        findings += _memory(config, limit)
    return Report(tuple(findings))


def _packages() -> list[Finding]:
    found = []
    for name in PACKAGES:
        try:
            found.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, "not installed", ok=name not in REQUIRED))
    return found


def _driver(devices: Sequence[jax.Device]) -> Finding:
    """The NVIDIA driver. A card that JAX does not see is wrong; no card at all is not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("driver", "no NVIDIA driver: models run on the CPU")
    query = [tool, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Finding("driver", f"nvidia-smi gave no answer in {DRIVER_TIMEOUT_S:.0f} s", ok=False)
    if answer.returncode != 0:
        return Finding("driver", f"nvidia-smi failed: {answer.stderr.strip() or answer.stdout.strip()}", ok=False)
    seen = any(device.platform == "gpu" for device in devices)
    note = "" if seen else ": JAX does not see it; install jaxinfer[cuda13] or [cuda12]"
    return Finding("driver", answer.stdout.strip().replace("\n", "; ") + note, ok=seen)


def _device_memory(device: jax.Device) -> int:
    """Bytes that arrays may take on one device."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return device.memory_stats()["bytes_limit"]


def _model(config: EngineConfig, memory: int) -> list[Finding]:
    try:
        checkpoint = resolve(config.model, revision=config.revision, load_format=config.load_format)
        mesh, axis_rules = choose_mesh(config), choose_rules(config)
        model = registry.for_mesh(checkpoint.config, tensor_names(checkpoint), mesh, axis_rules)
        check_context(config, model)
        check_tiers(config, model, rules.num_shards(rules.ROWS, mesh, axis_rules))
        if checkpoint.tensors is not None:
            load.check_complete(load.wanted_tensors(model.specs), checkpoint.tensors.shapes(), model.ignored)
    except ValueError as error:
        return [Finding("model", f"{config.model}: {error}", ok=False)]
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    weights = shard_bytes(
        abstract_params(model.specs, jnp.dtype(dtype), rules.shardings(model.specs, mesh, axis_rules))
    )
    parts = rules.num_shards("kv_heads", mesh, axis_rules) * rules.num_shards("layers", mesh, axis_rules)
    context = token_bytes(model.cache, jnp.dtype(dtype)) * (config.max_model_len or model.max_model_len) // parts
    fit = f"{_gib(weights)} of weights and {_gib(context)} for one full context, in {dtype}"
    return [
        Finding("model", f"{config.model}: {model.architecture}, {checkpoint.format}"),
        Finding("fit", f"{fit}; {_gib(memory)} per device", ok=weights < memory),
    ]


def _memory(config: EngineConfig, limit: int) -> list[Finding]:
    """What an engine would take of each device and of the host, part by part."""
    try:
        parts = plan_memory(config)
    except REFUSALS as error:
        return [Finding("memory", str(error), ok=False)]
    total = sum(part.num_bytes for part in parts if part.on_device)
    together = Finding("  together", f"{total:>15,} bytes of {limit:,}", ok=total <= limit)
    return [*_parts(parts, on_device=True), together, *_parts(parts, on_device=False)]


def _parts(parts: Sequence[MemoryPart], *, on_device: bool) -> list[Finding]:
    return [
        Finding(f"  {part.name}", f"{part.num_bytes:>15,} bytes" + (f"  {part.detail}" if part.detail else ""))
        for part in parts
        if part.on_device == on_device
    ]


def _gib(num: int) -> str:
    return f"{num / 2**30:.2f} GiB"
