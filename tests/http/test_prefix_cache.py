"""What clients say to the prefix cache, and what they are told of it."""

import pytest

CACHED = {"0-0": 4, "0-1": 9, "1-0": 2, "1-1": 9}
"""By prompt and sample: later samples find what the first one computed."""


@pytest.fixture
def cached_server(own_server):
    return own_server(prefix_caching=True, cached_tokens=CACHED)


def details(reply):
    return reply.json()["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_salt_reaches_every_sequence_of_a_request(server, engine, route):
    getattr(server, route)(cache_salt="tenant a", n=2)
    getattr(server, route)()
    assert [request.cache_salt for request in engine.requests] == ["tenant a", "tenant a", ""]


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_salt_that_is_empty_or_endless_is_refused_with_its_limit(server, engine, route):
    for salt, length in (("", 0), ("x" * 257, 257)):
        error = getattr(server, route)(cache_salt=salt).json()["error"]
        assert error["param"] == "cache_salt"
        assert error["message"] == f"cache_salt has {length} characters; it must have 1 to 256, or be left out"
    assert getattr(server, route)(cache_salt="x" * 256).status_code == 200
    assert len(engine.requests) == 1


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_usage_says_how_many_tokens_of_the_prompt_were_cached(cached_server, route):
    assert details(getattr(cached_server, route)()) == {"cached_tokens": 4}


def test_usage_counts_what_was_cached_of_each_prompt_once(cached_server):
    reply = cached_server.complete(prompt=[[5] * 10, [6] * 10], n=2)
    assert details(reply) == {"cached_tokens": 6}
    assert reply.json()["usage"]["prompt_tokens"] == 20


def test_prompt_that_was_not_cached_and_one_that_is_only_echoed_count_as_0(cached_server):
    cached_server.engine.cached_tokens = {}
    assert details(cached_server.complete()) == {"cached_tokens": 0}
    assert details(cached_server.complete(echo=True, max_tokens=0)) == {"cached_tokens": 0}


def test_last_chunk_of_a_stream_says_what_was_cached(cached_server):
    for stream in (cached_server.stream_complete, cached_server.stream_chat):
        *chunks, last, _ = stream(n=2, max_tokens=3, stream_options={"include_usage": True})
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert all(chunk["usage"] is None for chunk in chunks)


def test_running_usage_says_what_was_cached_with_every_chunk(cached_server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = cached_server.stream_complete(max_tokens=3, stream_options=options)[:-1]
    assert len(chunks) == 4
    assert all(chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 4} for chunk in chunks)


def test_openais_client_reads_what_was_cached(cached_server):
    ask = {"model": "models/fake", "messages": [{"role": "user", "content": "Hello"}]}
    usage = cached_server.openai.chat.completions.create(**ask, extra_body={"cache_salt": "a"}).usage
    assert usage.prompt_tokens_details.cached_tokens == 4


def test_without_a_prefix_cache_usage_does_not_speak_of_it(server):
    usage = server.complete(max_tokens=4).json()["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
