"""What the gRPC service needs from a server: the model of this process, or models in others."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from llmcli.api.embeddings import PATH as EMBEDDINGS_PATH
from llmcli.api.errors import ApiError
from llmcli.api.forms.base import Document
from llmcli.api.server_settings import ServerSettings
from llmcli.api.tokens import encode_text
from llmcli.serve.engine_thread.document_stream import stream_documents
from llmcli.serve.http import api_keys
from llmcli.serve.http.body_budget import BodyBudget
from llmcli.serve.http.exchange import build_form
from llmcli.serve.http.routes.embeddings import answer_embeddings
from llmcli.serve.http.service import Service
from llmcli.serve.processes.front import FrontServer, call_scope

KEY_HEADERS = ("authorization", "x-api-key")


@dataclass(frozen=True, slots=True)
class GrpcClient:
    """The client of a call. `metadata`: of the call; `address`: without the port."""

    metadata: Mapping[str, str]
    address: str


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a server. `token_age`: seconds since the last token of any answer; None: there
    was none yet, or it is unknown.
    """

    is_serving: bool
    model: str
    n_open: int
    token_age: float | None = None


class GrpcAnswers(Protocol):
    """Answers the calls of the gRPC service."""

    settings: ServerSettings
    body_budget: BodyBudget

    def documents(
        self, path: str, body: Mapping[str, Any], client: GrpcClient
    ) -> AsyncGenerator[Document, None]:
        """Yield the JSON objects of the answer to a request of the HTTP API. Raises UserError."""
        ...

    async def tokenize(self, request: Any, client: GrpcClient) -> list[int]:
        """Return the token ids of a TokenizeRequest. Raises UserError."""
        ...

    def health(self) -> Health:
        """Return the state of the server."""
        ...


class EngineAnswers:
    """Answers calls with the model of this process."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.settings, self.body_budget = service.settings, service.body_budget

    async def documents(
        self, path: str, body: Mapping[str, Any], client: GrpcClient
    ) -> AsyncGenerator[Document, None]:
        """Yield the JSON objects of the answer to a request of the HTTP API. Raises UserError."""
        name = api_keys.client_id(client.metadata, client.address, self.settings.keys)
        if path == EMBEDDINGS_PATH:
            yield await answer_embeddings(self._service, body, name)
            return
        bridge = self._service.bridge
        form = await build_form(bridge, path, body, self.settings)
        async with aclosing(stream_documents(bridge, form, name)) as documents:
            async for document in documents:
                yield document

    async def tokenize(self, request: Any, client: GrpcClient) -> list[int]:
        """Return the token ids of a TokenizeRequest. Raises UserError."""
        bridge = self._service.bridge
        ids: list[int] = await bridge.run_in_worker(
            encode_text,
            bridge.runner.model,
            request.text,
            request.add_special,
            request.parse_special,
            False,
            kind="texts",
        )
        return ids

    def health(self) -> Health:
        """Return the state of the server."""
        bridge = self._service.bridge
        age = bridge.metrics.last_token_age
        return Health(not bridge.is_stopping, self.settings.model_name, bridge.n_open, age)


class FrontAnswers:
    """Answers calls with the models of a front server, as HTTP requests to it."""

    def __init__(self, front: FrontServer) -> None:
        self._front = front
        self.settings, self.body_budget = front.settings, front.body_budget

    async def documents(
        self, path: str, body: Mapping[str, Any], client: GrpcClient
    ) -> AsyncGenerator[Document, None]:
        """Yield the JSON objects of the answer to a request of the HTTP API. Raises ApiError."""
        if self._front.is_stopping:
            raise ApiError("the server is stopping", 503)
        headers = {name: client.metadata[name] for name in KEY_HEADERS if name in client.metadata}
        scope = call_scope(self.settings, client.address, headers)
        with self._front.counted():
            async with aclosing(self._front.forwarded_documents(scope, path, body)) as documents:
                async for document in documents:
                    yield document

    async def tokenize(self, request: Any, client: GrpcClient) -> list[int]:
        """Return the token ids of a TokenizeRequest. Raises ApiError."""
        body = {
            "content": request.text,
            "add_special": request.add_special,
            "parse_special": request.parse_special,
            **({"model": request.model} if request.model else {}),
        }
        async with aclosing(self.documents("/tokenize", body, client)) as documents:
            ids: list[int] = (await anext(documents))["tokens"]
        return ids

    def health(self) -> Health:
        """Return the state of the server. It names no model."""
        return Health(not self._front.is_stopping, "", self._front.n_open)
