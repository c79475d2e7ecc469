"""Anthropic's Messages API: shapes, events, failures, and what is the same as in a chat completion."""

import json

import msgspec
import pytest

from jaxinfer.config import ServerConfig
from jaxinfer.http.message_events import MessageWriter
from jaxinfer.text.message import Call, Thought, Words
from jaxinfer.types import FinishReason
from tests.http.conftest import wait_for

HELLO = [{"role": "user", "content": "Hello"}]


def ask(server, path="/v1/messages", headers=None, **body):
    return server.http.post(path, json={"messages": HELLO, "max_tokens": 8, "temperature": 0} | body, headers=headers)


def read_events(data):
    """(name, object) of each event; checks the framing, and that the name is the type."""
    assert data.endswith("\n\n")
    found = []
    for block in data.removesuffix("\n\n").split("\n\n"):
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def joined(events):
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


def error_of(reply, status, kind):
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind
    return body["error"]["message"]


def prompt_of(server):
    ids = server.engine.requests[-1].prompt_ids
    return server.tokenizer.decode(ids, skip_special_tokens=False)


def test_reply_has_anthropics_shape_and_the_text_of_a_chat_completion(server):
    """E19."""
    body = ask(server).json()
    chat = server.chat(max_tokens=8).json()
    assert body == {
        "id": body["id"],
        "type": "message",
        "role": "assistant",
        "model": "models/fake",
        "content": [{"type": "text", "text": chat["choices"][0]["message"]["content"]}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": chat["usage"]["prompt_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 8,
        },
    }
    assert body["id"].startswith("msg_")


@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_stream_has_anthropics_events_in_order_and_adds_up_to_the_reply(server, engine, tokens_per_event):
    """E19."""
    engine.tokens_per_event = tokens_per_event
    engine.empty_first_event = True
    reply = ask(server, stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = read_events(reply.text)
    names = [event["type"] for event in events]
    num_deltas = names.count("content_block_delta")
    assert names == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    whole = ask(server).json()
    start, last = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["id"].startswith("msg_")
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert joined(events) == whole["content"][0]["text"] and num_deltas == -(-8 // tokens_per_event)
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"] == whole["usage"]
    assert {event["index"] for event in events if event["type"].startswith("content_block")} == {0}


def test_stop_sequence_is_told_and_not_shown(server):
    """B6.6."""
    for stream in (False, True):
        reply = ask(server, stop_sequences=["sat", "nothing"], stream=stream)
        body = read_events(reply.text)[-2]["delta"] if stream else reply.json()
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "sat")
        assert "sat" not in (joined(read_events(reply.text)) if stream else body["content"][0]["text"])


def test_end_of_the_models_turn_is_end_turn_and_no_text_is_no_block(server, engine):
    engine.end_with_eos = True
    assert ask(server, max_tokens=40).json()["stop_reason"] == "end_turn"
    engine.reply = "<|eos|>"
    body = ask(server).json()
    assert (body["content"], body["stop_reason"]) == ([], "end_turn")
    names = [event["type"] for event in read_events(ask(server, stream=True).text)]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


def test_system_and_blocks_become_the_chats_messages_and_turns_in_a_row_are_one(own_server):
    """E19, C3."""
    server = own_server(max_model_len=200)
    blocks = [{"type": "text", "text": "He", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "llo"}]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind", "citations": None}]
    messages = [
        {"role": "user", "content": blocks},
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "user", "content": "Bye"},
    ]
    assert ask(server, system=system, messages=messages).status_code == 200
    ours = prompt_of(server)
    chat = [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Hello\n\nthere"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    server.chat(messages=chat)
    assert ours == prompt_of(server)


def test_what_was_cached_is_not_among_the_input_tokens(own_server):
    server = own_server(prefix_caching=True, cached_tokens={"0-0": 5})
    whole = ask(server).json()["usage"]
    start = read_events(ask(server, stream=True).text)[0]["message"]["usage"]
    assert start | {"output_tokens": 0} == whole | {"output_tokens": 0}
    assert whole["cache_read_input_tokens"] == 5 and whole["input_tokens"] == 20 - 5


def test_sampling_fields_reach_the_engine(server, engine):
    ask(server, temperature=0.5, top_p=0.25, top_k=7, max_tokens=3, priority=2, cache_salt="s")
    request = engine.requests[-1]
    assert (request.temperature, request.top_p, request.top_k, request.max_tokens) == (0.5, 0.25, 7, 3)
    assert (request.priority, request.cache_salt) == (2, "s")


def test_tokens_are_counted_as_the_reply_counts_them(server, engine):
    """E14, E19."""
    usage = ask(server, system="Be kind").json()["usage"]
    num_requests = len(engine.requests)
    body = {"messages": HELLO, "system": "Be kind", "model": "models/fake"}
    reply = server.http.post("/v1/messages/count_tokens", json=body)
    assert reply.json() == {"input_tokens": usage["input_tokens"]} and len(engine.requests) == num_requests
    error_of(server.http.post("/v1/messages/count_tokens", json=body | {"model": "other"}), 404, "not_found_error")
    error_of(server.http.post("/v1/messages/count_tokens", json={}), 400, "invalid_request_error")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "system", "content": "a"}]}, r"messages[0].role is 'system'; it must be user"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "a"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type is 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0] is not a content block"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "content[0].x is not a"),
        ({"system": [{"type": "image"}]}, "system[0].type is 'image'"),
        ({"surprise": 1, "top_q": 2}, "surprise, top_q are not supported fields"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is"),
        ({"stop_sequences": [""]}, "stop contains an empty string"),
        ({"temperature": -1}, "temperature is -1"),
        ({"output_config": {"effort": "low"}}, "output_config.effort is 'low'"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type is 'json_object'"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is None"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, '"not"'),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema is None"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_400_in_anthropics_form(server, engine, body, words, stream):
    """B3.2, B3.3, E19."""
    assert words in error_of(ask(server, stream=stream, **body), 400, "invalid_request_error")
    assert not engine.requests


def test_fields_that_ask_for_what_is_done_anyway_are_accepted(server):
    fields = {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}, "tools": []}
    assert ask(server, **fields).status_code == 200
    assert ask(server, path="/v1/messages?beta=true").status_code == 200


