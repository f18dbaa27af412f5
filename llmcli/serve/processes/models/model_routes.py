"""The requests that a server of several models answers itself: lists of the models, loading and
unloading, its health and its memory.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from llmcli.api.bodies.base import RequestBody, honored
from llmcli.api.errors import ApiError
from llmcli.api.server_settings import ServerSettings
from llmcli.serve.http.exchange import (
    cancel_on_disconnect,
    json_response,
    parse_json,
    read_all,
    read_body,
    read_checked_body,
)
from llmcli.serve.http.routes import ROUTES
from llmcli.serve.http.routes.answer_control import CONTROL_PATHS, parse_control, unknown_answer
from llmcli.serve.http.routes.api_description import docs_response, openapi_response
from llmcli.serve.http.routes.ollama import NEVER, OLLAMA_VERSION, model_document
from llmcli.serve.http.routes.ollama_models import ModelNameBody, pulled_response
from llmcli.serve.http.routes.page import build_page
from llmcli.serve.http.service import Route
from llmcli.serve.processes.models import model_reports
from llmcli.serve.processes.models.model_pool import ModelPool
from llmcli.serve.processes.models.model_request import read_client, read_keep_alive
from llmcli.serve.processes.models.pooled_model import PooledModel

# The paths whose requests load or unload a model if they have no prompt, as in ollama.
PROMPT_FIELDS = {"/api/generate": "prompt", "/api/chat": "messages"}
# llama-server's names of the states.
ROUTER_STATES = {
    "loaded": "loaded",
    "unloading": "loaded",
    "queued": "loading",
    "loading": "loading",
}
# No request changes the models on this disk.
REFUSED_PATHS = (
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/push",
    "/api/blobs",
)
PATH_PATTERNS = tuple(
    (compile_path(path)[0], route)
    for route in ROUTES.values()
    for path in (route.path, *route.further_paths)
    if not route.is_websocket
)
LOAD_PATH, UNLOAD_PATH = "/models/load", "/models/unload"
MODEL_PREFIX = "/v1/models/"
Handler = Callable[[Request], Awaitable[Response | None]]


def find_route(path: str) -> Route | None:
    """Return the route of a path, which a server of one model has, too; None if there is none."""
    return next((route for pattern, route in PATH_PATTERNS if pattern.match(path)), None)


async def read_facts(model: PooledModel) -> None:
    """Read the header of a model's file on another thread, so that running streams do not wait for
    the disk when its facts are used.
    """
    await asyncio.to_thread(lambda: model.served.facts)


class ModelChangeBody(RequestBody):
    """A model that a server of several loads or unloads."""

    origin: ClassVar[str] = "llama-server"
    model: str | None = honored("the name of the model")
    name: str | None = honored("the same as model")


class ModelRoutes:
    """The routes of a server of several models. `created`: the Unix time of its start."""

    def __init__(self, pool: ModelPool, settings: ServerSettings) -> None:
        self._pool, self._settings, self.created = pool, settings, int(time.time())
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/v1/models"): self._list_models,
            ("GET", "/models"): self._list_models,
            ("POST", LOAD_PATH): self.load,
            ("POST", UNLOAD_PATH): self.unload,
            ("GET", "/api/tags"): self._list_tags,
            ("GET", "/api/ps"): self._list_running,
            ("GET", "/api/version"): self._show_version,
            ("POST", "/api/show"): self._show_details,
            ("POST", "/api/generate"): self._load_without_prompt,
            ("POST", "/api/chat"): self._load_without_prompt,
            ("GET", "/health"): self._show_health,
            ("GET", "/v1/health"): self._show_health,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/v1/kv"): self._show_memory,
            ("GET", "/"): self._show_page,
            ("GET", "/index.html"): self._show_page,
            ("GET", "/docs"): self._describe,
            ("GET", "/openapi.json"): self._describe,
            ("POST", "/api/pull"): self._pull,
            **{("POST", path): self._control_answer for path in CONTROL_PATHS},
        }

    async def answer(self, request: Request) -> Response | None:
        """Answer a request; None if a model must answer it. A body that was read for this is in
        `request.state.body`. Raises ApiError and ClientDisconnected.
        """
        path = request.scope["path"]
        method = "GET" if request.method == "HEAD" else request.method
        if handler := self._handlers.get((method, path)):
            return await handler(request)
        if method == "GET" and path.startswith(MODEL_PREFIX):
            return json_response(self._model_document(await self._find(path[len(MODEL_PREFIX) :])))
        route = find_route(path)
        if route is None:
            raise ApiError(f"there is no path {path[:100]!r}; /docs lists all", 404)
        if route.path.startswith(REFUSED_PATHS):
            raise ApiError("a server of several models does not offer this", 501)
        if method not in route.methods:
            accepted = ", ".join(route.methods)
            raise ApiError(f"{method[:20]} {path[:200]}: this path accepts {accepted}", 405)
        return None

    async def _find(self, name: Any) -> PooledModel:
        """Return the model with a name, after reading its file's header. Raises ApiError."""
        if not isinstance(name, str) or not name:
            raise ApiError("model is missing", param="model")
        model = await self._pool.find(name)
        await read_facts(model)
        return model

    async def _read_model(self, request: Request) -> PooledModel:
        """Return the model that the body of a request names. Raises ApiError."""
        document = await read_body(request, self._settings.max_body)
        return await self._find(document.get("model") or document.get("name"))

    # --- lists

    async def _list_models(self, request: Request) -> Response:
        """Respond with an entry for each model."""
        await self._pool.refresh()
        models = [self._model_document(model) for model in await self._read_models()]
        return json_response(
            {"object": "list", "data": models, "memory": model_reports.memory_totals(self._pool)}
        )

    async def _read_models(self) -> list[PooledModel]:
        """Return the models in the order of their names, after reading the headers of their
        files.
        """
        models = self._models()
        await asyncio.gather(*map(read_facts, models))
        return models

    def _models(self) -> list[PooledModel]:
        """Return the models in the order of their names."""
        return sorted(self._pool.models.values(), key=lambda model: model.name)

    def _model_document(self, model: PooledModel) -> dict[str, Any]:
        """Return a model as an entry of /v1/models. `status` is llama-server's."""
        served, facts = model.served, model.served.facts
        state = model.shown_state
        return {
            "id": model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "llmcli",
            "aliases": list(served.names[1:]),
            "state": state,
            "status": {
                "value": ROUTER_STATES.get(model.state, "unloaded"),
                "failed": state == "failed",
            },
            **model_reports.model_fields(model),
            "meta": {
                "size": served.nbytes,
                "n_ctx": model.memory.n_ctx if model.memory else None,
                "n_ctx_train": facts.get("context_length"),
                "n_params": facts.get("parameters"),
                "file_type": facts.get("file_type"),
                "chat": facts.get("has_template"),
            },
        }

    def _ollama_document(self, model: PooledModel) -> dict[str, Any]:
        """Return a model as ollama lists it."""
        served, facts = model.served, model.served.facts
        stamp = served.stamp
        return model_document(
            model.name,
            nbytes=served.nbytes,
            changed=stamp.mtime_ns / 1e9 if stamp else self.created,
            architecture=facts.get("architecture") or "",
            n_params=facts.get("parameters") or 0,
            file_type=facts.get("file_type") or "",
        )

    async def _list_tags(self, request: Request) -> Response:
        """Respond with the models that are here, as ollama lists them."""
        await self._pool.refresh()
        models = [
            self._ollama_document(model) for model in await self._read_models() if model.served.path
        ]
        return json_response({"models": models})

    async def _list_running(self, request: Request) -> Response:
        """Respond with the loaded models, as ollama lists them."""
        loaded = [model for model in await self._read_models() if model.state == "loaded"]
        return json_response(
            {
                "models": [
                    {
                        **self._ollama_document(model),
                        "expires_at": _expiry(model),
                        "size": model.reserved_bytes + sum(model.device_bytes.values()),
                        "size_vram": sum(model.device_bytes.values()),
                        "context_length": model.memory.n_ctx if model.memory else 0,
                    }
                    for model in loaded
                ]
            }
        )

    async def _show_version(self, request: Request) -> Response:
        """Respond with the version of ollama whose API this is."""
        return json_response({"version": OLLAMA_VERSION})

    async def _show_details(self, request: Request) -> Response:
        """Respond with the facts of a model's file, as ollama does. The model is not loaded."""
        model = await self._read_model(request)
        facts = model.served.facts
        architecture = facts.get("architecture") or "unknown"
        size = model.memory.n_ctx if model.memory else facts.get("context_length")
        document = self._ollama_document(model)
        return json_response(
            {
                "modelfile": f"FROM {model.name}",
                "parameters": f"num_ctx {size}",
                "license": "",
                "template": "{{ .Prompt }}",
                "details": document["details"],
                "model_info": {
                    "general.architecture": architecture,
                    "general.parameter_count": facts.get("parameters"),
                    f"{architecture}.context_length": facts.get("context_length"),
                },
                "capabilities": ["completion", *(["tools"] if facts.get("has_template") else [])],
                "modified_at": document["modified_at"],
            }
        )

    # --- loading

    async def load(self, request: Request) -> Response:
        """Load a model, and respond when it is loaded."""
        model = await self._read_change(request)
        await cancel_on_disconnect(request.receive, self._touch(request, model, None))
        return json_response({"success": True, "model": model.name, "state": model.shown_state})

    async def unload(self, request: Request) -> Response:
        """Unload a model when its requests have ended, and respond then."""
        model = await self._read_change(request)
        was_loaded = await cancel_on_disconnect(request.receive, self._pool.unload(model))
        return json_response(
            {
                "success": True,
                "model": model.name,
                "state": model.shown_state,
                "was_loaded": was_loaded,
            }
        )

    async def _read_change(self, request: Request) -> PooledModel:
        """Return the model that a request loads or unloads. Raises ApiError."""
        body = await read_checked_body(request, self._settings.max_body, ModelChangeBody)
        return await self._find(body.model or body.name)

    async def _touch(self, request: Request, model: PooledModel, keep_alive: float | None) -> None:
        """Load a model for the client of a request, and let it stay for `keep_alive` seconds."""
        client = read_client(request.scope, self._settings.keys)
        async with self._pool.use(model, keep_alive, client):
            pass

    async def _load_without_prompt(self, request: Request) -> Response | None:
        """Load a model, or unload it with `keep_alive` 0, if an ollama request has no prompt.
        Otherwise return None.
        """
        request.state.body = await read_all(request, self._settings.max_body)
        document = await parse_json(request.state.body)
        if document.get(PROMPT_FIELDS[request.scope["path"]]):
            return None
        model = await self._find(document.get("model"))
        keep_alive = read_keep_alive(document.get("keep_alive"))
        if keep_alive == 0:
            await cancel_on_disconnect(request.receive, self._pool.unload(model))
        else:
            await cancel_on_disconnect(request.receive, self._touch(request, model, keep_alive))
        is_chat = request.scope["path"] == "/api/chat"
        text = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        return json_response(
            {
                "model": document["model"],
                "created_at": datetime.now(UTC).isoformat(),
                **text,
                "done": True,
                "done_reason": "unload" if keep_alive == 0 else "load",
            }
        )

    async def _control_answer(self, request: Request) -> Response:
        """Change a running answer of any model. Raises ApiError."""
        raw = await read_all(request, self._settings.max_body)
        return await self.control_answer(request.scope, raw)

    async def control_answer(self, scope: Any, raw: bytes) -> Response:
        """Change a running answer of any model. `raw`: the request's body. The request has the id of
        the answer and names no model, so that it is sent to all loaded models, of which at most one
        has the answer. Raises ApiError (404) if none has it.
        """
        body = parse_control(await parse_json(raw), scope["path"])
        answer = await model_reports.find_answer(self._pool, scope, raw)
        if answer is None:
            raise unknown_answer(body)
        return Response(answer.body, answer.status, media_type="application/json")

    # --- the server

    async def _show_health(self, request: Request) -> Response:
        """Respond that the server answers, with how many models are loaded."""
        models = self._models()
        return json_response(
            {
                "status": "ok",
                "open": sum(model.n_running + model.n_waiting for model in models),
                "models": len(models),
                "loaded": sum(model.state == "loaded" for model in models),
            }
        )

    async def _show_metrics(self, request: Request) -> Response:
        """Respond with the metrics of all loaded models, each with its label."""
        text = await model_reports.collect_metrics(self._pool, request.scope)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_memory(self, request: Request) -> Response:
        """Respond with the bytes of all models, and with the caches of the loaded ones."""
        return json_response(await model_reports.collect_memory(self._pool, request.scope))

    async def _describe(self, request: Request) -> Response:
        """Respond with the description of all paths."""
        build = docs_response if request.scope["path"] == "/docs" else openapi_response
        return await asyncio.to_thread(build, (*ROUTES.values(), *MODEL_ROUTES))

    async def _pull(self, request: Request) -> Response:
        """Report that a model is here. No model is downloaded."""
        body = await read_checked_body(request, self._settings.max_body, ModelNameBody)
        await self._find(body.requested)
        return pulled_response(body)

    async def _show_page(self, request: Request) -> Response:
        """Respond with the chat page."""
        document, headers = build_page()
        return Response(document, headers=headers, media_type="text/html; charset=utf-8")


_load: Any = ModelRoutes.load
_unload: Any = ModelRoutes.unload
# The routes that a server of one model does not have, for /docs and /openapi.json.
MODEL_ROUTES = (
    Route(LOAD_PATH, _load, ("POST",), body_type=ModelChangeBody),
    Route(UNLOAD_PATH, _unload, ("POST",), body_type=ModelChangeBody),
)


def _expiry(model: PooledModel) -> str:
    """Return the time at which an idle model is unloaded, as ollama writes it."""
    seconds = model.expires_at - time.monotonic()
    if model.served.is_pinned or math.isinf(seconds) or seconds > 1e9:
        return NEVER
    return (datetime.now(UTC) + timedelta(seconds=max(0.0, seconds))).isoformat()
