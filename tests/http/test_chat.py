"""/v1/chat/completions, streamed and whole."""

import pytest


def deltas(events, index=0):
    return [c["delta"] for e in events[:-1] for c in e["choices"] if c["index"] == index]


def refused(reply, param):
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    return reply.json()["error"]["message"]


def user(content):
    return {"role": "user", "content": content}


def test_first_chunk_of_an_index_has_the_role_and_empty_content(server):
    """B2.1, B11.5."""
    events = server.stream_chat(n=2, max_tokens=3)
    for index in (0, 1):
        assert deltas(events, index)[0] == {"role": "assistant", "content": ""}
    first = events[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["id"].startswith("chatcmpl-")
    assert first["choices"][0]["finish_reason"] is None


def test_later_deltas_have_no_role_and_no_null_content(server):
    """B2.2."""
    for delta in deltas(server.stream_chat(max_tokens=5))[1:]:
        assert "role" not in delta
        assert delta == {} or isinstance(delta["content"], str)


def test_last_delta_without_text_is_empty_and_has_the_finish_reason(server, engine):
    """B2.3."""
    engine.end_with_eos = True
    last = server.stream_chat()[-2]["choices"][0]
    assert last["delta"] == {}
    assert last["finish_reason"] == "stop"


def test_exactly_one_finish_chunk_per_index(server):
    """B2.4, B11.5."""
    events = server.stream_chat(n=3, max_tokens=5)
    for index in range(3):
        reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert reasons[-1] == "length"
        assert reasons.count(None) == len(reasons) - 1


def test_usage_comes_once_after_all_finishes_with_no_choices(server):
    """B2.5."""
    events = server.stream_chat(n=2, max_tokens=4, stream_options={"include_usage": True})
    whole = server.chat(n=2, max_tokens=4).json()["usage"]
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole
    assert whole["completion_tokens"] == 8
    assert all(e["usage"] is None for e in events[:-2])


def test_without_the_option_there_is_no_usage_anywhere(server):
    """B2.5."""
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all("usage" not in e for e in server.stream_chat(max_tokens=4, **options)[:-1])


def test_stream_options_without_stream_are_refused(server):
    """B2.7."""
    refused(server.chat(stream_options={"include_usage": True}), "stream_options")
    refused(server.chat(stream=False, stream_options={}), "stream_options")


def test_streamed_content_equals_the_whole_message(server):
    """B7.6."""
    message = server.chat(max_tokens=20).json()["choices"][0]["message"]
    streamed = "".join(delta.get("content", "") for delta in deltas(server.stream_chat(max_tokens=20)))
    assert message == {"role": "assistant", "content": streamed}


def test_prompt_is_the_rendered_template_without_further_special_tokens(server, engine):
    """B12.6."""
    server.chat(messages=[{"role": "system", "content": "be brief"}, user("Hello")])
    text = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert list(engine.requests[0].prompt_ids) == server.tokenizer.encode(text, add_special_tokens=False)


def rendered(server, engine, **body):
    assert server.chat(**body).status_code == 200
    return server.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


def test_template_arguments_of_a_request_reach_the_template(server, engine):
    assert rendered(server, engine, chat_template_kwargs={"prefix": "Sure"}).endswith("assistant\nSure")
    assert not rendered(server, engine, add_generation_prompt=False).endswith("assistant\n")


def test_template_arguments_that_other_fields_set_are_refused(server):
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "self"):
        assert name in refused(server.chat(chat_template_kwargs={name: 1}), "chat_template_kwargs")


def test_text_parts_are_joined_in_order(server, engine):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert "user\nHello<" in rendered(server, engine, messages=[user(parts)])


def test_developer_reaches_the_template_as_system(server, engine):
    messages = [{"role": "developer", "content": "x"}, user("Hello")]
    assert "system\nx<" in rendered(server, engine, messages=messages)


def test_earlier_reply_comes_back_with_its_null_fields(server):
    earlier = server.openai.chat.completions.create(model="models/fake", messages=[user("Hello")], max_tokens=2)
    messages = [user("Hi"), earlier.choices[0].message.model_dump()]
    assert server.chat(messages=messages).status_code == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
        (user([{"type": "text"}]), "messages[0].content[0].text"),
        (user([{"type": "text", "text": 1}]), "messages[0].content[0].text"),
        (user([{"type": "text", "text": "a", "x": 1}]), "messages[0].content[0].x"),
        (user(["a"]), "messages[0].content[0]"),
        (user(None), "messages[0].content"),
        (user(1), "messages[0].content"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "wizard", "content": "a"}, "messages[0].role"),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, "messages[0].tool_call_id"),
        (user("a") | {"tool_calls": [{}]}, "messages[0].tool_calls"),
        (user("a") | {"surprise": 1}, "messages[0].surprise"),
    ],
)
def test_message_that_cannot_be_honoured_is_refused_with_its_place(server, message, param):
    refused(server.chat(messages=[message]), param)


def test_words_of_the_template_are_the_message_of_a_400(server):
    """B3.6."""
    message = refused(server.chat(messages=[{"role": "assistant", "content": "x"}]), "messages")
    assert "the user must speak first" in message


def test_chat_runs_to_the_end_of_the_context_unless_asked_otherwise(server):
    """B8.2."""
    usage = server.chat().json()["usage"]
    assert usage["total_tokens"] == 64


def test_max_completion_tokens_wins_over_max_tokens(server):
    """B8.3."""
    assert server.chat(max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert server.chat(max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert server.chat(max_tokens=9).json()["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0, "max_completion_tokens": 3}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"echo": True}, "echo"),
        ({"functions": []}, "functions"),
    ],
)
def test_value_that_cannot_be_honoured_is_refused_with_its_parameter(server, engine, body, param):
    """B3.2, B5.4."""
    refused(server.chat(**body), param)
    assert not engine.requests


def test_values_that_ask_for_nothing_are_accepted(server):
    body = {"tools": None, "tool_choice": None, "response_format": {"type": "text"}, "parallel_tool_calls": None}
    assert server.chat(**body).status_code == 200


def test_logprobs_have_bytes_and_the_top_entries_of_each_token(server):
    """B5.4."""
    content = server.chat(logprobs=True, top_logprobs=2, max_tokens=4).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 4
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)


def test_bytes_of_partial_utf8_tokens_join_to_the_text(server, engine):
    """B5.5."""
    engine.reply = "한"
    num_tokens = len(server.tokenizer.encode("한", add_special_tokens=False))
    events = server.stream_chat(logprobs=True, max_tokens=num_tokens)[:-1]
    entries = [x for e in events for c in e["choices"] for x in (c.get("logprobs") or {"content": []})["content"]]
    assert len(entries) == num_tokens > 1
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "한"


def test_chat_without_top_logprobs_gives_the_chosen_tokens_only(server):
    content = server.chat(logprobs=True, max_tokens=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]


def test_chat_parses_with_the_openai_client_streamed_and_whole(server):
    ask = {"model": "models/fake", "messages": [user("Hello")], "temperature": 0, "max_tokens": 6}
    whole = server.openai.chat.completions.create(**ask)
    chunks = list(server.openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_stop_string_in_chat_ends_the_message(server, engine):
    choice = server.chat(stop="sat").json()["choices"][0]
    assert choice["message"]["content"] == "the cat "
    assert choice["stop_reason"] == "sat"
    assert len(engine.cancelled) == 1
