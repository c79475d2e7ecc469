"""Requests made from the OpenAPI document by schemathesis: none fails in the server, and every reply is as it says."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.http.openapi import OPERATIONS
from jaxinfer.text.chat_template import ChatTemplate
from tests.http.conftest import Server
from tests.http.fake_engine import FakeEngine
from tests.http.tiny_tokenizer import make_tokenizer

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed; the extra 'clients' has it")
checks = pytest.importorskip("schemathesis.checks")

pytestmark = pytest.mark.long

EXCLUDED = {
    "positive_data_acceptance": "much that fits the schema is refused: what a schema cannot say",
}
"""Checks that are not made, and why."""


@pytest.fixture(scope="module")
def server():
    tokenizer, config = make_tokenizer()
    server = Server(FakeEngine(tokenizer), tokenizer, ChatTemplate.from_config(config), grace_s=0.2)
    yield server
    assert server.http.get("/health").status_code == 200
    assert not server.engine.running and not len(server.frontend.open_requests)
    server.close()


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def documented():
    """Every operation, but of several paths for one thing only the first."""
    seen = []
    for path, methods in OPERATIONS.items():
        if methods not in seen and not path.startswith(("/v1/batches", "/v1/files")):  # only with a folder for them
            seen.append(methods)
            yield from ((path, method) for method in methods)


def many(test):
    """Runs a test with data of hypothesis, the same every time."""
    checked = settings(
        max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    checked(test)()


@pytest.fixture(scope="module")
def ask():
    excluded = checks.CHECKS.get_by_names(list(EXCLUDED))
    return lambda case: case.call_and_validate(excluded_checks=excluded, timeout=20)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("path", "method"), list(documented()))
def test_no_request_fails_in_the_server_and_every_reply_fits_the_document(api, ask, path, method, mode):
    operation = api[path][method]
    if mode == "negative" and not OPERATIONS[path][method].body:
        pytest.skip("takes nothing that does not fit the document")

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def check(case):
        ask(case)

    many(check)


HELLO = [{"role": "user", "content": "Hello"}]
EXAMPLES = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5, 6]},
}


def test_there_is_an_example_for_every_operation_with_a_body():
    with_body = {path for path, method in documented() if OPERATIONS[path][method].body}
    assert EXAMPLES.keys() == with_body


@pytest.mark.parametrize("path", EXAMPLES)
def test_requests_that_are_right_but_for_one_field_are_answered_as_the_document_says(api, ask, path):
    operation = api[path]["POST"]
    assert ask(operation.Case(body=EXAMPLES[path], media_type="application/json")).status_code == 200
    statuses = []

    @given(case=operation.as_strategy(), data=st.data())
    def check(case, data):
        names = sorted(case.body.keys() - {"prompt", "messages", "input", "tokens"}) or [None]
        name = data.draw(st.sampled_from(names))
        case.body = EXAMPLES[path] | ({} if name is None else {name: case.body[name]})
        statuses.append(ask(case).status_code)

    many(check)
    assert 200 in statuses and set(statuses) <= {200, 400, 404}


def test_stored_responses_are_shown_and_deleted_as_the_document_says(api, ask):
    body = ask(api["/v1/responses"]["POST"].Case(body=EXAMPLES["/v1/responses"], media_type="application/json")).json()
    for method in ("GET", "DELETE"):
        case = api["/v1/responses/{response_id}"][method].Case(path_parameters={"response_id": body["id"]})
        assert ask(case).status_code == 200
