"""Clients that disconnect or do not read, and servers that are stopped."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.fakes import FakeContext, fake_runner
from tests.fixtures.server import CHAT, Served, serving

LONG = {
    "model": "tiny",
    "messages": HELLO,
    "max_tokens": 100_000,
    "ignore_eos": True,
    "stream": True,
}
STREAM = {"model": "tiny", "messages": HELLO, "stream": True, "extra_body": {"ignore_eos": True}}
ROOT = Path(__file__).parents[2]


def idle(served: Served) -> None:
    """Wait until nothing is asked of the engine, and look at its books."""

    async def wait() -> None:
        while served.bridge.n_open or await served.bridge.run_on_engine_thread(
            lambda: served.bridge.runner.engine.is_busy
        ):
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(wait(), 30))
    served.bridge.runner.engine.ledger.check()


def begun(served: Served, **more: object) -> socket.socket:
    """A connection on which a request was sent."""
    connection = socket.create_connection(("127.0.0.1", served.settings.port))
    body = json.dumps({**LONG, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_small_pieces_go_out_at_once(serve: Callable[..., Served]) -> None:
    served = serve()
    taken: list[int] = []

    async def look() -> None:
        for connection in served.server.server_state.connections:
            link = connection.transport.get_extra_info("socket")
            taken.append(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    with client(served) as asked:
        asked.models.list()
        loop = served.server.servers[0].get_loop()
        asyncio.run_coroutine_threadsafe(look(), loop).result(30)
    assert taken
    assert all(taken)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_the_engine(
    serve: Callable[..., Served], stream: bool
) -> None:
    passed = threading.Event()
    context = FakeContext(
        n_ctx=200_000, n_seq_max=4, before=lambda number: passed.set() if number > 3 else None
    )
    served = serve(context=context)
    with begun(served, stream=stream):
        assert passed.wait(30)
    idle(served)
    assert len(context.batches) < 100_000


def test_a_client_that_vanishes_while_its_prompt_is_computed_frees_the_engine(
    serve: Callable[..., Served],
) -> None:
    reached, gone = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 2:
            reached.set()
            assert gone.wait(30)

    context = FakeContext(n_ctx=200_000, n_seq_max=4, n_batch=64, before=before)
    served = serve(context=context)
    with begun(served, messages=[{"role": "user", "content": "x" * 50_000}]):
        assert reached.wait(30)
    gone.set()
    idle(served)
    assert len(context.batches) < 50_000 // 64


def test_a_client_that_vanishes_from_the_queue_is_forgotten(serve: Callable[..., Served]) -> None:
    served = serve(b"y" * 500, parallel=1, n_ctx=2000, n_seq_max=1)
    with client(served) as asked, asked.chat.completions.create(**STREAM, max_tokens=400) as first:
        assert next(iter(first))
        begun(served).close()
        assert sum(1 for _ in first) > 100
    idle(served)


def test_who_reads_slowly_holds_up_nobody(serve: Callable[..., Served]) -> None:
    served = serve(b"z" * 600, n_ctx=5000)
    slow = begun(served, max_tokens=500)
    with client(served) as asked:
        for _ in range(3):
            found = asked.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20)
            assert found.choices[0].message.content == "z" * 20
    read = b""
    while b"[DONE]" not in read[-100:]:
        read += slow.recv(1 << 16)
    slow.close()
    assert read.count(b'"content":"z"') == 500
    idle(served)


def test_what_a_stream_begins_while_the_server_stops_it_ends(serve: Callable[..., Served]) -> None:
    served = serve(b"w" * 400, n_ctx=2000)
    with client(served) as asked, asked.chat.completions.create(**STREAM, max_tokens=300) as stream:
        parts = iter(stream)
        next(parts)
        served.server.handle_exit(signal.SIGTERM, None)
        assert sum(len(one.choices[0].delta.content or "") for one in parts) == 300
    served.thread.join(30)  # a stream may be over before the server has looked for a signal
    with pytest.raises(openai.APIConnectionError), client(served) as asked:
        asked.models.list()


def test_a_second_signal_ends_what_runs_and_says_so(serve: Callable[..., Served]) -> None:
    served = serve(n_ctx=200_000, drain=30)
    connection = http.client.HTTPConnection("127.0.0.1", served.settings.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(LONG).encode())
    answer = connection.getresponse()
    answer.readline()
    served.server.handle_exit(signal.SIGTERM, None)
    served.server.handle_exit(signal.SIGTERM, None)
    with suppress(http.client.IncompleteRead, ConnectionError):  # cut, which is what was asked for
        assert b"[DONE]" not in answer.read()
    connection.close()


def test_a_server_whose_engine_died_leaves_and_tells_of_what() -> None:
    def fail(number: int) -> None:
        raise ZeroDivisionError("a bug")

    def ask() -> None:
        with serving(fake_runner(context=FakeContext(before=fail), template=CHAT)) as served:
            end, ended = served.bridge.on_engine_death, threading.Event()
            served.bridge.on_engine_death = lambda: (end(), ended.set())
            connection = http.client.HTTPConnection("127.0.0.1", served.settings.port, timeout=30)
            connection.request(
                "POST", "/v1/chat/completions", json.dumps({**LONG, "stream": False}).encode()
            )
            assert connection.getresponse().status == 500
            connection.close()
            assert ended.wait(30)
            assert served.server.should_exit

    with pytest.raises(ZeroDivisionError):
        ask()


def test_the_command_serves_drains_and_leaves(stories_gguf: Path, home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "llmcli.app",
        "serve",
        str(stories_gguf),
        "--port",
        "0",
        "--json",
        "-t",
        "1",
        "-a",
        "tiny",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = json.loads(process.stdout.readline())
        with openai.OpenAI(base_url=f"{ready['url']}/v1", api_key="x", max_retries=0) as asked:
            stream = asked.completions.create(
                model="tiny",
                prompt="Once",
                max_tokens=200,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            parts = iter(stream)
            next(parts)
            process.send_signal(signal.SIGTERM)
            assert [one.choices[0].finish_reason for one in parts][-1] == "length"
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
