"""What every test runs under, said before anything imports JAX, and the files that tests share.

JAX reads its settings from the environment, which the workers of a run and the processes that tests start inherit.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

NUM_CPU_DEVICES = 4
"""Virtual devices of the CPU, so that meshes are tested in the same process."""
CACHE_BYTES = 2**30
"""Limit of the compilation cache. With a limit JAX locks it, so that the workers of a run can share it."""
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


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    if os.environ["JAX_PLATFORMS"] == "cpu":
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(NUM_CPU_DEVICES))
    if not hasattr(config, "workerinput"):  # the process that starts the workers, or the only one
        folder = tempfile.mkdtemp(prefix="jaxinfer-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(CACHE_BYTES)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of published files that the repository does not hold."""
    folder = os.environ.get("JAXINFER_TEST_ASSETS")
    if not folder:
        pytest.skip("JAXINFER_TEST_ASSETS is not set: the published files are not at hand")
    if not Path(folder).is_dir():
        pytest.fail(f"JAXINFER_TEST_ASSETS is {folder}, which is not a folder")
    return Path(folder)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    """Reads a family of tests/golden: golden("llama")."""

    def read(family: str) -> Golden:
        folder = GOLDEN / family
        if not folder.is_dir():
            known = ", ".join(sorted(path.name for path in GOLDEN.iterdir()))
            raise ValueError(f"no golden {family!r}; known: {known}")
        with np.load(folder / "expected.npz") as arrays:
            count = sum(name.startswith("prompt_") for name in arrays)
            columns = (
                [arrays[f"{kind}_{i}"] for i in range(count)] for kind in ("prompt", "logits", "tokens", "margins")
            )
            return Golden(folder, json.loads((folder / "config.json").read_text()), *columns)

    return read
