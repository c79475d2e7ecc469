"""The form of an output in the body of a request: what reaches the engine, and what is refused with its field."""

from __future__ import annotations

import pytest

from jaxinfer.structured import StructuredOutputs
from jaxinfer.text.grammar import write

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "thing", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json": SCHEMA}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True, "description": "d"}}},
            {"json": SCHEMA},
        ),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
        ({"guided_regex": "[a-c]+"}, {"regex": "[a-c]+"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "disable_fallback": True}},
            {"json_object": True, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"regex": "a|b"}}, {"regex": "a|b"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"regex": "a|b"}, {"regex": "a|b"}),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"json_schema": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"grammar": 'root ::= "a"', "guided_decoding_backend": "guidance"}, {"grammar": 'root ::= "a"'}),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_every_way_to_ask_for_a_form_reaches_the_engine(server, engine, endpoint, body, form):
    reply = getattr(server, endpoint)(**body, max_tokens=2, n=2)
    assert reply.status_code == 200, reply.text
    assert [request.grammar for request in engine.requests] == [write(StructuredOutputs(**form))] * 2


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_without_a_form_nothing_is_constrained(server, engine, body):
    assert server.chat(**body, max_tokens=2).status_code == 200
    assert [request.grammar for request in engine.requests] == [""]


FORMAT = {"type": "json_schema", "schema": SCHEMA}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body", "form"),
    [
        ("responses", {"text": {"format": {"type": "json_object"}}}, {"json_object": True}),
        ("responses", {"text": {"format": FORMAT | {"name": "thing", "strict": True}}}, {"json": SCHEMA}),
        ("responses", {"text": {"format": {"type": "text"}}}, None),
        ("messages", {"output_config": {"format": FORMAT}}, {"json": SCHEMA}),
        ("messages", {"output_format": FORMAT}, {"json": SCHEMA}),
        ("messages", {"output_config": {"format": None}}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_in_the_words_of_the_other_routes_reaches_the_engine(server, engine, path, body, form, stream):
    limits = {"messages": HELLO, "max_tokens": 2} if path == "messages" else {"input": "Hello", "max_output_tokens": 2}
    reply = server.http.post(f"/v1/{path}", json=limits | body | {"stream": stream})
    assert reply.status_code == 200, reply.text
    wanted = "" if form is None else write(StructuredOutputs(**form))
    assert [request.grammar for request in engine.requests] == [wanted]


def test_a_response_shows_the_format_that_it_was_asked_for(server):
    given = {"type": "json_schema", "name": "thing", "schema": SCHEMA}
    reply = server.http.post("/v1/responses", json={"input": "Hello", "text": {"format": given}})
    assert reply.json()["text"] == {"format": given}


SCHEMA_FIELD = "response_format.json_schema"


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({"response_format": {}}, "response_format.type", "supported: text, json_object, json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "not a supported field"),
        ({"response_format": {"type": "json_schema"}}, SCHEMA_FIELD, "name and schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, f"{SCHEMA_FIELD}.name", "a b"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, f"{SCHEMA_FIELD}.schema", "None"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": "yes"}}},
            f"{SCHEMA_FIELD}.strict",
            "'yes'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            f"{SCHEMA_FIELD}.schema",
            '"not"',
        ),
        ({"guided_json": {"contains": {}}}, "guided_json", '"contains"'),
        ({"guided_json": 3}, "guided_json", "expected"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
        ({"guided_regex": ""}, "guided_regex", "at least one character"),
        ({"guided_choice": []}, "guided_choice", "a list of strings"),
        ({"guided_grammar": "start: b"}, "guided_grammar", 'unknown name: "b"'),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "llguidance alone"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "both given",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "not supported",
        ),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "not a supported field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_met_is_refused_before_anything_runs(server, engine, stream, body, param, problem):
    reply = server.chat(**body, stream=stream)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert problem in error["message"]
    assert not engine.requests
