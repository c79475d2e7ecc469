"""Fields of other engines' clients: what is done with each, and that no other is taken for one."""

import msgspec
import pytest

from jaxinfer.http import openai
from jaxinfer.http.known_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    FIELDS,
    STREAM_FIELDS,
    Label,
    Only,
    Refused,
    Renamed,
    decode,
)
from jaxinfer.types import InvalidRequest

COMPLETION = {"prompt": "Hello"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
SCHEMAS = {
    "completion": (openai.CompletionRequest, COMPLETION, FIELDS | COMPLETION_FIELDS),
    "chat": (openai.ChatRequest, CHAT, FIELDS | CHAT_FIELDS),
}


def rows(*kinds):
    """Kind of request, name and rule of every row for which the table, and not the schema, decides."""
    return [
        pytest.param(which, name, rule, id=f"{which} {name}")
        for which, (kind, _, table) in SCHEMAS.items()
        for name, rule in table.items()
        if isinstance(rule, kinds) and name not in kind.__struct_fields__
    ]


def read(which, **fields):
    kind, body, _ = SCHEMAS[which]
    return decode(kind, msgspec.json.encode(body | fields))


@pytest.mark.parametrize(("which", "name", "rule"), rows(Only))
def test_value_that_asks_for_what_is_done_anyway_is_accepted_and_any_other_refused_with_the_reason(which, name, rule):
    """S24."""
    for value in rule.values:
        assert read(which, **{name: value}) == read(which)
    for value in (not rule.values[0] if isinstance(rule.values[0], bool) else "zzz", {"a": 1}, [7], 12345):
        with pytest.raises(InvalidRequest, match=f"^{name} is .* is accepted: ") as error:
            read(which, **{name: value})
        assert error.value.param == name and rule.reason in str(error.value)


@pytest.mark.parametrize(("which", "name", "rule"), rows(Refused))
def test_field_that_is_not_supported_is_refused_with_the_reason_unless_it_is_null(which, name, rule):
    """S24."""
    assert read(which, **{name: None}) == read(which)
    for value in (True, "a", 0, []):
        with pytest.raises(InvalidRequest, match=f"^{name} is not supported: ") as error:
            read(which, **{name: value})
        assert rule.reason in str(error.value)


@pytest.mark.parametrize(("which", "name", "rule"), rows(Label))
def test_label_changes_nothing(which, name, rule):
    assert rule.reason
    for value in ("a", {"a": 1}, 5, None):
        assert read(which, **{name: value}) == read(which)


@pytest.mark.parametrize(("which", "name", "rule"), rows(Renamed))
def test_field_of_another_name_means_ours_and_both_together_are_refused(which, name, rule):
    value = {"stop": ["a"], "cache_salt": "a", "include_stop_str_in_output": True}.get(
        rule.ours, "[0-9]" if rule.ours.startswith("guided_") else 2
    )
    assert read(which, **{name: value}) == read(which, **{rule.ours: value}) != read(which)
    assert read(which, **{name: value, rule.ours: None}) == read(which, **{rule.ours: value})
    with pytest.raises(InvalidRequest, match=f"{name} and {rule.ours} mean the same"):
        read(which, **{name: value, rule.ours: value})


@pytest.mark.parametrize("which", SCHEMAS)
def test_all_unknown_fields_are_named_at_once(which):
    """S24."""
    with pytest.raises(InvalidRequest, match=r"^temprature, to_p are not supported fields$") as error:
        read(which, temprature=1, store=False, to_p=1)
    assert (error.value.param, error.value.code) == ("temprature", "invalid_field")
    with pytest.raises(InvalidRequest, match=r"^stream_options\.x is not a supported field$"):
        read(which, stream=True, stream_options={"x": 1})


@pytest.mark.parametrize("name", STREAM_FIELDS)
def test_fields_of_stream_options_have_rules_too(name):
    options = {"include_usage": True}
    plain = read("chat", stream=True, stream_options=options)
    assert read("chat", stream=True, stream_options=options | {name: False}) == plain
    with pytest.raises(InvalidRequest, match=rf"^stream_options\.{name} is true; only false is accepted"):
        read("chat", stream=True, stream_options=options | {name: True})


def test_known_field_does_not_hide_what_else_is_wrong():
    with pytest.raises(InvalidRequest, match="max_tokens: expected int"):
        read("chat", store=False, max_tokens="5")
    with pytest.raises(InvalidRequest, match="messages is missing"):
        decode(openai.ChatRequest, b'{"store": false}')


def test_token_ids_are_packed_all_the_same():
    body = msgspec.json.encode({"prompt": [5, 6, 7], "store": False})
    assert list(decode(openai.CompletionRequest, body).prompt) == [5, 6, 7]
    assert not decode(openai.CompletionRequest, body).has_text


def test_server_answers_clients_that_send_such_fields(server):
    reply = server.chat(store=False, metadata={"a": "b"}, service_tier="auto", n_predict=3)
    assert reply.json()["usage"]["completion_tokens"] == 3
    error = server.chat(structural_tag="{}").json()["error"]
    assert error["param"] == "structural_tag" and "not supported" in error["message"]
