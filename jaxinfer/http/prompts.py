"""From a request body to the sequences that the engine runs for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.http import openai
from jaxinfer.http.errors import HttpError
from jaxinfer.http.metrics import SequenceTimer, ServerMetrics
from jaxinfer.http.replies import ReplyHead
from jaxinfer.http.streams import Choice, Generation
from jaxinfer.http.tools import Callable
from jaxinfer.text import reasoning, tool_grammar
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.control_tokens import ControlTokens
from jaxinfer.text.message import MessageFormat, MessageParser
from jaxinfer.text.output import OutputStream
from jaxinfer.text.requests import lower, refuse_endless
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.text.tool_calls import formats
from jaxinfer.types import EngineHandle, InvalidRequest, SamplingParams


class PromptMaker:
    """Renders, tokenises and checks. Holds no state of a request, so that several threads may use one."""

    def __init__(
        self,
        engine: EngineHandle,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        config: ServerConfig,
    ):
        self._info = engine.info
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        source = "" if chat_template is None else chat_template.source
        self._control_tokens = None if tokenizer is None else ControlTokens(tokenizer, source)
        self._reasoning = reasoning.choose(config.reasoning_parser, source)
        self._tool_calls = formats.choose(config.tool_call_parser, source)
        self._strict = config.strict_max_tokens
        self._template_kwargs: dict[str, Any] = dict(config.chat_template_kwargs)
        self.model_names = tuple(config.served_model_names) or (engine.info.model,)

    def model_name(self, asked: str | None) -> str:
        """The name to report; raises HttpError 404 for a model that is not served."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            message = f"the model {asked!r} is not served here; served: {', '.join(self.model_names)}"
            raise HttpError(404, message, code="model_not_found", param="model")
        return asked

    def generation(
        self,
        request: openai.CompletionRequest | openai.ChatRequest,
        reply_id: str,
        metrics: ServerMetrics,
        arrival_s: float,
    ) -> Generation:
        """Raises InvalidRequest, or HttpError for an unknown model."""
        model = self.model_name(request.model)
        sampling = request.to_sampling()
        if isinstance(request, openai.ChatRequest):
            conversation, echoes = self._conversation(request), False
            sampling = self._constrain(sampling, conversation)
            prompts: Sequence[openai.Prompt] = [conversation.ids]
        else:
            conversation, echoes = None, bool(request.echo)
            prompts = request.prompts()
        choices: list[Choice] = []
        prompt_tokens = 0
        for number, prompt in enumerate(prompts):  # one at a time: the first that is refused spares the others
            ids = self._ids(prompt)
            self._check_room(len(ids), sampling)
            echo = self._echo(prompt, sampling) if echoes else ""
            scored = sampling.logprobs if echoes else None
            prompt_tokens += len(ids)
            for sequence in lower(ids, _at_least_one(sampling), self._info, self._tokenizer, f"{reply_id}-{number}"):
                markers = () if conversation is None else conversation.markers
                output = OutputStream(self._tokenizer, ids, sampling, always_shown=markers, num_echoed=len(echo))
                message = None if conversation is None else conversation.parser()
                timer = SequenceTimer(metrics, arrival_s, len(ids), sequence.max_tokens)
                # Without a token to generate it runs for what the engine says of the prompt, if anything.
                prompt_only = sampling.max_tokens == 0
                runs = None if prompt_only and sampling.prompt_logprobs is None else sequence
                choices.append(Choice(len(choices), runs, output, timer, echo, message, scored, prompt_only))
        metrics.choices_asked.observe(sampling.n)
        return Generation(
            head=ReplyHead(reply_id, int(time.time()), model, conversation is not None),
            choices=choices,
            n=sampling.n,
            prompt_tokens=prompt_tokens,
            shows_cached=self._info.prefix_caching,
            logprobs=sampling.logprobs is not None,
            prompt_logprobs=request.prompt_logprobs,
            stream=bool(request.stream),
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
        )

    def _check_room(self, prompt_len: int, sampling: SamplingParams) -> None:
        """InvalidRequest where max_tokens is no cap, but has to fit."""
        asked, limit = sampling.max_tokens or 0, self._info.max_model_len
        if self._strict and prompt_len < limit < prompt_len + asked:
            raise InvalidRequest(
                f"prompt has {prompt_len} tokens and max_tokens is {asked}; the limit is {limit} tokens, prompt and "
                f"output together, so that {limit - prompt_len} are left",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def text_ids(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """A prompt's token ids, as a completion has them. Raises InvalidRequest."""
        return self._ids(text, add_special_tokens=add_special_tokens) if text else []

    def chat_ids(self, request: openai.ChatRequest) -> Sequence[int]:
        """A conversation's token ids, those of the chat template included. Raises InvalidRequest."""
        return self._conversation(request).ids

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included. Raises InvalidRequest."""
        return self._require_tokenizer("tokens").decode(ids, skip_special_tokens=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; U+FFFD for part of a UTF-8 sequence."""
        tokenizer = self._require_tokenizer("return_token_strs")
        return [tokenizer.token_text(id) for id in ids]

    def tokenizer_facts(self) -> dict[str, Any]:
        """What vLLM's /tokenizer_info says of the tokenizer, as far as clients read it. Raises InvalidRequest."""
        tokenizer = self._require_tokenizer("tokenizer_info")
        ends = next(iter(tokenizer.eos_ids), None)
        names = {"bos_token": tokenizer.bos_id, "eos_token": ends, "pad_token": None}
        texts = {name: None if id is None else self.text_of([id]) for name, id in names.items()}
        template = None if self._chat_template is None else self._chat_template.source
        return {"tokenizer_class": "PreTrainedTokenizerFast", **texts, "chat_template": template}

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer", param=param)
        return self._tokenizer

    def _ids(self, prompt: openai.Prompt, *, add_special_tokens: bool = True) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer; give the prompt as token ids", param="prompt")
        refuse_endless(prompt, self._info, self._tokenizer)
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def _conversation(self, request: openai.ChatRequest) -> _Conversation:
        if self._tokenizer is None or self._control_tokens is None or self._chat_template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        callable = request.callable_tools()
        tools = callable.schemas
        if tools and self._tool_calls is None:
            raise InvalidRequest(
                "tools is not supported: the model's chat template shows no known format of tool calls, or the server "
                "was started with --tool-call-parser none; with tool_choice 'none' they are accepted",
                param="tools",
            )
        if tools and not self._chat_template.shows_tools:
            raise InvalidRequest(
                "tools is not supported: the model's chat template does not show them; --chat-template gives another",
                param="tools",
            )
        messages, mark = self._control_tokens.guard(request.template_messages())
        text = self._chat_template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            tools=request.tools if tools else None,
            **(self._template_kwargs | (request.chat_template_kwargs or {})),
        )
        refuse_endless(text, self._info, self._tokenizer)
        ids = self._control_tokens.encode(text, mark)  # without further special tokens: a template writes its own
        message_format = MessageFormat(self._reasoning, self._tool_calls if tools else None)
        markers = message_format.marker_ids(self._tokenizer)
        return _Conversation(ids, text, message_format, markers, callable, request.parallel_tool_calls is not False)

    def _constrain(self, sampling: SamplingParams, conversation: _Conversation) -> SamplingParams:
        """With the form of its calls, and with the thought that may come before whatever has a form."""
        assert self._tokenizer is not None
        form, callable = sampling.structured_outputs, conversation.callable
        if form is not None and callable.schemas:
            raise InvalidRequest(
                f"{form.param} and tools are both given; an output has one form, or with tool_choice 'none' that of "
                f"{form.param}",
                param=form.param,
            )
        if callable.constrain:
            assert self._tool_calls is not None
            markers = [marker for marker in self._tool_calls.markers if self._is_special(marker)]
            form = tool_grammar.tool_calls(
                callable.schemas,
                name=callable.name,
                required=callable.required,
                parallel=conversation.parallel,
                format=self._tool_calls.name,
                special=markers,
            )
        if form is None or self._reasoning is None:
            return dataclasses.replace(sampling, structured_outputs=form)
        inside = reasoning.begins_inside(self._reasoning, conversation.text)
        return dataclasses.replace(sampling, structured_outputs=dataclasses.replace(form, thought_begun=inside))

    def _is_special(self, marker: str) -> bool:
        assert self._tokenizer is not None
        id = self._tokenizer.special_id(marker)
        return id is not None and self._tokenizer.is_special(id)

    def _echo(self, prompt: openai.Prompt, sampling: SamplingParams) -> str:
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer, so there is no text to echo", param="echo")
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=sampling.skip_special_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Conversation:
    """A chat request, ready for the model, and how its replies are read."""

    ids: Sequence[int]
    text: str  # the rendered template
    message_format: MessageFormat
    markers: Collection[int]  # special tokens that the parser has to see
    callable: Callable
    parallel: bool

    def parser(self) -> MessageParser | None:
        """For one choice. None: the reply is nothing but words."""
        if self.message_format == MessageFormat(None, None):
            return None
        named = self.callable.name is not None
        schemas = self.callable.schemas
        return MessageParser(self.message_format, self.text, schemas, parallel=self.parallel, is_named=named)


def _at_least_one(sampling: SamplingParams) -> SamplingParams:
    """With max_tokens 0 nothing runs, but the prompt is checked like any other."""
    return dataclasses.replace(sampling, max_tokens=1, min_tokens=0) if sampling.max_tokens == 0 else sampling
