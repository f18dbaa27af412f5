"""The gRPC service gives the same answers as HTTP."""

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from llmcli.errors import UserError
from llmcli.serve.grpc import service
from llmcli.serve.grpc.service import PROTO_FOLDER, SERVICE_NAME, require_grpc
from llmcli.serve.http import body_budget
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.server import Served

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")

from llmcli.serve.grpc.service import message_classes  # noqa: E402

KIND = message_classes() if PROTO_FOLDER.exists() else {}
KEY = (("authorization", "Bearer secret-key-1"),)


class Stub:
    """What a generated client is: a callable for each method."""

    def __init__(self, channel: Any) -> None:
        for name in ("Generate", "Tokenize", "Embed", "Health"):
            make = channel.unary_stream if name == "Generate" else channel.unary_unary
            parse = KIND[f"{name}Response"].FromString
            setattr(
                self,
                name,
                make(
                    f"/{SERVICE_NAME}/{name}",
                    request_serializer=KIND[f"{name}Request"].SerializeToString,
                    response_deserializer=parse,
                ),
            )


@contextmanager
def talking(served: Served) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{served.server.grpc_port}") as channel:
        yield Stub(channel)


def generate(**more: Any) -> Any:
    said = [KIND["Message"](**one) for one in HELLO]
    return KIND["GenerateRequest"](**{"messages": said, **more})


def test_the_compiled_file_says_what_the_source_says(tmp_path: Path) -> None:
    source = re.sub(r"//.*", "", (PROTO_FOLDER / "llmcli.proto").read_text())
    for name, body in re.findall(r"message (\w+) \{(.*?)\}", source, re.DOTALL):
        fields = {one.name: one.number for one in KIND[name].DESCRIPTOR.fields}
        assert fields == {
            field: int(number) for field, number in re.findall(r"(\w+) = (\d+);", body)
        }, name
    assert set(KIND) == set(re.findall(r"message (\w+)", source))
    protoc = pytest.importorskip("grpc_tools.protoc")
    made, theirs = tmp_path / "made.binpb", Path(protoc.__file__).parent / "_proto"
    words = [
        "protoc",
        f"-I{PROTO_FOLDER}",
        f"-I{theirs}",
        f"--descriptor_set_out={made}",
        "llmcli.proto",
    ]
    assert protoc.main(words) == 0
    assert made.read_bytes() == (PROTO_FOLDER / "llmcli.binpb").read_bytes()


def test_without_grpcio_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_grpc()
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UserError, match="gRPC needs grpcio") as told:
        require_grpc()
    assert "llmcli[grpc]" in str(told.value.hint)


def test_it_says_what_http_says(tiny_with_grpc: Served) -> None:
    served = tiny_with_grpc
    with client(served) as asked:
        whole = asked.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)
        vector = asked.embeddings.create(
            model="tiny", input=["a cat", "a dog"], encoding_format="float"
        )
    with talking(served) as stub:
        pieces = list(stub.Generate(generate(max_tokens=12)))
        ids = stub.Tokenize(KIND["TokenizeRequest"](text="a cat", add_special=True)).tokens
        found = stub.Embed(KIND["EmbedRequest"](texts=["a cat", "a dog"]))
        by_ids = stub.Embed(KIND["EmbedRequest"](ids=[KIND["Tokens"](tokens=ids)], dimensions=8))
        health = stub.Health(KIND["HealthRequest"]())
    assert "".join(one.text for one in pieces) == whole.choices[0].message.content
    assert [one.finish_reason for one in pieces if one.finish_reason] == ["length"]
    usage = pieces[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 12)
    assert usage.cached_tokens > 0
    assert list(ids) == served.bridge.runner.embedder().encode("a cat")
    for one, data in zip(found.vectors, vector.data, strict=True):
        assert list(one.values) == pytest.approx(data.embedding, abs=1e-3)
    assert len(by_ids.vectors[0].values) == 8 and found.tokens == vector.usage.prompt_tokens
    assert health.serving and health.model == "tiny" and health.last_token_age_ms >= 0


def test_other_fields_travel_as_they_are(serve_grpc: Callable[..., Served]) -> None:
    with talking(serve_grpc()) as stub:
        pieces = list(
            stub.Generate(generate(more={"n": 2, "logprobs": True, "top_logprobs": 2}, stop=["l"]))
        )
        texts = ["".join(one.text for one in pieces if one.index == index) for index in (0, 1)]
        known = [json.loads(one.more_json) for one in pieces if one.more_json]
    assert texts == ["he", "he"]
    assert all(len(one["logprobs"]["content"][0]["top_logprobs"]) == 2 for one in known) and known


