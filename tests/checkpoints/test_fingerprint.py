"""What changes keys and values changes the fingerprint, and nothing else does."""

import dataclasses
import json
import os
import shutil
import time

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import orbax_store, safetensors
from checkpoints.fingerprint import EDGE_BYTES, fingerprint
from checkpoints.resolve import resolve
from checkpoints.source import CheckpointError
from jaxinfer.params import ParamSpec, Source

CONFIG = {"model_type": "llama", "hidden_size": 8}


def folder(path, *, num_files=2, values=2**17):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    for i in range(num_files):
        weights = np.random.default_rng(i).standard_normal(values, np.float32)
        safetensors.write(path / f"model-{i + 1:05}-of-{num_files:05}.safetensors", {f"w{i}": weights})
    return path


def of(path, dtype="bfloat16", seed=0, load_format="auto"):
    return fingerprint(resolve(str(path), load_format=load_format), dtype=dtype, seed=seed)


def flip(path, position):
    with path.open("r+b") as file:
        file.seek(position, 2 if position < 0 else 0)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_copy_elsewhere_has_the_same_fingerprint(tmp_path):
    path = folder(tmp_path / "a")
    first = of(path)
    assert len(first) == 64 and int(first, 16)
    (path / "tokenizer.json").write_text("{}")
    (path / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
    assert of(shutil.copytree(path, tmp_path / "b")) == first == of(path, seed=1)


def test_every_sampled_part_of_every_file_counts(tmp_path):
    path = folder(tmp_path / "a")
    files = sorted(path.glob("*.safetensors"))
    size = files[0].stat().st_size
    assert size > 3 * EDGE_BYTES
    seen = {of(path)}
    for file in files:
        for position in (size // 2, EDGE_BYTES - 1, -1, -EDGE_BYTES, size // 257 + 1):
            flip(file, position)
            seen.add(of(path))
    assert len(seen) == 1 + 2 * 5


def test_config_dtype_size_and_name_of_the_weights_count(tmp_path):
    path = folder(tmp_path / "a", num_files=1, values=8)
    seen = {of(path), of(path, dtype="float32")}
    (path / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 1}))
    seen.add(of(path))
    safetensors.write(path / "model-00001-of-00001.safetensors", {"w0": np.zeros(9, np.float32)})
    seen.add(of(path))
    os.rename(path / "model-00001-of-00001.safetensors", path / "model.safetensors")
    seen.add(of(path))
    assert len(seen) == 5


def test_every_byte_of_a_small_file_counts(tmp_path):
    path = folder(tmp_path / "a", num_files=1, values=8)
    file = path / "model-00001-of-00001.safetensors"
    checkpoint = resolve(str(path))
    seen = set()
    for position in range(file.stat().st_size):
        flip(file, position)
        seen.add(fingerprint(checkpoint, dtype="bfloat16", seed=0))
        flip(file, position)
    assert len(seen) == file.stat().st_size


def test_the_seed_counts_for_random_weights_alone(tmp_path):
    path = folder(tmp_path / "a", num_files=1, values=8)
    dummy = [of(path, seed=seed, load_format="dummy") for seed in (0, 0, 1)]
    assert dummy[0] == dummy[1] != dummy[2] and of(path) not in dummy
    flip(path / "model-00001-of-00001.safetensors", -1)
    assert of(path, load_format="dummy") == dummy[0]


def test_a_gguf_file_and_a_folder_that_holds_one_have_the_same_fingerprint(write_gguf, tmp_path):
    path = write_gguf()
    first = of(path)
    assert of(tmp_path) == first
    flip(path, -1)
    assert of(path) == of(tmp_path) != first


def test_the_files_of_an_orbax_store_count(tmp_path):
    specs = {"n": ParamSpec(shape=(6,), axes=(None,), sources=(Source("n", (6,)),))}
    origin = dataclasses.replace(resolve(str(folder(tmp_path / "a", values=8))), config=CONFIG)
    path = tmp_path / "store"
    orbax_store.save(path, {"n": jnp.arange(6.0)}, specs, origin)
    first = of(path)
    assert of(shutil.copytree(path, tmp_path / "b")) == first
    data = max((one for one in (path / "params").rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    flip(data, -1)
    assert of(path) != first


def test_weights_that_cannot_be_read_are_an_error(tmp_path):
    path = folder(tmp_path / "a", num_files=1, values=8)
    checkpoint = resolve(str(path))
    (path / "model.safetensors").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="the weights cannot be read"):
        fingerprint(checkpoint, dtype="bfloat16", seed=0)


def test_gigabytes_take_a_moment(tmp_path):
    path = folder(tmp_path / "a")
    checkpoint = resolve(str(path))
    for file in path.glob("*.safetensors"):
        os.truncate(file, 2**32)  # of holes
    start_s = time.perf_counter()
    fingerprint(checkpoint, dtype="bfloat16", seed=0)
    taken_s = time.perf_counter() - start_s
    assert taken_s < 0.5  # 0.016 where nothing else runs
