"""From what a user asks to what the engine runs: defaults applied, limits checked, one request per sample."""

from __future__ import annotations

import dataclasses
import os
from array import array
from collections.abc import Mapping, Sequence

import numpy

from jaxinfer.text import grammar
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import MAX_STOP_IDS, EngineInfo, InvalidRequest, Request, SamplingParams

BUILT_IN_DEFAULTS: Mapping[str, float] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Where neither the request nor the model's generation_config says anything."""

PROBE_CHARS_PER_TOKEN = 16
"""A text of fewer characters per token of context is tokenised at once; English has 4 to 5 in a token."""
SHORT_PROMPT = 500
"""Prompts of fewer tokens are looked at one by one."""

_MASK64 = 2**64 - 1


def lower(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    request_id: str,
) -> list[Request]:
    """One engine request per sample, named `request_id-0`, `request_id-1`, ...

    `max_tokens` is a cap: it is cut to what the context leaves after the prompt. Raises InvalidRequest, with the name
    of the parameter, for whatever the engine could not honour.
    """
    prompt = _checked_prompt(prompt_ids, info)
    resolved = _resolve(sampling, info.sampling_defaults)
    max_tokens = _max_tokens(len(prompt), sampling, info)
    if sampling.stop and tokenizer is None:
        raise InvalidRequest(
            "stop needs a tokenizer, and the model has none; stop_token_ids works without one", param="stop"
        )
    if sampling.session_id is not None and not info.prefix_caching:
        raise InvalidRequest(
            f"session_id is {sampling.session_id!r}, but the server keeps nothing of a request: prefix caching is off",
            param="session_id",
        )
    if sampling.prompt_logprobs is not None and not info.has_prompt_logprobs:
        raise InvalidRequest(
            "log-probabilities of a prompt (prompt_logprobs, or logprobs with echo) are not computed here; an engine "
            "that was started with --enable-prompt-logprobs does",
            param="prompt_logprobs",
        )
    _check_ids(sampling.logit_bias, "logit_bias", info)
    _check_ids(sampling.stop_token_ids, "stop_token_ids", info)
    stop_ids = _stop_ids(sampling, info, tokenizer)
    seed = int.from_bytes(os.urandom(8)) if sampling.seed is None else sampling.seed
    first = Request(
        request_id=f"{request_id}-0",
        prompt_ids=prompt,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=resolved["temperature"],
        top_k=_top_k(resolved["top_k"], info.vocab_size),
        top_p=resolved["top_p"],
        min_p=resolved["min_p"],
        repetition_penalty=resolved["repetition_penalty"],
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=sample_seed(seed, 0),
        logit_bias=dict(sampling.logit_bias),
        stop_ids=stop_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        cache_salt=sampling.cache_salt or "",
        priority=sampling.priority,
        session_id=sampling.session_id or "",
        grammar=_grammar(sampling, tokenizer),
    )
    others = range(1, sampling.n)
    return [
        first,
        *(dataclasses.replace(first, request_id=f"{request_id}-{j}", seed=sample_seed(seed, j)) for j in others),
    ]


def refuse_endless(text: str, info: EngineInfo, tokenizer: Tokenizer) -> None:
    """InvalidRequest for a prompt text of more than twice the context, before all of it is tokenised.

    16 MiB of text take half a minute. A beginning of it is tokenised instead, and four times as much if that is not
    enough to tell: so a text whose tokens are very long is still read whole.
    """
    num_chars = PROBE_CHARS_PER_TOKEN * info.max_model_len
    while num_chars < len(text):
        num_tokens = len(tokenizer.encode(text[:num_chars], add_special_tokens=False))
        if num_tokens > 2 * info.max_model_len:
            raise _too_long(f"more than {num_tokens}", info)
        num_chars *= 4


def special_stops(stops: Sequence[str], tokenizer: Tokenizer | None) -> dict[int, str]:
    """Stop strings that are the text of one added token, by its id: such a token may show no text to match.

    The token's id then ends the output. The string is matched in the text all the same: ordinary tokens can spell it.
    """
    if tokenizer is None:
        return {}
    return {id: stop for stop in stops if (id := tokenizer.special_id(stop)) is not None}


