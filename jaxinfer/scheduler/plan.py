"""StepPlan and StepResult: all that passes between scheduler and runner. Plain data, to print, store and replay."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxinfer.types import Request, TokenLogprobs


class DecodeRow(NamedTuple):
    """One token of a running sequence. The token itself is on the device: the last one sampled in this slot.

    A NamedTuple, as 256 are made a step: a frozen dataclass takes twice as long to make.
    """

    slot: int
    position: int  # of the token that is computed; the sampled token comes after it
    new_page: int | None  # page that holds `position`, when it is the first token on it
    plain: bool = True  # whether the argmax of the raw logits is all that its request asks for
    logprobs: bool = False  # whether the host wants log-probabilities of the sampled token


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of known tokens of one sequence."""

    slot: int
    start: int  # position of the first token of the chunk: tokens already in the cache
    token_ids: Sequence[int]
    new_pages: Sequence[int]  # pages that its tokens begin, for the slot's page table from index `first_new_page` on
    first_new_page: int
    samples: bool  # the chunk ends the known tokens: sample the next one
    request: Request  # its sampling parameters are written to the slot with every chunk
    prompt_len: int  # tokens of token ids below this position are prompt, later ones are output computed again
    history: (
        Sequence[int] | None
    )  # with the first chunk of an admission, all known tokens (prompt, then output), else None
    next_token: int | None = None  # that known to follow the chunk; None: none is
    scored: bool = False  # whether the log-probabilities of the tokens behind each of the chunk's are read


class LastToken(NamedTuple):
    """The only known token of a sequence that is not in the cache. As a decode row it is computed like any other: in
    a smaller step, by an attention that splits the context.
    """

    slot: int
    token_id: int
    request: Request  # as in PrefillChunk, and so are the next two
    prompt_len: int
    history: Sequence[int]


class CachedPrefix(NamedTuple):
    """The beginning of a newly admitted sequence that is in the cache already. Its first row starts behind it.

    The row comes with the same plan, or with a later one where some of the pages are still to arrive from the host.
    """

    slot: int
    pages: Sequence[int]  # for the slot's page table from index 0 on; the last one may be filled in part
    copied_from: int | None  # page whose content the last of `pages` begins with; None: all are shared as they are
    state: int | None = None  # place whose recurrent state the slot begins with; None: there are no such states
    last: LastToken | None = None  # what is left to compute, if it is a single token: then its first row is a DecodeRow


class KeptState(NamedTuple):
    """A copy of a slot's recurrent state, made after the step."""

    slot: int
    place: int


class LongChunk(NamedTuple):
    """A run of tokens of a sequence whose cache outgrows the device. It has a step of its own.

    Positions below `num_device_tokens` lie in pages of the slot's page table, and were computed by ordinary chunks;
    those from there on lie in the host context, which holds one sequence at a time. Steps of one sequence come in
    order, each starting where the one before ended; the first starts at `num_device_tokens`.
    """

    slot: int
    start: int  # position of the first token, at least num_device_tokens
    token_ids: Sequence[int]  # empty: one token, the last one sampled in this slot, which is on the device
    num_device_tokens: int  # a multiple of the page size, the same in every chunk of an admission
    samples: bool  # as in PrefillChunk
    request: Request  # as in PrefillChunk
    prompt_len: int  # as in PrefillChunk
    history: Sequence[int] | None = None  # as in PrefillChunk; not None where all of its pages were in the cache

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or 1


class DiskPage(NamedTuple):
    """A page that is on disk, or is to be: its file is found by `key`, and known by all the rest."""

    key: str  # `page_key` of the rest
    parent: str | None  # key of the page before it; None: it is a sequence's first
    salt: str
    tokens: tuple[int, ...]  # those on this page


