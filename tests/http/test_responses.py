"""OpenAI's Responses API: shapes, events, failures, and what is the same as in a chat completion."""

import contextlib
import threading

import msgspec
import pytest

from jaxinfer.http.response_events import ResponseWriter, usage_fields
from jaxinfer.http.response_store import ResponseStore
from jaxinfer.http.turns import Turns
from jaxinfer.text.message import Call, Thought, Words
from jaxinfer.types import FinishReason
from tests.http.conftest import Server, wait_for
from tests.http.fake_engine import FakeEngine
from tests.http.test_errors import error_of, post
from tests.http.test_messages import prompt_of, read_events

PATH = "/v1/responses"


def ask(server, **body):
    return server.http.post(PATH, json={"input": "Hello", "max_output_tokens": 8, "temperature": 0} | body)


def text_of(body):
    return "".join(part["text"] for item in body["output"] for part in item["content"])


def test_reply_has_openais_shape_and_the_text_of_a_chat_completion(server):
    """E7, B12.4."""
    body = ask(server, metadata={"a": "b"}, instructions="Be kind").json()
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    chat = server.chat(messages=messages, max_tokens=8).json()
    (item,) = body["output"]
    assert item == {
        "id": item["id"],
        "type": "message",
        "status": "incomplete",
        "role": "assistant",
        "content": [
            {
                "type": "output_text",
                "text": chat["choices"][0]["message"]["content"],
                "annotations": [],
                "logprobs": [],
            }
        ],
    }
    prompt_tokens = chat["usage"]["prompt_tokens"]
    assert body["usage"] == {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 8,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + 8,
    }
    assert body["id"].startswith("resp_") and item["id"].startswith("msg_") and body["object"] == "response"
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["metadata"], body["instructions"], body["max_output_tokens"]) == ({"a": "b"}, "Be kind", 8)
    assert (body["model"], body["store"], body["error"], body["temperature"]) == ("models/fake", True, None, 0)


def test_openais_own_client_reads_replies_and_streams(server, engine):
    """E7."""
    engine.end_with_eos = True
    reply = server.openai.responses.create(model="models/fake", input="Hello", temperature=0)
    assert reply.status == "completed" and reply.output_text == engine.reply
    with server.openai.responses.stream(model="models/fake", input="Hello", temperature=0) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == engine.reply
    assert events[-1].type == "response.completed"
    assert server.openai.responses.retrieve(reply.id).output_text == engine.reply


@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_stream_has_openais_events_in_order_with_numbers_and_adds_up_to_the_reply(server, engine, tokens_per_event):
    """E7, B12.4."""
    engine.tokens_per_event = tokens_per_event
    engine.empty_first_event = True
    reply = ask(server, stream=True, stream_options={"include_obfuscation": False})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = read_events(reply.text)
    names = [event["type"].removeprefix("response.") for event in events]
    num_deltas = names.count("output_text.delta")
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    whole = ask(server).json()
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == text_of(whole) == events[-4]["text"] == events[-3]["part"]["text"]
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]] and last["usage"] == whole["usage"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert last.keys() == whole.keys() and last["id"] == events[0]["response"]["id"]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


def test_end_of_the_models_turn_completes_and_no_text_is_no_item(server, engine):
    engine.end_with_eos = True
    body = ask(server, max_output_tokens=None).json()
    assert (body["status"], body["incomplete_details"], text_of(body)) == ("completed", None, engine.reply)
    engine.reply = "<|eos|>"
    assert ask(server).json()["output"] == []
    names = [event["type"] for event in read_events(ask(server, stream=True).text)]
    assert names == ["response.created", "response.in_progress", "response.completed"]


def test_items_become_the_chats_messages(own_server):
    """E7, C3."""
    server = own_server(max_model_len=200)
    earlier = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind"}]},
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [earlier]},
        {"role": "user", "content": [{"type": "input_text", "text": "B"}, {"type": "text", "text": "ye"}]},
    ]
    assert ask(server, input=items).status_code == 200
    ours = prompt_of(server)
    contents = [("system", "Be kind"), ("user", "Hello"), ("assistant", "Hi"), ("user", "Bye")]
    server.chat(messages=[{"role": role, "content": content} for role, content in contents])
    assert ours == prompt_of(server)


