"""jaxinfer: large language models on NVIDIA GPUs, served from JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.agent.loop import Agent
    from jaxinfer.api import LLM, follow
    from jaxinfer.config import EngineConfig
    from jaxinfer.offline import run_batch
    from jaxinfer.serving import serve
    from jaxinfer.structured import StructuredOutputs
    from jaxinfer.types import SamplingParams

__all__ = ["LLM", "Agent", "EngineConfig", "SamplingParams", "StructuredOutputs", "follow", "run_batch", "serve"]

_HOMES = {
    "Agent": "jaxinfer.agent.loop",
    "LLM": "jaxinfer.api",
    "follow": "jaxinfer.api",
    "run_batch": "jaxinfer.offline",
    "serve": "jaxinfer.serving",
    "EngineConfig": "jaxinfer.config",
    "SamplingParams": "jaxinfer.types",
    "StructuredOutputs": "jaxinfer.structured",
}


def __getattr__(name: str) -> Any:
    """Public names on first use, so that parts which need no JAX, like the HTTP front end, do not load it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
