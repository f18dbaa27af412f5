"""A model in a separate process is restarted when it is killed."""

import asyncio
import errno
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmcli.api.server_settings import ServerSettings
from llmcli.errors import UserError
from llmcli.runtime.binding.placement.model_placement import ON_HOST
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.engine_thread.engine_watch import EngineStuck
from llmcli.serve.processes import supervised_process as child_module
from llmcli.serve.processes.front import FrontServer
from llmcli.serve.processes.supervised_process import SupervisedProcess
from tests.fixtures.server import CHAT, GREEDY
from tests.serve.processes.test_front import run_request, run_websocket


def chunks(sent: list[Any]) -> list[Any]:
    lines = b"".join(item.get("body", b"") for item in sent).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def answer_texts(sent: list[Any]) -> list[str]:
    """Return the texts of both answers of a stream."""
    choices = [item["choices"][0] for item in chunks(sent)]
    return [
        "".join(item["delta"].get("content") or "" for item in choices if item["index"] == index)
        for index in (0, 1)
    ]


@contextmanager
def open_stories_model(path: Path) -> Iterator[tuple[EngineBridge, ServerSettings]]:
    """Open the model in the other process. The function is pickled by name, so it is at module
    level.
    """
    options = RunOptions(ctx_size=512, threads=1, threads_batch=1)
    with (
        open_runner(path, options, template=CHAT, slots=4, placement=ON_HOST) as runner,
        closing(EngineBridge(runner)) as bridge,
    ):
        yield bridge, ServerSettings(("tiny",), sampling=GREEDY)


@contextmanager
def fail_to_open() -> Iterator[tuple[EngineBridge, ServerSettings]]:
    raise UserError("no worker at a:1", hint="start it")
    yield


@contextmanager
def open_stuck_model(path: Path) -> Iterator[tuple[EngineBridge, ServerSettings]]:
    """Open the model in the other process, where its engine counts as stuck."""

    def check_responsive() -> None:
        raise EngineStuck("the engine has been working on 512 rows for 9 s")

    with open_stories_model(path) as (bridge, settings):
        bridge.check_responsive = check_responsive  # type: ignore[method-assign]
        yield bridge, settings


def test_a_process_whose_engine_is_stuck_is_killed(stories_gguf: Path) -> None:
    notes: list[str] = []

    async def scenario() -> None:
        process.supervise()
        async with asyncio.timeout(60):
            while not notes:
                await asyncio.sleep(0.01)

    with closing(
        SupervisedProcess(partial(open_stuck_model, stories_gguf), notes.append)
    ) as process:
        process.start()
        first_pid = process.pid
        asyncio.run(scenario())
    assert "the engine has been working on 512 rows for 9 s" in notes[0]
    with pytest.raises(ProcessLookupError):
        os.kill(first_pid, 0)


@pytest.fixture
def child(stories_gguf: Path) -> Iterator[SupervisedProcess]:
    process = SupervisedProcess(partial(open_stories_model, stories_gguf), lambda text: None)
    process.start()
    with closing(process):
        yield process


def test_a_killed_model_is_restarted_and_its_stream_resumed(child: SupervisedProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "Once"}],
        # A resumed prompt is read in one batch, whose logits differ in the last bits. In a short
        # answer at a low temperature they choose the same tokens.
        "max_tokens": 60,
        "stream": True,
        "ignore_eos": True,
        "n": 2,
        "temperature": 0.3,
        "seed": 7,
    }
    short = json.dumps({**body, "max_tokens": 5, "stream": False, "n": 1}).encode()

    async def scenario() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        server = FrontServer(child, ServerSettings(("tiny",)))
        unbroken = await run_request(server, json.dumps(body).encode())
        broken_messages: list[Any] = []
        unread_messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return unread_messages.pop() if unread_messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            broken_messages.append(message)
            if len(broken_messages) == 3:
                os.kill(child.pid, signal.SIGKILL)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "query_string": b"",
        }
        await server(scope, receive, send)
        return (
            unbroken,
            broken_messages,
            await run_request(server, short),
            await run_websocket(server, json.loads(short)),
        )

    unbroken, broken, short_response, websocket_messages = asyncio.run(scenario())
    first, second = answer_texts(unbroken), answer_texts(broken)
    assert second == first
    assert first[0] != first[1]
    assert len({item["id"] for item in chunks(broken)}) == 1
    assert broken[-1]["body"].endswith(b"data: [DONE]\n\n")
    assert short_response[0]["status"] == 200
    assert json.loads(short_response[1]["body"])["usage"]["completion_tokens"] == 5
    assert websocket_messages[0]["type"] == "websocket.accept"
    assert json.loads(websocket_messages[1]["text"])["data"]["usage"]["completion_tokens"] == 5


def test_a_request_waits_for_the_next_process(
    child: SupervisedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old process has closed its socket but not ended yet, because it frees its memory."""
    body = json.dumps({"messages": [{"role": "user", "content": "Once"}], "max_tokens": 5}).encode()

    async def scenario() -> list[Any]:
        server, closed, may_exit = (
            FrontServer(child, ServerSettings(("tiny",))),
            asyncio.Event(),
            asyncio.Event(),
        )
        wait_for_exit = child._wait_for_exit

        async def delayed_wait_for_exit() -> str:
            closed.set()
            await may_exit.wait()
            return await wait_for_exit()

        monkeypatch.setattr(child, "_wait_for_exit", delayed_wait_for_exit)
        assert await child.wait(30) == ""
        os.kill(child.pid, signal.SIGKILL)
        await closed.wait()
        answer = asyncio.create_task(run_request(server, body))
        for _ in range(20):
            await asyncio.sleep(0)
        may_exit.set()
        return await answer

    assert asyncio.run(scenario())[0]["status"] == 200


def test_a_restart_without_free_files_is_tried_again(
    child: SupervisedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, notes = child.start, list[str]()
    monkeypatch.setattr(child_module, "RESTART_DELAYS_SECONDS", (0.0,))
    monkeypatch.setattr(child, "_note", notes.append)

    def fail_to_open() -> None:
        monkeypatch.setattr(child, "start", start)
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> list[Any]:
        assert await child.wait(30) == ""
        monkeypatch.setattr(child, "start", fail_to_open)
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not any("Too many open files" in text for text in notes):
                await asyncio.sleep(0)
        return await run_request(
            FrontServer(child, ServerSettings(("tiny",))),
            b'{"prompt": "Once", "max_tokens": 3}',
            path="/v1/completions",
        )

    assert asyncio.run(scenario())[0]["status"] == 200


def test_an_error_of_the_model_process_is_raised() -> None:
    with (
        closing(SupervisedProcess(fail_to_open, lambda text: None)) as process,
        pytest.raises(UserError, match="no worker at a:1") as notes,
    ):
        process.start()
    assert notes.value.hint == "start it"
