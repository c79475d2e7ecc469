"""jaxinfer doctor: what it looks at, and what makes it fail."""

from __future__ import annotations

import json
import subprocess

import jax
import pytest

from jaxinfer import build, cli, doctor, memory_plan
from jaxinfer.config import EngineConfig
from tests.api.test_serve_process import GOLDEN, SPOILED, doctored, run_cli, spoil

LOOKED_AT = ("python", "jax", "jaxlib", "driver", "devices", "memory per device", "model", "fit")


def examine(capsys, *args):
    status = cli.main(["doctor", *args])
    return status, capsys.readouterr().out


def test_healthy_machine_and_model_exit_with_0(capsys):
    status, out = examine(capsys, str(GOLDEN))
    assert status == 0
    lines = dict(line[5:].split("  ", 1) for line in out.splitlines())
    assert all(line.startswith("ok   ") for line in out.splitlines())
    found = {name.strip(): value.strip() for name, value in lines.items()}
    assert set(LOOKED_AT) <= found.keys()
    assert found["model"].endswith("llama: LlamaForCausalLM, safetensors")
    assert "of weights" in found["fit"] and "float32" in found["fit"]


def test_json_report_says_what_the_text_says(capsys):
    status, out = examine(capsys, str(GOLDEN), "--json")
    report = json.loads(out)
    assert (status, report["healthy"]) == (0, True)
    assert set(LOOKED_AT) <= {finding["name"] for finding in report["findings"]}
    assert all(finding["ok"] for finding in report["findings"])


def test_memory_by_part_is_what_an_engine_takes(capsys):
    status, out = examine(capsys, str(GOLDEN), "--memory", "--num-pages", "40", "--max-num-seqs", "2", "--json")
    found = {f["name"].strip(): f["value"] for f in json.loads(out)["findings"]}
    assert status == 0
    assert "40 pages of 16 tokens of" in found["KV cache"]
    config = EngineConfig(model=str(GOLDEN), num_pages=40, max_num_seqs=2, max_num_batched_tokens=16)
    parts = {part.name: part.num_bytes for part in memory_plan.plan_memory(config)}
    assert {*parts, "together"} <= set(found)
    engine = build.build_engine(config, show_progress=False)
    params, state = engine._runner._params, engine._runner._state
    assert parts["weights"] == sum(a.nbytes for a in params.values())
    assert parts["KV cache"] == state.k_pages.nbytes + state.v_pages.nbytes
    assert sum(parts.values()) == sum(a.nbytes for a in [*params.values(), *jax.tree.leaves(state)])
    engine.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no-such-model"], "is no file, no folder and no Hub id"),
        ([str(GOLDEN), "-tp", "3"], "does not divide"),
        ([str(GOLDEN), "-tp", "5"], "tensor_parallel_size is 5, but there are 4 devices"),
        ([str(GOLDEN), "--max-model-len", "257"], "max_model_len is 257; the model was made for at most 256 tokens"),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_model_that_cannot_run_here_exits_with_1_and_says_why(args, form, message, capsys):
    status, out = examine(capsys, *args, *form)
    assert status == 1
    assert message in out
    if form:
        assert [f["name"] for f in json.loads(out)["findings"] if not f["ok"]] == ["model"]
    else:
        assert [line for line in out.splitlines() if line.startswith("FAIL")] == [out.splitlines()[-1]]


def test_tensors_that_do_not_fit_are_a_fault(tmp_path, capsys):
    status, out = examine(capsys, doctored(tmp_path / "model", spoil))
    assert status == 1 and SPOILED in out


def test_backend_that_jax_cannot_start_is_a_fault_and_the_driver_is_reported_all_the_same():
    done = run_cli("doctor", str(GOLDEN), "--json", JAX_PLATFORMS="cuda")
    assert (done.returncode, done.stderr) == (1, "")
    faults = {finding["name"]: finding["value"] for finding in json.loads(done.stdout)["findings"] if not finding["ok"]}
    assert faults["devices"].startswith("JAX cannot start on JAX_PLATFORMS 'cuda': ")


def test_configuration_that_cannot_work_is_refused_before_anything_is_looked_at(capsys):
    assert cli.main(["doctor", "--page-size", "12"]) == 1
    assert capsys.readouterr().err == "jaxinfer doctor: page_size is 12; it must be a power of two from 8 to 256\n"


def test_default_model_is_found(capsys):
    status, out = examine(capsys)
    assert status == 0
    assert "smollm2-135m: LlamaForCausalLM, gguf" in out


def test_recurrent_states_are_told_apart_from_what_every_slot_has():
    config = EngineConfig(model=str(GOLDEN.parent / "qwen3_5"), num_pages=8, max_num_seqs=2, num_state_copies=3)
    parts = {part.name: part for part in memory_plan.plan_memory(config)}
    # Six layers of 2 x 2 matrices of 16 x 16, and 4 inputs of 2 x 64 channels; 2 slots, one for padding, 3 copies.
    assert parts["recurrent states"].num_bytes == 4 * 6 * (2 * 2 * 16 * 16 + 4 * 2 * 64) * 6
    assert parts["recurrent states"].detail == "of 2 sequences, and 3 copies for the prefix cache"
    assert parts["page tables and sampling"].num_bytes < 10_000


def test_weights_that_memory_does_not_hold_are_a_fault(monkeypatch):
    monkeypatch.setattr(doctor, "_device_memory", lambda _: 1000)
    report = doctor.examine(EngineConfig(model=str(GOLDEN)))
    assert [finding.name for finding in report.findings if not finding.ok] == ["fit"]


@pytest.mark.parametrize(
    ("answer", "ok", "value"),
    [
        (subprocess.CompletedProcess([], 9, "", "driver mismatch\n"), False, "nvidia-smi failed: driver mismatch"),
        (
            subprocess.CompletedProcess([], 0, "580.1, NVIDIA H200, 143771 MiB\n", ""),
            False,
            "580.1, NVIDIA H200, 143771 MiB: JAX does not see it; install jaxinfer[cuda13] or [cuda12]",
        ),
        (subprocess.TimeoutExpired([], 30), False, "nvidia-smi gave no answer in 30 s"),
    ],
)
def test_driver_without_a_card_for_jax_is_a_fault_that_says_what_to_do(answer, ok, value, monkeypatch):
    def run(*_, **__):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(doctor.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(doctor.subprocess, "run", run)
    assert doctor._driver([]) == doctor.Finding("driver", value, ok=ok)
