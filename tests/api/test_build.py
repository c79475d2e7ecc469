"""From a configuration to an engine: what is refused before anything slow, and what limits the context."""

from __future__ import annotations

import dataclasses
import math
import types
from pathlib import Path

import pytest

from checkpoints.resolve import Checkpoint, resolve
from checkpoints.source import CheckpointError
from jaxinfer import build, defaults, kv_tiers
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.runner.buckets import make_buckets
from jaxinfer.text.requests import lower
from jaxinfer.types import InvalidRequest, Request, SamplingParams
from tests.engine.drive import GOLDEN, drive

MODEL = str(GOLDEN / "llama")  # made for 256 tokens
GPU = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[types.SimpleNamespace(platform="cuda")]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, "max_model_len is 257; the model was made for at most 256 tokens"),
        (
            {"max_num_seqs": 16, "max_num_batched_tokens": 31},
            "max_num_batched_tokens is 31, less than twice max_num_seqs 16: a step must hold a row of every sequence",
        ),
    ],
)
def test_limits_that_cannot_hold_are_refused_with_both_numbers(options, message):
    with pytest.raises(ConfigError, match=message):
        build.build_engine(EngineConfig(model=MODEL, compile_cache_dir="", **options), show_progress=False)


def test_the_context_is_the_least_of_model_flag_and_pool():
    options = {"page_size": 8, "max_num_seqs": 1, "max_num_batched_tokens": 16, "compile_cache_dir": ""}
    # 20 tokens end within a page, and the pool has more.
    engine = build.build_engine(
        EngineConfig(model=MODEL, max_model_len=20, num_pages=5, **options), show_progress=False
    )
    assert engine.info.max_model_len == 20
    output = drive(engine, [Request(request_id="r", prompt_ids=[4] * 5, max_tokens=15, temperature=0.0)])["r"]
    assert len(output.tokens) == 15
    with pytest.raises(
        InvalidRequest, match="prompt has 20 tokens; the limit is 20 tokens, prompt and output together"
    ):
        lower([4] * 20, SamplingParams(), engine.info, None, "r")
    with pytest.raises(InvalidRequest, match="the prompt has 20 tokens; with 1 token of output that is more than"):
        engine.submit(Request(request_id="r", prompt_ids=[4] * 20, max_tokens=1))
    engine.close()


@pytest.mark.parametrize(
    ("num_pages", "flag", "context"), [(5, None, 40), (5, 64, 40), (31, None, 248), (64, None, 256)]
)
def test_a_pool_that_holds_less_than_the_model_limits_the_context(num_pages, flag, context):
    config = EngineConfig(model=MODEL, page_size=8, num_pages=num_pages, max_model_len=flag)
    assert sized(config).shape.max_model_len == context
    assert sized(config).shape.num_pages == num_pages


def test_without_a_number_of_pages_the_pool_holds_every_sequence_at_its_full_length():
    shape = sized(EngineConfig(model=MODEL, page_size=16, max_num_seqs=3)).shape
    assert (shape.num_pages, shape.max_model_len) == (3 * 256 // 16, 256)


def sized(config: EngineConfig):
    """The step builder of a configuration, before anything is compiled."""
    checkpoint = resolve(config.model)
    model = build.registry.from_config(checkpoint.config)
    mesh = build.rules.make_mesh(1)
    shape = build._state_shape(config, model, mesh)
    builder = build.StepBuilder(model=model, shape=shape, vocab_size=model.vocab_rows, mesh=mesh, buckets=())
    return kv_tiers.size_memory(config, builder, lambda _: 0)[0]


def checkpoint_with(**parts) -> Checkpoint:
    given = {"config": {}, "generation_config": {}, "tokenizer_config": {}, **parts}
    return Checkpoint(name="m", path=Path(), format="dummy", tensors=None, tokenizer_json=None, **given)


def test_every_id_that_any_file_names_ends_an_output():
    checkpoint = checkpoint_with(
        config={"eos_token_id": [5, 7], "text_config": {"eos_token_id": 9}}, generation_config={"eos_token_id": [7, 8]}
    )
    assert defaults.eos_ids(checkpoint, types.SimpleNamespace(eos_ids=(8, 3))) == (5, 7, 9, 8, 3)
    assert defaults.eos_ids(checkpoint_with(config={"eos_token_id": None}), None) == ()
    assert defaults.eos_ids(checkpoint_with(config={"eos_token_id": 0}), None) == (0,)


def test_sampling_defaults_are_those_of_the_generation_config():
    given = {"temperature": 0.6, "top_k": 20, "top_p": None, "max_length": 9, "do_sample": True}
    assert defaults.sampling_defaults(checkpoint_with(generation_config=given)) == {"temperature": 0.6, "top_k": 20}
    greedy = defaults.sampling_defaults(checkpoint_with(generation_config={**given, "do_sample": False}))
    assert greedy == {"temperature": 0.0, "top_k": 20}
    assert defaults.sampling_defaults(checkpoint_with()) == {}


@pytest.mark.parametrize("value", ["</s>", [2, "x"], -1, True])
def test_an_eos_that_is_no_token_id_is_refused(value):
    with pytest.raises(CheckpointError, match="eos_token_id is .*; token ids are needed"):
        defaults.eos_ids(checkpoint_with(config={"eos_token_id": value}), None)


@pytest.mark.parametrize(("name", "value"), [("temperature", "0.6"), ("top_p", 2.0), ("repetition_penalty", 0)])
def test_a_default_that_no_request_could_ask_for_is_refused(name, value):
    with pytest.raises(CheckpointError, match=f"generation_config's {name} is {value!r}: "):
        defaults.sampling_defaults(checkpoint_with(generation_config={name: value}))


def test_chunks_beside_decode_rows_are_as_large_as_keeps_every_step_within_its_time():
    config = EngineConfig(model=MODEL, max_step_ms=30.0)
    buckets = make_buckets("gpu", 256, 8192)
    times_ms = {bucket: bucket.tokens / 100 + bucket.rows / 50 for bucket in buckets}
    assert build._max_mixed_tokens(config, buckets, times_ms, GPU) == 2048
    # With few rows a step of 4096 tokens would do, but decode rows may be as many as there are slots.
    config = dataclasses.replace(config, max_step_ms=41.5)
    assert build._max_mixed_tokens(config, buckets, times_ms, GPU) == 2048
    config = dataclasses.replace(config, max_step_ms=1e-3)
    assert build._max_mixed_tokens(config, buckets, times_ms, GPU) == 512
    for limit_ms in (1e3, math.inf):
        config = dataclasses.replace(config, max_step_ms=limit_ms)
        assert build._max_mixed_tokens(config, buckets, times_ms, GPU) == 8192


def test_a_calm_step_takes_no_longer_than_three_decode_steps_and_is_never_smaller_than_the_smallest():
    buckets = make_buckets("gpu", 256, 8192)
    times_ms = {bucket: 3 + bucket.tokens / 100 for bucket in buckets}  # 3.32 ms for 32 decode rows
    assert build._calm_mixed_tokens(buckets, times_ms, GPU) == 512
    assert build._calm_mixed_tokens(buckets, {b: 1 if b.decode else 9 for b in buckets}, GPU) == 16
