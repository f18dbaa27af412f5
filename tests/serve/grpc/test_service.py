"""The gRPC service gives the same answers as the HTTP API."""

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from llmcli.errors import UserError
from llmcli.serve.grpc import service
from llmcli.serve.grpc.service import PROTO_FOLDER, SERVICE_NAME, require_grpc
from llmcli.serve.http import body_budget
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served
from tests.serve.http.routes.test_answer_control import (
    TEMPLATE,
    endless_thought,
    release_at_end,
)

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")

from llmcli.serve.grpc.service import message_classes  # noqa: E402

MESSAGE_CLASSES = message_classes() if PROTO_FOLDER.exists() else {}
KEY = (("authorization", "Bearer secret-key-1"),)


class Stub:
    """A client with a callable for each method, as protoc would generate it."""

    def __init__(self, channel: Any) -> None:
        for name in ("Generate", "Tokenize", "Embed", "Health"):
            make = channel.unary_stream if name == "Generate" else channel.unary_unary
            parse = MESSAGE_CLASSES[f"{name}Response"].FromString
            setattr(
                self,
                name,
                make(
                    f"/{SERVICE_NAME}/{name}",
                    request_serializer=MESSAGE_CLASSES[f"{name}Request"].SerializeToString,
                    response_deserializer=parse,
                ),
            )


@contextmanager
def open_stub(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{served.server.grpc_port}") as channel:
        yield Stub(channel)


def generate(**more: Any) -> Any:
    messages = [MESSAGE_CLASSES["Message"](**item) for item in HELLO]
    return MESSAGE_CLASSES["GenerateRequest"](**{"messages": messages, **more})


def test_the_descriptor_set_matches_the_proto_file(tmp_path: Path) -> None:
    source = re.sub(r"//.*", "", (PROTO_FOLDER / "llmcli.proto").read_text())
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", source, re.DOTALL):
        fields = {item.name: item.number for item in MESSAGE_CLASSES[name].DESCRIPTOR.fields}
        assert fields == {
            field: int(number) for field, number in re.findall(r"(\w+) = (\d+);", body)
        }, name
    assert set(MESSAGE_CLASSES) == set(re.findall(r"message (\w+)", source))
    protoc = pytest.importorskip("grpc_tools.protoc")
    compiled, include_folder = tmp_path / "made.binpb", Path(protoc.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTO_FOLDER}",
        f"-I{include_folder}",
        f"--descriptor_set_out={compiled}",
        "llmcli.proto",
    ]
    assert protoc.main(arguments) == 0
    assert compiled.read_bytes() == (PROTO_FOLDER / "llmcli.binpb").read_bytes()


def test_without_grpcio_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_grpc()
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UserError, match="gRPC needs grpcio") as caught:
        require_grpc()
    assert "llmcli[grpc]" in str(caught.value.hint)


def test_answers_equal_those_of_http(tiny_with_grpc: Served) -> None:
    served = tiny_with_grpc
    with client(served) as api:
        complete = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)
        vector = api.embeddings.create(
            model="tiny", input=["a cat", "a dog"], encoding_format="float"
        )
    with open_stub(served) as stub:
        pieces = list(stub.Generate(generate(max_tokens=12)))
        ids = stub.Tokenize(
            MESSAGE_CLASSES["TokenizeRequest"](text="a cat", add_special=True)
        ).tokens
        embedded = stub.Embed(MESSAGE_CLASSES["EmbedRequest"](texts=["a cat", "a dog"]))
        by_ids = stub.Embed(
            MESSAGE_CLASSES["EmbedRequest"](
                ids=[MESSAGE_CLASSES["Tokens"](tokens=ids)], dimensions=8
            )
        )
        health = stub.Health(MESSAGE_CLASSES["HealthRequest"]())
    assert "".join(item.text for item in pieces) == complete.choices[0].message.content
    assert [item.finish_reason for item in pieces if item.finish_reason] == ["length"]
    usage = pieces[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (complete.usage.prompt_tokens, 12)
    assert usage.cached_tokens > 0
    assert list(ids) == served.bridge.runner.embedder().encode("a cat")
    for item, data in zip(embedded.vectors, vector.data, strict=True):
        assert list(item.values) == pytest.approx(data.embedding, abs=1e-3)
    assert len(by_ids.vectors[0].values) == 8 and embedded.tokens == vector.usage.prompt_tokens
    assert health.serving and health.model == "tiny" and health.last_token_age_ms >= 0


def test_other_fields_are_passed_in_more(serve_grpc: Callable[..., Served]) -> None:
    with open_stub(serve_grpc()) as stub:
        pieces = list(
            stub.Generate(generate(more={"n": 2, "logprobs": True, "top_logprobs": 2}, stop=["l"]))
        )
        texts = ["".join(item.text for item in pieces if item.index == index) for index in (0, 1)]
        more_json = [json.loads(item.more_json) for item in pieces if item.more_json]
    assert texts == ["he", "he"]
    assert (
        all(len(item["logprobs"]["content"][0]["top_logprobs"]) == 2 for item in more_json)
        and more_json
    )


def test_a_prompt_is_continued(serve_grpc: Callable[..., Served]) -> None:
    with open_stub(serve_grpc()) as stub:
        pieces = list(
            stub.Generate(MESSAGE_CLASSES["GenerateRequest"](prompt="Once", max_tokens=3))
        )
    assert "".join(item.text for item in pieces) == "hel"
    assert pieces[-1].usage.completion_tokens == 3


def test_cancelling_a_call_cancels_its_answer(serve_grpc: Callable[..., Served]) -> None:
    served = serve_grpc(b"x" * 400)
    with open_stub(served) as stub:
        call = stub.Generate(generate())
        assert next(call).text == "x"
        call.cancel()
        assert "".join(item.text for item in stub.Generate(generate(max_tokens=5))) == "xxxxx"
        for _ in range(1000):
            if not stub.Health(MESSAGE_CLASSES["HealthRequest"]()).open:
                break
    assert served.bridge.n_open == 0


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"temperature": -1.0}, "INVALID_ARGUMENT", "temp"),
        ({"prompt": "a"}, "INVALID_ARGUMENT", "not both"),
        ({"more": {"n": 1000}}, "INVALID_ARGUMENT", "n must be"),
        (
            {"messages": [{"role": "user", "content": "x" * 600}]},
            "INVALID_ARGUMENT",
            "the context holds 512",
        ),
    ],
)
def test_errors_have_a_status_and_a_message(
    serve_grpc, request_: dict, status: str, message: str
) -> None:
    with open_stub(serve_grpc()) as stub, pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(generate(**request_)))
    assert refused.value.code().name == status
    assert message in refused.value.details()
    assert json.loads(dict(refused.value.trailing_metadata())["error-bin"])["error"]["message"]


