"""Chat messages to prompt text by the checkpoint's own Jinja template, in a sandbox."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxinfer.text.tokenizer import token_string
from jaxinfer.types import InvalidRequest

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_MARK = "\ue000continue\ue000"  # private use: no message and no template has it


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; for a prompt it is a block like any other."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


class _Refusal(jinja2.TemplateError):
    """The template itself refuses the conversation, in its own words."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which a model was not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """One or several named templates of a checkpoint. With several, `tool_use` serves requests with tools.

    Raises InvalidRequest (param `chat_template`) where the source is not a template. A template of a client runs in
    the sandbox too, but can still loop for long: whether to accept one is the server's decision.
    """

    def __init__(self, source: str | Mapping[str, str], tokenizer_config: Mapping[str, Any]):
        sources = {"default": source} if isinstance(source, str) else dict(source)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"chat template, line {error.lineno}: {error.message}", param="chat_template"
            ) from error
        parsed = [environment.parse(text) for text in sources.values()]
        self.shows_tools: bool = any("tools" in jinja2.meta.find_undeclared_variables(one) for one in parsed)
        """Whether a template reads the variable `tools`; the others leave them out without a word."""
        self.source: str = "\n".join(sources.values())
        """The text of all templates, which shows what the model's turns look like."""
        self._variables: dict[str, Any] = {}
        for name in _TOKEN_NAMES:
            if (text := token_string(tokenizer_config.get(name))) is not None:
                self._variables[name] = text

    @classmethod
    def from_config(
        cls, tokenizer_config: Mapping[str, Any], override: str | Mapping[str, str] | None = None
    ) -> ChatTemplate | None:
        """The template of tokenizer_config.json, or `override`: a template, several by name, or the name of one there.

        None: the checkpoint has no template.
        """
        source = tokenizer_config.get("chat_template")
        if isinstance(source, Sequence) and not isinstance(source, str):
            source = {entry["name"]: entry["template"] for entry in source}
        if override is not None:
            named = source.get(override) if isinstance(source, Mapping) and isinstance(override, str) else None
            source = override if named is None else named
        return None if source is None else cls(source, tokenizer_config)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text. `kwargs` are variables of the template (`enable_thinking`, `documents`, ...).

        With `continue_final_message` the prompt ends inside the last message, for the model to go on with. Raises
        InvalidRequest (param `messages`) with the template's own words where it refuses the conversation.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other", param="add_generation_prompt"
                )
            messages = _mark_end(messages)
        variables = self._variables | {"documents": None} | kwargs
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        text = _render(self._choose(tools), [_plain(message) for message in messages], variables)
        if not continue_final_message:
            return text
        if _CONTINUE_MARK not in text:
            raise InvalidRequest("the chat template does not show the final message", param="messages")
        return text[: text.rindex(_CONTINUE_MARK)]

    def _choose(self, tools: list[dict[str, Any]] | None) -> jinja2.Template:
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                f"the model has the chat templates {sorted(self._templates)} and no default", param="chat_template"
            )
        return self._templates[name]


def _render(template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text of the first spelling of the messages that the template can show; the fault of the first if none."""
    fault: Exception | None = None
    for spelling in _spellings(messages):
        try:
            return template.render({**variables, "messages": spelling})
        except _Refusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        except _TEMPLATE_FAULTS as error:
            fault = fault or error
    raise InvalidRequest(f"the chat template cannot show this: {fault}", param="messages") from fault


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers passes it on: no null fields, and reasoning under both names that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _spellings(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages, then other spellings of the same tool calls.

    A message of nothing but tool calls has no `content` for some templates, null for others (DeepSeek's), and an empty
    text for those that search it (Qwen's). Arguments are a mapping for most and JSON text for some (DeepSeek's). The
    empty text comes last: DeepSeek's template then shows an empty answer and leaves the calls out.
    """
    yield messages
    bare = any(message.get("tool_calls") and "content" not in message for message in messages)
    parsed = any(isinstance(f.get("arguments"), Mapping) for message in messages for f in _functions(message))
    for fills in ([{}, {"content": None}], [{"content": ""}]) if bare else ([{}],):
        for as_text in (False, True) if parsed else (False,):
            for fill in fills:
                if fill or as_text:
                    yield [_respell(message, fill, as_text) for message in messages]


def _functions(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    found = [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return [function for function in found if isinstance(function, Mapping)]


def _respell(message: dict[str, Any], fill: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    respelled = {**fill, **copy.deepcopy(message)}
    for function in _functions(respelled) if as_text else []:
        if isinstance(function, dict) and isinstance(function.get("arguments"), Mapping):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return respelled


def _mark_end(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with a mark where the text of its last message ends."""
    marked = copy.deepcopy(messages)
    content = marked[-1].get("content") if marked else None
    if isinstance(content, str):
        marked[-1]["content"] = content + _CONTINUE_MARK
        return marked
    for part in reversed(content or []):
        if isinstance(part.get("text"), str):
            part["text"] += _CONTINUE_MARK
            return marked
    raise InvalidRequest("continue_final_message needs a final message with text", param="messages")
