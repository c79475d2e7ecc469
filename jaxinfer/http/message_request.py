"""Request bodies of Anthropic's Messages API, and what they ask for as a chat completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from jaxinfer.http import known_fields, openai, tagged, tools
from jaxinfer.http.errors import NO_THREADS
from jaxinfer.http.formed import formed
from jaxinfer.http.known_fields import Fields, Label, Only, Refused, Rule
from jaxinfer.http.structured import message_format
from jaxinfer.http.turns import Turns
from jaxinfer.structured import StructuredOutputs
from jaxinfer.types import InvalidRequest

FIELDS: Mapping[str, Rule] = {
    "metadata": Label("it names the end user to the provider"),
    "cache_control": Label("prompts that begin alike are found in the cache without it"),
    "service_tier": Only(("auto", "standard_only"), "there is one tier"),
    "mcp_servers": Only(([],), "the server calls no tools itself"),
    "betas": Label("they are versions of the API; what they add is refused field by field"),
    "container": Refused("code is not run"),
    "context_management": Refused("the context is not edited"),
    "inference_geo": Refused("this server is where it is"),
    "thread": Refused("no conversation is kept on this route; send all of it each time", NO_THREADS),
}
BLOCK_FIELDS: Mapping[str, Rule] = {
    "cache_control": FIELDS["cache_control"],
    "citations": Only(([],), "sources are not cited"),
    "caller": Only(({"type": "direct"},), "only the model calls tools"),
}
TOOL_FIELDS: Mapping[str, Rule] = {
    "cache_control": FIELDS["cache_control"],
    "defer_loading": Only((False,), "the model is shown all tools"),
    "eager_input_streaming": Only((False,), "the input of a call is streamed once it is whole"),
    "allowed_callers": Only((["direct"],), "only the model calls tools"),
    "input_examples": Only(([],), "chat templates show no examples; put them into the description"),
}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}
"""Types of tool_choice, and what a chat calls them."""
SWITCHES = {"disabled": False, "adaptive": True}
"""Types of thinking, and what a chat template's `enable_thinking` is told."""


class _Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class TextBlock(_Block, kw_only=True, frozen=True):
    type: str
    text: str


class ThinkingBlock(_Block, kw_only=True, frozen=True):
    type: str
    thinking: str
    signature: str | None = None  # of the server that the thought is from; this one signs none, and checks none


class ToolUseBlock(_Block, kw_only=True, frozen=True):
    type: str
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block, kw_only=True, frozen=True):
    type: str
    tool_use_id: str
    content: str | list[msgspec.Raw] | None = None
    is_error: bool | None = None


class Tool(_Block, kw_only=True, frozen=True):
    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    strict: bool | None = None


