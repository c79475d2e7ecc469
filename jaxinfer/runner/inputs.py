"""A step's inputs: one int32 vector that the host fills and the device takes apart. Its layout is said here, once."""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.runner.buckets import Bucket
from jaxinfer.scheduler.plan import CachedPrefix, LastToken, LongChunk, PrefillChunk, StepPlan, TokenMask
from jaxinfer.types import MAX_LOGIT_BIAS, MAX_STOP_IDS, Request

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTS = ("top_k", "seed_low", "seed_high", "has_penalties", "has_bias", "wants_logprobs", "no_stop_before")
SAMPLING_FIELDS = len(FLOATS) + len(INTS) + MAX_STOP_IDS
"""int32 fields of one request's sampling parameters: FLOATS by their bits, INTS, then stop ids (-1: none)."""
_SAMPLING = struct.Struct(f"={len(FLOATS)}f{len(INTS)}I{MAX_STOP_IDS}i")
_floats_of = operator.attrgetter(*FLOATS)
_NO_STOPS = (-1,) * MAX_STOP_IDS
ROW_FIELDS = 5 + SAMPLING_FIELDS
"""Fields of a row of a mixed step: slot, query_len, context_len, samples, has_sampling, then the sampling fields."""


class StepInputs(NamedTuple):
    """What a step reads besides the state. T tokens, R rows, U page updates; padding rows have slot N and length 0."""

    slot: jax.Array  # [R]
    query_len: jax.Array  # [R] tokens
    context_len: jax.Array  # [R] tokens in the cache before the step
    samples: jax.Array  # [R] bool: whether the row's last token is followed by a sampled one
    tokens: jax.Array | None  # [T] ids; -1: the slot's last token. None: that holds for all
    sampling: tuple[jax.Array, jax.Array] | None  # slots [R] (N: unchanged) and their new fields [R, SAMPLING_FIELDS]
    page_updates: jax.Array  # [U, 3]: slot, index in its page table, page (0: no update)


def sampling_fields(request: Request, prompt_len: int) -> np.ndarray:
    """[SAMPLING_FIELDS] int32."""
    seed, stop_ids = request.seed, request.stop_ids
    packed = _SAMPLING.pack(  # a call of numpy for each part takes 60 us where no cache has its code
        *_floats_of(request),
        request.top_k,
        seed & 0xFFFFFFFF,
        seed >> 32 & 0xFFFFFFFF,
        bool(request.has_penalties),  # where a number is NumPy's, so is this
        bool(request.logit_bias or request.grammar),
        request.logprobs is not None,
        prompt_len + request.min_tokens if request.min_tokens else 0,
        *stop_ids,
        *_NO_STOPS[len(stop_ids) :],
    )
    return np.frombuffer(packed, np.int32)


def num_page_updates(bucket: Bucket, page_size: int) -> int:
    """Most pages that the rows of a step can begin: a chunk of n tokens begins at most n / S + 1."""
    return bucket.tokens // page_size + bucket.rows


def packed_size(bucket: Bucket, page_size: int) -> int:
    """Length of the vector for a bucket."""
    if bucket.decode:
        return 3 * bucket.rows
    return bucket.rows * ROW_FIELDS + bucket.tokens + 3 * num_page_updates(bucket, page_size)


