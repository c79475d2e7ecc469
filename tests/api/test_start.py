"""Starting: weights are loaded while steps are compiled or fetched, and whatever fails first ends both."""

from __future__ import annotations

import logging
import threading
import time

import jax
import pytest

from checkpoints.source import CheckpointError
from jaxinfer import build
from jaxinfer.config import EngineConfig
from jaxinfer.runner import compiled, executables
from jaxinfer.runner.disk_cache import DiskCache
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.types import Request
from tests.engine.drive import GOLDEN, drive

OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "page_size": 8, "compile_cache_dir": ""}
CONFIG = EngineConfig(model=str(GOLDEN / "llama"), **OPTIONS)


def start(config=CONFIG):
    return build.build_engine(config, show_progress=False)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Steps are kept, though the run of the tests has JAX's cache switched off."""
    folder = tmp_path / "steps"
    monkeypatch.setattr(build, "open_executables", lambda _: DiskCache.open(folder))
    monkeypatch.setattr(executables, "changed_source", lambda *_: None)
    return folder


REQUESTS = [
    Request(request_id="greedy", prompt_ids=[4, 5, 6], max_tokens=6, temperature=0.0),
    Request(request_id="drawn", prompt_ids=[7] * 20, max_tokens=6, temperature=1.0, seed=1),
    Request(request_id="all", prompt_ids=[9], max_tokens=6, seed=2, repetition_penalty=1.5, logprobs=2),
]


def test_engine_of_fetched_steps_answers_the_same_and_compiles_nothing_while_serving(kept, monkeypatch):
    first = start()
    expected = drive(first, REQUESTS)
    first.close()
    assert len(list(kept.iterdir())) > 5
    monkeypatch.setattr(compiled, "lower", None)  # nothing is traced
    second = start()
    assert drive(second, REQUESTS) == expected
    assert second.stats().compilations_after_ready == 0
    second.close()


def test_fetched_step_that_does_not_run_is_deleted_and_all_is_compiled_anew(kept, monkeypatch, caplog):
    first = start()
    expected = drive(first, REQUESTS)
    first.close()
    entries = set(kept.iterdir())
    warm_up, calls = ModelRunner._warm_up, []

    def fail_once(runner, progress):
        calls.append(None)
        if len(calls) == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: Function fusion not found\nmore")
        return warm_up(runner, progress)

    monkeypatch.setattr(ModelRunner, "_warm_up", fail_once)
    with caplog.at_level(logging.WARNING):
        second = start()
    assert "or a program beside it, fails: INTERNAL: Function fusion not found" in caplog.text
    assert set(kept.iterdir()) == entries
    assert len(calls) == 2 and drive(second, REQUESTS) == expected
    second.close()


def test_step_that_fails_though_it_was_compiled_here_is_a_fault(kept, monkeypatch):
    def fail(_runner, _progress):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    monkeypatch.setattr(ModelRunner, "_warm_up", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="broken"):
        start()
    assert list(kept.iterdir())


@pytest.mark.parametrize(("directory", "switch"), [("", True), (None, False)])
def test_nothing_is_kept_where_the_user_wants_no_cache(directory, switch):
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", switch)
    try:
        assert build.open_executables(EngineConfig(compile_cache_dir=directory)) is None
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


@pytest.fixture
def settings_of_jax():
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    names += ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_enable_compilation_cache", True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("settings_of_jax")
def test_steps_are_kept_beside_jaxs_own_cache(tmp_path):
    config = EngineConfig(compile_cache_dir=str(tmp_path))
    build.set_up_jax(config)
    assert build.open_executables(config) is not None
    assert (tmp_path / "steps").is_dir() and jax.config.jax_compilation_cache_dir == str(tmp_path)


@pytest.mark.usefixtures("settings_of_jax")
def test_folder_that_others_can_write_to_is_used_neither_for_steps_nor_by_jax(tmp_path, caplog):
    tmp_path.chmod(0o777)
    config = EngineConfig(compile_cache_dir=str(tmp_path))
    build.set_up_jax(config)
    assert build.open_executables(config) is None and jax.config.jax_compilation_cache_dir is None
    assert caplog.text.count("others can write to") == 1 and not list(tmp_path.iterdir())


def test_model_is_looked_for_while_the_devices_start(monkeypatch):
    find_model, find_devices, looked = build.find_model, build.find_devices, threading.Event()

    def look(config):
        looked.set()
        return find_model(config)

    def start_devices():
        assert looked.wait(60)
        return find_devices()

    monkeypatch.setattr(build, "find_model", look)
    monkeypatch.setattr(build, "find_devices", start_devices)
    start().close()


def test_weights_that_cannot_be_loaded_are_the_reason_while_steps_are_compiled(monkeypatch):
    compiling = threading.Event()
    lower = compiled.lower

    def lower_and_tell(*args):
        compiling.set()
        return lower(*args)

    def load(*_, **__):
        assert compiling.wait(60)
        raise CheckpointError("model.safetensors: the disk is gone")

    monkeypatch.setattr(compiled, "lower", lower_and_tell)
    monkeypatch.setattr(build, "load_params", load)
    num_threads = threading.active_count()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        start()
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("error", [RuntimeError("no such instruction"), KeyboardInterrupt()], ids=lambda e: type(e))
def test_error_or_interrupt_while_compiling_ends_the_loading(monkeypatch, error):
    loading, ended = threading.Event(), threading.Event()

    def load(*_, progress, **__):
        loading.set()
        try:
            for done in range(10_000):  # 100 s
                progress("loading", done, 10_000)
                time.sleep(0.01)
        finally:
            ended.set()

    def fail(*_):
        assert loading.wait(60)
        raise error

    monkeypatch.setattr(build, "load_params", load)
    monkeypatch.setattr(build, "compile_programs", fail)
    start_s = time.perf_counter()
    with pytest.raises(type(error)):
        start()
    assert ended.is_set() and time.perf_counter() - start_s < 50


def test_tensors_that_do_not_fit_are_refused_before_anything_is_compiled(monkeypatch):
    def refuse(*_):
        raise CheckpointError("does not fit")

    monkeypatch.setattr(build.load, "check_complete", refuse)
    monkeypatch.setattr(build, "compile_programs", None)
    with pytest.raises(CheckpointError, match="does not fit"):
        start()
