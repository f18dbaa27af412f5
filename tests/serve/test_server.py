"""Clients that disconnect or read slowly, and servers that are stopped."""

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

import httpx2 as httpx
import openai
import pytest

from llmcli.api.server_settings import ServerSettings
from llmcli.errors import UserError
from llmcli.runtime.runner import Runner
from llmcli.serve import server
from llmcli.serve.engine_thread.bridge import EngineBridge
from tests.api.forms.test_openai_chat import HELLO, client
from tests.fixtures.event_loop import run_within
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


def wait_until_idle(served: Served) -> None:
    """Wait until the engine has no requests, then check its ledger."""

    async def wait() -> None:
        while served.bridge.n_open or await served.bridge.run_on_engine_thread(
            lambda: served.bridge.runner.engine.is_busy
        ):
            await asyncio.sleep(0)

    run_within(30, wait())
    served.bridge.runner.engine.ledger.check()


def send_request(served: Served, **more: object) -> socket.socket:
    """Open a connection and send a request over it."""
    connection = socket.create_connection(("127.0.0.1", served.settings.port))
    body = json.dumps({**LONG, **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def test_connections_use_tcp_nodelay(serve: Callable[..., Served]) -> None:
    served = serve()
    nodelay_options: list[int] = []

    async def read_options() -> None:
        for connection in served.server.server_state.connections:
            link = connection.transport.get_extra_info("socket")
            nodelay_options.append(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    with client(served) as api:
        api.models.list()
        loop = served.server.servers[0].get_loop()
        asyncio.run_coroutine_threadsafe(read_options(), loop).result(30)
    assert nodelay_options
    assert all(nodelay_options)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_cancels_the_answer(serve: Callable[..., Served], stream: bool) -> None:
    decoding = threading.Event()
    context = FakeContext(
        n_ctx=200_000, n_seq_max=4, before=lambda number: decoding.set() if number > 3 else None
    )
    served = serve(context=context)
    with send_request(served, stream=stream):
        assert decoding.wait(30)
    wait_until_idle(served)
    assert len(context.batches) < 100_000


def test_a_disconnect_cancels_the_prompt(
    serve: Callable[..., Served],
) -> None:
    reached, disconnected = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 2:
            reached.set()
            assert disconnected.wait(30)

    context = FakeContext(n_ctx=200_000, n_seq_max=4, n_batch=64, before=before)
    served = serve(context=context)
    with send_request(served, messages=[{"role": "user", "content": "x" * 50_000}]):
        assert reached.wait(30)
    disconnected.set()
    wait_until_idle(served)
    assert len(context.batches) < 50_000 // 64


def test_a_disconnect_cancels_a_waiting_request(serve: Callable[..., Served]) -> None:
    served = serve(b"y" * 500, parallel=1, n_ctx=2000, n_seq_max=1)
    with client(served) as api, api.chat.completions.create(**STREAM, max_tokens=400) as first:
        assert next(iter(first))
        send_request(served).close()
        assert sum(1 for _ in first) > 100
    wait_until_idle(served)


def test_a_slow_reader_does_not_delay_others(serve: Callable[..., Served]) -> None:
    served = serve(b"z" * 600, n_ctx=5000)
    slow = send_request(served, max_tokens=500)
    with client(served) as api:
        for _ in range(3):
            found = api.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20)
            assert found.choices[0].message.content == "z" * 20
    received = b""
    while b"[DONE]" not in received[-100:]:
        received += slow.recv(1 << 16)
    slow.close()
    assert received.count(b'"content":"z"') == 500
    wait_until_idle(served)


def test_a_running_stream_finishes_while_the_server_stops(serve: Callable[..., Served]) -> None:
    served = serve(b"w" * 400, n_ctx=2000)
    with client(served) as api, api.chat.completions.create(**STREAM, max_tokens=300) as stream:
        chunks = iter(stream)
        next(chunks)
        served.server.handle_exit(signal.SIGTERM, None)
        assert sum(len(chunk.choices[0].delta.content or "") for chunk in chunks) == 300
    served.thread.join(30)  # the stream may end before the server has seen the signal
    with pytest.raises(openai.APIConnectionError), client(served) as api:
        api.models.list()


def test_a_second_signal_cancels_running_answers(serve: Callable[..., Served]) -> None:
    served = serve(n_ctx=200_000, drain=30)
    connection = http.client.HTTPConnection("127.0.0.1", served.settings.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(LONG).encode())
    answer = connection.getresponse()
    answer.readline()
    served.server.handle_exit(signal.SIGTERM, None)
    served.server.handle_exit(signal.SIGTERM, None)
    with suppress(http.client.IncompleteRead, ConnectionError):  # the response is cut off
        assert b"[DONE]" not in answer.read()
    connection.close()


def test_an_engine_error_stops_the_server_and_is_raised() -> None:
    def fail(number: int) -> None:
        raise ZeroDivisionError("a bug")

    def serve_and_fail() -> None:
        with serving(fake_runner(context=FakeContext(before=fail), template=CHAT)) as served:
            on_engine_death, ended = served.bridge.on_engine_death, threading.Event()
            served.bridge.on_engine_death = lambda: (on_engine_death(), ended.set())
            connection = http.client.HTTPConnection("127.0.0.1", served.settings.port, timeout=30)
            connection.request(
                "POST", "/v1/chat/completions", json.dumps({**LONG, "stream": False}).encode()
            )
            assert connection.getresponse().status == 500
            connection.close()
            assert ended.wait(30)
            assert served.server.should_exit

    with pytest.raises(ZeroDivisionError):
        serve_and_fail()


def test_the_command_serves_until_its_answers_are_finished(stories_gguf: Path, home: Path) -> None:
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
        with openai.OpenAI(base_url=f"{ready['url']}/v1", api_key="x", max_retries=0) as api:
            stream = api.completions.create(
                model="tiny",
                prompt="Once",
                max_tokens=200,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            chunks = iter(stream)
            next(chunks)
            process.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


def test_several_addresses_are_served_with_one_port(stories_runner: Runner) -> None:
    try:
        with server.open_listeners(("127.0.0.1", "::1"), 0) as listeners:
            ports = {listener.getsockname()[1] for listener in listeners}
            assert len(listeners) == 2 and len(ports) == 1
            (port,) = ports
            settings = ServerSettings(
                ("tiny",), host="127.0.0.1", further_hosts=("::1",), port=port
            )
            bridge = EngineBridge(stories_runner)
            http_server = server.HttpServer(bridge, settings, lambda: None)
            thread = threading.Thread(target=http_server.run, args=(listeners,))
            thread.start()
            try:
                for host in settings.hosts:
                    url = f"{server.server_url(settings, host)}/health"
                    assert httpx.get(url).status_code == 200
            finally:
                http_server.should_exit = True
                thread.join(30)
                bridge.close()
    except UserError as error:
        if "::1" not in str(error):
            raise
        pytest.skip("this machine has no IPv6")


def test_endpoints_can_be_switched_off(serve: Callable[..., Served]) -> None:
    paths = (("/metrics", "--metrics"), ("/slots", "--slots"), ("/", "--ui"))
    served = serve(disabled_paths=paths)
    for path, status in (("/metrics", 501), ("/slots", 501), ("/v1/slots", 501), ("/", 404)):
        response = httpx.get(served.url + path)
        assert response.status_code == status, path
        assert "start it with --" in response.json()["error"]["message"]
    assert httpx.get(serve().url + "/metrics").status_code == 200
