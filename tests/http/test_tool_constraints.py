"""Tools whose calls the output has to be, and answers behind a thought: what the engine is told to match."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.structured import StructuredOutputs
from jaxinfer.text.grammar import write
from jaxinfer.text.tool_grammar import tool_calls
from tests.http.conftest import ANY_PORT
from tests.http.test_tools import LOOK, make_server


@pytest.fixture(scope="module")
def shared_tools():
    server = make_server()
    yield server
    server.close()


@pytest.fixture
def server(shared_tools):
    shared_tools.engine.requests.clear()
    return shared_tools


NOW = {"type": "function", "function": {"name": "now", "strict": True}}
NAMED = {"type": "function", "function": {"name": "look"}}


def form_of(server, **body):
    """The grammar that reaches the engine for a chat with these fields."""
    reply = server.chat(**{"tools": [LOOK], "max_tokens": 1} | body)
    assert reply.status_code == 200, reply.text
    (request,) = server.engine.requests
    server.engine.requests.clear()
    return request.grammar


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tool_choice": "required"}, {}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"parallel": False}),
        ({"tool_choice": NAMED}, {"name": "look"}),
        ({"tools": [LOOK, NOW], "tool_choice": "auto"}, {"required": False}),
        (
            {"tools": [LOOK, NOW], "tool_choice": "auto", "parallel_tool_calls": False},
            {"required": False, "parallel": False},
        ),
    ],
)
@pytest.mark.parametrize("think", [None, True, False])
def test_a_choice_that_has_to_be_followed_becomes_a_grammar(server, body, expected, think):
    """A thought may come before; where the template has begun it, one does; where it is switched off, none."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in body.get("tools", [LOOK])}
    thinking = {} if think is None else {"chat_template_kwargs": {"think": think}}
    form = tool_calls(schemas, **expected)
    begun = {None: False, True: True, False: None}[think]
    assert form_of(server, **body, **thinking) == write(dataclasses.replace(form, thought_begun=begun))


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
@pytest.mark.parametrize("alone", [None, False, True])
def test_anthropics_choice_is_exactly_one_call_where_the_client_disables_others(server, choice, alone):
    """Anthropic promises exactly one use with `disable_parallel_tool_use`, and otherwise at least one."""
    tool = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
    flag = {} if alone is None else {"disable_parallel_tool_use": alone}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "tools": [tool]}
    reply = server.http.post("/v1/messages", json=body | {"tool_choice": choice | flag})
    assert reply.status_code == 200, reply.text
    form = tool_calls({"look": tool["input_schema"]}, name=choice.get("name"), parallel=not alone)
    (request,) = server.engine.requests
    assert request.grammar == write(dataclasses.replace(form, thought_begun=False))


def test_without_such_a_choice_nothing_is_constrained(server):
    assert form_of(server) == form_of(server, tool_choice="auto") == form_of(server, tool_choice="none") == ""


def test_a_form_of_an_answer_comes_behind_its_thought(server):
    form = StructuredOutputs(json_object=True, thought_begun=True)
    body = {"tools": None, "response_format": {"type": "json_object"}, "chat_template_kwargs": {"think": True}}
    assert form_of(server, **body) == write(form)


def test_tools_that_cannot_be_enforced_are_refused_with_the_keyword(server):
    unsupported = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": unsupported}}
    error = server.chat(tools=[tool], tool_choice="required").json()["error"]
    assert error["param"] == "tools" and "uniqueItems" in error["message"]
    error = server.chat(tools=[LOOK], response_format={"type": "json_object"}).json()["error"]
    assert error["param"] == "response_format" and "tools are both given" in error["message"]
    assert not server.engine.requests


def test_a_format_without_a_grammar_is_refused_where_a_call_is_required():
    server = make_server(dataclasses.replace(ANY_PORT, tool_call_parser="mistral"))
    error = server.chat(tools=[LOOK], tool_choice="required").json()["error"]
    server.close()
    assert error["param"] == "tool_choice" and "'mistral' of this model" in error["message"]
