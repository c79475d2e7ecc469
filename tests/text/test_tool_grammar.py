"""Tool calls by grammar: what an output may be where a call is wanted for certain."""

from __future__ import annotations

import json

import pytest

from jaxinfer.text.grammar import Grammars, check, write
from jaxinfer.text.tool_grammar import FORMATS, MAX_CALLS, tool_calls
from jaxinfer.types import InvalidRequest

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
TOOLS = {"weather": WEATHER, "now": {}, "note": {"properties": {"text": {"type": "string"}}}}


@pytest.fixture(scope="module")
def matches(byte_level):
    """Whether a text matches a form, by the tokenizer's own tokens."""
    grammars = Grammars(byte_level, byte_level.vocab_size, byte_level.eos_ids)

    def run(text: str, form) -> bool:
        grammar = write(form)
        check(grammar, byte_level, form.param)
        matcher = grammars.compile(grammar).result().matcher()
        for id in byte_level.encode(text, add_special_tokens=False):
            mask = matcher.mask()
            if mask is None or not mask[id // 8] >> id % 8 & 1:
                return False
            matcher.accept(id)
        return matcher.may_end

    yield run
    grammars.close()


def call(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


ROME = call("weather", {"city": "Rome", "days": 3})


def test_a_required_call_is_of_any_function_with_arguments_that_fit(matches):
    form = tool_calls(TOOLS)
    for text in (ROME, call("now", {}), call("note", {"text": "é"}), call("note", {}), "\n".join([ROME] * 3)):
        assert matches(text, form), text
    for text in (
        "",
        "text",
        f"text {ROME}",
        f"{ROME} text",
        call("weather", {"city": "Paris"}),
        call("weather", {}),
        call("now", {"x": 1}),
        call("note", []),
        call("other", {}),
        ROME.removesuffix("</tool_call>"),
        "\n".join([ROME] * (MAX_CALLS + 1)),
    ):
        assert not matches(text, form), text


def test_a_named_function_is_the_only_one_and_without_parallel_calls_there_is_one(matches):
    assert matches(ROME, tool_calls(TOOLS, name="weather"))
    assert not matches(ROME, tool_calls(TOOLS, name="now"))
    assert matches(ROME, tool_calls(TOOLS, parallel=False))
    assert not matches(f"{ROME}\n{ROME}", tool_calls(TOOLS, parallel=False))


@pytest.mark.parametrize("parallel", [True, False])
def test_where_no_call_is_required_there_may_be_text_but_what_begins_as_a_call_is_one(matches, parallel):
    form = tool_calls(TOOLS, required=False, parallel=parallel)
    for text in ("", "text", "a < b <tool", ROME, f"Let me see.\n{ROME}"):
        assert matches(text, form), text
    for text in (f"{ROME}\n{ROME}", f"a {ROME} b {ROME} c"):
        assert matches(text, form) == parallel, text
    for text in ("<tool_call>", "see <tool_call>\nnothing", call("weather", {"city": "Paris"}), ROME[:-3]):
        assert not matches(text, form), text


def test_markers_that_are_special_tokens_are_written_as_such(matches):
    """Here they are ordinary ones, and so no token of that name is found."""
    for required in (True, False):
        special = tool_calls(TOOLS, required=required, special=["<tool_call>"])
        with pytest.raises(InvalidRequest, match="unknown special token"):
            matches(ROME, special)


def test_what_cannot_be_enforced_is_refused_with_its_name(matches):
    with pytest.raises(InvalidRequest, match="'other'; tools has weather, now, note"):
        tool_calls(TOOLS, name="other")
    with pytest.raises(InvalidRequest, match=f"'pythonic' of this model; it can be in {FORMATS[0]}"):
        tool_calls(TOOLS, format="pythonic")
    with pytest.raises(InvalidRequest, match='"uniqueItems"') as refused:
        matches("", tool_calls({"f": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}))
    assert refused.value.param == "tools"
