"""What a request leaves nowhere, and what is refused since it would have to."""

from __future__ import annotations

import json

import pytest

from jaxinfer.cluster.calls import without_state
from jaxinfer.http.errors import HttpError


def body(**fields):
    return json.dumps({"model": "m", "input": "Hi"} | fields).encode()


def test_a_response_is_not_stored_where_it_does_not_say():
    for fields in ({}, {"store": None}, {"store": False}):
        found = json.loads(without_state("/v1/responses", body(**fields)))
        assert found == {"model": "m", "input": "Hi", "store": False}


@pytest.mark.parametrize("other", [body(), b"no json", b"[1]", b""])
def test_other_bodies_stay_as_they_are(other):
    assert without_state("/v1/chat/completions", other) == other
    if other != body():
        assert without_state("/v1/responses", other) == other


@pytest.mark.parametrize(
    ("path", "fields", "what"),
    [
        ("/v1/responses", {"store": True}, "a stored response"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "a stored response"),
        ("/v1/chat/completions", {"session_id": "s"}, "session_id"),
    ],
)
def test_what_one_replica_would_keep_is_refused(path, fields, what):
    with pytest.raises(HttpError, match=f"{what} is not served by replicas"):
        without_state(path, body(**fields))
