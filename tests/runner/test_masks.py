"""Masks on the device: the bias that they become, and what the sampler makes of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models import registry
from jaxinfer.runner import cache, inputs
from jaxinfer.scheduler.plan import TokenMask
from jaxinfer.types import Request
from tests.runner.test_step import make_builder


@pytest.fixture(scope="module")
def builder(golden):
    return make_builder(registry.from_config(golden("llama").config))


def mask(slot: int, allowed, num_words: int, bias=None) -> TokenMask:
    words = np.zeros(num_words, "<u4")
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return TokenMask(slot, words.tobytes(), bias or {})


def written(builder, masks, num_rows):
    """The state after these masks; the bias was 1 everywhere."""
    state = cache.zeros(builder.abstract_state)
    state = state.replace(logit_bias=jnp.ones_like(state.logit_bias))
    shape = builder.shape
    packed = inputs.pack_masks(masks, num_rows, vocab_rows=shape.vocab_rows, num_slots=shape.num_slots)
    assert packed.shape == (num_rows, inputs.mask_size(shape.vocab_rows))
    return jax.jit(builder.set_masks)(state, packed)


@pytest.mark.parametrize("num_words", [1, 3, 99])
def test_a_mask_is_a_bias_of_minus_infinity_but_for_what_it_allows(builder, num_words):
    """Words may end before the model's rows, or reach beyond them. Other slots keep what they have."""
    rows = builder.shape.vocab_rows
    allowed = [token for token in (0, 5, 31, 32, 95, rows - 1) if token < 32 * num_words]
    bias = np.asarray(written(builder, [mask(1, allowed, num_words, {5: 2.5, 7: 3.0})], 2).logit_bias)
    expected = np.full(rows, -np.inf)
    expected[allowed] = 0
    expected[5] = 2.5
    np.testing.assert_array_equal(bias[1], expected)
    np.testing.assert_array_equal(bias[0], np.ones(rows))


def test_masks_are_written_for_any_number_of_slots_at_once(builder):
    masks = [mask(slot, [slot], 1) for slot in (1, 0)]
    bias = np.asarray(written(builder, masks, 2).logit_bias)
    assert [np.flatnonzero(np.isfinite(bias[slot])).tolist() for slot in (0, 1)] == [[0], [1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_takes_the_likeliest_or_a_draw_of_what_is_allowed(builder, temperature):
    state = written(builder, [mask(1, [3, 40], 2)], 1)
    ask = Request(request_id="r", prompt_ids=(1,), max_tokens=9, temperature=temperature, logprobs=1, grammar="any")
    logits = np.tile(np.arange(builder.shape.vocab_rows, dtype=np.float32) / 9, (2, 1))
    state = state.replace(
        logits=jnp.asarray(logits),
        sampled_slot=jnp.asarray([1, 0]),
        sampled_position=jnp.asarray([5, 6]),
        sampling=state.sampling.at[1].set(inputs.sampling_fields(ask, 1)),
    )
    after = jax.jit(builder.sampler(2))(state)
    token = int(after.last_token[1])
    assert token == 40 if temperature == 0 else token in (3, 40)
    chosen = np.asarray(after.logprobs)[1, :1].view(np.float32)[0]
    assert chosen == pytest.approx(float(jax.nn.log_softmax(logits[0])[token]), abs=1e-5)