def test_only_health_needs_no_key(serve_grpc: Callable[..., Served]) -> None:
    with open_stub(serve_grpc(keys=("secret-key-1",))) as stub:
        assert stub.Health(MESSAGE_CLASSES["HealthRequest"]()).serving
        for call in (
            lambda: list(stub.Generate(generate())),
            lambda: stub.Tokenize(MESSAGE_CLASSES["TokenizeRequest"]()),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "".join(item.text for item in stub.Generate(generate(), metadata=KEY)) == "hello"


def test_a_large_request_is_refused(serve_grpc: Callable[..., Served]) -> None:
    with open_stub(serve_grpc(max_body=2048)) as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(MESSAGE_CLASSES["TokenizeRequest"](text="x" * 4096))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


class CountingProxy:
    """A proxy for one connection to a server's port, which counts the bytes sent to the server."""

    def __init__(self, port: int) -> None:
        self.passed, self._port = 0, port
        self._changed = threading.Condition()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._listening, self._listening.accept()[0] as client_socket:
            with socket.create_connection(("127.0.0.1", self._port)) as include_folder:
                return_thread = threading.Thread(
                    target=self._pass, args=(include_folder, client_socket)
                )
                return_thread.start()
                self._pass(client_socket, include_folder)
                return_thread.join()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while raw := source.recv(1 << 16):
                target.sendall(raw)
                if target.getpeername()[1] == self._port:
                    with self._changed:
                        self.passed += len(raw)
                        self._changed.notify_all()
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait until the client has closed the connection."""
        self._thread.join(30)

    def wait(self, count: int) -> None:
        """Wait until `count` bytes were sent to the server."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.passed >= count, 30)


def hold_reading_slot(stub: Any, second_channel: Any, end: threading.Event) -> tuple[Any, Any]:
    """Open a call that sends no request until `end` is set, and wait until it occupies the only
    reading slot. Return this call and the error of a second call, which had to wait.
    """
    while True:
        slow = second_channel.stream_unary(f"/{SERVICE_NAME}/Tokenize").future(
            iter(lambda: None if end.wait() else b"", None)
        )
        # The server refuses the slow call if it arrives while a short call is being read.
        while not slow.done():
            short = stub.Tokenize.future(MESSAGE_CLASSES["TokenizeRequest"](text="x"))
            if error := short.exception(60):
                return slow, error


def test_flow_control_keeps_a_request_at_the_client(
    serve_grpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_READING_CALLS", 1)
    monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 0)
    served, end = serve_grpc(), threading.Event()
    large, address = (
        MESSAGE_CLASSES["TokenizeRequest"](text="x" * (1 << 20)),
        f"127.0.0.1:{served.server.grpc_port}",
    )
    with (
        closing(CountingProxy(served.server.grpc_port)) as proxy,
        open_stub(served) as stub,
        grpc.insecure_channel(address) as second_channel,
    ):
        slow, busy = hold_reading_slot(stub, second_channel, end)
        assert busy.code() == grpc.StatusCode.UNAVAILABLE
        monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 60)
        with grpc.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
            proxied = Stub(channel)
            waiting = proxied.Tokenize.future(large)
            proxy.wait(body_budget.SMALL_BODY_BYTES // 2)
            for _ in range(20):  # the server reads this connection
                assert proxied.Health(MESSAGE_CLASSES["HealthRequest"]()).serving
            assert proxy.passed < 4 * body_budget.SMALL_BODY_BYTES
            end.set()
            assert len(waiting.result(60).tokens) == 1 << 20
        with pytest.raises(grpc.RpcError) as refused:
            slow.result(60)
        assert "one request" in str(refused.value)


@pytest.fixture
def serve_grpc(serve: Callable[..., Served]) -> Callable[..., Served]:
    return lambda *reply, **settings: serve(*reply, grpc_port=0, **settings)


@pytest.fixture
def tiny_with_grpc(stories_runner: Any) -> Iterator[Served]:
    from tests.fixtures.server import serving

    with serving(stories_runner, grpc_port=0) as served:
        yield served


def test_the_thinking_of_a_call_is_ended_over_http(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    served = serve(endless_thought(released), template=TEMPLATE, n_ctx=4096, grpc_port=0)
    release_at_end(served, released, monkeypatch)
    with open_stub(served) as stub:
        call = stub.Generate(generate(more={"endless": True}), timeout=60)
        found = dict(call.initial_metadata())[service.ID_METADATA]
        first = next(call)  # the answer has begun
        body = {"id": found, "action": "reasoning_end"}
        ended = httpx.post(f"{served.v1}/chat/completions/control", json=body, timeout=60)
        assert ended.json()["success"] is True
        assert first.reasoning
        assert "yes" in "".join(answer.text for answer in call)
