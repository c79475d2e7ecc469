"""Request bodies of the OpenAI API: their schemas, and what they ask for in the words of `jaxinfer.types`.

Every field is honoured or refused: an unknown one is an error that names it, and so is a value that cannot be met.
"""

from __future__ import annotations

import operator
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec

from jaxinfer.http import token_ids
from jaxinfer.http.structured import StructuredBody, asks_for_form, form_of
from jaxinfer.http.tools import Callable, check_answers, check_tools, template_calls
from jaxinfer.types import MAX_LOGPROBS, InvalidRequest, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where the client gives none, as OpenAI has it. Chat takes what the context leaves."""
MAX_N = 128
"""Most choices per prompt (the limit of the OpenAI API)."""
MAX_ID_DIGITS = 20
"""Longest token id written as text; Python reads none of several thousand digits."""
MAX_CHOICES = 1024
"""Most choices of one request, over all of its prompts: each one is a request to the engine."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that a client may use, and what a chat template is told: most know no developer and would skip the turn."""
FIELDS_OF_ROLES = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
"""Fields of a message that one role alone may have."""
RESERVED_TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "self"})
"""Template variables that other fields of the request set."""
SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "cache_salt",
    "priority",
    "session_id",
)
"""Fields that SamplingParams has, too; what a body leaves out has the default there."""
_sampling_of = operator.attrgetter(*SAMPLING_FIELDS)

