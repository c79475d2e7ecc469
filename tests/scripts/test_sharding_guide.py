"""The guide to sharding runs as it stands: its own assertions compare plans with what is real, and meshes with one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "scripts" / "sharding_guide.py"
LIMIT_S = 900
"""On two free cores it takes two minutes."""


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 30)
def test_the_guide_runs_from_its_first_cell_to_its_last():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_NUM", "XLA_FLAGS"))}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    done = subprocess.run(
        [sys.executable, str(GUIDE)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    for said in ("tensor=2 ", "pipeline=2 ", "tensor=2: the same tokens as one device", "refused: a tensor axis of 3"):
        assert said in done.stdout
    assert done.stdout.rstrip().endswith("the logits are the same")
