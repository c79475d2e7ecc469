"""Grammars: what is written for a form, what is refused, and what a matcher allows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.structured import MAX_GRAMMAR_CHARS, StructuredOutputs
from jaxinfer.text.grammar import MIN_SIDE_BY_SIDE, Grammars, check, write
from jaxinfer.types import InvalidRequest, SamplingParams

SUITE = json.loads((Path(__file__).parents[1] / "data" / "json_schema_suite.json").read_text())["groups"]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(byte_level):
    return byte_level


@pytest.fixture(scope="module")
def grammars(tokenizer):
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    yield grammars
    grammars.close()


def start(grammars, **form):
    return grammars.compile(write(StructuredOutputs(**form))).result().matcher()


def allowed(matcher, barred=()) -> set[int]:
    words = matcher.mask(barred)
    return (
        set()
        if words is None
        else set(np.flatnonzero(np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little")))
    )


def matches(grammars, tokenizer, text: str, **form) -> bool:
    """Whether the tokenizer's own tokens of a text are allowed, one after the other, and then the end."""
    matcher = start(grammars, **form)
    for id in tokenizer.encode(text, add_special_tokens=False):
        if id not in allowed(matcher):
            return False
        matcher.accept(id)
    return matcher.may_end


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        (
            {"json": PERSON},
            ['{"name": "é😀"}', '{"name":"a",\n  "age":\n    3}'],
            ['{"age": 3}', '{"name":   "a"}', "[]"],
        ),
        ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, ['{"name":"a"}'], ['{"name": "a"}']),
        ({"json": PERSON, "whitespace_pattern": " {2}"}, ['{"name":  "a"}'], ['{"name": "a"}']),
        ({"json": True}, ["3", "[1, {}]"], ["", "[1"]),
        ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "3", '"a"']),
        ({"regex": r"^\d+/[a-c]$"}, ["12/b"], ["12/b$", "^12/b", "/b", "12/d"]),
        ({"regex": r"^a|b$"}, ["a", "b"], ["ab", "c", ""]),
        ({"regex": r"[^$]+\$[]^]"}, ["x$]", "ab$^"], ["$$]", "x$a"]),
        ({"choice": ["yes", "no", 'a"b\\/\n😀']}, ["yes", "no", 'a"b\\/\n😀'], ["y", "yesno", ""]),
        ({"grammar": 'start: "(" start ")" | /[0-9]/'}, ["((3))", "3"], ["((3)", "33"]),
        ({"grammar": 'root ::= "a" root | [0-9]'}, ["aa3", "3"], ["aa", "a33"]),
    ],
)
def test_a_form_allows_what_matches_it_and_nothing_else(grammars, tokenizer, form, yes, no):
    check(write(StructuredOutputs(**form)), tokenizer, "form")
    assert [text for text in yes if not matches(grammars, tokenizer, text, **form)] == []
    assert [text for text in no if matches(grammars, tokenizer, text, **form)] == []


@pytest.mark.parametrize(
    "form",
    [
        {"json": PERSON},
        {"choice": ['{"name": "a"}']},
        {"grammar": """start: "{" /[^}]+/ "}" """},
        {"regex": r"\{[^}]+\}"},
    ],
)
def test_a_thought_may_come_before_any_form(grammars, tokenizer, form):
    """It ends with the first closing tag, and what follows that is the form; white space may stand between them."""
    answer = '{"name": "a"}'
    yes = {True: ["hm</think>", "\nhm < ha\n</think>\n\n"], False: ["", "<think>hm</think>", "\n<think>\n</think>\n"]}
    no = {True: ["", "hm", "</think>hm", "</think></think>"], False: ["hm", "hm</think>", "<think>hm"]}
    for begun in (True, False):
        for before in (*yes[begun], *no[begun]):
            found = matches(grammars, tokenizer, before + answer, thought_begun=begun, **form)
            assert found == (before in yes[begun]), (begun, before)


