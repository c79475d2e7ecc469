"""The command line: what it prints, what it refuses, and the exit status."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxinfer import cli, offline, serving
from jaxinfer.api import LLM
from jaxinfer.batch.config import BatchConfig
from jaxinfer.config import EngineConfig
from tests.api.test_serve_process import (
    GOLDEN,
    SPOILED,
    TINY_FLAGS,
    doctored,
    run_cli,
    save_tiny_model,
    spoil,
)
from tests.checkpoints.conftest import add_metadata, tiny_metadata, tiny_tensors

COMMANDS = ("serve", "generate", "chat", "agent", "batch", "convert", "doctor", "shard-report")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a command that must succeed, with a small engine where it has one."""
    cache = str(tmp_path_factory.mktemp("compiled"))

    def run(command, *args, stdin=""):
        engine = () if command == "convert" else (*TINY_FLAGS, "--compile-cache-dir", cache)
        done = run_cli(command, *args, *engine, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    return run


GREEDY = ("--temperature", "0", "--max-tokens", "9")


def test_generate_prints_the_prompt_with_its_completion_and_what_it_took(run, model):
    out = run("generate", str(model), "--prompt", "abc", *GREEDY, "--stats")
    assert out.startswith("abc")
    assert re.search(r"\ntime to first token \d+ ms, \d tokens, ([\d.]+ tokens/s|n/a)\n$", out)


def test_generate_with_chat_prints_the_answer_alone(run, model):
    answer = run("generate", "--model", str(model), "--chat", "--prompt", "abc", *GREEDY)
    assert run("generate", str(model), "--prompt", "user: abc\n>", *GREEDY) == "user: abc\n>" + answer


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-tokens", "0"], "max_tokens is 0; a generation has at least 1 token"),
        (
            ["--num-pages", "999999999"],
            "the device's memory does not hold the model .*; num_pages is 999999999; fewer",
        ),
    ],
)
def test_what_only_the_engine_can_refuse_is_refused_in_one_line_too(model, flags, message):
    done = run_cli("generate", str(model), "--prompt", "abc", *TINY_FLAGS, "--compile-cache-dir", "", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"jaxinfer generate: {message}.*", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_numbers_run_on_a_cpu(run, model, dtype):
    assert run("generate", str(model), "--prompt", "abc", *GREEDY, "--dtype", dtype).startswith("abc")


def test_chat_answers_every_line_of_a_pipe_and_remembers_the_turns_before(run, model):
    out = run("chat", str(model), "--system", "be", *GREEDY, stdin="abc\nand d\n")
    first, second, end = out.split("> ")[1:]
    history = "system: be\nuser: abc\n>"
    assert run("generate", str(model), "--prompt", history, *GREEDY) == history + first
    history = f"system: be\nuser: abc\nassistant: {first[:-1]}\nuser: and d\n>"
    assert run("generate", str(model), "--prompt", history, *GREEDY) == history + second
    assert end.strip() == ""


def test_converted_store_generates_the_same_text(run, model, tmp_path):
    store = str(tmp_path / "store")
    run("convert", str(model), store)
    prompt = ("--prompt", "Once upon", *GREEDY)
    assert run("generate", store, *prompt) == run("generate", str(model), *prompt)
    again = run_cli("convert", str(model), store)
    assert again.returncode == 1
    assert again.stderr.splitlines()[-1].endswith("store: is not empty; a store is written to a new folder")
    assert "Traceback" not in again.stderr


@pytest.mark.long
def test_default_model_answers_in_the_terminal(tmp_path):
    options = ("--max-model-len", "256", "--compile-cache-dir", str(tmp_path), "--max-num-seqs", "1")
    done = run_cli("generate", "--prompt", "The capital of France is", *GREEDY, *options)
    assert (done.returncode, done.stdout[:31]) == (0, "The capital of France is Paris.")
    done = run_cli("chat", *GREEDY, *options, stdin="What is the capital of France?\nAnd of Italy?\n")
    assert done.returncode == 0
    assert "Paris" in done.stdout and "Rome" in done.stdout


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_tells_of_every_command_and_flag(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([*([command] if command else []), "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    if command is None:
        assert all(name in out for name in COMMANDS)
    else:
        assert f"usage: jaxinfer {command}" in out


@pytest.mark.parametrize("args", [[], ["fly"], ["generate"], ["serve", "--max-num-seqs", "many"], ["convert", "a"]])
def test_wrong_usage_exits_with_2(args, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert end.value.code == 2
    assert "usage: jaxinfer" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "a"], ["chat"], ["doctor"]])
def test_every_field_of_the_engine_has_a_flag(command):
    args = cli._parser().parse_args(command)
    assert [field.name for field in dataclasses.fields(EngineConfig) if not hasattr(args, field.name)] == []


def test_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"jaxinfer {importlib.metadata.version('jaxinfer')}\n"


def test_what_the_command_line_says_of_a_job_is_passed_on(monkeypatch, capsys):
    seen = {}

    def run_batch(input, output, **options):
        seen.update(options, input=input, output=output)
        counts = {"num_rows": 3, "num_failed": 1, "prompt_tokens": 5, "cached_tokens": 2, "output_tokens": 7}
        return offline.BatchResult(output=Path(output), **counts)

    monkeypatch.setattr(offline, "run_batch", run_batch)
    paths = ("--input", "in.jsonl", "--output", "out.jsonl")
    job = ("--job-seed", "4", "--shard-index", "1", "--shard-count", "2", "--checkpoint-s", "0.5", "--restart")
    defaults = ("--max-tokens", "9", "--temperature", "0", "--sampling-seed", "8")
    assert cli.main(["batch", *paths, *job, *defaults, "--model", "m", "--seed", "6", "--no-progress"]) == 0
    assert capsys.readouterr().out == "out.jsonl: 3 rows, 1 failed, 7 tokens\n"
    assert (seen["input"], seen["output"], seen["model"], seen["seed"]) == ("in.jsonl", "out.jsonl", "m", 6)
    assert (seen["restart"], seen["show_progress"]) == (True, False)
    given = BatchConfig(**seen["job"])
    assert (given.seed, given.shard_index, given.shard_count, given.checkpoint_s) == (4, 1, 2, 0.5)
    assert given.defaults == {"max_tokens": 9, "temperature": 0.0, "seed": 8}
    assert (given.arrange_rows, seen["ray"]) == (True, None)
    cluster = ("--ray", "--ray-workers", "2", "--ray-gpus", "0.5", "--ray-cpus", "0", "--ray-address", "auto")
    assert cli.main(["batch", *paths, "--no-arrange-rows", *cluster]) == 0
    assert seen["ray"] == {"num_workers": 2, "num_gpus": 0.5, "num_cpus": 0.0, "address": "auto"}
    assert BatchConfig(**seen["job"]).arrange_rows is False
    assert "max_step_ms" not in seen
    assert cli.main(["batch", *paths, "--max-step-ms", "inf"]) == 0
    assert seen["max_step_ms"] == float("inf")


def test_a_job_that_cannot_be_begun_is_refused_in_one_line(capsys, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    (tmp_path / "in.jsonl").write_text("")
    paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output)]
    err = refusal(["batch", str(GOLDEN), *paths], capsys)
    assert re.fullmatch("jaxinfer batch: .*out.jsonl exists and no job has written it; .*\n", err)
    err = refusal(["batch", str(GOLDEN), *paths, "--ray-workers", "2"], capsys)
    assert (
        err == "jaxinfer batch: --ray-workers is given without --ray, and so without a cluster; give both or neither\n"
    )
    err = refusal(["batch", str(GOLDEN), *paths[2:], "--input", str(tmp_path / "none")], capsys)
    assert re.fullmatch("jaxinfer batch: .*No such file.*\n", err)


def refusal(args, capsys):
    """What a command that must fail says on standard error."""
    assert cli.main(args) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--page-size", "12"], "page_size is 12; it must be a power of two from 8 to 256"),
        (
            ["no-such-model"],
            "model 'no-such-model' is no file, no folder and no Hub id; give a folder with config.json",
        ),
        ([str(GOLDEN), "--model", "other"], "two models are named: '.*llama' and --model 'other'; give one"),
        (["--model", ""], "model is empty; give a folder, a GGUF file, a Hub id or an alias"),
        ([""], "model is empty; give a folder, a GGUF file, a Hub id or an alias"),
        (["--num-pages", "9999999999"], "num_pages is 9999999999; it must be at most 1073741824"),
        (["--max-model-len", "1"], "max_model_len is 1; it must be at least 2"),
        (["--kv-host-gib", "nan"], "kv_host_gib is nan; it must be from 0 to 1048576 GiB"),
        (["--kv-disk-dir", "kv"], "kv_disk_dir is 'kv' and kv_host_gib is 0.0; pages go to disk by way of the host's"),
        (["--step-timeout-s", "0"], "step_timeout_s is 0.0; it must be from 0.01 to 86400 seconds"),
    ],
)
def test_configuration_that_cannot_work_is_refused_in_one_line(command, args, message, capsys):
    prompt = ["--prompt", "a"] if command == "generate" else []
    port = ["--port", "0"] if command == "serve" else []
    err = refusal([command, *args, *prompt, *port], capsys)
    assert re.fullmatch(f"jaxinfer {command}: {message}.*\n", err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-model-len", "257"], "max_model_len is 257; the model was made for at most 256 tokens"),
        (["--tensor-parallel-size", "3"], "a tensor axis of 3 devices does not divide .*kv_heads 4.*: 1, 2, 4"),
        (["--mesh", "tensor:2"], "mesh is 'tensor:2'; axes and their sizes are needed"),
        (["--mesh", "expert=2"], "mesh axis expert of 2 devices splits nothing of LlamaForCausalLM"),
        (["--mesh", "tensor=2", "-tp", "2"], "mesh is 'tensor=2' and tensor_parallel_size is 2; give one"),
        (["--rules", "fast"], "rules are 'fast'; known: tensor, whole-experts"),
        (["-tp", "5"], "tensor_parallel_size is 5, but there are 4 devices"),
        (["--max-num-batched-tokens", "16", "--max-num-seqs", "9"], "max_num_batched_tokens is 16, less than twice"),
    ],
)
def test_what_model_or_devices_cannot_do_is_refused_in_one_line(args, message, capsys):
    err = refusal(["generate", str(GOLDEN), "--prompt", "a", "--compile-cache-dir", "", *args], capsys)
    assert re.fullmatch(f"jaxinfer generate: {message}.*\n", err)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], True), (["--enable-prefix-caching"], True), (["--no-enable-prefix-caching"], False)],
)
def test_prefixes_are_cached_unless_that_is_switched_off(flags, expected, monkeypatch):
    asked = {}
    monkeypatch.setattr("jaxinfer.serving.serve", lambda **options: asked.update(options))
    assert cli.main(["serve", str(GOLDEN), *flags]) == 0
    given = {name: value for name, value in asked.items() if name not in ("host", "port", "server", "ray")}
    assert EngineConfig(**given).enable_prefix_caching is expected


