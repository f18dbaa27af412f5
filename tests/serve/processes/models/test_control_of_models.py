"""The thinking of a running answer is ended in a real server of several models."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from llmcli.config import load_config
from quant.convert import checkpoint_source
from quant.quantize import plan, write
from tests.serve.processes.models.test_several_models import KEY, SECONDS, Server, serving

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)
CHAT, CONTROL = "/v1/chat/completions", "/v1/chat/completions/control"
BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "endless": True,  # so that the thinking does not end by itself soon
    "stream": True,
    "max_tokens": 12000,
    "temperature": 0,
}


@pytest.fixture
def table(stories: Path, tmp_path: Path) -> None:
    """Two models that think, in [serve]."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(stories, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.gguf"
        source = checkpoint_source.open_checkpoint(folder)
        write.write_model(plan.plan_quantization(source, "F32"), path, threads=1)
        lines.append(f'[serve."{name}"]\nref = "{path}"\nctx_size = 16384\n')
    catalog = load_config().user_catalog
    catalog.parent.mkdir(parents=True, exist_ok=True)
    catalog.write_text("".join(lines))


def chunks(server: Server, model: str) -> Iterator[dict[str, Any]]:
    with server.api.stream("POST", CHAT, json={**BODY, "model": model}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def has_reply(chunk: dict[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in chunk["choices"])


def is_thinking(chunk: dict[str, Any]) -> bool:
    return any(choice["delta"].get("reasoning_content") for choice in chunk["choices"])


def test_only_the_named_answer_of_two_models_stops_thinking(table: None) -> None:
    with serving() as server:
        for name in ("one", "two"):
            assert server.api.post("/models/load", json={"model": name}).json()["success"]
        one, two = chunks(server, "one"), chunks(server, "two")
        first = next(chunk for chunk in one if is_thinking(chunk))
        other = next(chunk for chunk in two if is_thinking(chunk))
        body = {"id": first["id"], "action": "reasoning_end"}
        ended = server.api.post(CONTROL, json=body)
        assert (ended.status_code, ended.json()["success"]) == (200, True)
        assert any(has_reply(chunk) for chunk in one)
        ended = server.api.post(CONTROL, json={**body, "id": other["id"]})
        assert ended.json()["success"] is True  # it was still thinking
        assert any(has_reply(chunk) for chunk in two)
        one.close()
        two.close()

        # a message on a socket needs no id of the response
        address = f"{server.url.replace('http', 'ws', 1)}/v1/ws"
        headers = {"authorization": f"Bearer {KEY}"}
        with connect(address, additional_headers=headers, max_queue=None) as socket:
            request = {"id": "a", "path": CHAT, "body": {**BODY, "model": "two"}}
            socket.send(json.dumps(request))
            socket.send(json.dumps({"id": "a", "action": "reasoning_end"}))
            messages = [json.loads(socket.recv(timeout=SECONDS))]
            while "control" not in messages[-1]:
                messages.append(json.loads(socket.recv(timeout=SECONDS)))
            assert messages[-1]["control"] == {"action": "reasoning_end", "success": True}
            while not ("data" in messages[-1] and has_reply(messages[-1]["data"])):
                messages.append(json.loads(socket.recv(timeout=SECONDS)))
