"""What a client is told of one sequence: text, tokens and log-probabilities, from the engine's events."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.logprobs import OutputLogprob, PromptLogprobs, spelled
from jaxinfer.text.requests import special_stops
from jaxinfer.text.stop import StopMatcher
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason, SamplingParams, TokenEvent, TokenLogprobs


class OutputDelta(NamedTuple):
    """What is new. Joined over an output: all its text, and every counted token exactly once.

    A NamedTuple, as one is made for every token: a frozen dataclass takes several times as long to make.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Counted tokens, whose text may still be withheld."""
    logprobs: tuple[OutputLogprob, ...] | None = None
    """One per token id, if asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the id of `stop_token_ids` that ended the output; None for the model's own EOS."""


class _Token(NamedTuple):
    id: int
    logprob: OutputLogprob | None
    text_end: int  # characters of output that were complete once this token was taken


class OutputStream:
    """One output, from the first token event to its finish.

    A delta with a finish reason is the last: later events give None. It can come before the engine's own last event,
    when a stop string matched; the caller then cancels the engine's request. Without a tokenizer there is no text.
    `always_shown` are special tokens that are in the text even where `sampling` leaves them out; `num_echoed` counts
    characters that the client is shown before the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        always_shown: Collection[int] = (),
        num_echoed: int = 0,
    ):
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._prompt = None if sampling.prompt_logprobs is None else PromptLogprobs(tokenizer, prompt_ids, sampling)
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_ids,
                skip_special_tokens=sampling.skip_special_tokens,
                always_shown=always_shown,
            )
        self._matcher = StopMatcher(sampling.stop, include=sampling.include_stop_str_in_output)
        self._special_stops = special_stops(sampling.stop, tokenizer)
        self._is_plain = not sampling.stop and sampling.logprobs is None
        self._waiting: list[_Token] = []  # taken while a stop string that was complete could still lose to another
        self._num_tokens = 0
        self._num_chars = 0
        self._num_echoed = num_echoed
        self._num_cached_tokens = 0
        self._finished = False

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far: up to the one that completed the stop string, EOS and stop ids included."""
        return self._num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were in the cache already; 0 until the first token."""
        return self._num_cached_tokens

    @property
    def prompt_logprobs(self) -> list[OutputLogprob] | None:
        """One for every token of the prompt, from the first event on; None where nobody asked."""
        return None if self._prompt is None else self._prompt.found

    @property
    def has_text(self) -> bool:
        """Whether tokens have a text at all."""
        return self._detokenizer is not None

    @property
    def finished(self) -> bool:
        """Whether the last delta has been given."""
        return self._finished

    def begin(self) -> None:
        """Reads the end of the prompt, as the first event does otherwise: to be called while the engine computes."""
        if self._detokenizer is not None:
            self._detokenizer.begin()

    def push(self, event: TokenEvent) -> OutputDelta | None:
        """What the event adds for the client; None if nothing does."""
        if self._finished:
            return None
        if event.cached_tokens:
            self._num_cached_tokens = event.cached_tokens
        self.read_prompt(event)
        if self._is_plain and event.finish_reason is None:
            return self._pass(event.token_ids)
        text: list[str] = []
        tokens: list[_Token] = []
        for i, id in enumerate(event.token_ids):
            ends = id == event.stop_id and i == len(event.token_ids) - 1
            logprobs = event.logprobs[i] if event.logprobs is not None else None
            self._take(id, logprobs, ends, text, tokens)
            if self._matcher.matched is not None:
                return self._finish(text, tokens, FinishReason.STOP, self._matcher.matched)
        if event.finish_reason is not None:
            return self._end(event, text, tokens)
        if not tokens and not any(text):
            return None
        return self._delta(text, tokens)

    def read_prompt(self, event: TokenEvent) -> bool:
        """Takes what an event says of the prompt, and of nothing else; whether it says it."""
        if self._prompt is None or event.prompt_logprobs is None:
            return False
        self._prompt.take(event.prompt_logprobs)
        return True

    def _pass(self, ids: Sequence[int]) -> OutputDelta | None:
        """Tokens of an output of which nothing is withheld: nearly every event."""
        if not ids:
            return None
        self._num_tokens += len(ids)
        return OutputDelta("" if self._detokenizer is None else self._detokenizer.push(ids), tuple(ids))

    def _take(self, id: int, logprobs: TokenLogprobs | None, ends: bool, text: list[str], tokens: list[_Token]) -> None:
        """Takes one token; what it releases is appended to `text` and `tokens`."""
        shown = self._output_logprob(id, logprobs) if self._sampling.logprobs is not None and logprobs else None
        taken = self._num_tokens + len(self._waiting) + 1
        piece = ""
        if self._detokenizer is not None and not ends:
            piece = self._detokenizer.push((id,))
        self._num_chars += len(piece)
        text.append(self._matcher.push(piece, armed=taken >= self._sampling.min_tokens))
        self._waiting.append(_Token(id, shown, self._num_chars))
        if not self._matcher.pending:
            self._count_waiting(tokens)

    def _count_waiting(self, tokens: list[_Token]) -> None:
        """Counts the tokens that waited: all, or up to the one that completed the stop string."""
        end = self._matcher.matched_end
        for token in self._waiting:
            tokens.append(token)
            self._num_tokens += 1
            if end is not None and token.text_end >= end:
                break
        self._waiting.clear()

    def _end(self, event: TokenEvent, text: list[str], tokens: list[_Token]) -> OutputDelta:
        """The engine has ended the output: shows all that was withheld."""
        assert event.finish_reason is not None
        if self._detokenizer is not None:
            rest = self._detokenizer.flush()
            self._num_chars += len(rest)
            if self._waiting:
                self._waiting[-1] = self._waiting[-1]._replace(text_end=self._num_chars)
            taken = self._num_tokens + len(self._waiting)
            text.append(self._matcher.push(rest, armed=taken >= self._sampling.min_tokens))
        text.append(self._matcher.flush())
        self._count_waiting(tokens)
        if self._matcher.matched is not None:
            return self._finish(text, tokens, FinishReason.STOP, self._matcher.matched)
        stop_reason: str | int | None = None
        if event.stop_id is not None:
            stop_reason = self._special_stops.get(event.stop_id)
            if stop_reason is not None and self._sampling.include_stop_str_in_output:
                text.append(stop_reason)
            if stop_reason is None and event.stop_id in self._sampling.stop_token_ids:
                stop_reason = event.stop_id
        return self._finish(text, tokens, event.finish_reason, stop_reason)

    def _finish(
        self, text: list[str], tokens: list[_Token], reason: FinishReason, stop_reason: str | int | None
    ) -> OutputDelta:
        self._finished = True
        delta = self._delta(text, tokens)
        return delta._replace(finish_reason=reason, stop_reason=stop_reason)

    def _delta(self, text: list[str], tokens: list[_Token]) -> OutputDelta:
        logprobs = None
        if self._sampling.logprobs is not None:
            logprobs = tuple(token.logprob for token in tokens if token.logprob is not None)
        return OutputDelta("".join(text), tuple(token.id for token in tokens), logprobs)

    def _output_logprob(self, id: int, logprobs: TokenLogprobs) -> OutputLogprob:
        return spelled(self._tokenizer, id, logprobs, self._num_echoed + self._num_chars)
