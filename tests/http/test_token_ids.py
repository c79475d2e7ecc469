"""The ids of a prompt as they are read from JSON, against what a decoder of JSON says of the same body."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from jaxinfer.http import token_ids
from jaxinfer.http.openai import CompletionRequest, decode
from jaxinfer.types import InvalidRequest

SEPARATORS = (",", ", ")


@pytest.fixture(autouse=True)
def short_bodies_are_cut_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_ids, "MIN_BYTES", 0)


@pytest.mark.parametrize("separator", SEPARATORS)
def test_ids_of_every_length_at_every_offset_are_read_as_json_reads_them(separator):
    rng = random.Random(0)
    for count in range(1, 40):
        ids = [rng.randrange(10 ** rng.randint(1, token_ids.MAX_DIGITS)) for _ in range(count)]
        found = token_ids.read(json.dumps(ids, separators=(separator, ":"))[1:-1].encode())
        assert found is not None and found.typecode == "I" and found.tolist() == ids


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,", ",1", "1,,2", "01", "1,00", "-1", "1,-2", "1.5", "1e3", "1 2", "1 ,2", "1,2, 3", "1, 2,3", "1,  2",
     " 1", "1 ", "1, 2,34 5", "1;2", "1, x", '1,"2"', "123456789", "1\n", "1,\n2", "1:2"],
)  # fmt: skip
def test_what_is_written_in_another_way_or_is_no_list_of_ids_is_left_to_others(text):
    assert token_ids.read(text.encode()) is None


@pytest.mark.parametrize("place", ["first", "last", "twice", "nested", "in a key"])
def test_a_list_is_the_prompt_only_where_the_decoder_finds_it_under_that_key(place):
    ids, other = "[1, 2, 3]", "[4, 5]"
    body = {
        "first": f'{{"prompt": {ids}, "max_tokens": 2}}',
        "last": f'{{"stop": ["\\"prompt\\": {other}"], "prompt" : {ids}}}',
        "twice": f'{{"prompt": {other}, "prompt": {ids}}}',
        "nested": f'{{"stream_options": {{"prompt": {other}}}, "prompt": {ids}}}',
        "in a key": f'{{"a\\"prompt": {other}, "prompt": {ids}}}',
    }[place].encode()
    if place in ("nested", "in a key"):
        with pytest.raises(InvalidRequest, match="is not a supported field"):
            decode(CompletionRequest, body)
    else:
        assert list(decode(CompletionRequest, body).prompt) == [1, 2, 3]


@pytest.mark.parametrize("rest", ["", "}}", ', "n": }', ', "n": "x"}'])
def test_what_is_wrong_behind_the_ids_is_found_where_it_is(rest):
    body = f'{{"prompt": [1, 2, 3]{rest}'.encode()
    with pytest.raises(InvalidRequest) as found:
        decode(CompletionRequest, body)
    assert token_ids.MARK.decode().strip('"') not in str(found.value)


@pytest.mark.parametrize("short_bytes", [0, token_ids.SHORT_BYTES])
@pytest.mark.parametrize(
    ("text", "ids"),
    [("[7]", [7]), ("[1 ,\n 2]", [1, 2]), ("[0,4294967295]", [0, 2**32 - 1]), ("[4294967296]", None), ("[1,-2]", None),
     ("[1, 2.5]", None), ('[1, "a"]', None), ("[1, [2]]", None), ("[]", None), ('"1"', None), ("7", None)],
)  # fmt: skip
def test_few_ids_are_read_as_many_are(text, ids, short_bytes, monkeypatch):
    monkeypatch.setattr(token_ids, "SHORT_BYTES", short_bytes)
    found = token_ids.of_json(msgspec.Raw(text.encode()))
    assert ids == (None if found is None else found.tolist())
