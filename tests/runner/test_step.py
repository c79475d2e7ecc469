"""What XLA makes of a step: the state stays where it is, and devices speak as often as the model needs."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import registry
from jaxinfer.models.model import Model
from jaxinfer.runner import cache, inputs, sampling
from jaxinfer.runner.buckets import Bucket
from jaxinfer.runner.cache import StateShape
from jaxinfer.runner.compiled import compile_lowered, lower_masks, lower_sampler, lower_small, lower_step
from jaxinfer.runner.step import StepBuilder
from jaxinfer.sharding import rules
from jaxinfer.types import Request

BUCKETS = [Bucket(True, 2, 2), Bucket(False, 16, 2)]
by_bucket = pytest.mark.parametrize("bucket", BUCKETS, ids=str)


def make_builder(model: Model, num_devices: int = 1) -> StepBuilder:
    # Sizes that no weight has: a copy of the pool can then be told from any other.
    shape = StateShape(
        cache=model.cache,
        num_pages=13,
        page_size=8,
        num_slots=2,
        max_model_len=13 * 8,
        vocab_rows=model.vocab_rows,
        dtype=jnp.dtype(jnp.float32),
    )
    mesh = rules.make_mesh(num_devices)
    return StepBuilder(model=model, shape=shape, vocab_size=model.vocab_rows, mesh=mesh, buckets=tuple(BUCKETS))


def abstract_params(builder: StepBuilder) -> dict[str, jax.ShapeDtypeStruct]:
    shardings = rules.shardings(builder.model.specs, builder.mesh)
    return {
        name: jax.ShapeDtypeStruct(spec.array_shape, jnp.float32, sharding=shardings[name])
        for name, spec in builder.model.specs.items()
    }


@pytest.fixture(scope="module")
def builder(golden) -> StepBuilder:
    return make_builder(registry.from_config(golden("llama").config))


def num_state_arrays(builder: StepBuilder) -> int:
    return len(jax.tree.leaves(builder.abstract_state))


def aliased_outputs(compiled: jax.stages.Compiled) -> int:
    """Outputs that take the place of an argument."""
    header = compiled.as_text().split("\n", 1)[0]
    found = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", header)
    return 0 if found is None else len(re.findall(r"\{[\d, ]*\}: \(\d+", found.group(1)))


def assert_no_pool_is_copied(builder: StepBuilder, compiled: jax.stages.Compiled) -> None:
    cache, shape = builder.model.cache, builder.shape
    num_heads = cache.num_kv_heads // builder.mesh.size
    pool = f"f32[{cache.num_layers},{shape.num_pages + 1},{shape.page_size},{num_heads},{cache.head_width}]"
    text = compiled.as_text()
    assert pool in text
    copies = [line.strip() for line in text.splitlines() if re.search(rf"= {re.escape(pool)}\S* copy", line)]
    assert not copies, "\n".join(copies)


@by_bucket
def test_every_array_of_state_keeps_its_place_and_no_pool_is_copied(builder, bucket):
    compiled = compile_lowered(builder, lower_step(builder, abstract_params(builder), bucket))
    assert aliased_outputs(compiled) == num_state_arrays(builder)
    assert_no_pool_is_copied(builder, compiled)


def test_no_weight_is_turned_around_in_a_step(builder):
    """Of gate and up together XLA's CPU backend made a transposed copy for a single row."""
    text = compile_lowered(builder, lower_step(builder, abstract_params(builder), Bucket(True, 1, 1))).as_text()
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)\(", text)
    size = math.prod(builder.model.specs["gate_up"].shape)
    assert found and size not in [math.prod(map(int, shape.split(","))) for shape in found]


@pytest.mark.parametrize("program", ["set_up_slot", "set_up_prefix", "set_up_prefix_rows", "set_masks", "sampler"])
def test_what_runs_between_steps_leaves_every_array_of_state_in_its_place(builder, program):
    by_rows = {"set_masks": lower_masks, "sampler": lower_sampler}
    lowered = by_rows[program](builder, 2) if program in by_rows else lower_small(builder)[program]
    # With the staged inputs, and what they come in.
    others = (1 + builder.has_pinned) * program.startswith("set_up_prefix")
    assert aliased_outputs(compile_lowered(builder, lowered)) == num_state_arrays(builder) + others


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_prefix_is_put_in_place_without_a_copy_of_a_pool_and_without_a_word_between_devices(golden, num_devices):
    if jax.device_count() < num_devices:
        pytest.skip(f"one device; {num_devices} are needed")
    builder = make_builder(registry.from_config(golden("llama").config), num_devices)
    compiled = compile_lowered(builder, lower_small(builder)["set_up_prefix"])
    assert aliased_outputs(compiled) == num_state_arrays(builder) + 1 + builder.has_pinned
    assert_no_pool_is_copied(builder, compiled)
    page = 2 * builder.model.cache.num_layers * builder.shape.page_size * builder.model.cache.num_kv_heads
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * 4 * page * builder.model.cache.head_width
    assert not re.search(r"= \S+ (all-|collective-|reduce-scatter)", compiled.as_text())


def test_sampling_on_several_devices_needs_no_word_between_them(golden):
    if jax.device_count() < 2:
        pytest.skip("one device; 2 are needed")
    builder = make_builder(registry.from_config(golden("llama").config), num_devices=2)
    text = compile_lowered(builder, lower_sampler(builder, 2)).as_text()
    assert not re.search(r"= \S+ (all-|collective-|reduce-scatter)", text)


@by_bucket
@pytest.mark.parametrize("family", ["llama", "llama_tied", "llama_bias", "qwen2", "qwen3"])
def test_a_step_on_several_devices_sums_twice_a_layer_and_once_for_the_embedding(golden, family, bucket):
    if jax.device_count() < 2:
        pytest.skip("one device; 2 are needed")
    builder = make_builder(registry.from_config(golden(family).config), num_devices=2)
    text = lower_step(builder, abstract_params(builder), bucket).as_text()
    # Layers are scanned: what is in the scan's body is written once.
    assert text.count("stablehlo.while") >= 1
    assert text.count('"stablehlo.all_reduce"') == 3
    assert text.count('"stablehlo.all_gather"') == 1
    assert not re.search(r"stablehlo\.(all_to_all|collective_permute|reduce_scatter)", text)


def test_a_step_on_one_device_has_no_collective(builder):
    text = lower_step(builder, abstract_params(builder), BUCKETS[0]).as_text()
    assert not re.search(r"stablehlo\.(all_|collective|reduce_scatter)", text)


def test_layers_are_compiled_once_however_many_there_are(golden):
    config = dict(golden("llama").config)
    sizes = []
    for num_layers in (2, 8):
        model = registry.from_config({**config, "num_hidden_layers": num_layers})
        builder = make_builder(model)
        sizes.append(len(lower_step(builder, abstract_params(builder), BUCKETS[0]).as_text().splitlines()))
    assert sizes[0] == sizes[1]


def test_the_sampler_keeps_that_a_row_has_no_token_and_samples_the_others(builder):
    """Also of a request that draws, has penalties and wants log-probabilities."""
    state = cache.zeros(builder.abstract_state)
    logits = np.tile(np.arange(builder.shape.vocab_rows, dtype=np.float32), (2, 1))
    logits[0, 3] = np.nan
    ask = Request(request_id="r", prompt_ids=(1,), max_tokens=9, temperature=0.7, top_p=0.9, logprobs=2, seed=1)
    fields = inputs.sampling_fields(dataclasses.replace(ask, repetition_penalty=1.2), 1)
    state = state.replace(
        logits=jnp.asarray(logits),
        sampled_slot=jnp.asarray([1, 0]),
        sampled_position=jnp.asarray([5, 6]),
        last_token=jnp.asarray([9, sampling.NO_TOKEN, 0]),
        sampling=jnp.tile(fields, (3, 1)),
    )
    after = jax.jit(builder.sampler(2))(state)
    assert after.last_token[1] == sampling.NO_TOKEN and after.last_token[0] > 100
    chosen, _, top = sampling.unpack_logprobs(np.asarray(after.logprobs))
    assert chosen[1] == 0 and not top[1].any()
    assert np.isfinite(chosen[0]) and chosen[0] < 0
