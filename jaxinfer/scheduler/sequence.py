"""Sequence: the host side of one request. Only the Scheduler calls its methods, and only they change it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from jaxinfer.config import SchedulerLimits
from jaxinfer.scheduler.matching import Matcher
from jaxinfer.scheduler.plan import DecodeRow, KeptState, LastToken, LongChunk, PrefillChunk, TokenMask
from jaxinfer.types import FinishReason, InvalidRequest, Request, TokenEvent, TokenLogprobs


class Sequence:
    """A request's tokens, its place on the device and how far it is planned.

    A plan is made before the step before it is read, so what is planned runs ahead of what is known:

    - `tokens`: the prompt, then the output tokens that the host has read;
    - `num_in_flight`: output tokens that planned steps sample and the host has not read;
    - `num_computed`: positions whose keys and values are in the cache once every planned step has run.

    While prefilling, num_computed < prefill_end and nothing is in flight. From then on
    num_computed = len(tokens) + num_in_flight - 1: the newest token is what the next decode row computes.
    """

    __slots__ = (
        "arrival",
        "cuts",
        "fetching",
        "finished",
        "is_cacheable",
        "is_plain",
        "is_suspect",
        "matcher",
        "max_computed",
        "max_output",
        "min_len",
        "num_cached",
        "num_computed",
        "num_device",
        "num_in_flight",
        "num_logprobs",
        "num_overtaken",
        "page_size",
        "pages",
        "prefill_end",
        "prefix_len",
        "prompt_len",
        "refused",
        "request",
        "request_id",
        "scores",
        "slot",
        "state",
        "state_end",
        "state_step",
        "stop_ids",
        "tickets",
        "tokens",
        "was_admitted",
        "was_fetched",
    )

    def __init__(self, request: Request, limits: SchedulerLimits, arrival: int):
        """`arrival`: the higher, the later it came."""
        self.request = request
        self.arrival = arrival
        self.request_id = request.request_id
        self.num_logprobs = request.logprobs  # alternatives per token; None: no log-probabilities at all
        self.is_plain = request.is_plain
        self.tokens = array("I", request.prompt_ids)  # whose slices are copies of bytes, not of integers
        self.prompt_len = len(self.tokens)  # tokens
        self.max_output = min(request.max_tokens, limits.max_model_len - self.prompt_len)  # tokens
        # Positions that are ever computed: the last output token is sampled, but nothing follows from it.
        self.max_computed = self.prompt_len + self.max_output - 1
        self.page_size = limits.page_size
        # Positions from here on are not in pages, since the pool has no more: whoever reaches this holds all of them.
        self.num_device = limits.num_pages * limits.page_size
        self.min_len = self.prompt_len + request.min_tokens  # a stop id ends the output from the token after these
        self.stop_ids = frozenset(request.stop_ids)
        self.slot: int | None = None  # None: waiting or finished
        self.pages: list[int] = []  # page i holds positions i * page_size and up
        self.num_computed = 0
        self.prefill_end = 0  # tokens known at admission: positions below come from chunks, the others from decode rows
        self.num_in_flight = 0
        self.prefix_len = 0  # tokens that were in the cache at this admission: chunks begin behind them
        self.cuts: tuple[int, ...] = ()  # positions at which chunks end, so that the recurrent state there can be kept
        self.state: int | None = None  # place of the copy of its recurrent state that it keeps as it grows
        self.state_end = 0  # tokens that are in that copy
        self.state_step = -1  # the plan that made it
        self.num_cached = 0  # tokens of the prompt that were in the cache when it was admitted first
        self.is_cacheable = True  # whether what its pages hold may be used by others
        # Whether its logits were not numbers once, when it had begun with pages of others: it goes on with none of them
        # and gives none away, so that a second time would be its own fault.
        self.is_suspect = False
        # Log-probabilities of the prompt's tokens from the second on, as far as they are known; None: nobody asks.
        self.scores: list[TokenLogprobs] | None = None if request.prompt_logprobs is None else []
        self.matcher: Matcher | None = None  # has taken in the known tokens of the output; None: it may be anything
        self.was_admitted = False
        self.finished = False
        self.num_overtaken = 0  # admissions of others that came later, while this one waited
        self.refused: tuple[int, int, int] | None = (
            None  # what there was when it was not admitted: see `Admission._admits`
        )
        self.tickets: set[int] = set()  # transfers to be done before its first chunk
        self.fetching: set[int] = set()  # transfers to be done before it is looked at again
        self.was_fetched = False  # whether pages were read from disk for it

    def check_fits(self, limits: SchedulerLimits) -> None:
        """InvalidRequest if it could never run."""
        request, prompt_len = self.request, self.prompt_len
        if prompt_len < 1:
            raise InvalidRequest("the prompt has no tokens; give at least 1", param="prompt")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {request.max_tokens}; it must be at least 1", param="max_tokens")
        if prompt_len + 1 > limits.max_model_len:
            raise InvalidRequest(
                f"the prompt has {prompt_len} tokens; with 1 token of output that is more than the context of "
                f"{limits.max_model_len}",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.prompt_logprobs is not None and prompt_len > self.num_device:
            raise InvalidRequest(
                f"prompt_logprobs is {request.prompt_logprobs} and the prompt has {prompt_len} tokens; those of at "
                f"most {self.num_device}, which the cache holds, can be told",
                param="prompt_logprobs",
                code="context_length_exceeded",
            )
        if self.max_computed > self.num_device + limits.long_tokens:
            behind = (
                f", and the host's memory holds {limits.long_tokens} tokens behind them" if limits.long_tokens else ""
            )
            raise InvalidRequest(
                f"{prompt_len} tokens of prompt and {self.max_output} of output need "
                f"{-(-self.max_computed // limits.page_size)} pages of {limits.page_size} tokens; the cache has "
                f"{limits.num_pages}{behind}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def num_pages(self, num_positions: int) -> int:
        """Pages for its first positions."""
        return -(-min(num_positions, self.num_device) // self.page_size)

    def admit(self, slot: int, pages: list[int], prefix_len: int, tickets: set[int]) -> None:
        """Gives it a slot and the pages of all its known tokens, of which the first `prefix_len` are in the cache.

        Nothing may be in flight: every token is known. It runs once the transfers of `tickets` are done.
        """
        self.slot = slot
        self.pages = pages
        self.tickets = tickets
        self.prefill_end = len(self.tokens)
        self.prefix_len = self.num_computed = prefix_len
        self.is_cacheable = not self.is_suspect
        if not self.was_admitted:
            self.num_cached = prefix_len
        self.was_admitted = True

    def release(self) -> list[int]:
        """Takes slot and pages away; the cache is as good as empty. Returns the pages, which are now the caller's."""
        pages, self.pages = self.pages, []
        self.slot = None
        self.tickets = set()
        self.refused = None
        self.num_computed = 0
        self.prefill_end = 0
        return pages

    def known_in_cache(self) -> array[int]:
        """The known tokens whose keys and values are in pages once every planned step has run.

        Behind them may lie those of a token that is in flight: planned, but not known to the host.
        """
        return self.tokens[: min(self.num_computed, self.num_device)]

    def take_decode(self, new_page: int | None) -> DecodeRow:
        """Plans one token more; `new_page` holds its position if no page of the sequence does."""
        slot, position = self.slot, self.num_computed
        assert slot is not None
        if new_page is not None:
            self.pages.append(new_page)
        self.num_computed = position + 1
        self.num_in_flight += 1
        return DecodeRow(slot, position, new_page, self.is_plain, self.num_logprobs is not None)

    def keep_state(self, step: int) -> KeptState:
        """Its recurrent state is copied to the place that it has for that, after the step of plan `step`."""
        assert self.slot is not None and self.state is not None
        self.state_end, self.state_step = self.num_computed, step
        return KeptState(self.slot, self.state)

    @property
    def has_last_token_only(self) -> bool:
        """Whether all known tokens but the last came from the cache, and that one is not planned yet."""
        return 0 < self.prefix_len == self.num_computed == self.prefill_end - 1 < self.num_device

    def last_token(self) -> LastToken:
        """For a decode row to compute it."""
        assert self.slot is not None
        return LastToken(self.slot, self.tokens[-1], self.request, self.prompt_len, self.tokens[:])

    def take_last_token(self) -> DecodeRow:
        """Plans the last known token as a decode row. The page that it begins, if it does, is its last."""
        slot, position = self.slot, self.num_computed
        assert slot is not None
        self.num_computed = position + 1
        self.num_in_flight += 1
        new_page = None if position % self.page_size else self.pages[-1]
        return DecodeRow(slot, position, new_page, self.is_plain, self.num_logprobs is not None)

    def take_chunk(self, max_tokens: int) -> PrefillChunk:
        """Plans the next known tokens, `max_tokens` at most. A chunk carries the pages that its tokens begin."""
        slot, start = self.slot, self.num_computed
        assert slot is not None
        end = min(start + max_tokens, self.chunk_end)
        samples = end == self.prefill_end
        self.num_computed = end
        self.num_in_flight += samples
        first_new_page = -(-start // self.page_size)
        return PrefillChunk(
            slot=slot,
            start=start,
            token_ids=self.tokens[start:end],
            new_pages=self.pages[first_new_page : -(-end // self.page_size)],
            first_new_page=first_new_page,
            samples=samples,
            request=self.request,
            prompt_len=self.prompt_len,
            history=self.tokens[:] if start == self.prefix_len else None,
            next_token=self.tokens[end] if end < len(self.tokens) else None,
            scored=self.is_to_score and start < self.prompt_len - 1,
        )

    @property
    def chunk_end(self) -> int:
        """Where its next chunk ends if the step has room for it: with its known tokens, or where its state is kept."""
        return min(self.prefill_end, self.num_device, *(cut for cut in self.cuts if cut > self.num_computed))

    @property
    def is_to_score(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told."""
        return self.scores is not None and len(self.scores) < self.prompt_len - 1

    def score(self, start: int, scores: Iterable[TokenLogprobs]) -> None:
        """Takes in the log-probabilities of the tokens behind `start`: those that are not known, of the prompt alone.

        A chunk that was planned twice, because its sequence was preempted, counts once.
        """
        known = self.scores
        if known is not None and start <= len(known):
            for found in islice(scores, len(known) - start, self.prompt_len - 1 - start):
                known.append(replace(found, top=found.top[: self.request.prompt_logprobs]))

    def take_long(self, max_tokens: int) -> LongChunk:
        """Plans the next tokens that no page holds: known ones, `max_tokens` at most, or the last one sampled."""
        slot, start = self.slot, self.num_computed
        assert slot is not None
        known = self.tokens[start : min(start + max_tokens, self.prefill_end)]
        self.num_computed = start + (len(known) or 1)
        samples = self.num_computed >= self.prefill_end
        self.num_in_flight += samples
        history = self.tokens[:] if start == self.prefix_len else None
        return LongChunk(slot, start, known, self.num_device, samples, self.request, self.prompt_len, history)

    def receive(self, token: int, logprobs: TokenLogprobs | None) -> TokenEvent:
        """Takes in one sampled token and says what it did; `finished` is set when it was the last.

        Output token number k, counted from 1, ends the output if it is a stop id and k > min_tokens: so min_tokens
        tokens come out before a stop id, which is a further one. The device masks stop ids while fewer than min_tokens
        tokens are out, that is for k <= min_tokens; if one comes all the same, it is an ordinary token.
        A stop id counts as STOP even where the length limit falls on the same token. So does a token behind which the
        grammar lets nothing follow; that one counts before min_tokens, too, as there is nothing else to sample.
        """
        tokens = self.tokens
        tokens.append(token)
        self.num_in_flight -= 1
        tops = None if self.num_logprobs is None else self._cut(logprobs)
        is_first = len(tokens) == self.prompt_len + 1
        cached, scores = (self.num_cached, self.scores) if is_first else (0, None)
        if token in self.stop_ids and len(tokens) > self.min_len:
            reason, stop_id = FinishReason.STOP, token
        elif self.matcher is not None and self.matcher.accept(token):
            reason, stop_id = FinishReason.STOP, None
        elif len(tokens) > self.max_computed:
            reason, stop_id = FinishReason.LENGTH, None
        elif cached or scores is not None:
            reason, stop_id = None, None
        else:  # nearly always, so it names no field that keeps its default
            return TokenEvent(request_id=self.request_id, token_ids=(token,), logprobs=tops)
        self.finished = reason is not None
        return TokenEvent(
            request_id=self.request_id,
            token_ids=(token,),
            logprobs=tops,
            finish_reason=reason,
            stop_id=stop_id,
            cached_tokens=cached,
            prompt_logprobs=scores,
        )

    def _cut(self, logprobs: TokenLogprobs | None) -> tuple[TokenLogprobs]:
        """The device gives as many alternatives as any request may ask for; this one's share of them."""
        if logprobs is None:
            raise RuntimeError(f"{self.request_id!r} asked for log-probabilities, but the result of its step has none")
        return (TokenLogprobs(logprobs.logprob, logprobs.top[: self.num_logprobs]),)

    def mask(self) -> TokenMask | TokenEvent:
        """What it may sample next, once every known token is all there is; or its last event, if there is nothing."""
        assert self.matcher is not None and self.slot is not None
        barred = self.matcher.end_ids - self.stop_ids
        if len(self.tokens) < self.min_len:  # where the device bars stop ids
            barred |= self.stop_ids
        words = self.matcher.mask(barred)
        if words is not None:
            return TokenMask(self.slot, words, self.request.logit_bias)
        if self.matcher.may_end:
            self.finished = True
            return TokenEvent(request_id=self.request_id, finish_reason=FinishReason.STOP)
        return self.fail(f"no token may follow in its grammar: {self.matcher.error or 'all are barred'}")

    def fail(self, reason: str) -> TokenEvent:
        """Ends it for a fault that is not its own."""
        self.finished = True
        return TokenEvent(request_id=self.request_id, finish_reason=FinishReason.ERROR, error=reason)

    def cancel(self) -> TokenEvent:
        """Ends it without a token; rows that are in flight for it count no more."""
        self.finished = True
        return TokenEvent(request_id=self.request_id, finish_reason=FinishReason.ABORT)

    def check_integrity(self, num_rows: int) -> None:
        """Raises RuntimeError unless its counts agree. num_rows: of plans in flight that sample for it."""
        name, known, in_flight = self.request_id, len(self.tokens), self.num_in_flight
        if num_rows != in_flight:
            raise RuntimeError(f"{name!r} has {in_flight} tokens in flight, but {num_rows} rows of plans")
        if self.finished or known - self.prompt_len + in_flight > self.max_output:
            raise RuntimeError(f"{name!r} has ended, or is planned past its {self.max_output} tokens of output")
        if self.slot is None:
            if self.pages or self.num_computed:
                raise RuntimeError(f"{name!r} waits, but holds pages {self.pages}")
            return
        covered = max(self.num_computed, self.prefill_end)
        if len(self.pages) != self.num_pages(covered):
            raise RuntimeError(f"{name!r} holds {len(self.pages)} pages for {covered} positions")
        expected = known + in_flight - 1
        if self.num_computed != expected and not self.num_computed < self.prefill_end:
            raise RuntimeError(f"{name!r} has {self.num_computed} positions planned; its tokens say {expected}")
