"""Tools and thought in OpenAI's Responses API and in Anthropic's Messages API: the same as in a chat."""

import json

import pytest

from tests.http.test_messages import read_events
from tests.http.test_tools import CALL, LOOK, PARAMETERS, make_server, prompt
from tests.http.test_tools import reply as chat_reply

FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": PARAMETERS}
TOOL = {"name": "look", "description": "Looks.", "input_schema": PARAMETERS}
HELLO = {"role": "user", "content": "Hello"}
TEXT = f"<think>\nwhy\n</think>\n\nSo {CALL}\n{CALL}"


@pytest.fixture(scope="module")
def shared_tools():
    server = make_server(added=["<think>", "<tool_call>"])
    yield server
    server.close()


@pytest.fixture
def server(shared_tools):
    shared_tools.engine.requests.clear()
    return shared_tools


def post(server, path, text, body, tokens_per_event=1):
    """The answer where the model writes `text` and ends its turn."""
    server.engine.reply, server.engine.end_with_eos = text, True
    server.engine.tokens_per_event = tokens_per_event
    return server.http.post(path, json={"temperature": 0} | body)


def respond(server, text, tokens_per_event=1, **body):
    body = {"input": "Hello", "tools": [FUNCTION]} | body
    return post(server, "/v1/responses", text, body, tokens_per_event)


def message(server, text, tokens_per_event=1, **body):
    body = {"messages": [HELLO], "tools": [TOOL], "max_tokens": 400} | body
    return post(server, "/v1/messages", text, body, tokens_per_event)


def without(value, *names):
    """Without the fields of these names, wherever they are: ids are new each time."""
    if isinstance(value, dict):
        return {key: without(inner, *names) for key, inner in value.items() if key not in names}
    return [without(inner, *names) for inner in value] if isinstance(value, list) else value


def num_tokens(server, text):
    return len(server.tokenizer.encode(text, add_special_tokens=False))


# Responses


