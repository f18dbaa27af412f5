"""The gRPC service of llmcli.proto. It shares the engine bridge, the limits, the API keys and the
errors with the HTTP application.

The compiled .proto file is stored as a descriptor set, from which the message classes are created
when the server starts. Generated Python code would depend on one version of protobuf, and compiling
during installation would need grpcio-tools. A test compares the descriptor set with the .proto
file.

Each call is declared as a stream of request messages, although it has only one, because only then
the service decides when the message is read. Until then, gRPC's flow control leaves all of it
except SMALL_BODY_BYTES at the client.
"""

import asyncio
import functools
import importlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from llmcli.api.embeddings import PATH as EMBEDDINGS_PATH
from llmcli.api.errors import ApiError, ServerBusy, as_api_error, error_document
from llmcli.api.forms.base import encode_json
from llmcli.errors import UserError
from llmcli.serve.engine_thread.bug_log import log_bug
from llmcli.serve.grpc.answers import GrpcAnswers, GrpcClient
from llmcli.serve.http import api_keys, body_budget
from llmcli.serve.http.body_budget import BodyReservation

PROTO_FOLDER = Path(__file__).parent
SERVICE_NAME = "llmcli.v1.Llmcli"
MAX_CALLS = 1024  # running and waiting calls
# calls whose requests are read at the same time; only after that, memory is reserved for them
MAX_READING_CALLS = 16
REQUEST_SECONDS = 60.0  # time within which a request must arrive
ID_METADATA = "answer-id"  # the key of the initial metadata with the id of an answer
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
    """Raise UserError if grpcio is not installed. Called before a model is loaded, because loading
    can take minutes.
    """
    for name in ("grpc", "google.protobuf"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(
                "gRPC needs grpcio and protobuf", hint="pip install 'llmcli[grpc]'"
            ) from None


@functools.cache
def message_classes() -> Mapping[str, Any]:
    """Return the protobuf message classes by the names in llmcli.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    for file in descriptor_pb2.FileDescriptorSet.FromString(
        (PROTO_FOLDER / "llmcli.binpb").read_bytes()
    ).file:
        pool.Add(file)
    types = pool.FindFileByName("llmcli.proto").message_types_by_name
    return {
        name: message_factory.GetMessageClass(message_type) for name, message_type in types.items()
    }


async def start_server(answers: GrpcAnswers) -> Any:
    """Start a gRPC server on the current event loop, at the settings' `hosts` and `grpc_port`.
    Return the server and its port, which differs from `grpc_port` if that is 0.

    Raises UserError if the server cannot listen.
    """
    import grpc

    settings = answers.settings
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
        (grpc.method_handlers_generic_handler(SERVICE_NAME, GrpcService(answers).handlers()),)
    )
    assert settings.grpc_port is not None
    port = settings.grpc_port
    for host in settings.hosts:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if settings.ssl_cert and settings.ssl_key:
                pair = settings.ssl_key.read_bytes(), settings.ssl_cert.read_bytes()
                port = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            else:
                port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise UserError(
                f"gRPC cannot listen on {address}: {error}", hint="choose another --grpc-port"
            ) from None
    await server.start()
    return server, port


class GrpcService:
    """The methods of the gRPC service."""

    def __init__(self, answers: GrpcAnswers) -> None:
        self._answers, self._message_classes = answers, message_classes()
        self._reading_slots = asyncio.Semaphore(MAX_READING_CALLS)

    def handlers(self) -> dict[str, Any]:
        """Return gRPC's handlers of the methods. They receive a request as bytes and decode it
        themselves, because gRPC would report undecodable bytes as a server error with a traceback.
        """
        import grpc

        def single(name: str, function: Callable[..., Awaitable[Any]]) -> Any:
            return grpc.stream_unary_rpc_method_handler(
                functools.partial(self._answer_unary, name, function),
                None,
                self._message_classes[f"{name}Response"].SerializeToString,
            )

        return {
            "Generate": grpc.stream_stream_rpc_method_handler(
                self._answer_stream,
                None,
                self._message_classes["GenerateResponse"].SerializeToString,
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

    async def _answer_unary(
        self, name: str, function: Callable[..., Awaitable[Any]], _: object, context: Any
    ) -> Any:
        """Handle a call of a method that returns one message. `function`: takes the decoded request
        and the client, and returns the response; that of Health takes nothing.
        """
        try:
            if name == "Health":  # a Health request has no fields and needs no key
                return await function()
            self._require_key(context)
            raw, reservation = await self._read_request(context)
            with reservation:
                return await function(self._decode(name, raw), self._client(context))
        except Exception as error:  # noqa: BLE001 (the client receives it)
            log_bug(error)
            await _refuse(context, error)

    async def _answer_stream(self, _: object, context: Any) -> AsyncIterator[Any]:
        """Handle a call of Generate."""
        try:
            self._require_key(context)
            raw, reservation = await self._read_request(context)
            with reservation:
                request = self._decode("Generate", raw)
                async with aclosing(self._generate(request, context)) as answers:
                    async for answer in answers:
                        reservation.release()
                        yield answer
        except Exception as error:  # noqa: BLE001 (the client receives it)
            log_bug(error)
            await _refuse(context, error)

    async def _read_request(self, context: Any) -> tuple[bytes, BodyReservation]:
        """Read a call's request. Return its bytes and their memory reservation. Raises ApiError if
        there is no request or if it arrives too slowly.
        """
        import grpc

        try:
            async with asyncio.timeout(body_budget.RESERVE_SECONDS):
                await self._reading_slots.acquire()
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
            return raw, await self._answers.body_budget.reserve(len(raw))
        except TimeoutError:
            raise ApiError(
                f"the request did not arrive within {REQUEST_SECONDS:.0f} s", 408
            ) from None
        finally:
            self._reading_slots.release()

    def _decode(self, name: str, raw: bytes) -> Any:
        """Parse the bytes of a request of the method `name`. Raises ApiError if they are
        invalid.
        """
        from google.protobuf.message import DecodeError

        try:
            return self._message_classes[f"{name}Request"].FromString(raw)
        except DecodeError as error:
            raise ApiError(f"the bytes are not a valid {name}Request: {error}") from None

    def _require_key(self, context: Any) -> None:
        """Raise ApiError if the server needs an API key and the call's metadata has none of its
        keys.
        """
        metadata = dict(context.invocation_metadata() or ())
        if not api_keys.is_allowed(metadata, self._answers.settings.keys):
            raise ApiError(
                "this server needs a key: authorization: Bearer KEY", 401, code="invalid_api_key"
            )

    def _client(self, context: Any) -> GrpcClient:
        """Return the client of a call."""
        # the peer is written as ipv4:127.0.0.1:50000
        address = context.peer().partition(":")[2].rpartition(":")[0]
        return GrpcClient(dict(context.invocation_metadata() or ()), address)

    async def _generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Yield the response messages for a Generate request. The call's initial metadata has the id
        by which `/v1/chat/completions/control` changes the answer.
        """
        path, body = _http_request(request)
        documents = self._answers.documents(path, body, self._client(context))
        has_id = False
        async with aclosing(documents):
            async for chunk in documents:
                if not has_id:
                    has_id = True
                    await context.send_initial_metadata(((ID_METADATA, chunk["id"]),))
                for message in self._response_messages(chunk):
                    yield message

    def _response_messages(self, chunk: dict[str, Any]) -> list[Any]:
        """Convert a chunk of the HTTP API's stream to response messages: one for each choice that
        adds something, and one for the token counts.
        """
        response_class = self._message_classes["GenerateResponse"]
        messages = []
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
                messages.append(
                    response_class(
                        index=choice["index"],
                        text=_encodable(text),
                        reasoning=_encodable(reasoning),
                        finish_reason=finish,
                        more_json=_encodable(extra_json),
                    )
                )
        if usage := chunk.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            counts = self._message_classes["Usage"](
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=details.get("cached_tokens", 0),
                disk_tokens=details.get("disk_tokens", 0),
                completion_tokens=usage["completion_tokens"],
            )
            messages.append(response_class(usage=counts))
        return messages

    async def _tokenize(self, request: Any, client: GrpcClient) -> Any:
        ids = await self._answers.tokenize(request, client)
        return self._message_classes["TokenizeResponse"](tokens=ids)

    async def _embed(self, request: Any, client: GrpcClient) -> Any:
        body: dict[str, Any] = {
            "input": list(request.texts) or [list(item.tokens) for item in request.ids]
        }
        if request.model:
            body["model"] = request.model
        if request.HasField("dimensions"):
            body["dimensions"] = request.dimensions
        async with aclosing(self._answers.documents(EMBEDDINGS_PATH, body, client)) as documents:
            document = await anext(documents)
        vectors = [
            self._message_classes["Vector"](values=item["embedding"]) for item in document["data"]
        ]
        return self._message_classes["EmbedResponse"](
            vectors=vectors, tokens=document["usage"]["prompt_tokens"]
        )

    async def _health(self) -> Any:
        health = self._answers.health()
        response = self._message_classes["HealthResponse"](
            serving=health.is_serving, model=health.model, open=health.n_open
        )
        if health.token_age is not None:
            response.last_token_age_ms = round(health.token_age * 1e3)
        return response


def _http_request(request: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the JSON body of the HTTP request that is equivalent to a
    GenerateRequest. Raises ApiError for values that JSON does not have.
    """
    from google.protobuf import json_format

    try:
        body = (
            _integers(json_format.MessageToDict(request.more)) if request.HasField("more") else {}
        )
    # raised for NaN and infinity, which JSON does not have
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
    """Return a value with all whole numbers as int. A protobuf Struct stores every number as a
    float, but many fields of the API accept only whole numbers.
    """
    if isinstance(value, dict):
        return {name: _integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _encodable(text: str) -> str:
    """Return a text that can be encoded as UTF-8. Surrogate code points, which can only be in a
    text of the client, become question marks.
    """
    return text.encode("utf-8", "replace").decode()


async def _refuse(context: Any, error: Exception) -> None:
    """End a call with the gRPC status, the message, and the HTTP API's error object of an error."""
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