def pack(plan: StepPlan, bucket: Bucket, *, page_size: int, num_slots: int) -> np.ndarray:
    """The vector of a plan, padded to its bucket."""
    if bucket.decode:
        fields = [field for row in plan.decodes for field in (row.slot, row.position, row.new_page or 0)]
        return np.array(fields + [num_slots, 0, 0] * (bucket.rows - len(plan.decodes)), np.int32)
    packed = np.zeros(packed_size(bucket, page_size), np.int32)
    num_fields = bucket.rows * ROW_FIELDS
    rows = packed[:num_fields].reshape(bucket.rows, ROW_FIELDS)
    rows[:, 0] = num_slots
    tokens = packed[num_fields : num_fields + bucket.tokens]
    updates: list[tuple[int, int, int]] = []
    for i, row in enumerate(plan.decodes):
        rows[i, :5] = (row.slot, 1, row.position, 1, 0)
        tokens[i] = -1
        if row.new_page:
            updates.append((row.slot, row.position // page_size, row.new_page))
    start = len(plan.decodes)
    for i, chunk in enumerate(plan.prefills, start):
        _pack_chunk(chunk, rows[i])
        tokens[start : start + len(chunk.token_ids)] = chunk.token_ids
        start += len(chunk.token_ids)
        updates += ((chunk.slot, index, page) for index, page in enumerate(chunk.new_pages, chunk.first_new_page))
    if updates:
        packed[num_fields + bucket.tokens :].reshape(-1, 3)[: len(updates)] = updates
    return packed


def _pack_chunk(chunk: PrefillChunk, row: np.ndarray) -> None:
    row[:5] = (chunk.slot, len(chunk.token_ids), chunk.start, chunk.samples, 1)
    row[5:] = sampling_fields(chunk.request, chunk.prompt_len)


def unpack(packed: jax.Array, bucket: Bucket, *, page_size: int, num_slots: int) -> StepInputs:
    """Takes the vector apart, inside the step."""
    if bucket.decode:
        slot, position, page = packed.reshape(bucket.rows, 3).T
        real = slot < num_slots
        updates = jnp.stack([slot, position // page_size, page], axis=1)
        return StepInputs(slot, real.astype(jnp.int32), position, real, None, None, updates)
    num_fields = bucket.rows * ROW_FIELDS
    rows = packed[:num_fields].reshape(bucket.rows, ROW_FIELDS)
    tokens = packed[num_fields : num_fields + bucket.tokens]
    updates = packed[num_fields + bucket.tokens :].reshape(-1, 3)
    slot, query_len, context_len, samples, has_sampling = rows[:, :5].T
    sampling = (jnp.where(has_sampling > 0, slot, num_slots), rows[:, 5:])
    return StepInputs(slot, query_len, context_len, samples > 0, tokens, sampling, updates)


class LongInputs(NamedTuple):
    """What a long step reads besides the state and the host context. T tokens, of which `num_tokens` are real."""

    slot: jax.Array  # scalar
    num_tokens: jax.Array  # scalar
    start: jax.Array  # scalar: position of the first token
    num_device_tokens: jax.Array  # scalar: positions below it lie in pages
    samples: jax.Array  # scalar, bool
    sampling: jax.Array  # [SAMPLING_FIELDS]
    tokens: jax.Array  # [T] ids; -1: the slot's last token


def long_size(num_tokens: int) -> int:
    """Length of the vector for a long step of so many tokens: slot, tokens, start, on the device, samples, the rest."""
    return 5 + SAMPLING_FIELDS + num_tokens


def pack_long(chunk: LongChunk, num_tokens: int) -> np.ndarray:
    """The vector of a chunk, padded to `num_tokens`."""
    tokens = np.zeros(num_tokens, np.int32)
    tokens[: chunk.num_tokens] = chunk.token_ids or -1
    head = (chunk.slot, chunk.num_tokens, chunk.start, chunk.num_device_tokens, chunk.samples)
    return np.concatenate([np.array(head, np.int32), sampling_fields(chunk.request, chunk.prompt_len), tokens])


def unpack_long(packed: jax.Array, num_tokens: int) -> LongInputs:
    """Takes the vector, which may be longer, apart on the device."""
    slot, real, start, num_device_tokens, samples = packed[:5]
    sampling, tokens = jnp.split(packed[5 : long_size(num_tokens)], (SAMPLING_FIELDS,))
    return LongInputs(slot, real, start, num_device_tokens, samples > 0, sampling, tokens)


class SlotHistory(NamedTuple):
    """What a slot with penalties or a bias needs once, when a request gets it."""

    slot: jax.Array  # scalar
    tokens: jax.Array  # [max_model_len] known tokens
    is_prompt: jax.Array  # [max_model_len] bool
    is_output: jax.Array  # [max_model_len] bool
    bias_ids: jax.Array  # [MAX_LOGIT_BIAS]; the vocabulary's size where unused
    bias: jax.Array  # [MAX_LOGIT_BIAS] float32


def history_size(max_model_len: int) -> int:
    """Length of the vector for a slot's history: slot, prompt length, known length, tokens, bias ids, biases."""
    return 3 + max_model_len + 2 * MAX_LOGIT_BIAS


def pack_history(chunk: PrefillChunk | LongChunk | LastToken, *, max_model_len: int, vocab_rows: int) -> np.ndarray:
    """The vector for the slot of a chunk that begins an admission."""
    history = chunk.history or ()
    tokens = np.zeros(max_model_len, np.int32)
    tokens[: len(history)] = history
    head = np.array([chunk.slot, chunk.prompt_len, len(history)], np.int32)
    return np.concatenate([head, tokens, _pack_bias(chunk.request.logit_bias, vocab_rows)])


def _pack_bias(bias: Mapping[int, float], vocab_rows: int) -> np.ndarray:
    """[2 * MAX_LOGIT_BIAS] int32: ids, then biases by their bits."""
    ids, values = np.full(MAX_LOGIT_BIAS, vocab_rows, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    ids[: len(bias)], values[: len(bias)] = list(bias), list(bias.values())
    return np.concatenate([ids, values.view(np.int32)])


def unpack_history(packed: jax.Array, max_model_len: int) -> SlotHistory:
    """Takes the vector apart, on the device."""
    slot, prompt_len, known = packed[:3]
    tokens, ids, bits = jnp.split(packed[3:], (max_model_len, max_model_len + MAX_LOGIT_BIAS))
    index = jnp.arange(max_model_len)
    bias = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return SlotHistory(slot, tokens, index < prompt_len, (index >= prompt_len) & (index < known), ids, bias)


class SlotMasks(NamedTuple):
    """What M slots may sample next. Unused ones are slot N."""

    slot: jax.Array  # [M]
    allowed: jax.Array  # [M, V] bool
    bias_ids: jax.Array  # [M, MAX_LOGIT_BIAS]; V where unused
    bias: jax.Array  # [M, MAX_LOGIT_BIAS] float32


def mask_size(vocab_rows: int) -> int:
    """Length of a slot's mask: slot, bits, bias ids, biases. For 150,000 tokens 27 kB, of which 8 for the bias."""
    return 1 + -(-vocab_rows // 32) + 2 * MAX_LOGIT_BIAS


def pack_masks(masks: Sequence[TokenMask], num_rows: int, *, vocab_rows: int, num_slots: int) -> np.ndarray:
    """[num_rows, mask_size] int32, padded to that many."""
    packed = np.zeros((num_rows, mask_size(vocab_rows)), np.int32)
    packed[:, 0] = num_slots
    packed[:, -2 * MAX_LOGIT_BIAS : -MAX_LOGIT_BIAS] = vocab_rows
    for row, mask in zip(packed, masks, strict=False):
        row[0] = mask.slot
        words = np.frombuffer(mask.words, "<i4")[: -(-vocab_rows // 32)]
        row[1 : 1 + len(words)] = words
        if mask.logit_bias:
            row[-2 * MAX_LOGIT_BIAS :] = _pack_bias(mask.logit_bias, vocab_rows)
    return packed


def unpack_masks(packed: jax.Array, vocab_rows: int) -> SlotMasks:
    """Takes the masks apart, on the device."""
    words, ids, bits = jnp.split(packed[:, 1:], (-(-vocab_rows // 32), -(-vocab_rows // 32) + MAX_LOGIT_BIAS), axis=1)
    allowed = (words[:, :, None] >> jnp.arange(32)) & 1
    allowed = allowed.reshape(len(packed), -1)[:, :vocab_rows] > 0
    return SlotMasks(packed[:, 0], allowed, ids, jax.lax.bitcast_convert_type(bits, jnp.float32))


class SlotPrefix(NamedTuple):
    """What a slot needs whose sequence begins with pages that are in the cache already."""

    slot: jax.Array  # scalar
    source: jax.Array  # scalar: page that is copied; 0: none, and page 0 is copied to itself
    target: jax.Array  # scalar: page that it is copied to
    has_last: jax.Array  # scalar: whether the next two are meant
    last_token: jax.Array  # scalar: what the slot's first decode row computes
    sampling: jax.Array  # [SAMPLING_FIELDS]
    pages: jax.Array  # [W] the slot's page table; 0 where its pages are not known yet


PREFIX_SCALARS = 5


def prefix_size(table_width: int) -> int:
    """Length of the vector for a slot's prefix: its scalars, the sampling fields, the pages."""
    return PREFIX_SCALARS + SAMPLING_FIELDS + table_width


def pack_prefix(prefix: CachedPrefix, *, table_width: int) -> np.ndarray:
    """The vector of a prefix."""
    packed = np.zeros(prefix_size(table_width), np.int32)
    last, start = prefix.last, PREFIX_SCALARS + SAMPLING_FIELDS
    source, target = (0, 0) if prefix.copied_from is None else (prefix.copied_from, prefix.pages[-1])
    packed[:PREFIX_SCALARS] = (prefix.slot, source, target, last is not None, 0 if last is None else last.token_id)
    if last is not None:
        packed[PREFIX_SCALARS:start] = sampling_fields(last.request, last.prompt_len)
    packed[start : start + len(prefix.pages)] = array("i", prefix.pages)  # a list takes numpy three times as long
    return packed


def unpack_prefix(packed: jax.Array) -> SlotPrefix:
    """Takes the vector apart, on the device."""
    fields, pages = jnp.split(packed[PREFIX_SCALARS:], (SAMPLING_FIELDS,))
    return SlotPrefix(*packed[:PREFIX_SCALARS], fields, pages)
