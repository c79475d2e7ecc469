"""A token for each row of a step, chosen as its request asks: the contract that every route fills."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.dispatch import Route, Target, dispatch, gpu_route
from pallas_kernels.sample import reference


class Parameters(NamedTuple):
    """What each row asks."""

    temperature: jax.Array  # [R] float32, as all down to presence_penalty; 0: the likeliest token
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    top_k: jax.Array  # [R] int32, as all below; 0: all tokens
    seed_low: jax.Array
    seed_high: jax.Array
    has_penalties: jax.Array
    has_bias: jax.Array
    wants_logprobs: jax.Array
    no_stop_before: jax.Array  # stop ids are barred from positions below this
    stop_ids: jax.Array  # [R, number of stop ids], -1 where unused


class History(NamedTuple):
    """What penalties and biases read, for all slots: a route reads only the slots of rows that have them."""

    output_counts: jax.Array  # [N + 1, V] int32: occurrences in the output
    in_prompt: jax.Array  # [N + 1, V] bool: whether the prompt holds the token
    logit_bias: jax.Array  # [N + 1, V] float32


class Places(NamedTuple):
    """Where each row stands."""

    slot: jax.Array  # [R] int32: of its history
    position: jax.Array  # [R] int32: of the token that is chosen
    active: jax.Array  # [R] bool: other rows get an arbitrary token, no log-probabilities, and cost nothing


class Logprobs(NamedTuple):
    """Natural log-probabilities of the raw logits; zeros for rows that did not ask."""

    chosen: jax.Array  # [R] float32
    top_ids: jax.Array  # [R, num_top] int32: the likeliest tokens; lower ids first among equals
    top: jax.Array  # [R, num_top] float32


ROUTES = (gpu_route("triton", "pallas_kernels.sample.triton"), Route("reference", reference.run))


def sample(
    logits: jax.Array,
    rows: Parameters,
    history: History,
    places: Places,
    *,
    num_top: int,
    target: Target,
    counters: jax.Ref | None = None,
) -> tuple[jax.Array, Logprobs]:
    """Tokens [R] int32, and the log-probabilities of rows that ask, from the first R rows of logits [>= R, V] float32.

    Of each row, in this order:
    - logit_bias is added; the repetition penalty divides positive logits of tokens in prompt or output and multiplies
      negative ones (Keskar et al. 2019); frequency times the count in the output and presence, where that is not 0, are
      subtracted (OpenAI API); stop ids are barred at positions below no_stop_before. A logit of -inf is never chosen.
    - A temperature of 0 takes the greatest logit, the lowest id among equals. Otherwise the softmax of the logits over
      the temperature is drawn from, cut to the top_k greatest logits (Fan et al. 2018), of these to the smallest set
      that reaches top_p of their sum (Holtzman et al. 2020), lower ids first among equals, and to what is as likely as
      min_p times the likeliest. At least one token stays. The sum is float32: where that of the more likely tokens is
      within 1e-5 of top_p, a route may keep one token more or less.
    - The draw is the greatest of logit / temperature + Gumbel noise (Maddison et al. 2014). The noise of a token is a
      function of seed, position and token alone: one Threefry block (Salmon et al. 2011), key (seed_low, seed_high),
      counter (position, token).

    counters: int32 zeros [>= R], and zeros again afterwards, by which programs that share a row agree who is last.
    """
    num_rows, vocab = places.slot.shape[0], logits.shape[-1]
    if logits.ndim != 2 or logits.shape[0] < num_rows:
        raise ValueError(f"logits {logits.shape} [>= R, V] do not fit slots {places.slot.shape} [R]")
    if any(array.ndim != 2 or array.shape[1] != vocab for array in history):
        raise ValueError(
            f"history {[a.shape for a in history]} [N + 1, V] does not fit logits {logits.shape} [>= R, V]"
        )
    if not 1 <= num_top <= vocab:
        raise ValueError(f"num_top {num_top} is not from 1 to V = {vocab}")
    how = {"num_top": num_top, "counters": counters, "target": target}
    tokens, logprobs = dispatch("sample", ROUTES, logits, rows, history, places, **how)
    return tokens, Logprobs(*logprobs)
