"""From a request body to the sequences that the engine runs for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from jaxinfer.config import ServerConfig
from jaxinfer.http import openai
from jaxinfer.http.errors import HttpError
from jaxinfer.http.metrics import SequenceTimer, ServerMetrics
from jaxinfer.http.replies import ReplyHead
from jaxinfer.http.streams import Choice, Generation
from jaxinfer.text.chat_template import ChatTemplate
from jaxinfer.text.output import OutputStream
from jaxinfer.text.requests import lower, refuse_endless
from jaxinfer.text.tokenizer import Tokenizer
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
        chat = isinstance(request, openai.ChatRequest)
        prompts = [self._chat_text(request)] if chat else request.prompts()
        choices: list[Choice] = []
        prompt_tokens = 0
        for number, prompt in enumerate(prompts):  # one at a time: the first that is refused spares the others
            ids = self._ids(prompt, add_special_tokens=not chat)  # a chat template writes its own
            echo = "" if chat or not request.echo else self._echo(prompt, sampling)
            prompt_tokens += len(ids)
            for sequence in lower(ids, _at_least_one(sampling), self._info, self._tokenizer, f"{reply_id}-{number}"):
                output = OutputStream(self._tokenizer, ids, sampling)
                timer = SequenceTimer(metrics, arrival_s, len(ids), sequence.max_tokens)
                runs = None if sampling.max_tokens == 0 else sequence
                choices.append(Choice(len(choices), runs, output, timer, echo))
        metrics.choices_asked.observe(sampling.n)
        return Generation(
            head=ReplyHead(reply_id, int(time.time()), model, chat),
            choices=choices,
            n=sampling.n,
            prompt_tokens=prompt_tokens,
            shows_cached=self._info.prefix_caching,
            logprobs=sampling.logprobs is not None,
            stream=bool(request.stream),
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
        )

    def text_ids(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """A prompt's token ids, as a completion has them. Raises InvalidRequest."""
        return self._ids(text, add_special_tokens=add_special_tokens) if text else []

    def chat_ids(self, request: openai.ChatRequest) -> Sequence[int]:
        """A conversation's token ids, those of the chat template included. Raises InvalidRequest."""
        return self._ids(self._chat_text(request), add_special_tokens=False)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included. Raises InvalidRequest."""
        return self._require_tokenizer("tokens").decode(ids, skip_special_tokens=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; U+FFFD for part of a UTF-8 sequence."""
        tokenizer = self._require_tokenizer("return_token_strs")
        return [tokenizer.token_text(id) for id in ids]

    def _require_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer", param=param)
        return self._tokenizer

    def _ids(self, prompt: openai.Prompt, *, add_special_tokens: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer; give the prompt as token ids", param="prompt")
        refuse_endless(prompt, self._info, self._tokenizer)
        return self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    def _chat_text(self, request: openai.ChatRequest) -> str:
        if self._tokenizer is None or self._chat_template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        return self._chat_template.render(
            request.template_messages(),
            add_generation_prompt=request.add_generation_prompt is not False,
            **(self._template_kwargs | (request.chat_template_kwargs or {})),
        )

    def _echo(self, prompt: openai.Prompt, sampling: SamplingParams) -> str:
        if self._tokenizer is None:
            raise InvalidRequest("the model has no tokenizer, so there is no text to echo", param="echo")
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=sampling.skip_special_tokens)


def _at_least_one(sampling: SamplingParams) -> SamplingParams:
    """With max_tokens 0 nothing runs, but the prompt is checked like any other."""
    return dataclasses.replace(sampling, max_tokens=1, min_tokens=0) if sampling.max_tokens == 0 else sampling
