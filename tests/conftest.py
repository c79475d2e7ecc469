"""What every test runs under, said before anything imports JAX, and the files that tests share.

JAX reads its settings from the environment, which the workers of a run and the processes that tests start inherit.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

NUM_CPU_DEVICES = 4
"""Virtual devices of the CPU, so that meshes are tested in the same process."""
GOLDEN = Path(__file__).parent / "golden"


class Golden(NamedTuple):
    """A tiny model of one family and what transformers makes of it in float32 (scripts/make_goldens.py)."""

    folder: Path
    """config.json and model.safetensors, as published."""
    config: Mapping[str, Any]
    prompts: list[np.ndarray]
    """[T] int32 each."""
    logits: list[np.ndarray]
    """[T, V] float32 each, of one full forward pass."""
    tokens: list[np.ndarray]
    """[16] int32 each: the greedy continuation, past any EOS id."""
    margins: list[np.ndarray]
    """[16] float32 each: first minus second logit of each greedy step."""


def pytest_configure() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    # A shell's background job ignores interrupts, and so would the servers that tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A step that a cache had would not count as compiled, and an engine would write to the user's own cache. (A cache
    # shared by the workers of one run was measured too: it saved nothing.)
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
    if os.environ["JAX_PLATFORMS"] == "cpu":
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(NUM_CPU_DEVICES))
        # Compilation is most of what a run takes: without optimisation by LLVM it takes two thirds of the time.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of published files that the repository does not hold."""
    folder = os.environ.get("JAXINFER_TEST_ASSETS")
    if not folder:
        pytest.skip("JAXINFER_TEST_ASSETS is not set: the published files are not at hand")
    if not Path(folder).is_dir():
        pytest.fail(f"JAXINFER_TEST_ASSETS is {folder}, which is not a folder")
    return Path(folder)


def read_golden(family: str) -> Golden:
    """A family of tests/golden."""
    folder = GOLDEN / family
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in GOLDEN.iterdir()))
        raise ValueError(f"no golden {family!r}; known: {known}")
    with np.load(folder / "expected.npz") as arrays:
        count = sum(name.startswith("prompt_") for name in arrays)
        columns = ([arrays[f"{kind}_{i}"] for i in range(count)] for kind in ("prompt", "logits", "tokens", "margins"))
        return Golden(folder, json.loads((folder / "config.json").read_text()), *columns)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Reads a family of tests/golden: golden("llama")."""
    return read_golden