Prompt = str | Sequence[int]


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class StreamOptions(_Body, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Generation(_Body, kw_only=True, frozen=True):
    """What both endpoints take. None is what OpenAI's clients send for "not given"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name; it wins
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredBody | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    prompt_logprobs: int | None = None
    user: str | None = None  # names the end user to the provider; it changes nothing in a reply

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def has_text(self) -> bool:
        """Whether there is text to render, to tokenise or to show: work that grows with the body."""
        return True

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar is to be compiled: milliseconds, whatever the size of the body."""
        return asks_for_form(self)

    def check(self, least_tokens: int = 1) -> None:
        """Raises InvalidRequest for what the schema cannot say."""
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < least_tokens:
                _refuse(name, f"{name} is {value}; it must be at least 1, or 0 where a completion's prompt is echoed")
        if self.stream_options is not None and not self.stream:
            _refuse("stream_options", "stream_options needs stream: true")
        if self.continuous_usage and not self.include_usage:
            _refuse("stream_options", "continuous_usage_stats needs include_usage: true")
        if self.prompt_logprobs is not None and self.stream:
            _refuse("prompt_logprobs", "prompt_logprobs needs stream: false; with echo, logprobs are streamed")
        if self.n is not None and self.n > MAX_N:
            _refuse("n", f"n is {self.n}; at most {MAX_N} choices per prompt are supported")

    def _sampling(self, max_tokens: int | None, logprobs: int | None, prompt: int | None) -> SamplingParams:
        fields = zip(SAMPLING_FIELDS, _sampling_of(self), strict=True)
        return SamplingParams(
            **{name: value for name, value in fields if value is not None},
            max_tokens=max_tokens,
            logit_bias=_token_biases(self.logit_bias),
            logprobs=logprobs,
            prompt_logprobs=prompt,
            structured_outputs=form_of(self),
        )


class CompletionRequest(_Generation, kw_only=True, frozen=True):
    """The body of POST /v1/completions."""

    prompt: str | Sequence[str | int | list[int]]  # an array("I") where it is one list of token ids: see `token_ids`
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    id_prefix: ClassVar[str] = "cmpl-"

    @property
    def has_text(self) -> bool:
        return bool(self.echo) or not isinstance(self.prompt, array)

    def check(self, least_tokens: int = 1) -> None:
        super().check(0 if self.echo else least_tokens)
        if self.suffix:
            _refuse("suffix", "suffix is not supported: the model completes at the end of the prompt")
        n = _or(self.n, 1)
        if self.best_of is not None and self.best_of != n:
            _refuse("best_of", f"best_of is {self.best_of}, n is {n}; only best_of equal to n is supported")
        num_prompts = len(self.prompts())
        if self.session_id is not None and num_prompts > 1:
            _refuse(
                "session_id",
                f"session_id is {self.session_id!r} with {num_prompts} prompts; a session is one sequence: give one",
            )
        if (num_choices := num_prompts * n) > MAX_CHOICES:
            _refuse("prompt", f"{num_choices} choices were asked for; one request may have {MAX_CHOICES}")

    def prompts(self) -> list[Prompt]:
        """The prompts, each a non-empty string or a non-empty list of token ids."""
        prompt = self.prompt
        if isinstance(prompt, str | array) or all(isinstance(item, int) for item in prompt):
            prompts: list[Any] = [prompt]
        elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
            prompts = list(prompt)
        else:
            _refuse(
                "prompt", "prompt mixes strings, token ids and lists; give one string, strings, ids or lists of ids"
            )
        if not all(prompts):
            _refuse("prompt", "prompt is empty; give at least one character or token id")
        return prompts

    def to_sampling(self) -> SamplingParams:
        asked = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        return self._sampling(_or(self.token_limit, DEFAULT_COMPLETION_TOKENS), self.logprobs, max(asked, default=None))


class _UnreadCompletion(CompletionRequest, kw_only=True, frozen=True):
    """The same with a prompt that is still JSON."""

    prompt: msgspec.Raw  # pyright: ignore[reportIncompatibleVariableOverride]


class TextPart(_Body, kw_only=True, frozen=True):
    type: str
    text: str | None = None


class Message(_Body, kw_only=True, frozen=True):
    """A turn of the conversation. The fields below `name` are those with which clients send back an earlier reply."""

    role: str
    content: str | list[msgspec.Raw] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    parsed: Any = None  # what OpenAI's client has made of the content, which says it all
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def to_template(self, path: str) -> dict[str, Any]:
        """The message as a chat template reads it. `path` says where in the body it stands."""
        if self.role not in ROLES:
            _refuse(f"{path}.role", f"{path}.role is {self.role!r}; supported: {', '.join(ROLES)}")
        for name in ("refusal", "annotations", "audio", "function_call"):
            if getattr(self, name):
                _refuse(f"{path}.{name}", f"{path}.{name} is not supported")
        for name, role in FIELDS_OF_ROLES.items():
            if getattr(self, name) and self.role != role:
                _refuse(
                    f"{path}.{name}", f"{path}.{name} is not supported for the role {self.role!r}, only for {role!r}"
                )
        message: dict[str, Any] = {"role": ROLES[self.role]}
        if self.content is not None:
            message["content"] = self.content
            if not isinstance(self.content, str):
                parts = (_text_of_part(part, f"{path}.content[{i}]") for i, part in enumerate(self.content))
                message["content"] = "".join(parts)
        elif not self.tool_calls:
            _refuse(f"{path}.content", f"{path}.content is missing")
        if self.name:
            message["name"] = self.name
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = template_calls(self.tool_calls, f"{path}.tool_calls")
        if self.role == "tool":
            if not self.tool_call_id:
                _refuse(f"{path}.tool_call_id", f"{path}.tool_call_id is missing; give the id of the call it answers")
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(_Generation, kw_only=True, frozen=True):
    """The body of POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    id_prefix: ClassVar[str] = "chatcmpl-"

    def check(self, least_tokens: int = 1) -> None:
        super().check(least_tokens)
        if self.top_logprobs is not None and not self.logprobs:
            _refuse("top_logprobs", "top_logprobs needs logprobs: true")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            _refuse("top_logprobs", f"top_logprobs is {self.top_logprobs}; it must be from 0 to {MAX_LOGPROBS}")
        for name in RESERVED_TEMPLATE_NAMES & (self.chat_template_kwargs or {}).keys():
            _refuse("chat_template_kwargs", f"chat_template_kwargs has {name!r}, which cannot be set there")
        if not self.messages:
            _refuse("messages", "messages is empty; give at least one message")
        self.callable_tools()

    def template_messages(self) -> list[dict[str, Any]]:
        messages = [message.to_template(f"messages[{i}]") for i, message in enumerate(self.messages)]
        check_answers(messages)
        return messages

    @property
    def is_constrained(self) -> bool:
        return super().is_constrained or bool(self.tools)

    def callable_tools(self) -> Callable:
        """The functions that the model may call; none with the choice "none"."""
        return check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def to_sampling(self) -> SamplingParams:
        logprobs = _or(self.top_logprobs, 0) if self.logprobs else None
        return self._sampling(self.token_limit, logprobs, self.prompt_logprobs)


_decoders: Mapping[type, msgspec.json.Decoder] = {
    kind: msgspec.json.Decoder(kind) for kind in (CompletionRequest, ChatRequest)
}
_unread_decoder = msgspec.json.Decoder(_UnreadCompletion)
_prompt_decoder = msgspec.json.Decoder(str | list[str | int | list[int]])
_part_decoder = msgspec.json.Decoder(TextPart)
_any_decoder = msgspec.json.Decoder()
_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_NAMED_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(?P<name>[^`]*)`")


def decode[Kind: _Generation](kind: type[Kind], body: bytes) -> Kind:
    """The request that `body` holds, checked. Raises InvalidRequest that names the field at fault."""
    packed: Any = _completion(body) if kind is CompletionRequest else None
    request: Kind = packed or _parse(_decoders[kind], body)
    request.check()
    return request


def _completion(body: bytes) -> CompletionRequest | None:
    """The request, not yet checked, with its token ids packed. None: something is wrong with the body."""
    try:
        if (parts := token_ids.cut(body)) is not None:  # a decoder would look at every id, only to find the list's end
            request = _unread_decoder.decode(parts.rest)
            if bytes(request.prompt) == token_ids.MARK and (ids := token_ids.read(parts.ids)) is not None:
                msgspec.structs.force_setattr(request, "prompt", ids)
                return request
        request = _unread_decoder.decode(body)
        prompt = token_ids.of_json(request.prompt)
        if prompt is None:
            prompt = _prompt_decoder.decode(request.prompt)
    except (msgspec.DecodeError, RecursionError):
        return None
    msgspec.structs.force_setattr(request, "prompt", prompt)
    return request


def _parse[Kind](decoder: msgspec.json.Decoder[Kind], data: bytes | msgspec.Raw, path: str = "") -> Kind:
    """The value that `data`, which stands at `path` of the body, holds. Raises InvalidRequest for whatever is wrong."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _schema_error(str(error), path) from None
    except (msgspec.DecodeError, RecursionError) as error:
        place = path or "the body"
        raise InvalidRequest(f"{place} is not valid JSON: {error}", param=path or None, code="invalid_json") from None


parse = _parse  # for the bodies of other routes


def _schema_error(message: str, path: str = "") -> InvalidRequest:
    """msgspec's complaint as ours: the field at fault becomes `param`, its place in the body starts the message."""
    if place := _PLACE.search(message):
        message, path = message[: place.start()], _join(path, place["path"])
    if named := _NAMED_FIELD.match(message):
        param = _join(path, named["name"])
        known = "is missing" if "missing" in message else "is not a supported field"
        return InvalidRequest(f"{param} {known}", param=param, code="invalid_field")
    message = message.replace("`", "").replace("Expected", "expected", 1)
    return InvalidRequest(f"{path or 'the body'}: {message}", param=path or None, code="invalid_type")


def _join(path: str, rest: str) -> str:
    """`rest` starts with a field's name, or with the bracket of an element."""
    return path + rest if not path or not rest or rest.startswith("[") else f"{path}.{rest}"


def _text_of_part(raw: msgspec.Raw, path: str) -> str:
    kind = _parse(_any_decoder, raw, path)  # a Raw is not checked before
    if isinstance(kind, dict) and isinstance(kind.get("type"), str) and kind["type"] != "text":
        _refuse(f"{path}.type", f"{path}.type is {kind['type']!r}; only text parts are supported")
    part = _parse(_part_decoder, raw, path)
    if part.text is None:
        _refuse(f"{path}.text", f"{path}.text is missing")
    return part.text


def _token_biases(biases: Mapping[str, float] | None) -> dict[int, float]:
    for token in biases or {}:
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_ID_DIGITS):
            _refuse("logit_bias", f"logit_bias has the key {token!r}; keys are token ids")
    return {int(token): bias for token, bias in (biases or {}).items()}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
