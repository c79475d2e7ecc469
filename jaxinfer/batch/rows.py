"""From a row of the input to what the engine runs for it, or to the reason why it does not.

What a row asks for means what the same body means to the server: it goes through the same code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from jaxinfer.batch.sources import RawRow, encode
from jaxinfer.http import known_fields, openai
from jaxinfer.http.errors import Problem, problem
from jaxinfer.http.metrics import ServerMetrics
from jaxinfer.http.prompts import PromptMaker
from jaxinfer.http.streams import Generation
from jaxinfer.text.requests import sample_seed
from jaxinfer.types import InvalidRequest

KINDS: Mapping[str, type[openai.CompletionRequest] | type[openai.ChatRequest]] = {
    "/v1/chat/completions": openai.ChatRequest,
    "/v1/completions": openai.CompletionRequest,
}
"""What a row may ask for, by its url."""
BATCH_FIELDS = frozenset({"custom_id", "method", "url", "body"})
"""Of a row in the OpenAI API's batch format; one with any but the first is taken for such a row."""
MAX_ROW_BYTES = 16 * 2**20
"""Longest row, as long as the server's longest body."""
SEED_BITS = 63
"""Of the seed that a row without one gets: what every reader of JSON takes for an integer."""


class BadRow(Exception):
    """The row asks for nothing that could be answered; `code` is a short slug for programs."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(slots=True)
class Row:
    """A row on its way through the engine."""

    raw: RawRow
    id: str
    custom_id: str | None
    generation: Generation | None  # None: it has failed already
    failure: bytes | None = None  # its line of the output, then

    @property
    def num_sequences(self) -> int:
        """What it needs of the engine."""
        return 0 if self.generation is None else len(self.generation.choices)

    def success(self, body: bytes) -> bytes:
        """The line of a row that was answered."""
        return _line(self.id, self.custom_id, response=_response(self.id, 200, body))

    def refusal(self, what: Problem) -> bytes:
        """The line of a row that the server would have answered with an error."""
        return _line(self.id, self.custom_id, response=_response(self.id, what.status, what.body))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What all rows of a job share."""

    key: str  # of the job: the ids of its rows are made of it
    created_s: int  # seconds since the epoch
    seed: int
    defaults: Mapping[str, Any]  # fields of a body that does not give them
    duplicates: Mapping[int, int]  # see `find_duplicates`
    url: str | None = None  # that all rows must have; None: any of KINDS


