"""Request fields that clients of other engines send and our schemas do not have: one table says what is done with each.

A field is translated to ours, accepted where its value asks for what is done anyway, or refused with the reason. What
is neither in a schema nor here is refused by name. Null is what clients send for "not given", and always accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from jaxinfer.http import openai
from jaxinfer.types import InvalidRequest


class Renamed(NamedTuple):
    """Honoured: means what a field of ours does."""

    ours: str


class Only(NamedTuple):
    """Accepted with these values alone, which ask for what is done anyway; others are refused."""

    values: tuple[Any, ...]
    reason: str


class Label(NamedTuple):
    """Accepted with any value: it tells of the request, and asks for nothing in the reply."""

    reason: str


class Refused(NamedTuple):
    """Not supported with any value."""

    reason: str
    code: str = "invalid_value"


Rule = Renamed | Only | Label | Refused

_STORED = "replies are kept by /v1/responses alone"
_BEAM = "there is no beam search"
_SAMPLER = "this sampler is not there; temperature, top_k, top_p and min_p are"
_PENALTY = "this penalty is not there; repetition_penalty, frequency_penalty and presence_penalty are"

FIELDS: Mapping[str, Rule] = {
    # OpenAI
    "metadata": Label("it is kept with stored replies"),
    "safety_identifier": Label("it names the end user to the provider"),
    "prompt_cache_key": Label("a hint where prompts that begin alike are sent; they are found without it"),
    "prompt_cache_retention": Only(("in-memory", "in_memory"), "how long prompts are kept is the server's decision"),
    "service_tier": Only(("auto", "default"), "there is one tier"),
    "store": Only((False,), _STORED),
    "modalities": Only((["text"],), "replies are text"),
    "audio": Refused("replies are text"),
    "prediction": Refused("there is no predicted output"),
    "web_search_options": Refused("the server searches nothing"),
    "moderation": Refused("the server moderates nothing"),
    "verbosity": Only(("medium",), "the model has no such setting"),
    "functions": Refused("the older form of tools is not supported"),
    "function_call": Only(("none",), "the older form of tool_choice is not supported"),
    # vLLM
    "use_beam_search": Only((False,), _BEAM),
    "length_penalty": Only((1, 1.0), _BEAM),
    "early_stopping": Only((False,), _BEAM),
    "request_id": Label("the reply has an id of its own; X-Request-Id is echoed"),
    "spaces_between_special_tokens": Only((True,), "special tokens are shown as the tokenizer joins them"),
    "detokenize": Only((True,), "replies are text"),
    "truncate_prompt_tokens": Refused("prompts are not cut; shorten it, which /tokenize helps with"),
    "return_tokens_as_token_ids": Only((False,), "tokens are shown as text"),
    "return_token_ids": Only((False,), "token ids are not shown"),
    "return_prompt_text": Only((False,), "a completion shows its prompt with echo"),
    "allowed_token_ids": Refused("tokens are not limited to a list; logit_bias makes them likelier"),
    "bad_words": Only(([],), "words are not forbidden; logit_bias makes tokens less likely"),
    "logits_processors": Only(([],), "code of a request is not run"),
    "thinking_token_budget": Refused("reasoning has no limit of its own; max_tokens is for all of the reply"),
    "guided_decoding_backend": Only(("auto", "guidance"), "llguidance alone matches grammars"),
    "chat_template": Refused("a request's own template is not run; the server has --chat-template"),
    "chat_template_content_format": Only(("auto", "string"), "text parts are joined"),
    "documents": Only(([],), "documents are not supported; put them into a message"),
    "continue_final_message": Only((False,), "the last message is not continued"),
    "mm_processor_kwargs": Only(({},), "the model reads text alone"),
    "kv_transfer_params": Refused("keys and values are not sent between servers"),
    "vllm_xargs": Only(({},), "these arguments are another engine's"),
    "data_parallel_rank": Refused("there is one engine"),
    "prompt_embeds": Refused("prompts are text or token ids"),
    # SGLang
    "min_new_tokens": Renamed("min_tokens"),
    "max_new_tokens": Renamed("max_tokens"),
    "no_stop_trim": Renamed("include_stop_str_in_output"),
    "rid": Label("the reply has an id of its own; X-Request-Id is echoed"),
    "extra_key": Renamed("cache_salt"),
    "regex": Renamed("guided_regex"),
    "ebnf": Renamed("guided_grammar"),
    "json_schema": Renamed("guided_json"),
    "structural_tag": Refused("a tag in running text is not supported; tools with strict: true are"),
    "stop_regex": Refused("stop takes strings"),
    "lora_path": Refused("there are no adapters"),
    "session_params": Refused("session_id names a session"),
    "return_hidden_states": Only((False,), "hidden states are not shown"),
    "return_routed_experts": Only((False,), "the choice of experts is not shown"),
    "custom_logit_processor": Refused("code of a request is not run"),
    "custom_params": Refused("there is nothing that would read them"),
    "separate_reasoning": Only((False,), "reasoning is not split off"),
    "stream_reasoning": Only((True,), "what is generated is streamed"),
    # Text Generation Inference, llama.cpp, Ollama and their clients
    "n_predict": Renamed("max_tokens"),
    "repeat_penalty": Renamed("repetition_penalty"),
    "stop_sequences": Renamed("stop"),
    "cache_prompt": Only((True,), "prompts that begin alike are found in the cache; cache_salt keeps one apart"),
    "truncate": Refused("prompts are not cut; shorten it, which /tokenize helps with"),
    "details": Only((False,), "usage and finish_reason are always shown"),
    "decoder_input_details": Only((False,), "prompt_logprobs asks for log-probabilities of the prompt"),
    "do_sample": Refused("temperature 0 is greedy, and above it is sampled"),
    "watermark": Only((False,), "text is not marked"),
    "typical_p": Only((1, 1.0), _SAMPLER),
    "tfs_z": Only((1, 1.0), _SAMPLER),
    "top_a": Only((0, 0.0), _SAMPLER),
    "mirostat": Only((0,), _SAMPLER),
    "xtc_probability": Only((0, 0.0), _SAMPLER),
    "dynatemp_range": Only((0, 0.0), _SAMPLER),
    "smoothing_factor": Only((0, 0.0), _SAMPLER),
    "no_repeat_ngram_size": Only((0,), _PENALTY),
    "encoder_repetition_penalty": Only((1, 1.0), _PENALTY),
    "dry_multiplier": Only((0, 0.0), _PENALTY),
    "grammar": Renamed("guided_grammar"),
    "format": Refused("response_format says what form an output has"),
    "options": Only(({},), "give each option as a field of its own"),
    "keep_alive": Only((-1, "-1"), "the model stays loaded"),
    # LiteLLM, OpenRouter and other routers
    "provider": Refused("this server is the only provider"),
    "models": Refused("model names the one to use"),
    "route": Refused("requests are answered here"),
    "transforms": Only(([],), "prompts are not changed"),
    "plugins": Only(([],), "there are no plugins"),
}

COMPLETION_FIELDS: Mapping[str, Rule] = {
    "add_special_tokens": Only((True,), "a text begins as the tokenizer has it; token ids are taken as they are"),
}
CHAT_FIELDS: Mapping[str, Rule] = {
    "add_special_tokens": Only((False,), "the chat template writes the special tokens"),
    "echo": Only((False,), "a chat's prompt is not shown"),
}
STREAM_FIELDS: Mapping[str, Rule] = {
    "include_obfuscation": Only((False,), "events are not padded"),
}
"""Fields of `stream_options`."""

_raw_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
Fields = dict[str, msgspec.Raw]


def decode[Kind: openai.CompletionRequest | openai.ChatRequest](kind: type[Kind], body: bytes) -> Kind:
    """As `openai.decode`, which alone runs where a body has none of these fields. Raises InvalidRequest."""
    try:
        return openai.decode(kind, body)
    except InvalidRequest as error:
        if error.code != "invalid_field" or (cleaned := _without_known(kind, body)) is None:
            raise
    return openai.decode(kind, cleaned)


def _without_known(kind: type[msgspec.Struct], body: bytes) -> bytes | None:
    """The body in the words of our schemas; None if there is nothing to translate. Refuses what is in no table."""
    own = COMPLETION_FIELDS if kind is openai.CompletionRequest else CHAT_FIELDS
    try:
        fields = _raw_decoder.decode(body)
        changed = apply(fields, kind, {**FIELDS, **own})
        options = fields.get("stream_options")
        if options is not None and bytes(options).startswith(b"{"):
            inner = _raw_decoder.decode(options)
            if apply(inner, openai.StreamOptions, STREAM_FIELDS, "stream_options."):
                fields["stream_options"] = msgspec.Raw(msgspec.json.encode(inner))
                changed = True
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.json.encode(fields) if changed else None


def parse[Kind: msgspec.Struct](
    decoder: msgspec.json.Decoder[Kind], kind: type[Kind], body: bytes, rules: Mapping[str, Rule]
) -> Kind:
    """The struct of a body, after the rules for fields that it does not have. Raises InvalidRequest."""
    try:
        return openai.parse(decoder, body)
    except InvalidRequest as error:
        if error.code != "invalid_field":
            raise
        fields = openai.parse(_raw_decoder, body)  # what is wrong further on has not been read yet
        if not apply(fields, kind, rules):
            raise
    return openai.parse(decoder, msgspec.json.encode(fields))


def apply(fields: Fields, kind: type[msgspec.Struct], rules: Mapping[str, Rule], path: str = "") -> bool:
    """Takes out of `fields` what is not in the schema, by the rules; whether there was any.

    path: of the object in the body, for messages. Raises InvalidRequest that names every field in neither.
    """
    schema = {field.encode_name for field in msgspec.structs.fields(kind)}
    foreign = [name for name in fields if name not in schema]
    if strangers := [name for name in foreign if name not in rules]:
        names = ", ".join(path + name for name in strangers)
        what = "is not a supported field" if len(strangers) == 1 else "are not supported fields"
        raise InvalidRequest(f"{names} {what}", param=path + strangers[0], code="invalid_field")
    for name in foreign:
        _apply_rule(path + name, rules[name], fields.pop(name), fields)
    return bool(foreign)


def _apply_rule(name: str, rule: Rule, raw: msgspec.Raw, fields: Fields) -> None:
    if bytes(raw) == b"null":
        return
    match rule:
        case Renamed(ours):
            if bytes(fields.get(ours, b"null")) != b"null":
                raise InvalidRequest(f"{name} and {ours} mean the same; give one", param=name)
            fields[ours] = raw
        case Only(values, reason):
            value = msgspec.json.decode(raw)
            if not any(type(value) is type(legal) and value == legal for legal in values):
                allowed = " or ".join(msgspec.json.encode(legal).decode() for legal in values)
                shown = bytes(raw)[:80].decode(errors="replace")
                raise InvalidRequest(f"{name} is {shown}; only {allowed} is accepted: {reason}", param=name)
        case Refused(reason, code):
            raise InvalidRequest(f"{name} is not supported: {reason}", param=name, code=code)
        case Label():
            pass
