"""The gRPC service (llmcli.proto). It uses the engine bridge, limits, keys and errors of the HTTP
application.

The compiled .proto file is stored as a descriptor set, and the message classes are created from it
when the server starts. Generated Python code would depend on one version of protobuf, and compiling
during installation would need grpcio-tools. A test compares the descriptor set with the .proto
file.

A request is one message, but each call is received as a stream of messages, because only then the
service decides when to read it. Until then, gRPC's flow control keeps all of a request except
SMALL_BODY_BYTES at the client.
"""

import asyncio
import functools
import importlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from llmcli.api.errors import ApiError, ServerBusy, as_api_error, error_document
from llmcli.api.forms.base import encode_json
from llmcli.api.tokens import encode_text
from llmcli.errors import UserError
from llmcli.serve.engine_thread.document_stream import stream_documents
from llmcli.serve.http import api_keys, body_budget
from llmcli.serve.http.body_budget import BodyReservation
from llmcli.serve.http.exchange import build_form
from llmcli.serve.http.routes.embeddings import answer_embeddings
from llmcli.serve.http.service import Service

PROTO_FOLDER = Path(__file__).parent
SERVICE_NAME = "llmcli.v1.Llmcli"
MAX_CALLS = 1024  # running and waiting calls
# calls that read their request or reserve memory at the same time; each request may have the
# largest size
MAX_READING_CALLS = 16
REQUEST_SECONDS = 60.0  # time within which a request must arrive
PLAIN_FIELDS = ("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
GRPC_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}


