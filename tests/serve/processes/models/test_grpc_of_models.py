"""gRPC of a real server of several models: a call names its model, which is loaded for it."""

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.serve.processes.models.test_several_models import KEY, LIMIT, SECONDS, serving, table

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")

from tests.serve.grpc.test_service import MESSAGE_CLASSES, Stub  # noqa: E402

__all__ = ["table"]  # a fixture
METADATA = (("authorization", f"Bearer {KEY}"),)


def call(method: Any, name: str, **fields: Any) -> Any:
    request = MESSAGE_CLASSES[f"{name}Request"](**fields)
    return method(request, metadata=METADATA, timeout=SECONDS)


def test_calls_name_their_model(table: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # free when the server listens
    with serving("--grpc-port", str(port), "--memory-limit", LIMIT) as server:
        with grpc.insecure_channel(f"127.0.0.1:{server.ready['grpc_port']}") as channel:
            stub: Any = Stub(channel)
            prompt = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0.0}
            for name in ("one", "two"):
                answers = list(call(stub.Generate, "Generate", model=name, **prompt))
                assert "".join(answer.text for answer in answers) == server.text(name)
                assert answers[-1].usage.completion_tokens == 12
                assert server.models()[f"{name}:260k"]["state"] == "loaded"
            tokens = call(stub.Tokenize, "Tokenize", text="Once upon", model="two").tokens
            found = server.api.post("/tokenize", json={"content": "Once upon", "model": "two"})
            assert list(tokens) == found.json()["tokens"] != []
            health = call(stub.Health, "Health")
            assert (health.serving, health.model) == (True, "")

            for method, name, fields in (
                (stub.Generate, "Generate", prompt),
                (stub.Embed, "Embed", {"texts": ["x"]}),
                (stub.Tokenize, "Tokenize", {"text": "x"}),
            ):
                ask: Any = next if name == "Generate" else bool
                with pytest.raises(grpc.RpcError) as refused:
                    ask(call(method, name, model="three", **fields))
                assert refused.value.code() == grpc.StatusCode.NOT_FOUND
                assert "there is no model 'three'" in refused.value.details()
            with pytest.raises(grpc.RpcError) as refused:
                stub.Tokenize(MESSAGE_CLASSES["TokenizeRequest"](text="x", model="one"))
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert server.models()["one:260k"]["state"] == "here"