def test_a_prompt_is_continued(serve_grpc: Callable[..., Served]) -> None:
    with talking(serve_grpc()) as stub:
        pieces = list(stub.Generate(KIND["GenerateRequest"](prompt="Once", max_tokens=3)))
    assert "".join(one.text for one in pieces) == "hel"
    assert pieces[-1].usage.completion_tokens == 3


def test_a_call_that_is_cancelled_ends_its_answer(serve_grpc: Callable[..., Served]) -> None:
    served = serve_grpc(b"x" * 400)
    with talking(served) as stub:
        call = stub.Generate(generate())
        assert next(call).text == "x"
        call.cancel()
        assert "".join(one.text for one in stub.Generate(generate(max_tokens=5))) == "xxxxx"
        for _ in range(1000):
            if not stub.Health(KIND["HealthRequest"]()).open:
                break
    assert served.bridge.n_open == 0


@pytest.mark.parametrize(
    ("request_", "status", "told"),
    [
        ({"model": "other"}, "NOT_FOUND", "not served here"),
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
def test_what_is_wrong_has_a_status_and_words(
    serve_grpc, request_: dict, status: str, told: str
) -> None:
    with talking(serve_grpc()) as stub, pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(generate(**request_)))
    assert refused.value.code().name == status
    assert told in refused.value.details()
    assert json.loads(dict(refused.value.trailing_metadata())["error-bin"])["error"]["message"]


def test_a_key_is_needed_but_for_health(serve_grpc: Callable[..., Served]) -> None:
    with talking(serve_grpc(keys=("secret-key-1",))) as stub:
        assert stub.Health(KIND["HealthRequest"]()).serving
        for call in (
            lambda: list(stub.Generate(generate())),
            lambda: stub.Tokenize(KIND["TokenizeRequest"]()),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert "".join(one.text for one in stub.Generate(generate(), metadata=KEY)) == "hello"


def test_what_is_too_large_is_refused(serve_grpc: Callable[..., Served]) -> None:
    with talking(serve_grpc(max_body=2048)) as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(KIND["TokenizeRequest"](text="x" * 4096))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


class Between:
    """A proxy before a server's port that counts what it passes on to it; of one connection."""

    def __init__(self, port: int) -> None:
        self.passed, self._port = 0, port
        self._changed = threading.Condition()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._listening, self._listening.accept()[0] as ours:
            with socket.create_connection(("127.0.0.1", self._port)) as theirs:
                back = threading.Thread(target=self._pass, args=(theirs, ours))
                back.start()
                self._pass(ours, theirs)
                back.join()

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
        """Wait for its end, which is the client's."""
        self._thread.join(30)

    def wait(self, count: int) -> None:
        """Until so many bytes went to the server."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.passed >= count, 30)


def hold_reading_turn(stub: Any, other: Any, end: threading.Event) -> tuple[Any, Any]:
    """Open a call that sends its head and no request until `end`, and wait until it occupies the
    only reading turn. Return the call and the error of a second call.
    """
    while True:
        slow = other.stream_unary(f"/{SERVICE_NAME}/Tokenize").future(
            iter(lambda: None if end.wait() else b"", None)
        )
        # The server refuses the slow call if it arrives while a short call is being read.
        while not slow.done():
            short = stub.Tokenize.future(KIND["TokenizeRequest"](text="x"))
            if error := short.exception(60):
                return slow, error


def test_a_request_stays_with_its_client_until_it_is_read(
    serve_grpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_READING_CALLS", 1)
    monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 0)
    served, end = serve_grpc(), threading.Event()
    large, address = (
        KIND["TokenizeRequest"](text="x" * (1 << 20)),
        f"127.0.0.1:{served.server.grpc_port}",
    )
    with (
        closing(Between(served.server.grpc_port)) as between,
        talking(served) as stub,
        grpc.insecure_channel(address) as other,
    ):
        slow, busy = hold_reading_turn(stub, other, end)
        assert busy.code() == grpc.StatusCode.UNAVAILABLE
        monkeypatch.setattr(body_budget, "RESERVE_SECONDS", 60)
        with grpc.insecure_channel(f"127.0.0.1:{between.port}") as channel:
            through = Stub(channel)
            waiting = through.Tokenize.future(large)
            between.wait(body_budget.SMALL_BODY_BYTES // 2)
            for _ in range(20):  # the server reads this connection
                assert through.Health(KIND["HealthRequest"]()).serving
            assert between.passed < 4 * body_budget.SMALL_BODY_BYTES
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
