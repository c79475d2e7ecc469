"""scripts/measure_vllm_batch.py over an engine with vLLM's shape: what it asks of it, and what it keeps."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import measure_batch
import measure_vllm_batch
import pytest
from make_batch_rows import make_rows

LENGTHS = ["--prompt", "4", "8", "--output", "2", "6"]


class FakeEngine:
    """One row at a time, a token a step: the request's own number of tokens, less `short` of the first one."""

    def __init__(self, step_s: float, short: int):
        self._step_s = step_s
        self._short = short
        self._left: list[SimpleNamespace] = []
        self.output_processor = SimpleNamespace(request_states={})
        limits = SimpleNamespace(max_num_seqs=7, max_num_batched_tokens=64)
        model = SimpleNamespace(dtype="torch.bfloat16", max_model_len=4096, enforce_eager=False)
        cache = SimpleNamespace(gpu_memory_utilization=0.9, enable_prefix_caching=True)
        self.vllm_config = SimpleNamespace(model_config=model, cache_config=cache, scheduler_config=limits)

    def add(self, sampling: SimpleNamespace) -> None:
        asked = sampling.max_tokens - (0 if self._left else self._short)
        self._left.append(SimpleNamespace(asked=asked, token_ids=[]))

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[SimpleNamespace]:
        time.sleep(self._step_s)
        row = self._left[0]
        row.token_ids.append(1)
        finished = len(row.token_ids) >= row.asked
        detokenizer = SimpleNamespace(num_output_tokens=lambda: len(row.token_ids))
        self.output_processor.request_states = {} if finished else {"0": SimpleNamespace(detokenizer=detokenizer)}
        if not finished:
            return []
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=self._left.pop(0).token_ids)], finished=True)]


@pytest.fixture
def vllm(monkeypatch):
    """The module; its `made` has the flags of every LLM, its `calls` what every generate was given."""

    class LLM:
        def __init__(self, **flags):
            module.made.append(flags)
            self.llm_engine = FakeEngine(module.step_s, module.short)

        def generate(self, prompts, sampling):
            module.calls.append((prompts, sampling))
            for one in sampling:
                self.llm_engine.add(one)
            while self.llm_engine.has_unfinished_requests():
                self.llm_engine.step()

    module = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace, made=[], calls=[], step_s=0.0, short=0)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"version of {name}")
    return module


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    kept = ["--label", "x", "--model", str(tmp_path), "--results", str(tmp_path / "results.json")]
    return [*kept, "--rows", "5", *LENGTHS]


def kept_rows(tmp_path):
    return json.loads((tmp_path / "results.json").read_text())


def test_one_call_gets_the_rows_of_the_job_and_its_figures_stand_beside_the_jobs(
    vllm, asked, tmp_path, monkeypatch, capsys
):
    job = {"duration": 1.0, "output_throughput": 300.0}
    monkeypatch.setattr(measure_batch, "measure_job", lambda *_: job)
    alike = ["--label", "x", "--rows", "5", *LENGTHS, "--results", str(tmp_path / "results.json"), "--only", "job"]
    assert measure_batch.main(alike) == 0
    assert "times" not in capsys.readouterr().out
    assert measure_vllm_batch.main(asked) == 0
    ((prompts, sampling),) = vllm.calls
    rows = [row["body"] for row in make_rows(5, (4, 8), (2, 6), 151_643, 0)]
    assert [prompt["prompt_token_ids"] for prompt in prompts] == [row["prompt"] for row in rows]
    assert [one.max_tokens for one in sampling] == [row["max_tokens"] for row in rows]
    assert all(one.temperature == 0 and one.ignore_eos for one in sampling)
    (flags,) = vllm.made
    assert (flags["load_format"], flags["dtype"], flags["max_model_len"]) == ("dummy", "bfloat16", 4096)
    content = kept_rows(tmp_path)
    ours, theirs = content["batch"]["x"]
    tokens = sum(row["max_tokens"] for row in rows)
    assert (theirs["kind"], theirs["rows"], theirs["prompt"], theirs["output"]) == ("vllm", 5, [4, 8], [2, 6])
    assert (theirs["completed"], theirs["failed"], theirs["total_output_tokens"]) == (5, 0, tokens)
    assert "cut" not in theirs and theirs["settings"]["max_num_seqs"] == 7
    assert content["runs"][theirs["run"]]["versions"]["vllm"] == "version of vllm"
    ratio = f"job: {300 / theirs['output_throughput']:.3f} times vLLM's output tokens/s over 5 rows\n"
    assert capsys.readouterr().out.endswith(ratio)
    assert measure_batch.main(alike) == 0
    assert capsys.readouterr().out.endswith(ratio)


def test_a_call_out_of_time_is_kept_as_far_as_it_came_and_says_so(vllm, asked, tmp_path, monkeypatch):
    vllm.step_s = 0.05
    monkeypatch.setattr(measure_vllm_batch, "END_S", 0.0)
    limit_s = 0.6
    rows = ["--rows", "500"]  # of 100 s or more
    assert measure_vllm_batch.main([*asked, *rows, "--time-limit-s", str(limit_s)]) == 1
    (row,) = kept_rows(tmp_path)["batch"]["x"]
    assert row["cut"] is True and row["completed"] < 500
    ended = [body["body"]["max_tokens"] for body in make_rows(row["completed"] + 1, (4, 8), (2, 6), 151_643, 0)]
    assert sum(ended[:-1]) <= row["total_output_tokens"] < sum(ended)  # the rows that ended, and what there is of one
    assert row["output_throughput"] == pytest.approx(row["total_output_tokens"] / row["duration"], rel=0.01)


def test_without_time_left_when_the_engine_is_ready_nothing_is_measured_or_kept(vllm, asked, tmp_path, capsys):
    assert measure_vllm_batch.main([*asked, "--time-limit-s", "0"]) == 1
    assert "vllm: not measured" in capsys.readouterr().out
    assert vllm.calls == [] and not (tmp_path / "results.json").exists()


def test_rows_that_come_out_shorter_than_they_ask_for_are_told(vllm, asked, tmp_path, capsys):
    vllm.short = 1
    assert measure_vllm_batch.main(asked) == 1
    (row,) = kept_rows(tmp_path)["batch"]["x"]
    asked_for = row["total_output_tokens"] + 1
    assert row["wrong_length"] is True
    assert f"{asked_for - 1} output tokens where the rows ask for {asked_for}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--rows", "0"], "--rows is 0"),
        (["--model", "nowhere"], "--model is nowhere"),
        (["--max-model-len", "13"], "the longest row may have 14 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(vllm, asked, capsys, flags, told):
    with pytest.raises(SystemExit):
        measure_vllm_batch.main([*asked, *flags])
    assert told in capsys.readouterr().err
    assert vllm.made == []


def test_a_ratio_names_what_was_cut_and_is_of_the_same_rows_only():
    shape = {"rows": 2, "prompt": [1, 2], "output": [3, 4]}
    theirs = {"kind": "vllm", "output_throughput": 100.0, "cut": True} | shape
    ours = {"kind": "server", "clients": 8, "output_throughput": 150.0} | shape
    told = measure_batch.against_vllm([ours, theirs, ours | {"rows": 3}])
    assert told == ["server: 1.500 times vLLM's output tokens/s over 2 rows (cut: vLLM)"]
    assert measure_batch.against_vllm([ours]) == []