def test_conversations_are_not_kept_and_the_client_is_told_in_the_words_that_it_knows(server):
    """E19."""
    error = ask(server, thread={"type": "create"}).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"} and "send all of it" in error["message"]
    assert ask(server, thread=None).status_code == 200


def test_every_failure_has_anthropics_form(server, engine, own_server):
    """B3.1, E19, E25."""
    error_of(server.http.get("/v1/messages"), 405, "invalid_request_error")
    error_of(server.http.get("/v1/messages/nothing"), 404, "not_found_error")
    error_of(ask(server, model="other"), 404, "not_found_error")
    for body in (b"{", b'{"x": 1, "messages"', b'{"x": ' + b"[" * 20_000):
        error_of(server.http.post("/v1/messages", content=body), 400, "invalid_request_error")
    error_of(server.http.post("/v1/messages", content=b" " * (2**24 + 1)), 413, "request_too_large")
    engine.refuse = True
    reply = ask(server)
    error_of(reply, 503, "overloaded_error")
    assert int(reply.headers["retry-after"]) >= 1
    engine.refuse, engine.fail_after = False, 0
    error_of(ask(server, stream=True), 500, "api_error")
    locked = own_server(config=ServerConfig(port=0, api_keys=("k",)))
    error_of(ask(locked), 401, "authentication_error")
    assert ask(locked, headers={"x-api-key": "k", "anthropic-version": "2023-06-01"}).status_code == 200


def test_stream_that_fails_late_ends_with_an_error_event(server, engine):
    """B3.3, E19."""
    engine.fail_after = 3
    events = read_events(ask(server, stream=True).text)
    assert events[-1]["error"]["type"] == "api_error" and "NaN in the logits" in events[-1]["error"]["message"]
    assert joined(events) and not [event for event in events if event["type"] == "message_stop"]


def test_client_that_leaves_stops_the_engine(server, engine):
    """B9.1."""
    engine.step_s = 0.02
    body = {"messages": HELLO, "max_tokens": 40, "stream": True}
    with server.http.stream("POST", "/v1/messages", json=body) as reply:
        next(reply.iter_lines())
    wait_for(lambda: engine.cancelled and not engine.running)


# Parts other than words


USAGE = {"input_tokens": 3, "output_tokens": 4}


def test_thought_words_and_calls_are_blocks_of_their_own_in_their_order():
    """E19, B4.3."""
    writer = MessageWriter("msg_1", "m")
    data = writer.start(USAGE)
    data += writer.parts([Thought("hm"), Thought("m"), Words("I "), Words("look")])
    data += writer.parts([Call(0, "call_1", "find", '{"a": 1}'), Call(1, "call_2", "stop", "{}")])
    data += writer.end(FinishReason.STOP, None, USAGE)
    events = read_events(data.decode())
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    arguments = [event["delta"].get("partial_json") for event in events if event["type"] == "content_block_delta"]
    assert arguments == [None, None, None, None, '{"a": 1}', "{}"]
    body = json.loads(msgspec.json.encode(writer.body(USAGE)))
    assert body["content"] == [
        {"type": "thinking", "thinking": "hmm", "signature": ""},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "call_1", "name": "find", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
    ]
