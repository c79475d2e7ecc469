"""/tokenize, /detokenize and /tokenizer_info: what a prompt is in tokens, for clients that plan their context."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxinfer.http import known_fields, openai
from jaxinfer.http.bodies import json_response, read_body
from jaxinfer.http.messages import count_tokens
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.types import EngineInfo, InvalidRequest

_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class TokenizeText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of POST /tokenize with a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    """As a completion has them. None: true."""
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


_text_decoder = msgspec.json.Decoder(TokenizeText)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def token_routes(prompts: PromptMaker, info: EngineInfo) -> list[Route]:
    """The first two under /v1 too, and Anthropic's count_tokens. They run in threads: a megabyte takes seconds."""
    routes = []
    for path, act in (("/tokenize", _tokenize), ("/detokenize", _detokenize)):
        endpoint = _endpoint(act, prompts, info)
        routes += [Route(prefix + path, endpoint, methods=["POST"]) for prefix in ("", "/v1")]

    async def describe(_: HttpRequest) -> Response:
        return json_response(prompts.tokenizer_facts())

    routes.append(Route("/tokenizer_info", describe, methods=["GET"]))
    counting = _endpoint(lambda body, prompts, _: count_tokens(body, prompts), prompts, info)
    return [*routes, Route("/v1/messages/count_tokens", counting, methods=["POST"])]


def _endpoint(act: Any, prompts: PromptMaker, info: EngineInfo) -> Any:
    async def answer(request: HttpRequest) -> Response:
        body = await read_body(request.scope, request.receive)
        return json_response(await asyncio.to_thread(act, body, prompts, info))

    return answer


def _tokenize(body: bytes, prompts: PromptMaker, info: EngineInfo) -> dict[str, Any]:
    ids, with_texts = _read(body, prompts)
    return {
        "count": len(ids),
        "max_model_len": info.max_model_len,
        "tokens": list(ids),
        "token_strs": prompts.token_texts(ids) if with_texts else None,
    }


def _read(body: bytes, prompts: PromptMaker) -> tuple[Sequence[int], bool]:
    """The ids of the prompt or of the messages, and whether their texts are asked for."""
    try:
        fields = _fields_of(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}", code="invalid_json") from None
    if ("prompt" in fields) == ("messages" in fields):
        given = "both prompt and messages" if "prompt" in fields else "neither prompt nor messages"
        raise InvalidRequest(f"the body has {given}; give one of them", param="prompt")
    if "prompt" in fields:
        text = openai.parse(_text_decoder, body)
        prompts.model_name(text.model)
        special = text.add_special_tokens is not False
        return prompts.text_ids(text.prompt, add_special_tokens=special), bool(text.return_token_strs)
    with_texts = openai.parse(_flag_decoder, fields.pop("return_token_strs", msgspec.Raw(b"null")), "return_token_strs")
    chat = known_fields.decode(openai.ChatRequest, msgspec.json.encode(fields))
    prompts.model_name(chat.model)
    return prompts.chat_ids(chat), bool(with_texts)


_flag_decoder = msgspec.json.Decoder(bool | None)


def _detokenize(body: bytes, prompts: PromptMaker, info: EngineInfo) -> dict[str, Any]:
    request = openai.parse(_detokenize_decoder, body)
    prompts.model_name(request.model)
    for id in request.tokens:
        if not 0 <= id < info.vocab_size:
            raise InvalidRequest(f"tokens has {id}; the vocabulary has ids 0 to {info.vocab_size - 1}", param="tokens")
    return {"prompt": prompts.text_of(request.tokens)}
