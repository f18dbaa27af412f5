"""The front server of several models: the requests that it answers itself, and who may send
them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.api.server_settings import ServerSettings
from llmcli.serve.processes.models import model_reports
from llmcli.serve.processes.models.models_front import ModelsFront
from tests.serve.processes.models.fake_processes import MIB, World, run

NEEDS = {"a": 300 * MIB, "b": 300 * MIB}
KEY = "a-key-that-is-long"
ORIGIN = "https://app.example"
CONTROL = "/v1/chat/completions/control"


def serve(
    scenario: Callable[[World, httpx.AsyncClient], Awaitable[None]], folder: Path, **settings: Any
) -> None:
    """Run a scenario with a client of a front server of the models a and b."""

    async def with_client(world: World) -> None:
        front = ModelsFront(world.pool, ServerSettings(("a",), **settings))
        transport = httpx.ASGITransport(front)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await scenario(world, client)

    run(with_client, folder, NEEDS)


def test_a_request_without_the_key_loads_nothing(tmp_path: Path) -> None:
    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        body = {"model": "a", "prompt": "x"}
        for key in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            for path in ("/v1/completions", "/models/load", CONTROL, "/no/such/path"):
                refused = await client.post(path, json=body, headers=key)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/v1/models/a", "/v1/kv", "/metrics", "/api/tags"):
                assert (await client.get(path, headers=key)).status_code == 401
        for path in ("/", "/index.html", "/health", "/v1/health", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        assert world.loads == []
        for key in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            answer = await client.post("/v1/completions", json=body, headers=key)
            assert (answer.status_code, answer.text) == (200, "a")

    serve(scenario, tmp_path, keys=(KEY,))


def test_cors_headers_are_on_answers_and_on_errors(tmp_path: Path) -> None:
    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        preflight = await client.options(
            "/v1/completions",
            headers={
                "origin": ORIGIN,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            },
        )
        assert preflight.status_code == 200  # browsers send it without the key
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        own = {"authorization": f"Bearer {KEY}", "origin": ORIGIN}
        for name, status in (("a", 200), ("no-such-model", 404)):
            answer = await client.post("/v1/completions", json={"model": name}, headers=own)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
        refused = await client.get("/v1/models", headers={"origin": ORIGIN})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN
        foreign = await client.get("/health", headers={"origin": "https://foreign.example"})
        assert "access-control-allow-origin" not in foreign.headers
        assert world.loads == ["a"]

    serve(scenario, tmp_path, keys=(KEY,), cors=(ORIGIN,))


def test_the_routes_of_several_models_are_described(tmp_path: Path) -> None:
    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        page = (await client.get("/docs")).text
        for path in ("/models/load", "/models/unload"):
            operation = document["paths"][path]["post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            assert schema["$ref"].endswith("/ModelChangeBody")
            assert operation["summary"]
            assert f"<code>{path}</code>" in page
            wrong = await client.post(path, json={"model": 5})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model")
        assert CONTROL in document["paths"]
        listed = (await client.get("/v1/models")).json()
        openai = {"id", "object", "created", "owned_by", "meta"}
        for model in listed["data"]:
            assert model.keys() - openai == model_reports.MODEL_FIELDS.keys()
        assert listed["memory"].keys() == {"limit_bytes", "reserved_bytes", "devices"}

    serve(scenario, tmp_path)


def test_a_foreign_page_loads_nothing(tmp_path: Path) -> None:
    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        foreign = {"origin": "https://foreign.example"}
        for path in ("/v1/completions", "/models/load"):
            refused = await client.post(path, json={"model": "a"}, headers=foreign)
            assert refused.status_code == 403
        assert world.loads == []

    serve(scenario, tmp_path)


def test_a_client_that_disconnects_cancels_the_request_of_its_process(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        front = ModelsFront(world.pool, ServerSettings(("a",)))
        world.may_answer.clear()
        disconnected = asyncio.Event()
        unread = [{"type": "http.request", "body": b'{"model": "a"}', "more_body": False}]

        async def receive() -> Any:
            if unread:
                return unread.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope["query_string"] = b""
        request = asyncio.ensure_future(front(scope, receive, send))
        await world.until(lambda: world.n_open == 1)
        disconnected.set()
        await request
        assert world.n_open == 0
        assert world.pool.models["a"].n_running == 0
        assert world.state("a") == "loaded"

    run(scenario, tmp_path, NEEDS)


def test_a_running_answer_is_changed_in_the_process_that_has_it(tmp_path: Path) -> None:
    def answer(name: str, scope: Any, body: bytes) -> tuple[int, bytes]:
        if scope["path"] != CONTROL:
            return 200, name.encode()
        asked.append(name)
        found = json.loads(body)["id"] == f"answer-of-{name}"
        return (200, f"changed by {name}".encode()) if found else (404, b"{}")

    asked: list[str] = []

    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        world.answer = answer
        body = {"id": "answer-of-b", "action": "reasoning_end"}
        nothing_loaded = await client.post(CONTROL, json=body)
        assert (nothing_loaded.status_code, asked, world.loads) == (404, [], [])
        for name in "ab":
            await client.post("/v1/completions", json={"model": name})
        changed = await client.post(CONTROL, json=body)
        assert (changed.status_code, changed.text) == (200, "changed by b")
        assert asked == ["a", "b"]
        unknown = await client.post(CONTROL, json={**body, "id": "x"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["message"] == "no running answer has the id 'x'"
        wrong = await client.post(CONTROL.removeprefix("/v1"), json={**body, "action": "stop"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "action")

    serve(scenario, tmp_path)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/", 200),
        ("HEAD", "/health", 200),
        ("HEAD", "/v1/models/a", 200),
        ("POST", "/health", 405),
        ("DELETE", "/v1/models/a", 405),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/ws", 404),
        ("GET", "/no/such/path", 404),
        ("POST", "/files", 501),
        ("GET", "/v1/batches/1", 501),
        ("DELETE", "/api/delete", 501),
        ("POST", "/api/blobs/sha256:0", 501),
    ],
)
def test_requests_that_no_model_answers_load_none(
    tmp_path: Path, method: str, path: str, status: int
) -> None:
    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        world.pool.settings = replace(world.pool.settings, default_name="a")
        assert (await client.request(method, path)).status_code == status
        assert world.loads == []

    serve(scenario, tmp_path)


def test_paths_that_are_switched_off(tmp_path: Path) -> None:
    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        for path, status in (("/", 404), ("/index.html", 404), ("/metrics", 501)):
            assert (await client.get(path)).status_code == status
        assert (await client.get("/v1/kv")).status_code == 200

    serve(scenario, tmp_path, disabled_paths=(("/", "--ui"), ("/metrics", "--metrics")))


def test_the_change_of_an_answer_does_not_wait_for_a_busy_model(tmp_path: Path) -> None:
    async def scenario(world: World, client: httpx.AsyncClient) -> None:
        world.answer = lambda name, _scope, _body: (200, b'{"success": true}')
        await world.ask("a")
        world.may_answer = asyncio.Event()  # b answers nothing
        assert (await client.post("/models/load", json={"model": "b"})).status_code == 200
        body = {"id": "chatcmpl-1", "action": "reasoning_end"}
        async with asyncio.timeout(model_reports.REPORT_SECONDS / 2):
            changed = await client.post(CONTROL, json=body)
        assert (changed.status_code, changed.json()) == (200, {"success": True})
        await world.until(lambda: not world.n_open)

    serve(scenario, tmp_path)
