"""A model in a separate process: killed, cleaned up, restarted."""

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
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.serve.engine_thread.bridge import EngineBridge
from llmcli.serve.processes import supervised_process as child_module
from llmcli.serve.processes.front import FrontServer
from llmcli.serve.processes.supervised_process import SupervisedProcess
from tests.fixtures.server import CHAT, GREEDY
from tests.serve.processes.test_front import asked, talked


def chunks(sent: list[Any]) -> list[Any]:
    lines = b"".join(one.get("body", b"") for one in sent).decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def said(sent: list[Any]) -> list[str]:
    """What each of two answers says."""
    choices = [one["choices"][0] for one in chunks(sent)]
    return [
        "".join(one["delta"].get("content", "") for one in choices if one["index"] == index)
        for index in (0, 1)
    ]


@contextmanager
def stories_apart(path: Path) -> Iterator[tuple[EngineBridge, ServerSettings]]:
    """What the other process opens: it gets there by name."""
    options = RunOptions(ctx_size=512, threads=1, threads_batch=1)
    with (
        open_runner(path, options, template=CHAT, slots=4, gpu_layers=0) as runner,
        closing(EngineBridge(runner)) as bridge,
    ):
        yield bridge, ServerSettings(("tiny",), sampling=GREEDY)


@contextmanager
def refused() -> Iterator[tuple[EngineBridge, ServerSettings]]:
    raise UserError("no worker at a:1", hint="start it")
    yield


@pytest.fixture
def child(stories_gguf: Path) -> Iterator[SupervisedProcess]:
    made = SupervisedProcess(partial(stories_apart, stories_gguf), lambda text: None)
    made.start()
    with closing(made):
        yield made


def test_a_model_that_is_killed_comes_back(child: SupervisedProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "Once"}],
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
        "n": 2,
        "temperature": 1,
        "seed": 7,
    }
    short = json.dumps({**body, "max_tokens": 5, "stream": False, "n": 1}).encode()

    async def story() -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        made = FrontServer(child, ServerSettings(("tiny",)))
        unbroken = await asked(made, json.dumps(body).encode())
        seen: list[Any] = []
        parts = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            return parts.pop() if parts else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            seen.append(message)
            if len(seen) == 3:
                os.kill(child.pid, signal.SIGKILL)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [],
            "query_string": b"",
        }
        await made(scope, receive, send)
        return unbroken, seen, await asked(made, short), await talked(made, json.loads(short))

    unbroken, broken, again, talk = asyncio.run(story())
    first, second = said(unbroken), said(broken)
    assert second == first
    assert first[0] != first[1]
    assert len({one["id"] for one in chunks(broken)}) == 1
    assert broken[-1]["body"].endswith(b"data: [DONE]\n\n")
    assert again[0]["status"] == 200
    assert json.loads(again[1]["body"])["usage"]["completion_tokens"] == 5
    assert talk[0]["type"] == "websocket.accept"
    assert json.loads(talk[1]["text"])["data"]["usage"]["completion_tokens"] == 5


def test_whoever_asks_while_a_lost_model_is_buried_waits_for_the_next(
    child: SupervisedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end of the link is closed; the process itself, which may have gigabytes to free, is still
    there.
    """
    body = json.dumps({"messages": [{"role": "user", "content": "Once"}], "max_tokens": 5}).encode()

    async def story() -> list[Any]:
        made, closed, buried = (
            FrontServer(child, ServerSettings(("tiny",))),
            asyncio.Event(),
            asyncio.Event(),
        )
        end = child._wait_for_exit

        async def ending() -> str:
            closed.set()
            await buried.wait()
            return await end()

        monkeypatch.setattr(child, "_wait_for_exit", ending)
        assert await child.wait(30) == ""
        os.kill(child.pid, signal.SIGKILL)
        await closed.wait()
        answer = asyncio.create_task(asked(made, body))
        for _ in range(20):
            await asyncio.sleep(0)
        buried.set()
        return await answer

    assert asyncio.run(story())[0]["status"] == 200


def test_a_model_for_which_the_system_has_no_file_just_now_is_tried_again(
    child: SupervisedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, told = child.start, list[str]()
    monkeypatch.setattr(child_module, "RESTART_DELAYS_SECONDS", (0.0,))
    monkeypatch.setattr(child, "_note", told.append)

    def refused() -> None:
        monkeypatch.setattr(child, "start", start)
        raise OSError(errno.EMFILE, "Too many open files")

    async def story() -> list[Any]:
        assert await child.wait(30) == ""
        monkeypatch.setattr(child, "start", refused)
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not any("Too many open files" in text for text in told):
                await asyncio.sleep(0)
        return await asked(
            FrontServer(child, ServerSettings(("tiny",))),
            b'{"prompt": "Once", "max_tokens": 3}',
            path="/v1/completions",
        )

    assert asyncio.run(story())[0]["status"] == 200


def test_a_model_that_does_not_open_is_told_in_its_words() -> None:
    with (
        closing(SupervisedProcess(refused, lambda text: None)) as made,
        pytest.raises(UserError, match="no worker at a:1") as told,
    ):
        made.start()
    assert told.value.hint == "start it"
