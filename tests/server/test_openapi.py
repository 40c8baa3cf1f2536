"""/openapi.json says what there is, its limits are the server's, and no request that it allows gives a server error."""

import json
import re

import pytest

from afserve.errors import RequestError
from afserve.server.bodies.declared import ChatBody, CompletionBody, EmbeddingBody, TokenizeBody
from afserve.server.bodies.fields import Fields


def test_every_route_is_described(server, http):
    described = http.get("/openapi.json").json()
    paths = [(re.sub(r":\w+\}", "}", route.path), route.methods) for route in server.app.routes]
    routes = {(method, path) for path, methods in paths for method in methods - {"HEAD"}}
    assert {(m.upper(), path) for path, found in described["paths"].items() for m in found} == routes


def test_every_reference_leads_somewhere(http):
    described = http.get("/openapi.json").json()
    names = set(described["components"]["schemas"])
    text = json.dumps(described)
    used = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= names and len(names) > 25
    completion = described["components"]["schemas"]["CompletionRequest"]["properties"]
    assert completion["logprobs"]["maximum"] == 20 and completion["n"]["maximum"] == 128


BODIES = (CompletionBody, ChatBody, EmbeddingBody, TokenizeBody)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_the_document_says_of_a_field_is_what_its_reader_holds(body):
    """Each limit of the schema is taken, and what is beyond it refused by the field's name."""
    checked = 0
    for name, schema in body.schema()["properties"].items():
        good, bad = [], []
        if "minimum" in schema:
            low, high = schema["minimum"], schema["maximum"]
            good, bad = [low, high, None], [low - 1, high + 1, "x", True, []]
            if (body, name) == (CompletionBody, "max_tokens"):
                good.remove(0)  # of a prompt that is repeated alone
        elif "enum" in schema:
            good, bad = [*schema["enum"], None], ["none of them", 5]
        elif schema.get("type") == ["boolean", "null"] and name != "parallel_tool_calls":
            good, bad = [True, False, None], [1, "true"]
        for value in good:
            getattr(body(Fields({name: value})), name)
        for value in bad:
            with pytest.raises(RequestError) as refused:
                getattr(body(Fields({name: value})), name)
            assert refused.value.param == name and refused.value.message.startswith(f"{name}: ")
        checked += bool(bad)
    assert checked >= 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_what_it_allows_gives_no_server_error(make_backend, run_server):
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    def no_fault(ctx, response, case):
        """A request that asks for an answer within a millisecond is told that there was none."""
        asked_for = isinstance(case.body, dict) and case.body.get("deadline") is not None
        if not (asked_for and response.status_code == 504 and "as asked" in response.text):
            not_a_server_error(ctx, response, case)

    checks = [no_fault, content_type_conformance, response_schema_conformance]
    with run_server(make_backend()) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        asked = 0
        for result in schema.exclude(path=["/admin/down", "/live"]).get_all_operations():
            operation = result.ok()

            @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy())
            def ask(case):
                nonlocal asked
                asked += 1
                case.call_and_validate(base_url=server.url, checks=checks, timeout=60)

            ask()
        assert asked > 500
