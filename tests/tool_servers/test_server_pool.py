"""Tool servers, honest and hostile, over stdio and HTTP."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from llmcli.errors import UserError
from llmcli.tool_servers import server_pool
from llmcli.tool_servers.limits import ToolLimits
from llmcli.tool_servers.server_file import ToolServer
from llmcli.tool_servers.server_pool import ToolServers
from llmcli.tool_servers.tool_result import ToolResult
from tests.fixtures import tool_server

pytest.importorskip("mcp", reason="needs the extra mcp: pip install 'llmcli[mcp]'")

Open = Callable[..., ToolServers]
LIMITS = ToolLimits(start_seconds=240, call_seconds=240, output_bytes=1000)


def program(behaviour: str, name: str = "", **more: object) -> ToolServer:
    """Return a server of tests/fixtures/tool_server.py."""
    return ToolServer(name or behaviour, sys.executable, (tool_server.__file__, behaviour), **more)  # type: ignore[arg-type]


@pytest.fixture
def open_servers() -> Iterator[Open]:
    """Return a function that starts servers, given as behaviours or as servers."""
    with ExitStack() as stack:

        def open_(*servers: str | ToolServer, **limits: float) -> ToolServers:
            values = [program(s) if isinstance(s, str) else s for s in servers]
            own_limits = ToolLimits(**{**vars_of(LIMITS), **limits})  # type: ignore[arg-type]
            return stack.enter_context(ToolServers(values, own_limits))

        yield open_


def vars_of(limits: ToolLimits) -> dict[str, float]:
    return {name: getattr(limits, name) for name in ToolLimits.__slots__}  # type: ignore[attr-defined]


def call(servers: ToolServers, name: str = "echo", **arguments: object) -> ToolResult:
    tool = next(tool for tool in servers.tools if tool.name == name)
    return servers.call(tool, dict(arguments))


@pytest.fixture
def http_url() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, tool_server.__file__, "http"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    with process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        process.kill()


def test_an_honest_server(open_servers: Open) -> None:
    servers = open_servers("honest")
    assert [tool.name for tool in servers.tools] == ["echo", "add", "environment", "large"]
    assert servers.tools[1].schema["required"] == ["a", "b"]
    assert call(servers, "echo", text="ünïcode") == ToolResult("ünïcode")
    assert call(servers, "add", a=2, b=3).text == "5"
    assert call(servers, "add", a="x").is_error


def test_an_honest_server_over_http(http_url: str, open_servers: Open) -> None:
    servers = open_servers(ToolServer("web", url=http_url))
    assert [(state.state, state.problem) for state in servers.states] == [("ready", "")]
    assert call(servers, "add", a=2, b=3).text == "5"
    large = call(servers, "large", count=100_000)
    assert large.n_left_out == 99_000
    too_large = call(servers, "large", count=20 << 20)
    assert too_large.is_error and "exceeded the 4194304 byte limit" in too_large.text
    assert call(servers, "add", a=2, b=3).text == "5"


def test_a_program_gets_its_variables_and_folder_and_no_others(
    open_servers: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "x")
    text = call(
        open_servers(program("honest", env={"GIVEN": "1"}, cwd=str(tmp_path))), "environment"
    ).text
    assert "GIVEN" in text and "MY_SECRET_TOKEN" not in text
    assert text.endswith(f"in {tmp_path}")


@pytest.mark.parametrize(
    ("behaviour", "problem"),
    [
        ("never_answers", "it did not answer within 0.5 s"),
        ("exits_at_once", "it ended with exit code 3: no such database"),
        ("initializes_with_nonsense", "its answer is not what the protocol demands"),
        ("has_an_unknown_version", "Unsupported protocol version from the server: 1999-01-01"),
        ("writes_only_nonsense", "its standard output is not the protocol's: it has other text"),
        ("sends_an_endless_line", "it sent a message of more than 4 MiB"),
        ("floods_with_notifications", "it sent more than 16 MiB at once"),
        ("lists_no_list", "its list of tools is not a list"),
    ],
)
def test_a_server_that_does_not_start(open_servers: Open, behaviour: str, problem: str) -> None:
    limits = {"start_seconds": 0.5} if behaviour == "never_answers" else {}
    servers = open_servers(behaviour, **limits)
    assert [(state.state, state.problem) for state in servers.states] == [("ended", problem)]
    assert servers.tools == ()


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        (ToolServer("none", "/no/such/program"), "cannot start /no/such/program: No such file"),
        (ToolServer("web", url="http://127.0.0.1:9/mcp"), "connect"),
    ],
)
def test_a_server_that_is_not_there(open_servers: Open, server: ToolServer, problem: str) -> None:
    servers = open_servers(server, "honest")
    assert servers.states[0].state == "ended" and problem in servers.states[0].problem
    assert call(servers, "add", a=1, b=1).text == "2"  # the other one is not hurt


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("dies_in_a_call", "the server has ended: it was ended by signal 9: out of memory"),
        ("hangs_in_a_call", "no result within 0.3 s"),
        ("closes_its_output", "the server has ended: it closed its standard output"),
        ("sends_a_large_result", "the server has ended: it sent a message of more than 4 MiB"),
        ("returns_no_object", "its answer is not what the protocol demands"),
    ],
)
def test_a_call_that_fails(open_servers: Open, behaviour: str, text: str) -> None:
    limits = {"call_seconds": 0.3} if behaviour == "hangs_in_a_call" else {}
    result = call(open_servers(behaviour, **limits))
    assert result.is_error and text in result.text


def test_a_server_that_has_ended_says_so_in_each_call(open_servers: Open) -> None:
    servers = open_servers("dies_in_a_call")
    first, second = call(servers), call(servers)
    assert first.text == second.text
    assert servers.states[0].state == "ended"


def test_text_beside_messages_is_counted(open_servers: Open) -> None:
    servers = open_servers("writes_some_nonsense")
    assert call(servers).text == "ok"
    assert servers.states[0].n_stray_lines == 4


def test_nothing_of_a_server_acts_on_the_terminal(open_servers: Open) -> None:
    servers = open_servers("acts_on_the_terminal")
    assert servers.tools[0].description == "clear␇ �gnihton"
    assert call(servers).text == "red ␈�1m �"


def test_requests_of_a_server_are_declined(open_servers: Open) -> None:
    assert call(open_servers("asks_the_client")).text == "error error error"


def test_answers_without_a_request_are_ignored(open_servers: Open) -> None:
    assert call(open_servers("answers_other_requests")).text == "right"


def test_content_that_is_not_text_is_named(open_servers: Open) -> None:
    assert call(open_servers("returns_odd_content")).text == (
        "[image of 3 bytes left out: this model reads text]\ninside\n"
        "[resource http://127.0.0.1/x]\n[content of type hologram left out]\n"
        "[something that is no block of content]"
    )


def test_the_message_of_an_error_is_bounded(open_servers: Open) -> None:
    result = call(open_servers("refuses_the_call"))
    assert result.is_error and result.text.startswith("bad\nzzz")
    assert result.text.endswith("[99,004 of 100,004 bytes left out]")


def test_wrong_tools_are_left_out_with_reasons(open_servers: Open) -> None:
    servers = open_servers("lies_about_schemas")
    assert [tool.name for tool in servers.tools] == ["echo"]
    assert [(tool.name[:9], tool.reason) for tool in servers.omitted] == [
        ("echo", "the server has two tools of this name"),
        ("text", "its schema is not an object"),
        ("unknown", "its schema is not that of an object"),
        ("array", "its schema is not that of an object"),
        ("number", "its schema is invalid at properties.x.minimum"),
        ("deep", "its schema is nested more than 32 levels deep"),
        ("large", "its schema has more than 32,768 bytes"),
        ("talkative", "its description has more than 8,192 characters"),
        ("a tool wi", "it has no name"),
        ("nnnnnnnnn", "its name has more than 128 characters"),
        ("a tool wi", "it has no name"),
        ("none", "its schema is not an object"),
        ("a tool wi", "it is not an object"),
    ]


def test_the_number_of_tools_is_bounded(open_servers: Open) -> None:
    servers = open_servers("has_many_tools")
    assert len(servers.tools) == 128
    assert servers.omitted[0].reason == "the server has more than 128 tools"


def test_a_list_without_end(open_servers: Open) -> None:
    servers = open_servers("lists_without_end")
    assert [tool.name for tool in servers.tools] == ["echo"]


def test_names_that_servers_share_get_a_prefix(open_servers: Open) -> None:
    servers = open_servers(program("honest", "one"), program("writes_some_nonsense", "two"))
    assert [tool.name for tool in servers.tools if "echo" in tool.name] == [
        "one__echo",
        "two__echo",
    ]
    assert call(servers, "one__echo", text="1").text == "1"
    assert call(servers, "two__echo", text="1").text == "ok"


def test_programs_end_with_the_block() -> None:
    with ToolServers(
        [program("leaves_a_child_behind"), program("ignores_signals")], LIMITS
    ) as servers:
        pids = [int(servers.call(tool, {}).text) for tool in servers.tools]
        assert len(pids) == 2 and all(_is_running(pid) for pid in pids)
    deadline = time.monotonic() + 10
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_ctrl_c_does_not_stop_the_end_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = ToolServers([program("ignores_signals")], LIMITS)
    wait_for_end = servers._end

    signals = [signal.SIGINT]  # a second one would interrupt the end of the test

    async def end() -> None:
        if signals:
            signal.raise_signal(signals.pop())
        await wait_for_end()

    monkeypatch.setattr(servers, "_end", end)
    monkeypatch.setattr(server_pool, "CLOSE_SECONDS", 240.0)  # a busy machine needs long
    with servers:
        pid = int(call(servers).text)
        with pytest.raises(KeyboardInterrupt):
            servers.close()
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended may wait for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_call_can_be_stopped_and_the_server_is_used_again(open_servers: Open) -> None:
    servers = open_servers("hangs_in_a_call", "honest")
    hanging = next(tool for tool in servers.tools if tool.server == "hangs_in_a_call")
    with pytest.raises(KeyboardInterrupt):
        servers.call(hanging, {}, lambda: True)
    assert call(servers, "add", a=1, b=2).text == "3"


def test_without_the_package_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_pool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed") as in_checkout:
        ToolServers([], LIMITS)
    monkeypatch.setattr(server_pool, "is_checkout", lambda: False)
    with pytest.raises(UserError, match="not installed") as in_package:
        ToolServers([], LIMITS)
    assert in_checkout.value.hint == "scripts/setup --all"
    assert "install " in in_package.value.hint and in_package.value.hint.endswith(" 'llmcli[mcp]'")
