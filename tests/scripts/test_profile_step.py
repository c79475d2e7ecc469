"""scripts/profile_step.py: traces in the documented format, the limits of a step, and a whole run on the CPU."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import profile_step
import pytest
import step_timing
import step_trace
from step_spec import StepSpec, parse_specs

from jaxinfer.models.model import CacheShape
from jaxinfer.params import ParamSpec

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "profile_step.py"
MB = 1_000_000


def named(kind, name, pid, tid=None):
    event = {"ph": "M", "pid": pid, "name": kind, "args": {"name": name}}
    return event if tid is None else event | {"tid": tid}


def ran(name, ts, dur, tid, pid=1):
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": {"hlo_module": "jit_run"}}


PROCESSES = [named("process_name", "/device:GPU:0", 1), named("process_name", "/host:CPU", 701)]
THREADS = [
    named("thread_name", "Stream #14(Compute)", 1, 14),
    named("thread_name", "Stream #15(MemcpyD2H)", 1, 15),
    named("thread_name", "XLA Ops", 1, 100),
    named("thread_name", "python", 701, 9),
]
# Two steps: 10 us of a product, 2 us of nothing, 4 us of a fusion beside 3 us of a copy; 20 us lie between the two.
KERNELS = [
    event
    for start in (100.0, 138.0)
    for event in (
        ran("nvjet_tst_128x8_64x12_NNT", start, 10.0, 14),
        ran("loop_add_fusion_12.3", start + 12, 4.0, 14),
        ran("MemcpyD2H", start + 15, 3.0, 15),
        ran("fusion.7", start, 16.0, 100),  # the same time again, by operation
        ran("PjitFunction(run)", start - 50, 40.0, 9, pid=701),
    )
]


@pytest.fixture
def trace(tmp_path):
    def write(events, name="vm.trace.json.gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ns", "traceEvents": [*events, {}]}).encode()))
        return path

    return write


def test_kernels_are_what_ran_on_the_streams_of_the_device(trace):
    kernels = step_trace.load_kernels(trace([*PROCESSES, *THREADS, *KERNELS]))
    assert [kernel.name for kernel in kernels[:3]] == ["nvjet_tst_128x8_64x12_NNT", "loop_add_fusion_12.3", "MemcpyD2H"]
    assert len(kernels) == 6
    assert kernels[0] == step_trace.Kernel("nvjet_tst_128x8_64x12_NNT", 100.0, 10.0, "Stream #14(Compute)")


def test_a_step_is_its_kernels_and_the_gaps_between_them(trace):
    figures = step_trace.table(step_trace.load_kernels(trace([*PROCESSES, *THREADS, *KERNELS])), 2)
    assert figures["span_ms"] == pytest.approx((18 + 20 + 18) / 2 / 1e3)
    assert figures["busy_ms"] == pytest.approx(16e-3)  # 10 + 4 + 3 us, of which 1 us twice
    assert figures["gap_ms"] == pytest.approx((2 + 2 + 20) / 2 / 1e3)
    assert figures["overlap_ms"] == pytest.approx(1e-3)
    assert (figures["num_kernels"], figures["num_gaps"]) == (3, 1.5)
    assert [(row["name"], row["calls"], row["ms"]) for row in figures["kernels"]] == [
        ("nvjet_tst_128x8_64x12_NNT", 1, 0.01),
        ("loop_add_fusion", 1, 0.004),
        ("MemcpyD2H", 1, 0.003),
    ]
    assert figures["gaps"][0] == {"after": "MemcpyD2H", "before": "nvjet_tst_128x8_64x12_NNT", "calls": 0.5, "ms": 0.01}
    text = step_trace.format_table(figures)
    assert "3 kernels a step" in text and "loop_add_fusion" in text and "gap 0.0100 ms/step" in text


def test_kernels_whose_bytes_are_known_get_their_share_of_the_limit(trace):
    kernels = step_trace.load_kernels(trace([*PROCESSES, *THREADS, *KERNELS]))
    figures = step_trace.table(kernels, 2, bytes_by_pattern={"^nvjet": 30 * MB}, bytes_per_s=4e12)
    product = figures["kernels"][0]
    assert (product["bytes"], product["tb_per_s"], product["share_of_limit"]) == (30 * MB, 3.0, 0.75)
    assert "share_of_limit" not in figures["kernels"][1]
    with pytest.raises(step_trace.TraceError, match="no kernel's name matches 'attention'"):
        step_trace.table(kernels, 2, bytes_by_pattern={"attention": MB})


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([PROCESSES[1], *THREADS, *KERNELS], r"no process named '/device:GPU:0'; it has /host:CPU"),
        ([*THREADS, *KERNELS], r"no process named '/device:GPU:0'; it has none with a name"),
        ([*PROCESSES, *THREADS[2:], *KERNELS], r"/device:GPU:0 has no thread named 'Stream #...'; it has XLA Ops"),
        ([*PROCESSES, *THREADS], r"nothing ran on Stream #14\(Compute\), Stream #15\(MemcpyD2H\)"),
    ],
    ids=["no device", "no process names", "no stream names", "no kernels"],
)
def test_a_trace_without_kernels_says_what_is_missing(trace, events, message):
    with pytest.raises(step_trace.TraceError, match=message):
        step_trace.load_kernels(trace(events))


@pytest.mark.parametrize("data", [b"", b"\x1f\x8b broken", b"[1]", b'{"other": 1}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path, data):
    path = tmp_path / "x.trace.json.gz"
    path.write_bytes(data)
    with pytest.raises(step_trace.TraceError, match="is no trace"):
        step_trace.load_kernels(path)


def test_the_table_of_a_trace_is_printed(trace, capsys):
    path = trace([*PROCESSES, *THREADS, *KERNELS])
    assert profile_step.main(["table", str(path), "--num-steps", "2"]) == 0
    assert "nvjet_tst_128x8_64x12_NNT" in capsys.readouterr().out
    assert profile_step.main(["table", str(path), "--device", "/device:GPU:3"]) == 1
    assert "no process named '/device:GPU:3'" in capsys.readouterr().err


def test_names_of_kernels_lose_the_numbers_of_their_use():
    names = {
        "loop_add_fusion_12.3": "loop_add_fusion",
        "paged_attention": "paged_attention",
        "wrapped_add.1": "wrapped_add",
    }
    assert {name: step_trace.group_name(name) for name in names} == names
    assert step_trace.group_name("void gemm<1>_2") == "gemm<1>"
    assert len(step_trace.group_name("x" * 200)) == step_trace.MAX_NAME


def test_steps_are_named_by_rows_context_and_chunk():
    specs = parse_specs("1x16,+1024,32x1024+512,4x0")
    assert specs == [StepSpec(1, 16, 0), StepSpec(0, 0, 1024), StepSpec(32, 1024, 512), StepSpec(4, 0, 0)]
    assert [str(spec) for spec in specs] == ["1x16", "+1024", "32x1024+512", "4x0"]
    assert [spec.file_name for spec in specs] == ["1x16", "chunk1024", "32x1024-chunk512", "4x0"]
    for wrong in ("", "1", "0x4", "1x2+", "1x2x3"):
        with pytest.raises(ValueError, match="is not ROWSxCONTEXT"):
            parse_specs(wrong)


def test_bytes_of_kernels_come_from_names_of_parameters():
    found = profile_step.kernel_bytes(["nvjet.*=qkv,out", "attention=kv"], {"qkv": 10, "out": 6}, 5, devices=2)
    assert found == {"nvjet.*": 8, "attention": 5}
    with pytest.raises(ValueError, match=r"\['mlp'\] are not among kv, qkv"):
        profile_step.kernel_bytes(["x=mlp"], {"qkv": 10}, 5, devices=1)


def test_flags_after_the_dashes_are_fields_of_the_engines_config():
    config = profile_step.engine_config(
        ["--", "--model", "m", "--max-model-len", "64", "--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching"]
    )
    assert (config.model, config.max_model_len, config.gpu_memory_utilization) == ("m", 64, 0.5)
    assert not config.enable_prefix_caching


def test_a_step_is_told_by_part_and_the_kernels_of_no_part_by_name(trace):
    cublas = ("nvjet_tst_128x8_64x12_NNT", "void cublasLt::splitKreduce_kernel<32>")
    names = {
        "products": ("_one_row", "_few_rows", "_chain", *cublas),
        "attention": ("_decode_attention", "_combine", "_prefill_attention", "paged_prefill_attention", "_kv_write"),
        "experts": ("_choose", "_sort", "_product", "_down"),
        "delta rule": ("_one_token", "_norm_heads", "_prepare_chunks", "states_of_chunks", "outputs_of_tokens"),
        "norms": ("_rms_norm",),
        "collectives": ("_collective", "ncclDevKernel_AllGather_RING_LL"),
        "sampling": ("input_reduce_fusion_2", "_scan", "cut", "_draw", "logprobs"),
        "copies": ("MemcpyD2H", "Memset"),
        "other": ("loop_select_fusion", "loop_add_fusion_1", "not_seen_before", "loop_add_fusion_2"),
    }  # fmt: skip
    flat = [name for of_part in names.values() for name in of_part]
    events = [ran(name, 10.0 * index, 4.0, 14) for index, name in enumerate(flat)]
    found = step_trace.parts(step_trace.table(step_trace.load_kernels(trace([*PROCESSES, *THREADS, *events])), 2))
    assert found["parts_ms"] == {part: pytest.approx(2e-3 * len(of_part)) for part, of_part in names.items()}
    assert found["other_ms"] == {"loop_select_fusion": 2e-3, "loop_add_fusion": 4e-3, "not_seen_before": 2e-3}
    assert sum(found["parts_ms"].values()) == pytest.approx(found["busy_ms"])


def test_every_triton_kernel_of_ours_has_a_part():
    files = (ROOT / "pallas_kernels").rglob("*.py")
    launched = {name for path in files for name in re.findall(r"\blaunch\(\s*(\w+)", path.read_text())} - {"kernel"}
    assert {"_one_row", "_decode_attention", "cut"} <= launched
    assert [name for name in launched if step_trace.part_of(name) == "other"] == []


def test_the_floor_is_the_time_to_read_the_weights():
    moved = {"weights_bytes": 8_040_000_000, "kv_bytes": 10**9, "flops": 1}
    assert step_timing.floor(moved, 4.3e12, 2.71) == {"floor_ms": 1.8698, "times_floor": 1.4494}


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """profile.json of a tiny model on the CPU, and what the run printed."""
    out = tmp_path_factory.mktemp("profile")
    engine = ["--model", str(ROOT / "tests" / "golden" / "qwen3"), "--max-num-seqs", "2", "--compile-cache-dir", ""]
    steps = ["--steps", "1x20,1x9+7,5x5", "--num-steps", "3", "--trace-steps", "2"]
    steps += ["--record", "tiny", "--results", out / "results.json", "--read-tb-per-s", "0.001"]
    command = [sys.executable, SCRIPT, "measure", "--platform", "cpu", "--quiet", "--out", out, *steps, "--"]
    command += [*engine, "--max-num-batched-tokens", "16"]
    root = str(Path(profile_step.importlib.import_module("jaxinfer").__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, env=environment)
    return out, json.loads((out / "profile.json").read_text()), done


def test_a_run_on_the_cpu_times_steps_and_says_that_times_of_kernels_are_missing(profile):
    out, content, done = profile
    first, second = content["steps"]
    assert (first["step"], first["bucket"]) == ("1x20", "decode 1 rows")
    assert (second["step"], second["bucket"]) == ("1x9+7", "mixed 16 tokens, 2 rows")
    for step in content["steps"]:
        assert 0 < step["dispatch_ms"] <= step["waited_ms"] and step["step_ms"] > 0
        assert "times of kernels are missing on a CPU" in step["kernels_missing"]
        assert (out / step["trace"]).is_file() and (out / step["perfetto"]).is_file()
    assert "times of kernels are missing on a CPU" in done.stdout
    assert done.returncode == 1  # of the step that does not fit
    assert "step 5x5 has 5 sequences; there are 2 slots" in done.stderr


def test_a_step_reads_every_weight_once_and_the_keys_and_values_of_its_sequences(profile):
    _, content, _ = profile
    first, second = content["steps"]
    weights = sum(size for name, size in content["param_bytes"].items() if name != "embed")  # looked up in, not read
    config = json.loads((ROOT / "tests" / "golden" / "qwen3" / "config.json").read_text())
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    assert (first["weights_bytes"], first["kv_bytes"]) == (weights, 21 * token)
    assert (second["weights_bytes"], second["kv_bytes"]) == (weights, 10 * token)
    assert second["flops"] > 2 * first["flops"]
    assert first["memory_ms"] == pytest.approx(1e3 * (weights + 21 * token) / content["copy_bytes_per_s"], abs=1e-3)
    assert first["limit_ms"] == max(first["memory_ms"], first["matrix_ms"])


def test_steps_are_recorded_beside_their_floor_and_the_run_that_they_come_from(profile):
    out, content, _ = profile
    kept = json.loads((out / "results.json").read_text())
    (date,) = kept["runs"]
    assert kept["runs"][date]["limits"]["read_bytes_per_s"] == 10**9
    assert "--record" in kept["runs"][date]["command"]
    for row, step in zip(kept["steps"]["tiny"], content["steps"], strict=True):
        assert {name: row[name] for name in profile_step.RECORDED} == {
            name: step[name] for name in profile_step.RECORDED
        }
        assert row["run"] == date
        assert row["floor_ms"] == pytest.approx(1e3 * step["weights_bytes"] / 1e9, abs=1e-3)
        assert row["times_floor"] == pytest.approx(step["step_ms"] / row["floor_ms"], rel=1e-3)
        assert "missing on a CPU" in row["kernels_missing"]


def test_the_device_time_of_a_recorded_step_is_by_part(profile, trace):
    table = step_trace.table(step_trace.load_kernels(trace([*PROCESSES, *THREADS, *KERNELS])), 2)
    step = {name: value for name, value in profile[1]["steps"][0].items() if name != "kernels_missing"}
    step["kernels"] = table
    found = profile_step.recorded(step)["device"]
    assert (found["parts_ms"]["products"], found["parts_ms"]["copies"], found["gap_ms"]) == (0.01, 0.003, 0.012)
    assert found["other_ms"] == {"loop_add_fusion": 0.004}
    assert "products 0.0100" in profile_step._text(step)


def test_the_chart_of_a_profile_is_a_picture(profile, trace, tmp_path):
    pytest.importorskip("matplotlib")
    content = profile[1]
    kernels = step_trace.load_kernels(trace([*PROCESSES, *THREADS, *KERNELS]))
    content["steps"][0]["kernels"] = step_trace.table(kernels, 2)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    assert profile_step.main(["plot", str(path)]) == 0
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_the_chart_names_the_kernels_that_take_most(trace):
    kernels = step_trace.load_kernels(trace([*PROCESSES, *THREADS, *KERNELS]))
    found = profile_step.segments([{"kernels": step_trace.table(kernels, 2)}, {}])
    assert list(found) == ["nvjet_tst_128x8_64x12_NNT", "loop_add_fusion", "MemcpyD2H", "gaps"]
    assert found["gaps"] == [pytest.approx(0.012), 0.0]


def test_of_experts_a_step_reads_those_that_its_tokens_hit():
    specs = {
        "embed": ParamSpec(shape=(100, 10), axes=(None, None), sources=()),
        "up": ParamSpec(shape=(8, 10, 5), axes=("experts", None, None), sources=(), layers=range(2)),
    }
    model = SimpleNamespace(specs=specs)
    shape = SimpleNamespace(cache=CacheShape(2, 1, 4), dtype=jnp.dtype(jnp.bfloat16))
    builder = SimpleNamespace(model=model, shape=shape, mesh=SimpleNamespace(size=1))
    built = step_timing.Built(None, builder, {"embed": 2000, "up": 1600}, 0.0)
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    one, many = (step_timing.traffic(built, StepSpec(rows, 3, 0), config) for rows in (1, 64))
    assert one == {"weights_bytes": 2000 + 400, "kv_bytes": 4 * 32, "flops": 2 * 1000 + 2 * 800 // 4}
    assert many["weights_bytes"] == 3600
    assert many["flops"] == 64 * one["flops"]