def require_grpc() -> None:
    """Raise UserError if grpcio is not installed. Called before a model is loaded."""
    for name in ("grpc", "google.protobuf"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(
                "gRPC needs grpcio and protobuf", hint="pip install 'llmcli[grpc]'"
            ) from None


@functools.cache
def message_classes() -> Mapping[str, Any]:
    """Return the message classes by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    for file in descriptor_pb2.FileDescriptorSet.FromString(
        (PROTO_FOLDER / "llmcli.binpb").read_bytes()
    ).file:
        pool.Add(file)
    types = pool.FindFileByName("llmcli.proto").message_types_by_name
    return {name: message_factory.GetMessageClass(kind) for name, kind in types.items()}


async def start_server(service: Service) -> Any:
    """Start a gRPC server on the current event loop. It listens on the settings' `host` and
    `grpc_port`. Return the server and its port.

    Raises UserError if it cannot listen.
    """
    import grpc

    settings = service.settings
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", settings.max_body),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", body_budget.SMALL_BODY_BYTES),
        ),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE_NAME, GrpcService(service).handlers()),)
    )
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    where = f"{host}:{settings.grpc_port}"
    try:
        if settings.ssl_cert and settings.ssl_key:
            pair = settings.ssl_key.read_bytes(), settings.ssl_cert.read_bytes()
            port = server.add_secure_port(where, grpc.ssl_server_credentials([pair]))
        else:
            port = server.add_insecure_port(where)
    except RuntimeError as error:
        raise UserError(
            f"gRPC cannot listen on {where}: {error}", hint="choose another --grpc-port"
        ) from None
    await server.start()
    return server, port


class GrpcService:
    """The methods that the gRPC service offers."""

    def __init__(self, service: Service) -> None:
        self._service, self._kinds = service, message_classes()
        self._readers = asyncio.Semaphore(MAX_READING_CALLS)

    def handlers(self) -> dict[str, Any]:
        """Return the handlers of the methods. They decode requests themselves, because gRPC would
        report undecodable bytes as a server error with a traceback.
        """
        import grpc

        def single(name: str, function: Callable[..., Awaitable[Any]]) -> Any:
            return grpc.stream_unary_rpc_method_handler(
                functools.partial(self._single, name, function),
                None,
                self._kinds[f"{name}Response"].SerializeToString,
            )

        return {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._stream,
                None,
                self._kinds["GenerateResponse"].SerializeToString,
            ),
            **{
                name: single(name, function)
                for name, function in (
                    ("Tokenize", self._tokenize),
                    ("Embed", self._embed),
                    ("Health", self._health),
                )
            },
        }

    async def _single(
        self, name: str, function: Callable[..., Awaitable[Any]], _: object, context: Any
    ) -> Any:
        try:
            if name == "Health":  # a Health request has no fields and needs no key
                return await function()
            self._require_key(context)
            raw, reservation = await self._whole(context)
            with reservation:
                return await function(self._decode(name, raw))
        except UserError as error:
            await _refuse(context, error)

    async def _stream(self, _: object, context: Any) -> AsyncIterator[Any]:
        try:
            self._require_key(context)
            raw, reservation = await self._whole(context)
            with reservation:
                request = self._decode("Generate", raw)
                async with aclosing(self._generate(request, self._client(context))) as answers:
                    async for answer in answers:
                        reservation.release()
                        yield answer
        except UserError as error:
            await _refuse(context, error)

    async def _whole(self, context: Any) -> tuple[bytes, BodyReservation]:
        """Return the bytes of a call's request and their memory reservation. Raises ApiError if no
        request arrives or if it arrives too slowly.
        """
        import grpc

        try:
            async with asyncio.timeout(body_budget.RESERVE_SECONDS):
                await self._readers.acquire()
        except TimeoutError:
            raise ApiError(
                "too many requests are being read at once; retry later", 503, code="busy"
            ) from None
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                raw: Any = await context.read()
            if raw is grpc.aio.EOF:
                raise ApiError(
                    "a call needs one request; this one had none, or one that is too large"
                )
            return raw, await self._service.body_budget.reserve(len(raw))
        except TimeoutError:
            raise ApiError(
                f"the request did not arrive within {REQUEST_SECONDS:.0f} s", 408
            ) from None
        finally:
            self._readers.release()

    def _decode(self, name: str, raw: bytes) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return self._kinds[f"{name}Request"].FromString(raw)
        except DecodeError as error:
            raise ApiError(f"the bytes are not a valid {name}Request: {error}") from None

    def _require_key(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        if not api_keys.is_allowed(metadata, self._service.settings.keys):
            raise ApiError(
                "this server needs a key: authorization: Bearer KEY", 401, code="invalid_api_key"
            )

    def _client(self, context: Any) -> str:
        # gRPC writes the client's address as ipv4:127.0.0.1:50000
        address = context.peer().partition(":")[2].rpartition(":")[0]
        return api_keys.client_id(
            dict(context.invocation_metadata() or ()), address, self._service.settings.keys
        )

    async def _generate(self, request: Any, client: str) -> AsyncGenerator[Any, None]:
        service = self._service
        path, body = _body(request)
        form = await build_form(service.bridge, path, body, service.settings)
        async with aclosing(stream_documents(service.bridge, form, client)) as documents:
            async for chunk in documents:
                for piece in self._pieces(chunk):
                    yield piece

    def _pieces(self, chunk: dict[str, Any]) -> list[Any]:
        """Return the chunk of a stream as messages: one for each choice, and one for the token
        counts.
        """
        response_class = self._kinds["GenerateResponse"]
        pieces = []
        for choice in chunk["choices"]:
            delta = dict(choice.get("delta") or {"content": choice.get("text")})
            text, reasoning = (
                delta.pop("content", None) or "",
                delta.pop("reasoning_content", None) or "",
            )
            delta.pop("role", None)
            extra = {
                **delta,
                **({"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}),
            }
            finish = choice.get("finish_reason") or ""
            if text or reasoning or finish or extra:
                extra_json = json.dumps(extra, ensure_ascii=False) if extra else ""
                pieces.append(
                    response_class(
                        index=choice["index"],
                        text=_whole(text),
                        reasoning=_whole(reasoning),
                        finish_reason=finish,
                        more_json=_whole(extra_json),
                    )
                )
        if usage := chunk.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            counts = self._kinds["Usage"](
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=cached,
                completion_tokens=usage["completion_tokens"],
            )
            pieces.append(response_class(usage=counts))
        return pieces

    async def _tokenize(self, request: Any) -> Any:
        bridge = self._service.bridge
        ids = await bridge.run_in_worker(
            encode_text,
            bridge.runner.model,
            request.text,
            request.add_special,
            request.parse_special,
            False,
            kind="texts",
        )
        return self._kinds["TokenizeResponse"](tokens=ids)

    async def _embed(self, request: Any) -> Any:
        body: dict[str, Any] = {
            "input": list(request.texts) or [list(item.tokens) for item in request.ids]
        }
        if request.model:
            body["model"] = request.model
        if request.HasField("dimensions"):
            body["dimensions"] = request.dimensions
        document_ = await answer_embeddings(self._service, body)
        vectors = [self._kinds["Vector"](values=item["embedding"]) for item in document_["data"]]
        return self._kinds["EmbedResponse"](
            vectors=vectors, tokens=document_["usage"]["prompt_tokens"]
        )

    async def _health(self) -> Any:
        bridge, age = self._service.bridge, self._service.bridge.metrics.last_token_age
        response = self._kinds["HealthResponse"](
            serving=not bridge.is_stopping,
            model=self._service.settings.model_name,
            open=bridge.n_open,
        )
        if age is not None:
            response.last_token_age_ms = round(age * 1e3)
        return response


def _body(request: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the equivalent HTTP request."""
    from google.protobuf import json_format

    try:
        body = (
            _integers(json_format.MessageToDict(request.more)) if request.HasField("more") else {}
        )
    # the request contains numbers that JSON does not have
    except (json_format.Error, ValueError) as error:
        raise ApiError(f"more is not valid JSON: {error}", param="more") from None
    for name in PLAIN_FIELDS:
        optional = request.DESCRIPTOR.fields_by_name[name].has_presence
        if request.HasField(name) if optional else getattr(request, name):
            body[name] = getattr(request, name)
    if request.stop:
        body["stop"] = list(request.stop)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if not request.messages:
        return "/v1/completions", body
    if request.prompt:
        raise ApiError("give either messages or a prompt, not both", param="prompt")
    return "/v1/chat/completions", body | {
        "messages": [
            {"role": message.role, "content": message.content} for message in request.messages
        ],
    }


def _integers(value: Any) -> Any:
    """Convert the whole numbers of a Struct's value to int, because a Struct stores all numbers as
    float.
    """
    if isinstance(value, dict):
        return {name: _integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole(text: str) -> str:
    """Return a text that can be encoded as UTF-8: surrogate code points, which only a client's own
    text can contain, become question marks.
    """
    return text.encode("utf-8", "replace").decode()


async def _refuse(context: Any, error: UserError) -> None:
    import grpc

    api_error = as_api_error(error)
    metadata: list[tuple[str, Any]] = [("error-bin", encode_json(error_document(api_error)))]
    if isinstance(error, ServerBusy):
        metadata.append(("retry-after", str(error.retry_after)))
    await context.abort(
        grpc.StatusCode[GRPC_CODES.get(api_error.status, "INVALID_ARGUMENT")],
        str(api_error),
        tuple(metadata),
    )
