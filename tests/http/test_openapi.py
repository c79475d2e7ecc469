"""/openapi.json: what it says is what the server does."""

import re

import msgspec
import pytest

from jaxinfer.http.openapi import OPERATIONS, RULES


@pytest.fixture(scope="module")
def document(shared_server):
    reply = shared_server.http.get("/openapi.json")
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    return reply.json()


def test_every_route_and_method_is_in_the_document_and_no_other(shared_server, document):
    routes = {}
    for route in shared_server.app.routes:
        path = re.sub(r":\w+}", "}", route.path)
        routes.setdefault(path, set()).update(method.lower() for method in route.methods - {"HEAD"})
    assert {path: set(methods) for path, methods in document["paths"].items()} == routes
    assert OPERATIONS.keys() >= routes.keys()


def test_every_field_of_every_request_struct_is_in_the_document_and_unknown_ones_are_not(document):
    for kind in RULES:
        schema = document["components"]["schemas"][kind.__name__]
        assert {field.encode_name for field in msgspec.structs.fields(kind)} <= schema["properties"].keys()
        assert schema["additionalProperties"] is False


def test_fields_that_are_always_refused_are_not_in_the_document_and_the_accepted_ones_are(document):
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "suffix" not in properties and "chat_template" not in properties
    assert properties["store"]["enum"] == [False, None]
    assert properties["max_new_tokens"]["anyOf"] == properties["max_tokens"]["anyOf"]


def test_every_reference_of_the_document_leads_somewhere(document):
    found = re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode())
    assert found and set(found) <= document["components"]["schemas"].keys()


def test_every_operation_says_what_a_failure_looks_like(document):
    for path, methods in document["paths"].items():
        for operation in methods.values():
            ref = operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
            assert ref.endswith("/AnthropicError") == path.startswith("/v1/messages")
            assert operation["summary"]
