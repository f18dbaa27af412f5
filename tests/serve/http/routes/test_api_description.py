"""/openapi.json describes the requests that the server takes, and /docs shows the same to people."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import jsonschema
import pytest

from llmcli.serve.http.routes import ROUTES
from scripts.fuzz.http_requests import VALID
from tests.api.test_fields import SMALLEST
from tests.fixtures.server import Served

METHODS = {"get", "post", "put", "delete", "head", "patch"}
BAD_REQUESTS = {
    "/v1/chat/completions": {"messages": []},
    "/v1/messages": {"messages": [], "max_tokens": 1},
    "/api/chat": {"messages": 1},
    "/completion": {},
    "/v1/embeddings": {},
}


@pytest.fixture
def document(serve: Callable[..., Served]) -> dict[str, Any]:
    served = serve(keys=("secret",))
    found = httpx.get(f"{served.url}/openapi.json", timeout=60)  # needs no key
    assert found.headers["content-type"] == "application/json"
    return dict(found.json())


def references(value: Any) -> Iterator[str]:
    """Yield all references in a JSON document."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for entry in value.values():
            yield from references(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from references(entry)


def validator(document: dict[str, Any], schema: Any) -> jsonschema.Draft202012Validator:
    """Return a validator of one schema of the document."""
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def body_schema(document: dict[str, Any], path: str) -> Any:
    body = document["paths"][path]["post"]["requestBody"]
    return body["content"]["application/json"]["schema"]


def test_every_path_is_described_and_every_reference_resolves(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    for route in ROUTES.values():
        for path in (route.path, *route.further_paths) if not route.is_websocket else ():
            methods = document["paths"][path.replace(":path}", "}")]
            assert methods.keys() == {method.lower() for method in route.methods}
            assert methods.keys() <= METHODS
            for operation in methods.values():
                assert operation["summary"]
                assert bool(operation["security"]) is not route.is_public
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names <= schemas.keys()


def test_the_schemas_take_what_the_server_takes(document: dict[str, Any]) -> None:
    requests = [*SMALLEST.items(), *((path, body) for path, body in VALID)]
    checked = 0
    for path, body in requests:
        if "requestBody" not in document["paths"].get(path, {}).get("post", {}):
            continue
        errors = validator(document, body_schema(document, path)).iter_errors(body)
        assert [(path, error.json_path, error.message) for error in errors] == []
        checked += 1
    assert checked > 30


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [], "n": 0},
        {"messages": [], "temperature": -1},
        {"messages": [], "tools": [{"type": "function", "function": {}}]},
        {},
    ],
)
def test_the_schemas_refuse_what_the_server_refuses(
    document: dict[str, Any], body: dict[str, Any]
) -> None:
    schema = body_schema(document, "/v1/chat/completions")
    assert not validator(document, schema).is_valid(body)


@pytest.mark.parametrize("path", BAD_REQUESTS)
def test_errors_have_the_described_form(serve: Callable[..., Served], path: str) -> None:
    served = serve()
    document = httpx.get(f"{served.url}/openapi.json", timeout=60).json()
    answer = httpx.post(served.url + path, json=BAD_REQUESTS[path])
    assert answer.status_code == 400
    content = document["paths"][path]["post"]["responses"]["default"]["content"]
    validator(document, content["application/json"]["schema"]).validate(answer.json())


def test_effects_are_in_the_schemas(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert (fields["store"]["x-effect"], fields["functions"]["x-effect"]) == ("ignored", "refused")
    assert fields["functions"]["description"] == "Refused: use tools"
    assert "null" in fields["temperature"]["type"]
    assert len(json.dumps(document)) < 400_000


def test_the_page_lists_paths_and_fields_and_runs_nothing(serve: Callable[..., Served]) -> None:
    found = httpx.get(f"{serve(keys=('secret',)).url}/docs", timeout=60)
    assert found.status_code == 200
    policy = found.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    text = found.text
    assert "<script" not in text
    assert re.findall(r"https?://", text) == []
    for word in ("/v1/chat/completions", "max_completion_tokens", "guided_json", "OllamaOptions"):
        assert word in text
    anchors = set(re.findall(r'href="#(\w+)"', text))
    assert anchors <= set(re.findall(r'id="(\w+)"', text))