def test_thought_words_and_calls_are_items_and_tools_are_shown_to_the_model(server):
    """E7, B4.3."""
    body = respond(server, TEXT).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    thought, words, *calls = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert words["content"][0]["text"] == "So"
    assert [(call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("look", '{"x": 1}', "completed")
    ] * 2
    assert len({call["call_id"] for call in calls}) == 2
    assert body["status"] == "completed" and body["tools"] == [FUNCTION | {"strict": False}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", True)
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == num_tokens(server, "<think>\nwhy")
    ours = prompt(server)
    chat_reply(server, TEXT, tools=[LOOK])
    assert ours == prompt(server) and "Looks." in ours


@pytest.mark.parametrize("tokens_per_event", [1, 3, 500])
def test_streamed_items_are_those_of_the_whole_response_in_openais_order(server, tokens_per_event):
    """E7, B4."""
    events = read_events(respond(server, TEXT, tokens_per_event, stream=True).text)
    names = [event["type"].removeprefix("response.") for event in events]
    assert [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"] * 2,
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    whole, streamed = respond(server, TEXT).json(), events[-1]["response"]
    assert without(streamed["output"], "id", "call_id") == without(whole["output"], "id", "call_id")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["type"], item["id"]) for item in added] == [(item["type"], item["id"]) for item in done]
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert [(event["item_id"], event["delta"]) for event in deltas] == [(c["id"], c["arguments"]) for c in done[2:]]


def test_stored_calls_can_be_answered_and_gone_on_with(server):
    """E7."""
    first = respond(server, TEXT, instructions="Be kind").json()
    ids = [item["call_id"] for item in first["output"][2:]]
    answers = [{"type": "function_call_output", "call_id": id, "output": f"sun {i}"} for i, id in enumerate(ids)]
    second = respond(server, "<think>so</think>Sunny", input=answers, previous_response_id=first["id"]).json()
    calls = [{"id": id, "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}} for id in ids]
    chat = [
        HELLO,
        {"role": "assistant", "content": "So", "reasoning_content": "why", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": id, "content": f"sun {i}"} for i, id in enumerate(ids)),
    ]
    ours = prompt(server)
    chat_reply(server, "ok", messages=chat, tools=[LOOK])
    assert ours == prompt(server) and f"sun 1 for {ids[1]}" in ours
    respond(server, "ok", input="Thanks", previous_response_id=second["id"])
    ours = prompt(server)
    chat += [{"role": "assistant", "content": "Sunny", "reasoning_content": "so"}, HELLO | {"content": "Thanks"}]
    chat_reply(server, "ok", messages=chat, tools=[LOOK])
    assert ours == prompt(server)


def test_output_sent_back_as_input_is_the_same_conversation(server):
    """E7."""
    first = respond(server, TEXT, store=False).json()
    id = first["output"][2]["call_id"]
    parts = [{"type": "input_text", "text": "su"}, {"type": "input_text", "text": "n"}]
    answer = {"type": "function_call_output", "call_id": id, "output": parts, "status": "completed"}
    items = [HELLO, *first["output"], answer]
    assert respond(server, "ok", input=items).status_code == 200
    assert prompt(server).endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>why</think>So[look 1][look 1]<|im_end|>\n"
        f"<|im_start|>tool\nsun for {id}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_are_not_looked_for_with_the_choice_none_and_one_is_given_without_parallel_calls(server):
    body = respond(server, CALL, tool_choice="none").json()
    assert body["output"][0]["content"][0]["text"] == CALL and "Looks." not in prompt(server)
    body = respond(server, CALL + CALL, parallel_tool_calls=False).json()
    assert len(body["output"]) == 1 and body["parallel_tool_calls"] is False
    for choice in ("auto", "none"):
        assert respond(server, "ok", tools=[], tool_choice=choice, parallel_tool_calls=True).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
        ({"tools": [FUNCTION | {"x": 1}]}, "tools[0].x"),
        ({"tools": [FUNCTION | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [FUNCTION | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [5]}, "tools[0]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": ["a"]}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [HELLO, {"type": "function_call_output", "call_id": "b", "output": ""}]}, "input[1].call_id"),
        ({"input": [{"type": "reasoning", "id": "a", "summary": [1]}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "id": "a", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ],
)
def test_what_a_response_cannot_do_with_tools_is_refused_with_its_place(server, body, param):
    """B3.2."""
    answer = respond(server, "ok", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not server.engine.requests


def test_responses_with_calls_parse_with_the_openai_client(server):
    respond(server, TEXT)
    ask = {"model": "models/fake", "input": "Hello", "temperature": 0, "tools": [FUNCTION | {"strict": False}]}
    whole = server.openai.responses.create(**ask)
    with server.openai.responses.stream(**ask) as stream:
        streamed = stream.get_final_response()
    for body in (whole, streamed):
        assert [item.type for item in body.output] == ["reasoning", "message", "function_call", "function_call"]
        assert body.output_text == "So" and json.loads(body.output[2].arguments) == {"x": 1}


# Messages


def test_thought_words_and_calls_are_blocks_and_the_tools_are_shown_to_the_model(server):
    """E19, B4.3."""
    body = message(server, TEXT).json()
    thought, words, *calls = body["content"]
    assert thought == {"type": "thinking", "thinking": "why", "signature": ""}
    assert words == {"type": "text", "text": "So"}
    assert without(calls, "id") == [{"type": "tool_use", "name": "look", "input": {"x": 1}}] * 2
    assert len({call["id"] for call in calls}) == 2
    assert body["stop_reason"] == "tool_use"
    ours = prompt(server)
    chat_reply(server, TEXT, tools=[LOOK])
    assert ours == prompt(server)


@pytest.mark.parametrize("tokens_per_event", [1, 3, 500])
def test_streamed_blocks_are_those_of_the_whole_message_in_anthropics_order(server, tokens_per_event):
    """E19, B4."""
    events = read_events(message(server, TEXT, tokens_per_event, stream=True).text)
    seen = []
    for event in events:
        kind = event["type"].removeprefix("content_block_")
        shown = event.get("content_block", event.get("delta", {})).get("type", kind) if kind in "start delta" else kind
        if not seen or seen[-1] != (kind, shown):
            seen.append((kind, shown))
    call = [("start", "tool_use"), ("delta", "input_json_delta"), ("stop", "stop")]
    assert seen == [
        *[("message_start", "message_start"), ("ping", "ping")],
        *[("start", "thinking"), ("delta", "thinking_delta"), ("stop", "stop")],
        *[("start", "text"), ("delta", "text_delta"), ("stop", "stop")],
        *(call * 2),
        *[("message_delta", "message_delta"), ("message_stop", "message_stop")],
    ]
    whole = message(server, TEXT).json()
    joined = {}
    for event in events:
        if event["type"] == "content_block_delta":
            piece = next(value for key, value in event["delta"].items() if key != "type")
            joined[event["index"]] = joined.get(event["index"], "") + piece
    assert [joined[0], joined[1], *(json.loads(joined[i]) for i in (2, 3))] == [
        whole["content"][0]["thinking"],
        whole["content"][1]["text"],
        *(block["input"] for block in whole["content"][2:]),
    ]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"


def test_blocks_sent_back_with_results_are_the_same_conversation(server):
    """E19."""
    content = message(server, TEXT).json()["content"]
    first, second = (block["id"] for block in content[2:])
    results = [
        {"type": "tool_result", "tool_use_id": first, "content": [{"type": "text", "text": "sun"}]},
        {"type": "tool_result", "tool_use_id": second, "content": "no sky", "is_error": True},
        {"type": "text", "text": "And?"},
    ]
    messages = [HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
    assert message(server, "ok", messages=messages).status_code == 200
    ours = prompt(server)
    assert ours.endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>why</think>So[look 1][look 1]<|im_end|>\n"
        f"<|im_start|>tool\nsun for {first}<|im_end|>\n<|im_start|>tool\nError: no sky for {second}<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    body = {"messages": messages, "tools": [TOOL]}
    counted = server.http.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(server.engine.requests[-1].prompt_ids)}


def test_choices_of_tools_mean_what_they_mean_in_a_chat(server):
    body = message(server, CALL, tool_choice={"type": "none"}).json()
    assert body["content"] == [{"type": "text", "text": CALL}] and "Looks." not in prompt(server)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(message(server, CALL + CALL, tool_choice=choice).json()["content"]) == 1
    assert len(message(server, CALL + CALL, tool_choice={"type": "auto"}).json()["content"]) == 2
    assert message(server, "ok", tools=[], tool_choice={"type": "none"}).status_code == 200


def test_thinking_is_switched_by_the_templates_variable():
    template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ messages[0].content }}"
    server = make_server(template=template)
    try:
        for thinking, start in ((None, "Hello"), ("disabled", "False"), ("adaptive", "True")):
            body = {"tools": [], "thinking": thinking and {"type": thinking}}
            assert message(server, "ok", **body).status_code == 200
            assert prompt(server).startswith(start)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": {"type": "tool", "name": "fly"}}, "'fly'; tools has look"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice is"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'; it must be one of auto, none, any, tool"),
        ({"tool_choice": "auto"}, "tool_choice: expected object"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "there are no tools"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name is 'look'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema.type is 'string'"),
        ({"tools": [TOOL | {"x": 1}]}, "tools[0].x is not a supported field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].type is 'tool_use'; supported here: text, tool_result",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].content[0].tool_use_id is 'a'; no tool call before it has that id",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "f", "input": {}}]}
                ]
            },
            "messages[0].content[0].id is empty",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 1}]}
                ]
            },
            "messages[0].content[0].input: expected object",
        ),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "'redacted_thinking'"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens is 5"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display is 'omitted'"),
    ],
)
def test_what_a_message_cannot_do_with_tools_is_refused_with_its_place(server, body, words):
    """B3.2."""
    answer = message(server, "ok", **body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("response", "anthropic", "chat"),
    [
        ("required", {"type": "any"}, "required"),
        (
            {"type": "function", "name": "look"},
            {"type": "tool", "name": "look"},
            {"type": "function", "function": {"name": "look"}},
        ),
    ],
)
def test_a_choice_that_has_to_be_followed_constrains_the_output_as_in_a_chat(server, response, anthropic, chat):
    respond(server, CALL, tool_choice=response)
    message(server, CALL, tool_choice=anthropic)
    chat_reply(server, CALL, tools=[LOOK], tool_choice=chat)
    grammars = [request.grammar for request in server.engine.requests]
    assert len(grammars) == 3 and len(set(grammars)) == 1 and grammars[0]


def test_strict_tools_constrain_the_output_as_in_a_chat(server):
    assert respond(server, "ok", tools=[FUNCTION | {"strict": True}]).json()["tools"][0]["strict"] is True
    message(server, "ok", tools=[TOOL | {"strict": True}])
    chat_reply(server, "ok", tools=[{"type": "function", "function": LOOK["function"] | {"strict": True}}])
    grammars = [request.grammar for request in server.engine.requests]
    assert len(grammars) == 3 and len(set(grammars)) == 1 and grammars[0]
