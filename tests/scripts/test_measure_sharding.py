"""Figures of several GPUs stand beside those of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import measure_sharding
import pytest

from jaxinfer.sharding.mesh import parse

ROOT = Path(__file__).parents[2]


def section(model, mesh, variants):
    return {"model": model, "mesh": mesh, "variants": variants}


def row(step_ms, tokens, margins=(0.5, 0.001)):
    return {"rows": 2, "step_ms": step_ms, "waited_ms": step_ms, "dispatch_ms": 0.1, "tokens_per_s": 2e3 / step_ms,
            "predicted_ms": step_ms / 2, "tokens": tokens, "margins": list(margins)}  # fmt: skip


def test_a_mesh_is_compared_with_one_device_and_other_tokens_are_told_with_their_margins():
    one = section("m", "tensor=1", {"written": [row(4.0, [5, 6])]})
    two = section("m", "tensor=2", {"split": [row(2.0, [5, 6])], "captured": [row(2.5, [5, 7])]})
    alone, split, captured = measure_sharding.compare({"m-1": one, "m-2": two})
    assert "speed_up" not in alone
    assert (split["speed_up"], split["num_other_tokens"], split["largest_margin_of_those"]) == (2.0, 0, 0.0)
    assert (captured["speed_up"], captured["num_other_tokens"], captured["largest_margin_of_those"]) == (1.6, 1, 0.001)


def test_every_section_is_of_a_known_model_and_variants_and_has_one_on_a_single_device():
    for name, found in measure_sharding.SECTIONS.items():
        assert found.model in measure_sharding.MODELS and set(found.variants) <= set(measure_sharding.VARIANTS)
        assert parse(measure_sharding.SECTIONS[f"{found.model}-1"].mesh) == {"tensor": 1}
        assert ("--xla" in found.flags) == name.endswith("profiled")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tiny_models_are_measured_on_virtual_devices(tmp_path):
    out = tmp_path / "sharding.json"
    names = ["qwen3-30b-a3b-1", "qwen3-30b-a3b-2"]
    command = [sys.executable, ROOT / "scripts/measure_sharding.py", "--tiny", "--steps", "2", "--timeout-s", "400"]
    command += ["--sections", *names, "--out", out]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert list(found["sections"]) == names and not found["failed"]
    two = found["sections"]["qwen3-30b-a3b-2"]
    assert set(two["variants"]) == {"written"}
    assert set(two["weights_bytes"].values()) == {two["planned_weights_bytes"]}
    assert all(line["num_other_tokens"] == 0 for line in found["comparison"] if "speed_up" in line)