TIERS = {"kv_host_gib": 2.5, "kv_disk_dir": "/tmp/kv", "kv_disk_gib": 10.0, "step_timeout_s": 60.0}


@pytest.mark.parametrize("host", ["--kv-host-gib", "--kv-offloading-size"])
def test_tiers_and_the_time_limit_of_a_step_are_taken_from_the_command_line(host, monkeypatch):
    asked = {}
    monkeypatch.setattr("jaxinfer.serving.serve", lambda **options: asked.update(options))
    flags = [host, "2.5", "--kv-disk-dir", "/tmp/kv", "--kv-disk-gib", "10", "--step-timeout-s", "60"]
    assert cli.main(["serve", str(GOLDEN), *flags]) == 0
    assert {name: asked[name] for name in TIERS} == TIERS
    asked.clear()
    assert cli.main(["serve", str(GOLDEN)]) == 0
    assert not TIERS.keys() & asked.keys()


def test_memory_that_holds_no_page_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("jaxinfer.runner.cache.CPU_POOL_BYTES", 1000)
    err = refusal(["generate", str(GOLDEN), "--prompt", "a", "--compile-cache-dir", ""], capsys)
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("jaxinfer generate: no room for a KV cache: 0 MiB are left beside")


def test_port_in_use_is_refused_before_the_model_is_looked_at(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        err = refusal(["serve", "no-such-model", "--port", str(port)], capsys)
    assert err.startswith(f"jaxinfer serve: cannot listen on 127.0.0.1 port {port} (Address already in use)")


def test_chat_template_file_that_does_not_exist_is_refused_by_its_name(capsys):
    err = refusal(["serve", str(GOLDEN), "--port", "0", "--chat-template", "no-such.jinja"], capsys)
    assert err == "jaxinfer serve: [Errno 2] No such file or directory: 'no-such.jinja'\n"


def test_chat_template_that_is_none_is_refused_with_its_line(tmp_path, capsys):
    path = tmp_path / "broken.jinja"
    path.write_text("one\n{% for %}")
    err = refusal(["serve", str(GOLDEN), "--port", "0", "--chat-template", str(path)], capsys)
    assert err.startswith("jaxinfer serve: chat template, line 2: ")


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_parser_is_refused_with_the_known_ones(flag, capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", str(GOLDEN), flag, "gpt"])
    assert re.search(rf"{flag}: invalid choice: 'gpt' \(choose from .*qwen3", capsys.readouterr().err)


def test_parsers_that_are_named_reach_the_server(monkeypatch):
    asked = {}
    monkeypatch.setattr(serving, "serve", lambda **options: asked.update(options))
    assert cli.main(["serve", str(GOLDEN)]) == 0
    assert (asked["server"]["tool_call_parser"], asked["server"]["reasoning_parser"]) == ("auto", "auto")
    assert cli.main(["serve", str(GOLDEN), "--tool-call-parser", "mistral", "--reasoning-parser", "none"]) == 0
    assert (asked["server"]["tool_call_parser"], asked["server"]["reasoning_parser"]) == ("mistral", "none")


def unknown_architecture(folder):
    folder.mkdir()
    config = json.loads((GOLDEN / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((GOLDEN / "model.safetensors").read_bytes())
    return folder


def truncated(folder):
    doctored(folder, lambda _: None)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def unsupported_gguf(folder):
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for key, value in tiny_metadata("llama").items():
        add_metadata(writer, key, value)
    for name, tensor in tiny_tensors().items():
        if name == "blk.0.ffn_up.weight":
            writer.add_tensor(name, np.zeros((2, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def spoiled(folder):
    return Path(doctored(folder, spoil))


def unreadable_tokenizer(folder):
    save_tiny_model(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


BROKEN = {
    unknown_architecture: r"architecture not supported: GPT2LMHeadModel; known: LlamaForCausalLM",
    truncated: r".*model\.safetensors: truncated: tensor .* ends at byte \d+, but the file ends after \d+",
    unsupported_gguf: r".*model\.gguf: tensor 'blk\.0\.ffn_up\.weight' is of type Q2_K; supported: F32",
    spoiled: re.escape(SPOILED.removesuffix("\n")),
    unreadable_tokenizer: r".*model: tokenizer\.json cannot be read",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_broken_checkpoint_is_refused_with_its_reason_and_no_traceback(make, tmp_path, capsys):
    folder = str(make(tmp_path / "model"))
    flags = ["--compile-cache-dir", ""]
    err = refusal(["generate", folder, "--prompt", "a", *flags], capsys)
    lines = err[err.index("jaxinfer generate:") :]
    assert re.match(f"jaxinfer generate: {BROKEN[make]}", lines)
    assert "Traceback" not in err
    with pytest.raises(ValueError, match=BROKEN[make]):
        LLM(folder, show_progress=False, compile_cache_dir="")


@pytest.mark.parametrize(
    "make", [unknown_architecture, truncated, unreadable_tokenizer], ids=lambda make: make.__name__
)
def test_broken_checkpoint_keeps_a_server_from_starting_with_its_reason_and_no_traceback(make, tmp_path):
    done = run_cli("serve", str(make(tmp_path / "model")), "--port", "0", "--compile-cache-dir", "")
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(f"jaxinfer serve: {BROKEN[make]}.*", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"], ["serve", "--max-num-seqs", "many"]])
def test_help_and_wrong_usage_do_not_wait_for_jax(args):
    code = "import sys\nfrom jaxinfer import cli\ntry:\n cli.main(sys.argv[1:])\nfinally:\n print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_a_following_process_is_no_engine_of_a_cluster(capsys):
    where = ["--coordinator", "127.0.0.1:9", "--num-processes", "2", "--process-id", "1"]
    assert cli.main(["serve", "--ray", *where]) == cli.EXIT_FAILED
    assert "--ray is given, and process_id is 1; an engine of a cluster is one process" in capsys.readouterr().err