def page_key(fingerprint: str, salt: str, parent_key: str | None, tokens: Sequence[int]) -> str:
    """SHA-256, as 64 hexadecimal digits, of a page's model, salt, tokens, and of all tokens before them."""
    told = json.dumps([fingerprint, salt, parent_key, list(tokens)], separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()


class Offload(NamedTuple):
    """Copies pages of the device to a frame of the host: page i of the frame is `pages[i]`."""

    frame: int
    pages: Sequence[int]
    ticket: int | None = None  # tells the end, if somebody wants to know


class Restore(NamedTuple):
    """Copies pages of a frame back to the device. This takes longer than a step: its end is told by the ticket."""

    ticket: int
    frame: int
    places: Sequence[tuple[int, int]]  # place in the frame, page of the device


class Save(NamedTuple):
    """Writes pages of a frame to disk. Its end is told by the ticket."""

    ticket: int
    frame: int
    pages: Sequence[tuple[int, DiskPage]]  # place in the frame


class Fetch(NamedTuple):
    """Reads pages from disk into a frame: page i of the frame is `pages[i]`. Its end is told by the ticket."""

    ticket: int
    frame: int
    pages: Sequence[DiskPage]


class Delete(NamedTuple):
    """Deletes pages from disk."""

    pages: Sequence[DiskPage]


class SaveSession(NamedTuple):
    """Writes what a session is made of, as JSON, once all writes before are done and if its pages are there.

    Its end is told by the ticket.
    """

    ticket: int
    session_id: str
    manifest: Mapping[str, Any]
    keys: Sequence[str]  # of its pages


class DeleteSession(NamedTuple):
    """Deletes that from disk."""

    session_id: str


Transfer = Offload | Restore | Save | Fetch | Delete | SaveSession | DeleteSession


class Transferred(NamedTuple):
    """A transfer with a ticket is done. For Restore: its copies are queued before whatever is launched from now on."""

    ticket: int
    failed: frozenset[str] = frozenset()  # keys of pages, or ids of sessions, that could not be written or read


class TokenMask(NamedTuple):
    """The tokens that a row may sample. It is known once the token before is: after the plan, before the sampling."""

    slot: int
    words: bytes  # little-endian, 32 bits each: bit i % 32 of word i // 32 is token i; none from the last word on
    logit_bias: Mapping[int, float]  # the request's own
    group: int = 0  # of those that the plan has


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of the device. Decode rows come first; every row is another slot.

    Without rows there is no step, only what comes before it, and no result.

    Where groups of devices have sequences, slots and pages of their own, the plan has those of each instead, and they
    run as one step. Its own rows are none then, and its properties speak of all groups.
    """

    step: int
    decodes: Sequence[DecodeRow]
    prefills: Sequence[PrefillChunk]
    prefixes: Sequence[CachedPrefix] = ()  # put in place before the step, in this order
    transfers: Sequence[Transfer] = ()  # begun before all else, in this order
    long: LongChunk | None = None  # the only row, if there is one
    kept_states: Sequence[KeptState] = ()  # copied after the step
    constrained: bool = False  # whether rows sample under masks: then the step is launched, and sampled later
    groups: Sequence[StepPlan] = ()  # none: there is one group, and this is its plan

    @property
    def parts(self) -> Sequence[StepPlan]:
        """The plan of each group."""
        return self.groups or (self,)

    @property
    def num_tokens(self) -> int:
        """Of the group that has the most."""
        if self.groups:
            return max(group.num_tokens for group in self.groups)
        if self.long is not None:
            return self.long.num_tokens
        return len(self.decodes) + sum(len(chunk.token_ids) for chunk in self.prefills)

    @property
    def num_rows(self) -> int:
        """Of the group that has the most."""
        if self.groups:
            return max(group.num_rows for group in self.groups)
        return len(self.decodes) + len(self.prefills) + (self.long is not None)

    @property
    def is_plain(self) -> bool:
        """Whether the argmax of the raw logits is all that any row asks for."""
        if self.groups:
            return all(group.is_plain for group in self.groups)
        return all(row.plain for row in self.decodes) and all(
            chunk.request.is_plain for chunk in self.chunks if chunk.samples
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row's log-probabilities are read."""
        if self.groups:
            return any(group.wants_logprobs for group in self.groups)
        return any(row.logprobs for row in self.decodes) or any(
            chunk.request.logprobs is not None for chunk in self.chunks if chunk.samples
        )

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of prompts are read."""
        return any(chunk.scored for chunk in self.prefills)

    @property
    def chunks(self) -> Sequence[PrefillChunk | LongChunk]:
        """All rows but the decode rows."""
        return self.prefills if self.long is None else (self.long,)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What the rows of a plan sampled, by slot: rows of chunks that do not sample are absent."""

    step: int
    token_ids: dict[int, int]  # slot -> token; -1: its logits were not numbers, and no token could be chosen
    logprobs: dict[int, TokenLogprobs]  # slot -> log-probabilities, for requests that asked
    groups: Sequence[StepResult] = ()  # of a plan's groups, where it has such
    # slot -> those of the tokens at positions start + 1 and up, for chunks that are scored.
    scores: Mapping[int, Sequence[TokenLogprobs]] = dataclasses.field(default_factory=dict)

    @property
    def has_bad_logits(self) -> bool:
        """Whether no token could be chosen for some row."""
        return -1 in self.token_ids.values() or any(group.has_bad_logits for group in self.groups)
