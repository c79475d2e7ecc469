"""Requests made from the OpenAPI document by schemathesis: none fails in the server, and every reply is as it says."""

import pytest
from hypothesis import HealthCheck, given, settings

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
        if methods not in seen:
            seen.append(methods)
            yield from ((path, method) for method in methods)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("path", "method"), list(documented()))
def test_no_request_fails_in_the_server_and_every_reply_fits_the_document(api, path, method, mode):
    operation = api[path][method]
    if mode == "negative" and not OPERATIONS[path][method].body:
        pytest.skip("takes nothing that does not fit the document")
    excluded = checks.CHECKS.get_by_names(list(EXCLUDED))

    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def ask(case):
        case.call_and_validate(excluded_checks=excluded, timeout=20)

    ask()
