"""Streams of /v1/completions."""

import json
import time


def text_of(events, index=0):
    return "".join(c["text"] for e in events[:-1] for c in e["choices"] if c["index"] == index)


def test_stream_has_the_headers_of_unbuffered_server_sent_events(server):
    """B1.1."""
    reply = server.complete(stream=True)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"


def test_every_event_is_one_line_of_json_even_when_the_text_has_line_breaks(server, engine):
    """B1.1."""
    engine.reply = 'a\n\nb\r\u2028"c"'
    assert text_of(server.stream_complete(max_tokens=11)) == engine.reply


def test_chunks_of_one_reply_share_id_created_model_and_object(server):
    """B1.2."""
    events = server.stream_complete(n=2)[:-1]
    assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1
    assert {e["object"] for e in events} == {"text_completion"}
    assert events[0]["id"].startswith("cmpl-")
    assert events[0]["model"] == "models/fake"


def test_exactly_the_last_chunk_of_an_index_has_a_finish_reason(server):
    """B1.3."""
    events = server.stream_complete(n=3, max_tokens=5)[:-1]
    for index in range(3):
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == index]
        assert reasons[-1] == "length"
        assert not any(reasons[:-1])


def test_streamed_text_is_the_text_of_the_whole_reply_and_never_repeated(server):
    """B1.4, B7.6."""
    whole = server.complete(max_tokens=20).json()["choices"][0]["text"]
    assert text_of(server.stream_complete(max_tokens=20)) == whole


def test_first_text_chunk_is_not_empty_when_the_engine_reports_before_its_first_token(server, engine):
    """B1.5."""
    engine.empty_first_event = True
    assert all(e["choices"][0]["text"] for e in server.stream_complete()[:-1])


def test_token_whose_text_is_withheld_gives_no_chunk(server, engine):
    """B1.5."""
    engine.reply = "한"
    events = server.stream_complete(max_tokens=3)
    num_tokens = len(server.tokenizer.encode("한", add_special_tokens=False))
    assert num_tokens > 1
    assert all(e["choices"][0]["text"] or e["choices"][0]["finish_reason"] for e in events[:-1])
    assert len(events) - 1 < 3


def test_token_whose_text_is_withheld_gives_a_chunk_when_logprobs_are_asked_for(server, engine):
    """B1.5."""
    engine.reply = "한"
    events = server.stream_complete(max_tokens=3, logprobs=0)
    assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in events[:-1]) == 3
    assert len(events) - 1 == 3


def test_every_chunk_has_a_stop_reason_and_the_last_one_names_the_stop(server):
    """B1.6."""
    events = server.stream_complete(stop=["sat"])
    assert [e["choices"][0]["stop_reason"] for e in events[:-1]][-1] == "sat"
    assert all(e["choices"][0]["stop_reason"] is None for e in events[:-2])


def test_echo_puts_the_prompt_before_the_first_delta_of_each_index(server):
    """B1.7."""
    events = server.stream_complete(echo=True, n=2, max_tokens=3)
    for index in (0, 1):
        texts = [c["text"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert texts[0].startswith("Hello") and texts[0] != "Hello"
        assert not any("Hello" in text for text in texts[1:])


def test_echo_with_max_tokens_0_streams_only_the_prompt(server, engine):
    """B1.7."""
    events = server.stream_complete(echo=True, max_tokens=0)
    assert text_of(events) == "Hello"
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert not engine.requests


def test_stream_ends_with_done(server):
    """B1.8."""
    assert server.stream_complete()[-1] == "[DONE]"


def test_stream_that_fails_ends_with_done_too(server, engine):
    """B1.8."""
    engine.fail_after = 2
    assert server.stream_complete()[-1] == "[DONE]"


def test_chunks_leave_the_server_as_their_tokens_come(server, engine):
    engine.step_s = 0.03
    times = []
    body = {"prompt": "Hello", "stream": True, "max_tokens": 8}
    with server.http.stream("POST", "/v1/completions", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert len(gaps) >= 5
    assert sorted(gaps)[len(gaps) // 2] > 0.015


def test_usage_of_a_stream_equals_that_of_the_whole_reply(server):
    """B2.8."""
    for extra in ({}, {"stop": ["sat"]}, {"n": 2}, {"echo": True}):
        whole = server.complete(max_tokens=20, **extra).json()["usage"]
        events = server.stream_complete(max_tokens=20, stream_options={"include_usage": True}, **extra)
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == whole
        assert all(e["usage"] is None for e in events[:-2])


def test_eos_counts_as_a_completion_token_streamed_and_whole(server, engine):
    """B2.8."""
    engine.end_with_eos = True
    num_tokens = len(server.tokenizer.encode(engine.reply, add_special_tokens=False)) + 1
    usage = server.stream_complete(max_tokens=50, stream_options={"include_usage": True})[-2]["usage"]
    whole = server.complete(max_tokens=50).json()
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == num_tokens
    assert whole["choices"][0]["text"] == engine.reply


def test_continuous_usage_is_the_running_count_on_every_chunk(server, engine):
    """B2.6."""
    engine.tokens_per_event = 2
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.stream_complete(max_tokens=6, stream_options=options)[:-1]
    assert [e["usage"]["completion_tokens"] for e in events] == [2, 4, 6, 6]
    assert all(e["usage"]["total_tokens"] == 2 + e["usage"]["completion_tokens"] for e in events)


def test_stream_parses_with_the_openai_client(server):
    stream = server.openai.completions.create(
        model="models/fake", prompt="Hello", stream=True, stream_options={"include_usage": True}, temperature=0
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 16
    assert "".join(c.choices[0].text for c in chunks if c.choices).startswith("the cat")


def test_body_of_each_event_is_plain_json(server):
    for event in server.complete(stream=True).text.split("\n\n")[:-2]:
        json.loads(event.removeprefix("data: "))
