"""Tools, choices and messages of tools that are refused, each with its place."""

import pytest

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}


def refused(answer, param):
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    return answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (1, "tools[0]"),
        ({"type": "web_search"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].function"),
        (LOOK | {"x": 1}, "tools[0].x"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "a" * 65}}, "tools[0].function.name"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "tools[0].function.x"),
        ({"type": "function", "function": {"name": "f", "description": 1}}, "tools[0].function.description"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, "tools[0].function.parameters"),
        ({"type": "function", "function": {"name": "f", "parameters": {}}}, "tools[0].function.parameters.type"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": []}}},
            "tools[0].function.parameters.properties",
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": "x"}}},
            "tools[0].function.parameters.required",
        ),
        ({"type": "function", "function": {"name": "f", "strict": 1}}, "tools[0].function.strict"),
    ],
)
def test_a_tool_that_is_none_is_refused_with_its_place(server, engine, tool, param):
    refused(server.chat(tools=[tool]), param)
    assert not engine.requests


def test_two_tools_of_one_name_are_refused(server):
    assert "'look'" in refused(server.chat(tools=[LOOK, LOOK]), "tools[1].function.name")


def test_a_function_without_parameters_is_a_tool(server):
    body = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert server.chat(**body, max_tokens=1).status_code == 200


def test_choices_that_name_no_function_are_refused(server):
    unknown = {"type": "function", "function": {"name": "fly"}}
    assert "'fly'; tools has look" in refused(server.chat(tools=[LOOK], tool_choice=unknown), "tool_choice")
    for choice in ("sometimes", 1, {}, {"type": "allowed_tools"}, {"type": "function"}):
        assert "must be" in refused(server.chat(tools=[LOOK], tool_choice=choice), "tool_choice")


def test_no_tools_in_a_list_and_choices_without_tools_are_refused(server):
    refused(server.chat(tools=[]), "tools")
    for choice in ("auto", "none", "required"):
        refused(server.chat(tool_choice=choice), "tool_choice")
    refused(server.chat(parallel_tool_calls=True), "parallel_tool_calls")
    assert server.chat(tools=None, tool_choice=None, parallel_tool_calls=None, max_tokens=1).status_code == 200


def assistant(*calls):
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def call(**changes):
    function = {"name": "look", "arguments": '{"x": 1}'} | changes.pop("function", {})
    return {"id": "a", "type": "function", "function": function} | changes


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x", "tool_call_id": "a"}], "messages[0].tool_call_id"),
        ([assistant(call()), {"role": "tool", "content": "x", "tool_call_id": "b"}], "messages[1].tool_call_id"),
        ([assistant(call()), {"role": "tool", "tool_call_id": "a"}], "messages[1].content"),
        ([assistant(call(id=None))], "messages[0].tool_calls[0].id"),
        ([assistant(call(type="custom"))], "messages[0].tool_calls[0].type"),
        ([assistant(call(x=1))], "messages[0].tool_calls[0].x"),
        ([assistant(1)], "messages[0].tool_calls[0]"),
        ([assistant({"id": "a"})], "messages[0].tool_calls[0].function"),
        ([assistant(call(function={"name": ""}))], "messages[0].tool_calls[0].function.name"),
        ([assistant(call(function={"arguments": "{"}))], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(call(function={"arguments": "[1]"}))], "messages[0].tool_calls[0].function.arguments"),
        ([assistant(call(function={"arguments": None}))], "messages[0].tool_calls[0].function.arguments"),
        ([{"role": "user", "content": "x", "tool_call_id": "a"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "reasoning": "y"}], "messages[0].reasoning"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
    ],
)
def test_messages_of_tools_that_do_not_fit_together_are_refused_with_their_place(server, messages, param):
    refused(server.chat(messages=messages), param)