def deep(levels: int) -> dict:
    """A schema of objects within objects."""
    return {"properties": {"a": deep(levels - 1)}} if levels else {"type": "string"}


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({"json": {"not": {}}}, '"not"'),
        ({"json": {"type": "array", "uniqueItems": True, "contains": {}}}, '"contains", "uniqueItems"'),
        ({"json": {"properties": {"a": {"if": {}, "then": {}}}}}, '"if", "then"'),
        ({"json": {"unevaluatedProperties": False, "x-guidance": {"lenient": True}}}, '"unevaluatedProperties"'),
        ({"json": {"oneOf": [{"minimum": 1}, {"type": "integer"}]}}, "oneOf whose options do not exclude each other"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"format": "iri", "type": "string"}}, "Unknown format: iri"),
        ({"json": {"$ref": "#/$defs/a"}}, "/$defs/a"),
        ({"json": {"$ref": "http://localhost/a"}}, "http://localhost/a"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-ahead"),
        ({"json": {"minimum": 3, "maximum": 2, "type": "integer"}}, "Unsatisfiable schema"),
        ({"json": "{"}, "is no JSON"),
        ({"json": {"const": float("nan")}}, "is no JSON"),
        ({"json": False}, "is False"),
        ({"json": {}, "whitespace_pattern": "["}, "unclosed character class"),
        ({"regex": "[a-z"}, "unclosed character class"),
        ({"regex": r"(?!a)b"}, "look-ahead"),
        ({"regex": r"(^a)b"}, "'^' inside it"),
        ({"regex": r"a$b"}, "'$' inside it"),
        ({"regex": r"[^\s\S]"}, "no output matches it"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": "start: <|none|>"}, "<|none|>"),
        ({"grammar": "nonsense"}, "cannot be read"),
        ({"choice": ["x" * MAX_GRAMMAR_CHARS]}, f"at most {MAX_GRAMMAR_CHARS}"),
        ({"choice": [f"c{i}" for i in range(2500)]}, "there are 2500 options; at most 1500"),
        ({"json": deep(150)}, "the schema cannot be read: recursion limit exceeded"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_name(tokenizer, form, problem):
    with pytest.raises(InvalidRequest) as refused:
        check(write(StructuredOutputs(param="form", **form)), tokenizer, "form")
    assert problem in str(refused.value) and refused.value.param == "form"


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({}, "is empty"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice"),
        ({"json": 3}, "has the JSON Schema 3"),
        ({"regex": ""}, "has the regex ''"),
        ({"grammar": 3}, "has the grammar 3"),
        ({"choice": "yes"}, "has the choice 'yes'"),
        ({"choice": []}, "has the choice []"),
        ({"choice": ["a", ""]}, "has the choice ['a', '']"),
        ({"regex": "a", "disable_any_whitespace": True}, "asks for regex"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "has both"),
    ],
)
def test_sampling_parameters_refuse_what_is_no_form(form, problem):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(structured_outputs=StructuredOutputs(**form))
    assert problem in str(refused.value) and refused.value.param == "structured_outputs"


def test_eos_is_allowed_exactly_where_the_grammar_may_end(grammars, tokenizer):
    (eos,) = tokenizer.eos_ids
    matcher = start(grammars, regex="aa(b)?")
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    assert eos not in allowed(matcher) and not matcher.may_end
    assert not matcher.accept(a) and eos not in allowed(matcher)
    assert not matcher.accept(a) and eos in allowed(matcher) and matcher.may_end
    assert allowed(matcher, [eos]) == {b} and allowed(matcher, [eos, b]) == set()
    assert matcher.accept(b)  # nothing may follow


def test_matchers_of_one_grammar_know_nothing_of_each_other(grammars, tokenizer):
    first, second = start(grammars, regex="[ab]c"), start(grammars, regex="[ab]c")
    before = allowed(second)
    first.accept(tokenizer.encode("a", add_special_tokens=False)[0])
    assert allowed(second) == before != allowed(first)


def test_masks_that_are_computed_side_by_side_are_those_of_one_by_one(grammars, tokenizer):
    """Also beside one that cannot go on; and what was computed is not kept for the token after."""
    ids = tokenizer.encode('{"a": [1, "text"]}', add_special_tokens=False)

    def make():
        found = [start(grammars, json_object=True) for _ in range(MIN_SIDE_BY_SIDE)]
        for num, matcher in enumerate(found):
            for id in ids[: num % len(ids)]:
                matcher.accept(id)
        found.append(start(grammars, json_object=True))
        found[-1].accept(tokenizer.encode("x", add_special_tokens=False)[0])
        return found

    prepared, single = make(), make()
    grammars.prepare(prepared)
    masks = [matcher.mask() for matcher in single]
    assert [matcher.mask() for matcher in prepared] == masks and masks.index(None) == MIN_SIDE_BY_SIDE
    grammars.prepare(prepared)
    assert not any(matcher.accept(ids[num % len(ids)]) for num, matcher in enumerate(prepared) if num < 3)
    assert prepared[0].mask() == single[1].mask() != masks[0]


def test_a_token_that_was_not_allowed_leaves_nothing_to_follow(grammars, tokenizer):
    matcher = start(grammars, regex="ab")
    assert not matcher.accept(tokenizer.encode("x", add_special_tokens=False)[0])
    assert matcher.mask() is None and not matcher.may_end and matcher.error


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "metaspace"])
def test_every_kind_of_tokenizer_finds_its_own_tokens_allowed(made, name):
    """Those of the rest of a text: some begin each text with a space, which an output does not."""
    tokenizer = made[name][2]
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    ids = tokenizer.encode("a the cat the", add_special_tokens=False)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode()
    for form in ({"choice": [text]}, {"choice": [text, text + " cat"]}, {"regex": f"({text}|[a-z ]*)"}):
        assert matches_ids(start(grammars, **form), ids), form
    grammars.close()


def matches_ids(matcher, ids) -> bool:
    for id in ids:
        if id not in allowed(matcher):
            return False
        matcher.accept(id)
    return matcher.may_end


def test_no_invalid_instance_of_the_published_suite_matches_its_schema(grammars, tokenizer):
    """An instance that is valid may be refused: its properties may not come in the order of the schema."""
    num_valid = num_found = 0
    for group in SUITE:
        grammar = write(StructuredOutputs(json=group["schema"]))
        check(grammar, tokenizer, group["from"])
        compiled = grammars.compile(grammar).result()
        for instance in group["invalid"]:
            text = json.dumps(instance, ensure_ascii=False)
            assert not byte_by_byte(compiled.matcher(), tokenizer, text), (group["from"], text)
        for instance in group["valid"]:
            num_valid += 1
            num_found += byte_by_byte(compiled.matcher(), tokenizer, json.dumps(instance, ensure_ascii=False))
    assert len(SUITE) > 150 and num_found > 0.9 * num_valid


def byte_by_byte(matcher, tokenizer, text: str) -> bool:
    """Whether a text matches. Single bytes are tokens, so that it does not depend on what others there are."""
    for byte in text.encode():
        if not matcher._library.try_consume_tokens([single_bytes(tokenizer)[byte]]):
            return False
    return matcher.may_end


def single_bytes(tokenizer) -> dict[int, int]:
    if not hasattr(single_bytes, "found"):
        ids = range(tokenizer.vocab_size)
        single_bytes.found = {t[0]: id for id in ids if len(t := tokenizer.token_bytes(id)) == 1}
    return single_bytes.found
