"""Tool calls of every format, found in a text however it is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import TOOL_CALL_PARSERS
from jaxinfer.text.tool_calls.formats import FORMATS, choose
from jaxinfer.text.tool_calls.parser import ToolCallParser
from jaxinfer.text.tool_calls.reading import ToolCall

TOOLS = {
    "look": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "f": {},
}
DEEPSEEK = {
    "[[": "<｜tool▁calls▁begin｜>",
    "]]": "<｜tool▁calls▁end｜>",
    "<<": "<｜tool▁call▁begin｜>",
    ">>": "<｜tool▁call▁end｜>",
    "||": "<｜tool▁sep｜>",
}


def deepseek(text):
    for short, long in DEEPSEEK.items():
        text = text.replace(short, long)
    return text


def parse(name, pieces, tools=TOOLS):
    """Texts, those next to each other joined, and calls."""
    parser = ToolCallParser(FORMATS[name], tools)
    found = [item for piece in pieces for item in parser.push(piece)] + parser.flush()
    joined = []
    for item in found:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


def call(name="look", **arguments):
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


ZURICH = call(city="Zürich", days=3)
CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "deepseek_v3": deepseek('[[<<function||look\n```json\n{"city": "Zürich", "days": 3}\n```>>]]'),
    "mistral": '[TOOL_CALLS][{"name": "look", "arguments": {"city": "Zürich", "days": 3}}]',
    "llama3_json": '{"name": "look", "parameters": {"city": "Zürich", "days": 3}}',
}
PAIRS = {
    "hermes": CALLS["hermes"] + '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "qwen3_coder": CALLS["qwen3_coder"] + "\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
    "deepseek_v3": deepseek(
        '[[<<function||look\n```json\n{"city": "Zürich", "days": 3}\n```>>\n<<function||f\n```json\n{}\n```>>]]'
    ),
    "mistral": CALLS["mistral"][:-1] + ', {"name": "f"}]',
    "llama3_json": CALLS["llama3_json"] + '; {"name": "f", "parameters": {}}',
}
EVERY = pytest.mark.parametrize("name", CALLS)


@EVERY
def test_a_call_has_its_name_and_its_arguments_as_json(name):
    assert parse(name, [CALLS[name]]) == [ZURICH]


@EVERY
def test_calls_in_parallel_are_given_in_order_and_one_without_parameters_has_an_empty_object(name):
    """B4.3."""
    assert parse(name, [PAIRS[name]]) == [ZURICH, ToolCall("f", "{}")]


@EVERY
def test_a_call_is_given_with_the_piece_that_completes_it(name):
    parser = ToolCallParser(FORMATS[name], TOOLS)
    given = [(i, item) for i, char in enumerate(PAIRS[name]) for item in parser.push(char)]
    assert [item for _, item in given] == [ZURICH, ToolCall("f", "{}")]
    assert given[0][0] < len(CALLS[name])


@EVERY
def test_text_around_calls_is_given_without_the_markup_and_the_white_space_around_it(name):
    """B4.4."""
    before = "" if name == "llama3_json" else "I shall look.\n\n"
    text = before + CALLS[name] + "\n\nDone. \n"
    assert parse(name, [text]) == [*([before.rstrip()] if before else []), ZURICH, "Done. \n"]


@EVERY
def test_an_answer_without_calls_is_given_as_it_is_and_at_once(name):
    parser = ToolCallParser(FORMATS[name], TOOLS)
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" ") == []
    assert parser.push("you < me [x] \n") == [" you < me [x]"]
    assert parser.flush() == [" \n"]


@EVERY
def test_a_call_that_is_cut_off_is_text(name):
    """B4.5."""
    for end in range(1, CALLS[name].rindex("3")):
        assert parse(name, [CALLS[name][:end]]) == [CALLS[name][:end]]


MALFORMED = [
    ("hermes", '<tool_call>{"name": "look", "arguments": {,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", "<tool_call>look(city)</tool_call>"),
    ("hermes", "<tool_call>" + '{"a":' * 9000 + "1" + "}" * 9000 + "</tool_call>"),
    ("qwen3_coder", "<tool_call><function=look>city</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
    ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("deepseek_v3", deepseek("[[]]")),
    ("deepseek_v3", deepseek("[[nothing]]")),
    ("deepseek_v3", deepseek("[[<<function||look\n```json\n{no}\n```>>]]")),
    ("deepseek_v3", deepseek("[[<<function||look\n{}>>]]")),
    ("deepseek_v3", deepseek("[[<<|| {}>>]]")),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral", "[TOOL_CALLS]look\n{}"),
    ("mistral", "[TOOL_CALLS][ARGS]{}"),
    ("llama3_json", '{"name": "unheard_of", "parameters": {}}'),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '<|python_tag|>look.call(city="Bern")'),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_a_malformed_call_is_text_markup_included(name, text):
    """B4.5."""
    assert parse(name, [text]) == [text]
    assert parse(name, list(text)) == [text]
    assert parse(name, [f"  {text} so\n"]) == [f"  {text} so\n"]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("hermes", "<tool_call>{broken"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call><tool_cal"),
        ("qwen3_coder", "<tool_call>"),
        ("qwen3_coder", "<tool_call><function=f></func"),
        ("deepseek_v3", deepseek("[[")),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][{"),
    ],
)
def test_a_call_after_a_malformed_one_is_found(name, broken):
    assert parse(name, [broken + CALLS[name]]) == [broken, ZURICH]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_'),
        ("qwen3_coder", "<tool_call><function=f></function>"),
        ("qwen3_coder", "<function=f></function></tool_call>"),
        ("deepseek_v3", deepseek("[[<<function||f\n```json\n{}\n``")),
        ("deepseek_v3", deepseek("[[<<function||f\n```json\n{}\n```>>")),
        ("deepseek_v3", deepseek("[[<<f||{}>>]]")),
        ("mistral", '[TOOL_CALLS] [{"name": "f"}'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f{}"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}"),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}'),
        ("llama3_json", '\n{"name": "f", "arguments": "{}"}\n'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
    ],
)
def test_other_spellings_of_a_call_are_calls(name, text):
    assert parse(name, [text]) == [ToolCall("f", "{}")]


def test_two_hermes_calls_without_closing_tags_are_two_calls():
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n'
    assert parse("hermes", [one + one]) == [ToolCall("f", "{}")] * 2


def test_two_mistral_calls_by_name_are_two_calls():
    assert parse("mistral", ['[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]look[ARGS]{"days": 1}']) == [
        ToolCall("f", "{}"),
        call(days=1),
    ]


def test_markup_inside_a_string_of_the_arguments_belongs_to_the_string():
    inside = '</tool_call> } ] " \\ <tool_call> ```'
    written = json.dumps({"name": "look", "arguments": {"city": inside}})
    assert parse("hermes", [f"<tool_call>{written}</tool_call>"]) == [call(city=inside)]
    assert parse("mistral", [f"[TOOL_CALLS][{written}]"]) == [call(city=inside)]
    assert parse("qwen3_coder", [f"<function=look><parameter=city>{inside}</parameter></function>"]) == [
        call(city=inside)
    ]


def test_line_breaks_in_a_string_as_models_write_them_become_escapes():
    assert parse("hermes", ['<tool_call>{"name": "f", "arguments": {"x": "a\n\tb"}}</tool_call>']) == [
        call("f", x="a\n\tb")
    ]


def test_half_of_a_surrogate_pair_stays_an_escape():
    """B4.8."""
    (found,) = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"x": "é\\ud83d"}}</tool_call>'])
    assert found.arguments == '{"x": "\\u00e9\\ud83d"}'


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": "string"}, "\n a\nb \n", " a\nb "),
        ({"type": "integer"}, "\n3\n", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "object"}, '{"a": {}}', {"a": {}}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "12", 12),
        (None, "12", "12"),
    ],
)
def test_the_schema_says_what_the_bare_text_of_a_parameter_is(schema, text, value):
    tools = {"f": {"properties": {} if schema is None else {"x": schema}}}
    (found,) = parse("qwen3_coder", [f"<function=f><parameter=x>{text}</parameter></function>"], tools)
    assert json.loads(found.arguments) == {"x": value}
    assert type(json.loads(found.arguments)["x"]) is type(value)


SCRAPS = [
    *("<tool_call>", "</tool_call>", "<function=look>", "<parameter=city>", "</parameter>", "</function>", "<tool"),
    *(deepseek(mark) for mark in ("[[", "]]", "<<", ">>", "||")),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json\n", "```", "function", "look\n", "f", "x", "é", " ", "\n"),
    *('{"name": "f", "arguments": {"a": "}"}}', '{"name": "f"', "{}", "{", "}", "[", "]", ",", ";", '"', "\\"),
    *CALLS.values(),
]


@settings(deadline=None, max_examples=500)
@given(name=st.sampled_from(sorted(CALLS)), scraps=st.lists(st.sampled_from(SCRAPS), max_size=10), data=st.data())
def test_however_the_text_is_cut_the_calls_and_texts_are_the_same(name, scraps, data):
    """B4.4."""
    text = "".join(scraps)
    expected = parse(name, [text])
    assert parse(name, list(text)) == expected
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    assert parse(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == expected
    for item in expected:
        if isinstance(item, ToolCall):
            assert isinstance(json.loads(item.arguments), dict)
    if not any(isinstance(item, ToolCall) for item in expected):
        assert "".join(expected) == text


@settings(deadline=None, max_examples=200)
@given(
    arguments=st.dictionaries(
        st.text(min_size=1, max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    name=st.sampled_from(["hermes", "deepseek_v3", "mistral", "llama3_json"]),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    length=st.integers(1, 7),
)
def test_any_arguments_come_through_unchanged(arguments, name, ascii_only, indent, length):
    """B4.8."""
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    old = '{"city": "Zürich", "days": 3}'
    text = "so\n" * (name != "llama3_json") + CALLS[name].replace(old, written)
    *_, found = parse(name, [text[i : i + length] for i in range(0, len(text), length)])
    assert found.name == "look" and json.loads(found.arguments) == arguments


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=one>\n1\n</parameter>", "qwen3_coder"),
        (deepseek("[[<<"), "deepseek_v3"),
        ('{{ "[TOOL_CALLS] [" }}', "mistral"),
        ('{{ "<|python_tag|>" + call }}', "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',)
        + ("llama3_json",),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_format_follows_from_the_template_unless_it_is_named(source, name):
    assert choose("auto", source) is (None if name is None else FORMATS[name])
    assert choose("none", source) is None
    assert choose("mistral", source) is FORMATS["mistral"]


def test_the_format_of_published_models_is_recognised(qwen3, deepseek_v3):
    assert choose("auto", qwen3[1]["chat_template"]).name == "hermes"
    assert choose("auto", deepseek_v3[1]["chat_template"]).name == "deepseek_v3"


def test_the_names_that_a_server_may_be_given_are_those_of_the_formats():
    assert set(TOOL_CALL_PARSERS) == {"auto", "none", *FORMATS}


@EVERY
def test_ids_of_calls_differ_and_have_the_form_that_the_models_templates_accept(name):
    ids = {FORMATS[name].new_id() for _ in range(50)}
    assert len(ids) == 50
    for id in ids:
        assert (len(id) == 9 and id.isalnum()) if name == "mistral" else (id[:5], len(id)) == ("call_", 29)
