"""jaxinfer.serve() and jaxinfer.LLM as scripts and notebooks use them: no main guard, two models, no close."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.api import LLM
from jaxinfer.types import EngineDead, SamplingParams
from tests.api.test_serve_process import GOLDEN, ROOT, environment, save_tiny_model

OPTIONS = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "page_size": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("compiled"))


def run_script(folder, text):
    """A script run to its end; what it printed."""
    path = folder / "script.py"
    path.write_text(text)
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, path], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_script_without_a_main_guard_may_serve_and_leaves_no_process(tmp_path, cache):
    model = save_tiny_model(tmp_path / "model")
    text = f"""
import json, os, urllib.request
import jaxinfer
print("begins")
server = jaxinfer.serve({str(model)!r}, port=0, block=False, compile_cache_dir={cache!r}, **{OPTIONS})
body = json.dumps(dict(prompt="abc", max_tokens=5, temperature=0, ignore_eos=True)).encode()
request = urllib.request.Request(server.url + "/v1/completions", body, {{"Content-Type": "application/json"}})
print(json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"])
server.shutdown()
server.shutdown()
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("alone")
"""
    assert run_script(tmp_path, text).split() == ["begins", "5", "alone"]


def test_script_that_never_closes_its_model_ends_without_a_word(tmp_path, cache):
    text = f"""
import jaxinfer
llm = jaxinfer.LLM({str(GOLDEN)!r}, compile_cache_dir={cache!r}, show_progress=False, **{OPTIONS})
stream = llm.stream([3, 4, 5], jaxinfer.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
print(len(next(stream).token_ids))
"""
    assert run_script(tmp_path, text).split() == ["1"]


@pytest.fixture(scope="module")
def first():
    with LLM(str(GOLDEN), compile_cache_dir="", show_progress=False, **OPTIONS) as llm:
        yield llm


def ids(llm):
    return llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids


def test_two_models_in_a_process_work_and_closing_one_leaves_the_other(first):
    expected = ids(first)
    with LLM(str(GOLDEN), compile_cache_dir="", show_progress=False, **OPTIONS) as second:
        assert ids(second) == ids(first) == expected
        stream = first.stream([5, 6, 7], GREEDY)
        start = list(next(stream).token_ids)
        assert ids(second) == expected
    assert start + [id for delta in stream for id in delta.token_ids] == expected
    assert ids(first) == expected
    # The second one's programs, and the caller's own, are no fault of the first.
    jax.jit(lambda x: x * 3 + 1).lower(jnp.ones(5)).compile()
    assert first.stats().compilations_after_ready == 0


def test_compilation_by_a_models_own_step_counts(first, monkeypatch):
    runner = first._engine._engine._runner
    run = runner._run

    def compiling_run(bucket, plan):
        jax.jit(lambda x: x * 5 + 2).lower(jnp.ones(7)).compile()
        run(bucket, plan)

    before = first.stats().compilations_after_ready
    monkeypatch.setattr(runner, "_run", compiling_run)
    ids(first)
    assert first.stats().compilations_after_ready > before


def test_closed_model_says_so_whatever_it_is_asked_and_is_closed_again_without_harm():
    with LLM(str(GOLDEN), compile_cache_dir="", show_progress=False, **OPTIONS) as llm:
        stream = llm.stream([5, 6, 7], GREEDY)
        next(stream)
    llm.close()
    for ask in (lambda: ids(llm), lambda: next(stream), llm.stats, lambda: next(llm.stream([5], GREEDY))):
        with pytest.raises(EngineDead, match="the engine was closed"):
            ask()
    assert llm.info.max_model_len == 256