def _grammar(sampling: SamplingParams, tokenizer: Tokenizer | None) -> str:
    """What the engine is to match, checked. Empty: anything goes."""
    form = sampling.structured_outputs
    if form is None:
        return ""
    if tokenizer is None:
        raise InvalidRequest(f"{form.param} needs a tokenizer, and the model has none", param=form.param)
    written = grammar.write(form)
    grammar.check(written, tokenizer, form.param)
    return written


def sample_seed(seed: int, sample: int) -> int:
    """The 64-bit seed of one of a request's samples: neighbouring seeds and samples share nothing visible."""
    return _mix64(_mix64(seed & _MASK64) + sample)


def _mix64(x: int) -> int:
    """The SplitMix64 generator's output for state x: a bijection of 64-bit integers (Steele, Lea, Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _checked_prompt(prompt_ids: Sequence[int], info: EngineInfo) -> array[int]:
    """A copy of the ids as 32-bit integers, which travel to the engine as they are.

    To pack and to compare 32,768 ids takes 0.2 ms; to look at them one by one takes 1 ms.
    """
    if not len(prompt_ids):
        raise InvalidRequest("prompt is empty; it must have at least one token", param="prompt")
    try:
        prompt = array("I", prompt_ids)
    except OverflowError:  # one of them is below 0, or has more than 32 bits
        _check_ids(prompt_ids, "prompt", info)
        raise
    if _highest(prompt) >= info.vocab_size:
        _check_ids(prompt, "prompt", info)
    if len(prompt) >= info.max_model_len:
        raise _too_long(f"{len(prompt)}", info)
    return prompt


def _highest(ids: array[int]) -> int:
    """Of a short prompt without numpy, whose code is in no cache of a server with nothing else to do: 25 us."""
    return max(ids) if len(ids) < SHORT_PROMPT else int(numpy.frombuffer(ids, numpy.uint32).max())


def _too_long(num_tokens: str, info: EngineInfo) -> InvalidRequest:
    # At the limit itself the two numbers are equal, and only the rest says why.
    return InvalidRequest(
        f"prompt has {num_tokens} tokens; the limit is {info.max_model_len} tokens, prompt and output together, "
        "and at least one is for the output",
        param="prompt",
        code="context_length_exceeded",
    )


def _check_ids(ids: Sequence[int] | Mapping[int, float], param: str, info: EngineInfo) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < info.vocab_size):
        wrong = next(id for id in ids if not 0 <= id < info.vocab_size)
        raise InvalidRequest(
            f"{param} has token id {wrong}; the vocabulary has ids 0 to {info.vocab_size - 1}", param=param
        )


def _max_tokens(prompt_len: int, sampling: SamplingParams, info: EngineInfo) -> int:
    if sampling.max_tokens == 0:
        raise InvalidRequest("max_tokens is 0; a generation has at least 1 token", param="max_tokens")
    room = info.max_model_len - prompt_len
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}; after a prompt of {prompt_len} tokens the context of "
            f"{info.max_model_len} tokens leaves {room}",
            param="min_tokens",
        )
    return max_tokens


def _resolve(sampling: SamplingParams, model_defaults: Mapping[str, float]) -> dict[str, float]:
    asked = {name: value for name in BUILT_IN_DEFAULTS if (value := getattr(sampling, name)) is not None}
    return {**BUILT_IN_DEFAULTS, **model_defaults, **asked}


def _top_k(top_k: float, vocab_size: int) -> int:
    return int(top_k) if 0 < top_k < vocab_size else 0


def _stop_ids(sampling: SamplingParams, info: EngineInfo, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    eos_ids = () if sampling.ignore_eos else info.eos_ids
    special = [id for id in special_stops(sampling.stop, tokenizer) if id < info.vocab_size]
    stop_ids = tuple(dict.fromkeys([*eos_ids, *sampling.stop_token_ids, *special]))
    if len(stop_ids) > MAX_STOP_IDS:
        raise InvalidRequest(
            f"{len(stop_ids)} token ids would end the output ({len(eos_ids)} of them the model's own); "
            f"at most {MAX_STOP_IDS} are supported",
            param="stop" if len(special) > len(sampling.stop_token_ids) else "stop_token_ids",
        )
    return stop_ids
