"""Log-probabilities as a client is told them: with the text of each token, of outputs and of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import SamplingParams, TokenLogprobs


class TopLogprob(NamedTuple):
    """One of the likeliest tokens at a position."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True)
class OutputLogprob:
    """Natural log-probabilities of one token."""

    token_id: int
    token: str
    """Its text alone; U+FFFD for part of a UTF-8 sequence."""
    bytes: bytes
    """Its raw bytes, which joined give the text of the output."""
    logprob: float | None
    """None: the first token of a prompt, before which there is nothing."""
    top: tuple[TopLogprob, ...]
    """The likeliest tokens at this position, likeliest first."""
    text_offset: int
    """Characters before this token's own: of the output, a stop string included that is not shown in the end, behind
    those of a prompt that is shown."""
    rank: int = 0
    """Of a token of the prompt: 1 if none was likelier. 0: it is generated, or nothing is before it."""


def spelled(tokenizer: Tokenizer | None, id: int, logprobs: TokenLogprobs, text_offset: int) -> OutputLogprob:
    """What the engine says of a token, with texts."""
    top = tuple(TopLogprob(top_id, *_spell(tokenizer, top_id), logprob) for top_id, logprob in logprobs.top)
    return OutputLogprob(id, *_spell(tokenizer, id), logprobs.logprob, top, text_offset, logprobs.rank)


def _spell(tokenizer: Tokenizer | None, id: int) -> tuple[str, bytes]:
    if tokenizer is None:
        return f"token_id:{id}", b""
    return tokenizer.token_text(id), tokenizer.token_bytes(id)


class PromptLogprobs:
    """Those of a prompt, of which nothing is known until the engine has computed all of it."""

    def __init__(self, tokenizer: Tokenizer | None, ids: Sequence[int], sampling: SamplingParams):
        self._tokenizer = tokenizer
        self._ids = ids
        self._skip = sampling.skip_special_tokens
        self.found: list[OutputLogprob] | None = None
        """One for every token; `text_offset` counts characters of the prompt's text."""

    def take(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Those of all tokens but the first."""
        text = None
        if self._tokenizer is not None:
            text = Detokenizer(self._tokenizer, (), skip_special_tokens=self._skip)
        found: list[OutputLogprob] = []
        num_chars = 0
        for id, known in zip(self._ids, (None, *logprobs), strict=True):
            if known is None:
                found.append(OutputLogprob(id, *_spell(self._tokenizer, id), None, (), num_chars))
            else:
                found.append(spelled(self._tokenizer, id, known, num_chars))
            num_chars += 0 if text is None else len(text.push((id,)))
        self.found = found
