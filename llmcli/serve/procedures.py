"""The same answers over gRPC (proto/llmcli.proto): the bridge, limits, keys and words of the HTTP
application.

2026-11-22: the compiled file is kept as a descriptor set, and its classes are made when the server
starts. Generated Python would be 300 lines that no one wrote, bound to the version of protobuf that
made them; compiling at build would need grpcio-tools (3 MB) to install a wheel. A test compares the
two files.

A request is one message, but each call is taken as a stream of them: only so is it for us to say
when it is read. Until then gRPC's flow control leaves all but SMALL bytes of it with the client.
"""

import asyncio
import functools
import importlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from llmcli.errors import UserError
from llmcli.serve import bodies, keys
from llmcli.serve.bodies import Place
from llmcli.serve.bridge import Busy
from llmcli.serve.chunks import chunks
from llmcli.serve.problems import Problem, document, problem
from llmcli.serve.routes.base import Service
from llmcli.serve.routes.embeddings import embedded
from llmcli.serve.routes.tokens import tokens_of
from llmcli.serve.schema.base import encoded
from llmcli.serve.stream import asked
from quant.errors import Refusal

FILES = Path(__file__).parent / "proto"
NAME = "llmcli.v1.Llmcli"
AT_ONCE = 1024  # calls, those that wait among them
READING = 16  # of them whose requests are read, or wait for room: each may have the largest size
PATIENCE = 60.0  # seconds for one to be whole
PLAIN = ("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
CODES = {
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


def check() -> None:
    """Raise UserError where grpcio is not installed, before a model is loaded."""
    for name in ("grpc", "google.protobuf"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(
                "gRPC needs grpcio and protobuf", hint="pip install 'llmcli[grpc]'"
            ) from None


@functools.cache
def messages() -> Mapping[str, Any]:
    """The classes of the messages, by name."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    for file in descriptor_pb2.FileDescriptorSet.FromString(
        (FILES / "llmcli.binpb").read_bytes()
    ).file:
        pool.Add(file)
    found = pool.FindFileByName("llmcli.proto").message_types_by_name
    return {name: message_factory.GetMessageClass(kind) for name, kind in found.items()}


async def start(service: Service) -> Any:
    """A server that listens on the settings' host and `grpc_port`, on this loop, and the port that
    it has.

    Raises UserError where it cannot.
    """
    import grpc

    settings = service.settings
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", settings.max_body),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", bodies.SMALL),
        ),
        maximum_concurrent_rpcs=AT_ONCE,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(NAME, Procedures(service).handlers()),)
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
            f"gRPC cannot listen on {where}: {error}", hint="take another --grpc-port"
        ) from None
    await server.start()
    return server, port


class Procedures:
    """What each call does."""

    def __init__(self, service: Service) -> None:
        self._service, self._kinds = service, messages()
        self._reading = asyncio.Semaphore(READING)

    def handlers(self) -> dict[str, Any]:
        """The methods as gRPC wants them. They read the bytes of a request themselves: what gRPC
        cannot read it calls a mistake of the server, with a traceback.
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
            if name == "Health":  # it has no fields, and needs no key: nothing of it is read
                return await function()
            self._let_in(context)
            raw, place = await self._whole(context)
            with place:
                return await function(self._read(name, raw))
        except Refusal as error:
            await _refuse(context, error)

    async def _stream(self, _: object, context: Any) -> AsyncIterator[Any]:
        try:
            self._let_in(context)
            raw, place = await self._whole(context)
            with place:
                request = self._read("Generate", raw)
                async with aclosing(self._generate(request, self._client(context))) as answers:
                    async for answer in answers:
                        place.leave()
                        yield answer
        except Refusal as error:
            await _refuse(context, error)

    async def _whole(self, context: Any) -> tuple[bytes, Place]:
        """A call's request and its room; raises Problem where there is none, or it does not come."""
        import grpc

        try:
            async with asyncio.timeout(bodies.PATIENCE):
                await self._reading.acquire()
        except TimeoutError:
            raise Problem(
                "too many requests are being read at once; come back later", 503, code="busy"
            ) from None
        try:
            async with asyncio.timeout(PATIENCE):
                raw: Any = await context.read()
            if raw is grpc.aio.EOF:
                raise Problem(
                    "a call has one request; this one had none, or a larger one than is taken"
                )
            return raw, await self._service.room.take(len(raw))
        except TimeoutError:
            raise Problem(f"the request was not there within {PATIENCE:.0f} s", 408) from None
        finally:
            self._reading.release()

    def _read(self, name: str, raw: bytes) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return self._kinds[f"{name}Request"].FromString(raw)
        except DecodeError as error:
            raise Problem(f"these bytes are no {name}Request: {error}") from None

    def _let_in(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ())
        if not keys.allowed(given, self._service.settings.keys):
            raise Problem(
                "this server needs a key: authorization: Bearer KEY", 401, code="invalid_api_key"
            )

    def _client(self, context: Any) -> str:
        address = context.peer().partition(":")[2].rpartition(":")[0]  # of ipv4:127.0.0.1:50000
        return keys.client(
            dict(context.invocation_metadata() or ()), address, self._service.settings.keys
        )

    async def _generate(self, request: Any, client: str) -> AsyncGenerator[Any, None]:
        service = self._service
        path, body = _body(request)
        form = await asked(service.bridge, path, body, service.settings)
        async with aclosing(chunks(service.bridge, form, client)) as told:
            async for chunk in told:
                for piece in self._pieces(chunk):
                    yield piece

    def _pieces(self, chunk: dict[str, Any]) -> list[Any]:
        """A chunk of a stream as messages: one for each choice of it, one for the counts."""
        made = self._kinds["GenerateResponse"]
        pieces = []
        for choice in chunk["choices"]:
            delta = dict(choice.get("delta") or {"content": choice.get("text")})
            text, reasoning = (
                delta.pop("content", None) or "",
                delta.pop("reasoning_content", None) or "",
            )
            delta.pop("role", None)
            rest = {**delta, **({"logprobs": choice["logprobs"]} if choice.get("logprobs") else {})}
            finish = choice.get("finish_reason") or ""
            if text or reasoning or finish or rest:
                more = json.dumps(rest, ensure_ascii=False) if rest else ""
                pieces.append(
                    made(
                        index=choice["index"],
                        text=_whole(text),
                        reasoning=_whole(reasoning),
                        finish_reason=finish,
                        more_json=_whole(more),
                    )
                )
        if usage := chunk.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            counts = self._kinds["Usage"](
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=cached,
                completion_tokens=usage["completion_tokens"],
            )
            pieces.append(made(usage=counts))
        return pieces

    async def _tokenize(self, request: Any) -> Any:
        bridge = self._service.bridge
        ids = await bridge.prepare(
            tokens_of,
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
            "input": list(request.texts) or [list(one.tokens) for one in request.ids]
        }
        if request.model:
            body["model"] = request.model
        if request.HasField("dimensions"):
            body["dimensions"] = request.dimensions
        found = await embedded(self._service, body)
        vectors = [self._kinds["Vector"](values=one["embedding"]) for one in found["data"]]
        return self._kinds["EmbedResponse"](vectors=vectors, tokens=found["usage"]["prompt_tokens"])

    async def _health(self) -> Any:
        bridge, age = self._service.bridge, self._service.bridge.meter.last_token_age
        made = self._kinds["HealthResponse"](
            serving=not bridge.stopping, model=self._service.settings.name, open=bridge.open
        )
        if age is not None:
            made.last_token_age_ms = round(age * 1e3)
        return made


def _body(request: Any) -> tuple[str, dict[str, Any]]:
    """The path and the document that would ask the same over HTTP."""
    from google.protobuf import json_format

    try:
        body = (
            _integers(json_format.MessageToDict(request.more)) if request.HasField("more") else {}
        )
    except (json_format.Error, ValueError) as error:  # numbers that JSON has no words for
        raise Problem(f"more is no JSON: {error}", param="more") from None
    for name in PLAIN:
        optional = request.DESCRIPTOR.fields_by_name[name].has_presence
        if request.HasField(name) if optional else getattr(request, name):
            body[name] = getattr(request, name)
    if request.stop:
        body["stop"] = list(request.stop)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if not request.messages:
        return "/v1/completions", body
    if request.prompt:
        raise Problem("either messages or a prompt, not both", param="prompt")
    return "/v1/chat/completions", body | {
        "messages": [{"role": one.role, "content": one.content} for one in request.messages],
    }


def _integers(value: Any) -> Any:
    """A Struct knows no whole numbers: what is one becomes one again."""
    if isinstance(value, dict):
        return {name: _integers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_integers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole(text: str) -> str:
    """Half characters of a client's own text are no UTF-8, which a message must be."""
    return text.encode("utf-8", "replace").decode()


async def _refuse(context: Any, error: Refusal) -> None:
    import grpc

    told = problem(error)
    metadata: list[tuple[str, Any]] = [("error-bin", encoded(document(told)))]
    if isinstance(error, Busy):
        metadata.append(("retry-after", str(error.retry_after)))
    await context.abort(
        grpc.StatusCode[CODES.get(told.status, "INVALID_ARGUMENT")], str(told), tuple(metadata)
    )