def test_sampling_fields_reach_the_engine(server, engine):
    ask(server, temperature=0.5, top_p=0.25, top_k=7, min_p=0.5, seed=3, priority=2, cache_salt="s")
    request = engine.requests[-1]
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (0.5, 0.25, 7, 0.5)
    assert (request.priority, request.cache_salt, request.max_tokens) == (2, "s", 8)


# What is kept


def test_next_turn_goes_on_with_what_was_said_but_not_with_the_instructions(own_server):
    """E7."""
    server = own_server(max_model_len=400, end_with_eos=True)
    first = ask(server, instructions="Be kind", max_output_tokens=None).json()
    second = ask(server, input="More", previous_response_id=first["id"], max_output_tokens=4, stream=True)
    second = read_events(second.text)[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    contents = [("user", "Hello"), ("assistant", server.engine.reply), ("user", "More")]
    ours = prompt_of(server)
    server.chat(messages=[{"role": role, "content": content} for role, content in contents])
    assert ours == prompt_of(server)
    ask(server, input="End", previous_response_id=second["id"])
    assert prompt_of(server).count("<|im_start|>") == 6 and text_of(second) in prompt_of(server)


def test_stored_response_is_shown_until_it_is_deleted(server):
    """E7."""
    body = ask(server).json()
    path = f"{PATH}/{body['id']}"
    assert server.http.get(path).json() == body
    assert server.http.delete(path).json() == {"id": body["id"], "object": "response", "deleted": True}
    for ask_again in (server.http.get, server.http.delete):
        error_of(ask_again(path), 404, "response_not_found")
    error_of(server.http.post(path + "/cancel"), 404, "response_not_found")
    error = error_of(ask(server, previous_response_id=body["id"]), 400, "previous_response_not_found")
    assert error["param"] == "previous_response_id"


def test_response_that_is_not_to_be_stored_is_not(server):
    body = ask(server, store=False).json()
    assert body["store"] is False
    error_of(server.http.get(f"{PATH}/{body['id']}"), 404, "response_not_found")


def test_response_that_runs_is_shown_as_such_and_cannot_be_gone_on_with(server, engine):
    engine.step_s = 0.02
    with server.http.stream("POST", PATH, json={"input": "Hello", "max_output_tokens": 40, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        response_id = msgspec.json.decode(next(lines).removeprefix("data: "))["response"]["id"]
        assert server.http.get(f"{PATH}/{response_id}").json()["status"] == "in_progress"
        error = error_of(ask(server, previous_response_id=response_id), 400, "invalid_value")
        assert "is in_progress" in error["message"]
        assert [line for line in lines if line.startswith("event: ")][-1] == "event: response.incomplete"
    assert server.http.get(f"{PATH}/{response_id}").json()["incomplete_details"] == {"reason": "max_output_tokens"}


def test_cancelling_ends_the_stream_and_the_sequence_and_keeps_what_there_is(server, engine):
    """E7, B9.1, B9.2."""
    engine.step_s = 0.05
    body = {"input": "Hello", "max_output_tokens": 44, "stream": True, "temperature": 0}
    with server.http.stream("POST", PATH, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        response_id = msgspec.json.decode(next(lines).removeprefix("data: "))["response"]["id"]
        cancelled = server.http.post(f"{PATH}/{response_id}/cancel").json()
        assert cancelled["status"] == "cancelled" and cancelled["output"][0]["status"] == "incomplete"
        rest = read_events("\n".join(lines).split("\n\n", 1)[1] + "\n")
    assert rest[-1]["type"] == "response.incomplete" and rest[-1]["response"] == cancelled
    assert not engine.running and len(engine.cancelled) == 1
    assert server.http.get(f"{PATH}/{response_id}").json() == cancelled
    error = error_of(server.http.post(f"{PATH}/{response_id}/cancel"), 400, "invalid_value")
    assert "is cancelled; there is nothing to cancel" in error["message"]


def test_response_of_one_front_end_is_shown_and_cancelled_by_another(text_parts, tmp_path):
    """E7."""
    tokenizer, template = text_parts
    path = str(tmp_path / "responses")
    with contextlib.ExitStack() as stack:
        first, second = (
            Server(FakeEngine(tokenizer, step_s=0.05), tokenizer, template, responses=ResponseStore(path), grace_s=0.2)
            for _ in range(2)
        )
        stack.callback(first.close)
        stack.callback(second.close)
        done = ask(first).json()
        assert second.http.get(f"{PATH}/{done['id']}").json() == done
        assert ask(second, previous_response_id=done["id"]).status_code == 200
        body = {"input": "Hello", "max_output_tokens": 44, "stream": True}
        with first.http.stream("POST", PATH, json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            response_id = msgspec.json.decode(next(lines).removeprefix("data: "))["response"]["id"]
            assert second.http.post(f"{PATH}/{response_id}/cancel").json()["status"] == "cancelled"
            assert [line for line in lines if line.startswith("event: ")][-1] == "event: response.incomplete"
        assert len(first.engine.cancelled) == 1


def test_client_that_leaves_stops_the_engine_and_the_response_is_cancelled(server, engine):
    """B9.1."""
    engine.step_s = 0.02
    with server.http.stream("POST", PATH, json={"input": "Hello", "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        response_id = msgspec.json.decode(next(lines).removeprefix("data: "))["response"]["id"]
    wait_for(lambda: server.http.get(f"{PATH}/{response_id}").json()["status"] == "cancelled")
    assert not engine.running


# What is refused, and what fails


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
        ({"input": [7]}, "input[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"surprise": 1}, "surprise"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"surprise": 1}}, "text.surprise"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_400_that_names_it(server, engine, body, param, stream):
    """B3.1, B3.2, B3.3."""
    reply = ask(server, **({"stream": stream} if "stream_options" not in body else {}), **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not engine.requests


def test_fields_that_ask_for_what_is_done_anyway_are_accepted(server):
    fields = {"background": False, "tools": [], "tool_choice": "auto", "truncation": "disabled", "include": []}
    fields |= {
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    assert ask(server, **fields).status_code == 200


def test_every_failure_has_its_status(server, engine):
    """B3.2, E25."""
    assert "POST" in server.http.get(PATH).headers["allow"]
    reply = server.http.post(PATH + "/resp_1")
    error_of(reply, 405, "method_not_allowed")
    assert {"GET", "DELETE"} <= set(reply.headers["allow"].split(", "))
    error_of(ask(server, model="other"), 404, "model_not_found")
    for body in (b"{", b'{"x": 1, "input"', b'{"x": ' + b"[" * 20_000):
        error_of(post(server, body, PATH), 400, "invalid_json")
    error_of(post(server, b"a", PATH, "text/plain"), 415, "unsupported_media_type")
    error_of(server.http.get(PATH + "/resp_1"), 404, "response_not_found")
    body = ask(server).json()
    error_of(server.http.get(f"{PATH}/{body['id']}?stream=true"), 400, "invalid_value")
    engine.refuse = True
    error_of(ask(server), 503, "queue_full")
    engine.refuse, engine.fail_after = False, 0
    error_of(ask(server, stream=True), 500, "engine_error")


def test_stream_that_fails_late_ends_with_a_failed_response_that_is_kept(server, engine):
    """B3.3."""
    engine.fail_after = 3
    events = read_events(ask(server, stream=True).text)
    last = events[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert "NaN in the logits" in last["response"]["error"]["message"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert server.http.get(f"{PATH}/{last['response']['id']}").json() == last["response"]


def test_many_at_once_do_not_disturb_each_other(server):
    bodies = []
    threads = [threading.Thread(target=lambda: bodies.append(ask(server).json())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({body["id"] for body in bodies}) == 8 and len({text_of(body) for body in bodies}) == 1


# Parts other than words


def test_thought_words_and_calls_are_items_of_their_own_in_their_order():
    """E7, B4.3."""
    writer = ResponseWriter({"id": "resp_1"})
    data = writer.start() + writer.parts([Thought("hm"), Thought("m"), Words("I "), Words("look")])
    data += writer.parts([Call(0, "call_1", "find", '{"a": 1}'), Call(1, "call_2", "stop", "{}")])
    data += writer.end(FinishReason.STOP, usage_fields(3, 1, 4))
    events = read_events(data.decode())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = events[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hmm"}] and items[0]["summary"] == []
    turns = Turns()
    writer.add_to(turns)
    (message,) = turns.messages()
    assert (message["reasoning_content"], message["content"]) == ("hmm", "I look")
    assert [(item["call_id"], item["name"], item["arguments"]) for item in items[2:]] == [
        ("call_1", "find", '{"a": 1}'),
        ("call_2", "stop", "{}"),
    ]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == items
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
