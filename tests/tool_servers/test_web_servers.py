"""Hostile tool servers over HTTP: each failure is a text, and the other calls go on."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from llmcli.tool_servers import server_pool
from llmcli.tool_servers.limits import ToolLimits
from llmcli.tool_servers.server_file import ToolServer
from llmcli.tool_servers.server_pool import ToolServers
from llmcli.tool_servers.tool_result import ToolResult
from tests.fixtures import hostile_web_server as hostile
from tests.fixtures.hostile_web_server import Act, HostileWebServer, serve_web

pytest.importorskip("mcp", reason="needs the extra mcp: pip install 'llmcli[mcp]'")

Open = Callable[..., tuple[ToolServers, HostileWebServer]]
LONG = 240.0  # seconds that no test needs
LIMITS = {"start_seconds": LONG, "call_seconds": LONG}
SHORT = 0.5  # seconds after which a server that hangs is given up
NEVER = "no result within 0.5 s"


@pytest.fixture
def open_web() -> Iterator[Open]:
    """Return a function that starts a server with acts and connects to it."""
    with ExitStack() as stack:

        def open_(
            limits: dict[str, float] | None = None, **acts: Act
        ) -> tuple[ToolServers, HostileWebServer]:
            server = stack.enter_context(serve_web(**acts))
            tool_server = ToolServer("web", url=server.url, headers={"Authorization": "Bearer KEY"})
            all_limits = ToolLimits(**{**LIMITS, **(limits or {})})  # type: ignore[arg-type]
            return stack.enter_context(ToolServers([tool_server], all_limits)), server

        yield open_


def call(servers: ToolServers, name: str) -> ToolResult:
    return servers.call(next(tool for tool in servers.tools if tool.name == name), {})


def call_echo(servers: ToolServers) -> ToolResult:
    """Call "echo". Repeat a call that a busy machine did not answer within SHORT."""
    deadline = time.monotonic() + LONG
    while (result := call(servers, "echo")).text == NEVER and time.monotonic() < deadline:
        pass
    return result


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (hostile.hangs, "it did not answer within 0.5 s"),
        (hostile.hangs_in_the_head, "it did not answer within 0.5 s"),
        (hostile.hangs_in_an_event, "it did not answer within 0.5 s"),
        (hostile.drops_the_connection, "disconnected"),
        (hostile.speaks_no_http, "disconnected"),
        (hostile.sends_an_endless_head, "Receive buffer too long"),
        (hostile.sends_html, "Unexpected content type: text/html; charset=utf-8"),
        (hostile.sends_endless_html, "Unexpected content type: text/html"),
        (hostile.sends_an_odd_content_type, "Unexpected content type: application/xxx"),
        (hostile.sends_invalid_json, "its answer is not what the protocol demands"),
        (hostile.sends_deep_json, "its answer is not what the protocol demands"),
        (hostile.sends_large_json, "it sent a message of more than 4 MiB"),
        (hostile.sends_endless_json, "it sent a message of more than 4 MiB"),
        (hostile.sends_too_little, "peer closed connection"),
        (hostile.sends_compressed_json, "its answer is compressed"),
        (hostile.sends_invalid_events, "its answer is not what the protocol demands"),
        (hostile.sends_an_endless_event, "event exceeded the 4194304 byte limit"),
        (hostile.sends_endless_comments, "it sent more than 16 MiB at once"),
        (hostile.notifies_without_end, "it sent more than 16 MiB at once"),
        (hostile.cuts_an_event, "SSE stream ended without a response"),
        (hostile.asks_to_come_back, "it closed more than 100 streams before the result"),
        (hostile.returns_no_object, "its answer is not what the protocol demands"),
        (hostile.has_an_odd_session, "its session has a name that is no short ASCII text"),
        (hostile.accept, "server answered a request with 202 Accepted"),
        (hostile.redirects_to("http://127.0.0.1:9/x"), "Redirect to http://127.0.0.1:9/x not"),
        (hostile.redirects_to("file:///etc/passwd"), "Redirect to file://127.0.0.1/etc/passwd not"),
        (hostile.redirects_to("/mcp"), "Redirect to http://127.0.0.1:"),
        (hostile.redirects_to("http://[::"), "it redirects to an invalid address"),
        (hostile.has_status(401), "HTTP status 401 Unauthorized"),
        (hostile.has_status(403, "<h1>no</h1>", "text/html"), "HTTP status 403 Forbidden"),
        (hostile.has_status(404), "HTTP status 404 Not Found"),
        (hostile.has_status(500, '{"error": "x"}', "application/json"), "HTTP status 500 Internal"),
        (hostile.has_status(503, "[" * 90_000, "application/json"), "HTTP status 503 Service"),
        (
            hostile.has_status(
                400,
                '{"jsonrpc": "2.0", "id": null, "error": {"code": 1, "message": "b\\u001b[31mad"}}',
                "application/json",
            ),
            "bad",
        ),
    ],
)
def test_a_server_that_does_not_start(open_web: Open, act: Act, problem: str) -> None:
    limits = {"start_seconds": SHORT} if act.__name__.startswith("hangs") else {}
    servers, _ = open_web(limits, initialize=act, GET=act)
    (state,) = servers.states
    assert state.state == "ended"
    assert problem in state.problem
    assert state.problem.isprintable() and len(state.problem) <= 300
    assert "KEY" not in state.problem
    assert servers.tools == ()


def test_a_server_that_accepts_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        with ToolServers([ToolServer("web", url=url)], ToolLimits(start_seconds=SHORT)) as servers:
            assert servers.states[0].problem == "it did not answer within 0.5 s"


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (hostile.hangs, NEVER),
        (hostile.hangs_in_the_head, NEVER),
        (hostile.hangs_in_an_event, NEVER),
        (hostile.answers_another_request, NEVER),
        (hostile.answers_with_a_request, NEVER),
        (hostile.drops_the_connection, "disconnected"),
        (hostile.speaks_no_http, "disconnected"),
        (hostile.sends_html, "Unexpected content type: text/html; charset=utf-8"),
        (hostile.sends_endless_html, "Unexpected content type: text/html"),
        (hostile.sends_invalid_json, "its answer is not what the protocol demands"),
        (hostile.sends_deep_json, "its answer is not what the protocol demands"),
        (hostile.sends_large_json, "it sent a message of more than 4 MiB"),
        (hostile.sends_endless_json, "it sent a message of more than 4 MiB"),
        (hostile.sends_too_little, "peer closed connection"),
        (hostile.sends_compressed_json, "its answer is compressed"),
        (hostile.sends_invalid_events, "its answer is not what the protocol demands"),
        (hostile.sends_an_endless_event, "event exceeded the 4194304 byte limit"),
        (hostile.cuts_an_event, "SSE stream ended without a response"),
        (hostile.returns_no_object, "its answer is not what the protocol demands"),
        (hostile.redirects_to("http://127.0.0.1:9/x"), "Redirect to http://127.0.0.1:9/x not"),
        (hostile.redirects_to("file:///etc/passwd"), "Redirect to file://127.0.0.1/etc/passwd not"),
        (hostile.has_status(401), "HTTP status 401 Unauthorized"),
        (hostile.has_status(404), "HTTP status 404 Not Found"),
        (hostile.has_status(500), "HTTP status 500 Internal Server Error"),
    ],
)
def test_a_call_that_fails_leaves_the_connection(open_web: Open, act: Act, text: str) -> None:
    servers, _ = open_web({"call_seconds": SHORT} if text == NEVER else {}, tools_call=act)
    result = call(servers, "hostile")
    assert result.is_error and text in result.text
    assert not any(c in result.text for c in "\x1b\x07")
    assert call_echo(servers) == ToolResult("ok")


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (hostile.notifies_without_end, "it sent more than 16 MiB at once"),
        (hostile.sends_endless_comments, "it sent more than 16 MiB at once"),
        (hostile.asks_to_come_back, "it closed more than 100 streams before the result"),
    ],
)
def test_a_flood_ends_the_connection(open_web: Open, act: Act, text: str) -> None:
    servers, server = open_web(tools_call=act, GET=act)
    assert text in call(servers, "hostile").text
    assert call(servers, "echo").text == f"the server has ended: {text}"
    assert len(server.seen) < 150


def test_a_stream_that_is_refused_is_closed(open_web: Open) -> None:
    servers, server = open_web(tools_call=hostile.sends_compressed_events)
    assert "its answer is compressed" in call(servers, "hostile").text
    assert server.closed.wait(30)
    assert call(servers, "echo").text == "ok"


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
def test_an_answer_that_trickles_ends(kind: str) -> None:
    # packages that come with mcp
    import anyio
    import httpx2

    from llmcli.tool_servers.protocol.channel import Channel
    from llmcli.tool_servers.protocol.http_transport import CheckedTransport

    def trickle(exchange: hostile.Exchange) -> None:
        try:
            exchange.begin(kind)
            while True:
                exchange.send_raw(b" ")
                time.sleep(0.01)
        finally:
            exchange.server.closed.set()

    async def post(url: str) -> str:
        channel = Channel()
        async with httpx2.AsyncClient(transport=CheckedTransport(channel, SHORT)) as client:
            message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            try:
                with anyio.fail_after(60):
                    return (await client.post(url, json=message)).text
            except httpx2.ReadTimeout as error:
                return str(error)

    with serve_web(ping=trickle) as server:
        text = anyio.run(post, server.url)
        # a busy machine may not send the head in time
        assert "its answer has not ended in time" in text or "no answer within 0.5 s" in text
        assert server.closed.wait(30)


def test_a_stream_can_be_resumed(open_web: Open) -> None:
    def answer(exchange: hostile.Exchange) -> None:
        request_id = next(iter(requests))
        exchange.begin("text/event-stream")
        exchange.send_event({"id": request_id, "result": hostile.text_result("resumed")})

    def come_back(exchange: hostile.Exchange) -> None:
        requests.append(exchange.message["id"])
        hostile.asks_to_come_back(exchange)

    requests: list[int] = []
    servers, _ = open_web(tools_call=come_back, GET=answer)
    assert call(servers, "hostile").text == "resumed"


def test_no_stream_is_opened_beside_calls(open_web: Open) -> None:
    servers, server = open_web(GET=hostile.closes_streams)
    for _ in range(3):
        assert call(servers, "echo").text == "ok"
    assert "GET" not in [kind for kind, _ in server.seen]


def test_a_notification_that_is_not_answered_does_not_block_calls(
    open_web: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.tool_servers.protocol.http_transport.NOTIFICATION_SECONDS", 0.1)
    servers, _ = open_web(notifications_initialized=hostile.hangs)
    assert call(servers, "echo").text == "ok"


def test_the_session_stays_that_of_the_start(open_web: Open) -> None:
    servers, server = open_web(tools_call=hostile.changes_the_session)
    assert call(servers, "hostile").text == "ok"
    assert call(servers, "echo").text == "ok"
    sessions = {headers.get("mcp-session-id") for kind, headers in server.seen if kind == "echo"}
    assert sessions == {hostile.SESSION}


def test_requests_of_a_server_are_declined(open_web: Open) -> None:
    servers, _ = open_web(tools_call=hostile.asks_the_client)
    assert call(servers, "hostile").text == "error error error"


def test_links_are_only_named(open_web: Open) -> None:
    servers, server = open_web(tools_call=hostile.links_to_files)
    assert call(servers, "hostile").text == (
        "[resource file:///etc/passwd]\n[resource ../../secret]\n[resource x]"
    )
    assert [kind for kind, _ in server.seen].count("resources/read") == 0


def test_wrong_tools_are_left_out_with_reasons(open_web: Open) -> None:
    servers, _ = open_web(tools_list=hostile.lies_about_tools)
    assert [tool.name for tool in servers.tools] == ["echo", "hostile"]
    assert [(tool.name, tool.reason) for tool in servers.omitted] == [
        ("clear", "its name has control characters"),
        ("�oche", "its name has control characters"),
        ("text", "its schema is not an object"),
        ("array", "its schema is not that of an object"),
        ("large", "its schema has more than 32,768 bytes"),
    ]


@pytest.mark.parametrize(
    "act", [hostile.hangs, hostile.hangs_in_an_event, hostile.sends_endless_json]
)
def test_the_end_does_not_wait_for_a_server(
    open_web: Open, act: Act, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "CLOSE_SECONDS", LONG)
    servers, _ = open_web(DELETE=act)
    begin = time.monotonic()
    servers.close()
    assert time.monotonic() - begin < LONG / 2
    assert servers.states[0].state == "ended"


def test_the_end_ends_the_session(open_web: Open) -> None:
    servers, server = open_web()
    servers.close()
    kind, headers = server.seen[-1]
    assert (kind, headers["mcp-session-id"]) == ("DELETE", hostile.SESSION)


def test_a_redirect_on_the_server_is_followed(open_web: Open) -> None:
    def redirect(exchange: hostile.Exchange) -> None:
        act = hostile.redirects_to("/moved") if exchange.path == "/mcp" else hostile.returns_ok
        act(exchange)

    servers, _ = open_web(tools_call=redirect)
    assert call(servers, "hostile") == ToolResult("ok")