class ToolChoice(_Block, kw_only=True, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Block, kw_only=True, frozen=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(_Block, kw_only=True, frozen=True):
    format: dict[str, Any] | None = None
    effort: str | None = None


class MessageParam(_Block, kw_only=True, frozen=True):
    role: str
    content: str | list[msgspec.Raw]


class MessagesRequest(_Block, kw_only=True, frozen=True):
    """The body of POST /v1/messages; the last three fields are our own."""

    messages: list[MessageParam]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[msgspec.Raw] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None

    def to_chat(self) -> openai.ChatRequest:
        """The same as a chat completion. Raises InvalidRequest."""
        turns = Turns()
        if self.system is not None:
            turns.words("system", _text(self.system, "system"))
        for i, message in enumerate(self.messages):
            _add_message(turns, message, f"messages[{i}]")
        if self.messages and self.messages[-1].role == "assistant":
            _refuse("messages", "the last message is the assistant's, which is not continued; end with the user's")
        tools = _read_tools(self.tools)
        choice = _read_choice(self.tool_choice)
        is_parallel = self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use
        chat = openai.ChatRequest(
            messages=[openai.Message(**message) for message in _joined(turns.messages())],
            model=self.model,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            tools=tools,
            tool_choice=None if tools is None and choice in ("auto", "none") else choice,
            parallel_tool_calls=None if tools is None or is_parallel else False,
            chat_template_kwargs=_switch(self.thinking),
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
        )
        chat.check()
        return formed(chat, _form(self.output_config or OutputConfig(), self.output_format))


_decoder = msgspec.json.Decoder(MessagesRequest)


def decode(body: bytes) -> openai.ChatRequest:
    """What a body asks for, as a chat completion. Raises InvalidRequest that names the field at fault."""
    return known_fields.parse(_decoder, MessagesRequest, body, FIELDS).to_chat()


def _add_message(turns: Turns, message: MessageParam, path: str) -> None:
    if message.role not in BLOCKS:
        _refuse(f"{path}.role", f"{path}.role is {message.role!r}; it must be user or assistant, and system is a field")
    content, path = message.content, f"{path}.content"
    if isinstance(content, str):
        return turns.words(message.role, content)
    texts: list[str] = []  # of blocks in a row
    for i, raw in enumerate(content):
        fields, kind = _open(raw, f"{path}[{i}]", BLOCKS[message.role])
        if kind != "text":
            _add_words(turns, message.role, texts)
            _add_block(turns, fields, kind, f"{path}[{i}]")
        else:
            texts.append(tagged.read(TextBlock, fields, BLOCK_FIELDS, f"{path}[{i}]").text)
    if texts or not content:
        turns.words(message.role, "".join(texts))


def _add_words(turns: Turns, role: str, texts: list[str]) -> None:
    """Says the texts and forgets them, if there are any."""
    if texts:
        turns.words(role, "".join(texts))
        texts.clear()


BLOCKS: Mapping[str, Sequence[str]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
"""Types of the blocks that each role may have."""


def _add_block(turns: Turns, fields: Fields, kind: str, path: str) -> None:
    if kind == "thinking":
        if thought := tagged.read(ThinkingBlock, fields, BLOCK_FIELDS, path).thinking:
            turns.thought(thought)
    elif kind == "tool_use":
        call = tagged.read(ToolUseBlock, fields, BLOCK_FIELDS, path)
        if not call.id:
            _refuse(f"{path}.id", f"{path}.id is empty; it is what the result of the call names")
        tools.check_name({"name": call.name}, path)
        turns.call(call.id, call.name, call.input)
    else:
        result = tagged.read(ToolResultBlock, fields, BLOCK_FIELDS, path)
        text = _text(result.content or "", f"{path}.content")
        # A chat has no other way to say it.
        shown = f"Error: {text}" if result.is_error else text
        turns.answer(result.tool_use_id, shown, f"{path}.tool_use_id")


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of one role in a row are one turn, as Anthropic has it: templates want roles to alternate."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if not joined or joined[-1]["role"] != message["role"] or message["role"] == "tool":
            joined.append(dict(message))
            continue
        last = joined[-1]
        last["content"] = "\n\n".join(text for text in (last["content"], message["content"]) if text is not None)
        if "reasoning_content" in message:
            last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    return joined


def _text(content: str | list[msgspec.Raw], path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_block_text(block, f"{path}[{i}]") for i, block in enumerate(content))


def _block_text(raw: msgspec.Raw, path: str) -> str:
    fields, _ = _open(raw, path, ("text",))
    return tagged.read(TextBlock, fields, BLOCK_FIELDS, path).text


def _open(raw: msgspec.Raw, path: str, kinds: Sequence[str]) -> tuple[Fields, str]:
    fields, kind = tagged.open_object(raw, path, "a content block", "text")
    if kind not in kinds:
        _refuse(f"{path}.type", f"{path}.type is {kind!r}; supported here: {', '.join(kinds)}")
    return fields, kind


def _read_tools(raws: Sequence[msgspec.Raw] | None) -> list[dict[str, Any]] | None:
    functions = []
    for i, raw in enumerate(raws or ()):
        path = f"tools[{i}]"
        fields, kind = tagged.open_object(raw, path, "an object", None)
        if kind not in (None, "custom"):
            _refuse(f"{path}.type", f"{path}.type is {kind!r}; only 'custom' is supported, which the client runs")
        functions.append(msgspec.structs.asdict(tagged.read(Tool, fields, TOOL_FIELDS, path)))
    return tools.chat_tools(functions, "input_schema")


def _read_choice(choice: ToolChoice | None) -> Any:
    """As a chat has it."""
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in CHOICES:
        wanted = ", ".join([*CHOICES, "tool"])
        _refuse("tool_choice.type", f"tool_choice.type is {choice.type!r}; it must be one of {wanted}")
    return CHOICES[choice.type]


def _form(config: OutputConfig, older: Mapping[str, Any] | None) -> StructuredOutputs | None:
    if config.effort is not None:
        _refuse("output_config.effort", f"output_config.effort is {config.effort!r}; the model has no such setting")
    if config.format is not None and older is not None:
        _refuse("output_format", "output_config.format and output_format are both given; an output has one form")
    if older is not None:
        return message_format(older, "output_format")
    return None if config.format is None else message_format(config.format, "output_config.format")


def _switch(thinking: Thinking | None) -> dict[str, Any] | None:
    """What a chat template is told of it: whether to think, which those of models that can be told read."""
    if thinking is None:
        return None
    if thinking.type not in SWITCHES:
        shown = f"thinking is of type {thinking.type!r} with budget_tokens {thinking.budget_tokens}"
        _refuse(
            "thinking", f"{shown}; thought has no limit of its own, so that only adaptive and disabled are supported"
        )
    if thinking.budget_tokens is not None:
        _refuse("thinking", f"thinking.budget_tokens is {thinking.budget_tokens}; thought has no limit of its own")
    if thinking.display not in (None, "summarized"):
        _refuse("thinking", f"thinking.display is {thinking.display!r}; thought is shown whole")
    return {"enable_thinking": SWITCHES[thinking.type]}


def _refuse(param: str, message: str) -> NoReturn:
    raise InvalidRequest(message, param=param)
