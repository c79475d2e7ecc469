"""Runs a script in the environment that has Triton and XLA's backend for NVIDIA GPUs, which is not the tests' own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-capture" / "bin" / "python"
H200 = ROOT / "tests" / "data" / "h200_target_config.pbtxt"


def run(script: str, *args: object, timeout_s: float = 600, **variables: str) -> Any:
    """What a script of this repository prints as JSON in its last line, run without a GPU; skips without Triton."""
    if not PYTHON.exists():
        pytest.skip("no .venv-capture: run JAXINFER_VENV=.venv-capture bash scripts/setup.sh capture")
    return run_with(PYTHON, script, *args, timeout_s=timeout_s, JAX_PLATFORMS="cpu", **variables)


def run_with(python: str | Path, script: str, *args: object, timeout_s: float, **variables: str) -> Any:
    """The same with another Python, and on what JAX finds there."""
    # What conftest sets for the tests on the CPU would change what is compiled.
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("JAX_", "XLA_", "TRITON_INTERPRET"))}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [python, ROOT / script, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])