class RowMaker:
    """Reads rows, renders, tokenises and checks. Threads may share it."""

    def __init__(self, prompts: PromptMaker, metrics: ServerMetrics, facts: JobFacts):
        self._prompts = prompts
        self._metrics = metrics
        self._facts = facts

    def make(self, raw: RawRow, attempt: int = 0) -> Row:
        """The row, ready to run or failed. attempt: tells its requests from those of an earlier try."""
        name = hashlib.sha256(f"{self._facts.key}/{raw.number}".encode()).hexdigest()[:32]
        custom_id: str | None = None
        try:
            fields = _fields(raw)
            custom_id = _custom_id(fields, raw)
            if (first := self._facts.duplicates.get(raw.number)) is not None:
                raise BadRow(
                    "duplicate_custom_id", f"{raw.place}: custom_id is {custom_id!r}, like that of row {first + 1}"
                )
            url, body = self._request(fields, raw)
        except BadRow as error:
            failed = _line(f"batch_req_{name}", custom_id, error={"code": error.code, "message": str(error)})
            return Row(raw, f"batch_req_{name}", custom_id, None, failed)
        row = Row(raw, f"batch_req_{name}", custom_id, None)
        try:
            row.generation = self._generation(url, body, raw, name if not attempt else f"{name}-{attempt}")
        except Exception as error:  # also one that nothing foresaw: it is logged, and ends nothing but its row
            row.failure = row.refusal(problem(error))
        return row

    def _request(self, fields: dict[str, Any], raw: RawRow) -> tuple[str, dict[str, Any]]:
        """Address and body. BadRow where they are missing or not known."""
        if not fields.keys() & (BATCH_FIELDS - {"custom_id"}):
            body = {name: value for name, value in fields.items() if name != "custom_id"}
            found = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
            url = next((url for name, url in found.items() if name in body), None)
            if url is None:
                raise BadRow("missing_field", f"{raw.place}: there is no prompt, no messages and no body")
        else:
            for name in ("custom_id", "method", "url", "body"):
                if fields.get(name) is None:
                    raise BadRow("missing_field", f"{raw.place}: {name} is missing")
            if unknown := fields.keys() - BATCH_FIELDS:
                raise BadRow("unknown_field", f"{raw.place}: {min(unknown)} is not a field of a batch's row")
            if fields["method"] != "POST":
                raise BadRow("invalid_method", f"{raw.place}: method is {fields['method']!r}; it must be 'POST'")
            url, body = fields["url"], fields["body"]
            if not isinstance(body, Mapping):
                raise BadRow("invalid_body", f"{raw.place}: body is a {type(body).__name__}; an object is needed")
        if not isinstance(url, str) or url not in KINDS:
            raise BadRow("invalid_url", f"{raw.place}: url is {url!r}; known: {', '.join(KINDS)}")
        if self._facts.url not in (None, url):
            raise BadRow("invalid_url", f"{raw.place}: url is {url!r}, and that of the batch {self._facts.url!r}")
        return url, dict(body)

    def _generation(self, url: str, body: dict[str, Any], raw: RawRow, name: str) -> Generation:
        given = {field for field, value in body.items() if value is not None}
        if given & {"max_tokens", "max_completion_tokens"}:
            given |= {"max_tokens", "max_completion_tokens"}
        body |= {field: value for field, value in self._facts.defaults.items() if field not in given}
        if body.get("seed") is None:
            body["seed"] = sample_seed(self._facts.seed, raw.number) >> (64 - SEED_BITS)
        kind = KINDS[url]
        try:
            data = encode(body)
        except (TypeError, ValueError, NotImplementedError, RecursionError) as error:
            raise InvalidRequest(f"the row has no form in JSON: {error}", code="invalid_json") from None
        request = known_fields.decode(kind, data)
        if request.stream:
            raise InvalidRequest("stream is true; a row of a batch has one reply", param="stream")
        generation = self._prompts.generation(request, kind.id_prefix + name, self._metrics, time.monotonic())
        head = dataclasses.replace(generation.head, created=self._facts.created_s)
        # What was cached depends on what ran before: with it, the same job would not write the same output.
        return dataclasses.replace(generation, head=head, shows_cached=False)


def failed_line(id: str, custom_id: str | None, code: str, message: str) -> bytes:
    """The line of a row that was not answered at all."""
    return _line(id, custom_id, error={"code": code, "message": message})


def _fields(raw: RawRow) -> dict[str, Any]:
    """The row as an object. BadRow if it is none."""
    data: Any = raw.data
    if isinstance(data, bytes):
        if len(data) > MAX_ROW_BYTES:
            raise BadRow("row_too_large", f"{raw.place} has {len(data)} bytes; at most {MAX_ROW_BYTES} are read")
        try:
            data = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRow("invalid_json", f"{raw.place} is not valid JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise BadRow("invalid_json", f"{raw.place} is a {type(data).__name__}; an object is needed")
    return dict(data)


def _custom_id(fields: Mapping[str, Any], raw: RawRow) -> str | None:
    """None: the row has none, which is fine for one that is not in the OpenAI API's format."""
    custom_id = fields.get("custom_id")
    if custom_id is not None and not (isinstance(custom_id, str) and custom_id and _is_unicode(custom_id)):
        raise BadRow("invalid_custom_id", f"{raw.place}: custom_id is {custom_id!r}; some text is needed")
    return custom_id


def _is_unicode(text: str) -> bool:
    """Python's text may have half of a surrogate pair, which no file can."""
    return text.encode("utf-8", "replace").decode() == text


def _response(id: str, status: int, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": id.replace("batch_", "", 1), "body": msgspec.Raw(body)}


def _line(
    id: str, custom_id: str | None, *, response: dict[str, Any] | None = None, error: dict[str, Any] | None = None
) -> bytes:
    """A line of the output, as the OpenAI API has it: `response` has a status and a body, or `error` a reason."""
    line = {"id": id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"
