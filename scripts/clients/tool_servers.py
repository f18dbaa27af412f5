#!/usr/bin/env python3
"""Check that the tools of MCP servers of other authors work in `llmcli chat` and `llmcli run`.

usage: .venv/bin/python scripts/clients/tool_servers.py [REF] [--folder FOLDER] [--threads N]

The script installs mcp-server-time, mcp-server-fetch, @modelcontextprotocol/server-everything and
@modelcontextprotocol/server-filesystem in FOLDER, with the versions of `packages.py`, and starts
them as `--mcp FILE` does: over stdio, and server-everything over HTTP, too. It compares their lists
of tools and the result of each call with the expected ones. Then the model REF gets a question for
which it must call a tool by itself. Without REF, this part is left out.

The script prints a line for each check, and exits with 1 if one fails.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from llmcli.api.tool_calls.base import ToolCall
from llmcli.chat.tools.chat_tools import ChatTools
from llmcli.chat.tools.open_tools import open_tools
from llmcli.chat.tools.tool_request import ToolRequest
from llmcli.config import load_config
from llmcli.ui import UI
from scripts.clients.packages import NPM_TOOL_SERVERS, TOOL_SERVERS
from scripts.clients.run import ROOT, install_npm, install_python

# the tools of each server; server-everything has more for clients that offer it abilities
EVERYTHING_TOOLS = (
    "echo get-annotated-message get-env get-resource-links get-resource-reference"
    " get-structured-content get-sum get-tiny-image gzip-file-as-resource simulate-research-query"
    " toggle-simulated-logging toggle-subscriber-updates trigger-long-running-operation"
)
TOOLS = {
    "everything": EVERYTHING_TOOLS,
    "everything-http": EVERYTHING_TOOLS,
    "fetch": "fetch",
    "fetch-public": "fetch",
    "files": "create_directory directory_tree edit_file get_file_info list_allowed_directories"
    " list_directory list_directory_with_sizes move_file read_file read_media_file"
    " read_multiple_files read_text_file search_files write_file",
    "time": "convert_time get_current_time",
}
PAGES = {
    "/robots.txt": ("text/plain", "User-agent: *\nDisallow: /private\n"),
    "/page": (
        "text/html",
        "<html><head><title>Birds</title></head><body><h1>Birds</h1>"
        "<p>The code word of this page is heron-4471.</p></body></html>",
    ),
    "/private": ("text/html", "<p>not for robots</p>"),
    "/long": ("text/plain", "".join(f"line {number}\n" for number in range(2000))),
    "/escapes": ("text/plain", "\x1b[31mred\x1b[0m \x1b]0;title\x07end"),
}
CODE_WORD = "heron-4471"
# Models of 1.5 billion parameters call a tool for this question, and then answer. After a call of
# "fetch" they often write the call again as text.
QUESTION = "It is 09:30 in Europe/Oslo. What time is it in Asia/Tokyo? Use the tool."
TOKYO_TIME = re.compile(r"T1[67]:30:00\+09:00")  # 16:30 in summer
ANSWER = re.compile(r"1[67]:30|[45]:30|\b[78](\.0)? ?h")
PORT_TRIES = 5
SECRET = "llmcli-test-secret"  # in the environment of llmcli
HIDDEN = "rook-2209"  # in a file outside of the folder of server-filesystem
CALL_SECONDS = 3.0
START_SECONDS = 60.0  # how long server-everything may take to listen
RUN_SECONDS = 600  # of one llmcli with a model


class Page(BaseHTTPRequestHandler):
    """The pages that mcp-server-fetch reads."""

    def do_GET(self) -> None:
        kind, text = PAGES.get(self.path, ("text/plain", ""))
        self.send_response(200 if self.path in PAGES else 404)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


class Checks:
    """Prints and counts checks. `n_failed`: how many failed."""

    def __init__(self) -> None:
        self.n_done = self.n_failed = 0

    def expect(self, name: str, is_right: bool, found: object) -> None:
        """Report a check. `found`: printed if it fails."""
        self.n_done += 1
        self.n_failed += not is_right
        print(f"{'ok' if is_right else 'FAILED'} {name}", flush=True)
        if not is_right:
            print(f"  {str(found)[:1000]!r}", flush=True)


class Caller:
    """Calls the tools of one server as a chat does when its model has written a call."""

    def __init__(self, tools: ChatTools, server: str, checks: Checks) -> None:
        self.tools, self.server, self.checks = tools, server, checks

    def call(self, name: str, pattern: str, /, *, is_error: bool = False, **arguments: Any) -> str:
        """Call a tool, and check that its result matches a pattern and is an error or none. Return
        the result.
        """
        tool = next(
            t for t in self.tools.servers.tools if t.server == self.server and t.own_name == name
        )
        call = ToolCall(tool.name, json.dumps(arguments), "call-1")
        (record,) = self.tools.run_calls([call], lambda: False)
        is_right = re.search(pattern, record.result) is not None and record.is_error == is_error
        self.checks.expect(
            f"{self.server}: {tool.own_name} {json.dumps(arguments)[:60]}", is_right, record
        )
        return record.result


def main() -> int:
    """Run all checks, and return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", nargs="?", help="a model that knows tools; without it no model runs")
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder where the servers are installed; default: a temporary folder",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of the model [%(default)s]")
    args = parser.parse_args()
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        python, npm = folder / "python", folder / "npm"
        install_python(python, TOOL_SERVERS)
        if not install_npm(npm, NPM_TOOL_SERVERS):
            print("there is no npm, which two of the servers need", file=sys.stderr)
            return 1
        allowed = Path(temporary).resolve() / "allowed"
        allowed.mkdir()
        (allowed.parent / "secret.txt").write_text(HIDDEN)
        everything = npm / "node_modules/.bin/mcp-server-everything"
        with run_pages() as pages, run_everything(everything) as url:
            servers: dict[str, dict[str, Any]] = {
                "time": {
                    "command": str(python / "bin/mcp-server-time"),
                    "args": ["--local-timezone", "UTC"],
                },
                "fetch": {
                    "command": str(python / "bin/mcp-server-fetch"),
                    "args": ["--allow-private-ips"],
                },
                "fetch-public": {"command": str(python / "bin/mcp-server-fetch")},
                "everything": {"command": str(everything), "env": {"GIVEN": "1"}},
                "everything-http": {"type": "http", "url": url},
                "files": {
                    "command": str(npm / "node_modules/.bin/mcp-server-filesystem"),
                    "args": [str(allowed)],
                },
            }
            os.environ["MY_API_KEY"] = SECRET
            check_calls(write_servers(Path(temporary), servers), pages, allowed, checks)
            if args.ref:
                file = write_servers(Path(temporary), {"time": servers["time"]})
                check_model([args.ref, "-t", str(args.threads)], file, checks)
    print(f"{checks.n_done - checks.n_failed} of {checks.n_done} checks passed with:")
    print(*TOOL_SERVERS, *NPM_TOOL_SERVERS, sep="\n")
    return int(checks.n_failed > 0)


def write_servers(folder: Path, servers: dict[str, Any]) -> Path:
    """Write a file for `--mcp`, and return its path."""
    file = folder / "servers.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return file


@contextmanager
def run_pages() -> Iterator[str]:
    """Serve PAGES on a free port of the loopback for the block. Yields their URL without a path."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def run_everything(program: Path) -> Iterator[str]:
    """Run server-everything over HTTP for the block. Yields its URL. Raises RuntimeError if it
    finds no free port, or does not listen in time.
    """
    # the server says which port it was given, but not which one it got for 0
    for _ in range(PORT_TRIES):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        process = subprocess.Popen(
            [program, "streamableHttp"],
            env={**os.environ, "PORT": str(port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stderr
            # at the limit, the end of the process ends its output, too
            limit = threading.Timer(START_SECONDS, process.kill)
            limit.start()
            is_up = any("listening on port" in line for line in process.stderr)
            limit.cancel()
            # what it writes later must not fill the pipe
            drain = threading.Thread(target=process.stderr.read, daemon=True)
            drain.start()
            try:
                if is_up:
                    yield f"http://127.0.0.1:{port}/mcp"
                    return
            finally:
                process.kill()
                drain.join()
    raise RuntimeError("server-everything found no free port, or did not listen in time")


def check_calls(file: Path, pages: str, allowed: Path, checks: Checks) -> None:
    """Check the lists of tools and the results of calls of all servers."""
    ui = UI()
    with open_tools(ToolRequest(str(file), ["*"]), load_config(), ui, None) as tools:
        assert tools
        states = [(state.server.name, state.state, state.problem) for state in tools.servers.states]
        checks.expect("all servers are ready", all(s[1] == "ready" for s in states), states)
        checks.expect("no tool is left out", not tools.servers.omitted, tools.servers.omitted)
        for server, names in TOOLS.items():
            found = {tool.own_name for tool in tools.servers.tools if tool.server == server}
            checks.expect(f"{server}: {len(found)} tools", found == set(names.split()), found)
        # the definitions that the model gets
        offered = tools.tool_set().names
        n_tools = sum(len(names.split()) for names in TOOLS.values())
        checks.expect(f"all {n_tools} tools are offered", len(offered) == n_tools, offered)
        check_time(Caller(tools, "time", checks))
        check_fetch(Caller(tools, "fetch", checks), pages)
        Caller(tools, "fetch-public", checks).call(
            "fetch", "not a public address", is_error=True, url=f"{pages}/page"
        )
        for server in ("everything", "everything-http"):
            check_everything(Caller(tools, server, checks))
        check_files(Caller(tools, "files", checks), allowed)
    request = ToolRequest(str(file), ["*"], tool_timeout=CALL_SECONDS)
    with open_tools(request, load_config(), ui, None) as tools:
        assert tools
        for name in ("everything", "everything-http"):
            server = Caller(tools, name, checks)
            server.call("trigger-long-running-operation", "no result within 3 s", is_error=True)
            server.call("echo", "^Echo: still here", message="still here")
    ended = {state.server.name: state.state for state in tools.servers.states}
    checks.expect("all servers have ended", set(ended.values()) == {"ended"}, ended)


def check_time(server: Caller) -> None:
    """Check the tools of mcp-server-time."""
    server.call("get_current_time", r'"timezone": "Europe/Oslo"', timezone="Europe/Oslo")
    server.call("get_current_time", "Invalid timezone", is_error=True, timezone="Nowhere")
    zones = {"source_timezone": "Asia/Kolkata", "target_timezone": "Asia/Tokyo"}
    server.call("convert_time", r'T13:00:00\+09:00[^}]*}[^}]*"\+3.5h"', time="09:30", **zones)
    server.call("convert_time", "Invalid time format", is_error=True, time="25:99", **zones)


def check_fetch(server: Caller, pages: str) -> None:
    """Check mcp-server-fetch."""
    server.call("fetch", CODE_WORD, url=f"{pages}/page")
    server.call("fetch", "<h1>Birds</h1>", url=f"{pages}/page", raw=True)
    server.call("fetch", "robots.txt", is_error=True, url=f"{pages}/private")
    server.call("fetch", "404", is_error=True, url=f"{pages}/missing")
    server.call("fetch", "start_index of 50", url=f"{pages}/long", max_length=50)
    server.call("fetch", "line 1999", url=f"{pages}/long", start_index=18_000)
    cut = server.call("fetch", r"bytes left out\]$", url=f"{pages}/long", max_length=900_000)
    server.checks.expect("fetch: a long result is cut", len(cut) < 17_000, len(cut))
    text = server.call("fetch", "red.*end", url=f"{pages}/escapes")
    server.checks.expect("fetch: no escape sequences", "\x1b" not in text, text)
    server.call("fetch", "(?i)url", is_error=True, url="no url")
    server.call("fetch", "(?i)url|protocol|failed", is_error=True, url="file:///etc/passwd")


def check_everything(server: Caller) -> None:
    """Check the tools of server-everything."""
    server.call("echo", "^Echo: ünï\ncode$", message="ünï\ncode")
    server.call("echo", "Invalid arguments", is_error=True)
    server.call("get-sum", "sum of 2 and 3.5 is 5.5", a=2, b=3.5)
    server.call("get-sum", "expected number", is_error=True, a="two", b=3)
    steps = {"duration": 0.5, "steps": 5}
    server.call("trigger-long-running-operation", "Duration: 0.5 seconds, Steps: 5", **steps)
    server.call("get-tiny-image", r"\[image of [\d,]+ bytes left out")
    for kind, text in (("error", "Error: "), ("success", "completed"), ("debug", "Debug: ")):
        server.call("get-annotated-message", text, messageType=kind)
    server.call("get-annotated-message", r"\[image", messageType="error", includeImage=True)
    server.call("get-structured-content", '"conditions": ?"', location="Chicago")
    server.call("get-structured-content", "Invalid", is_error=True, location="Oslo")
    server.call("get-resource-links", r"(\[resource demo://\S+\]\s*){3}$", count=3)
    text = {"resourceType": "Text", "resourceId": 1}
    server.call("get-resource-reference", "Resource 1: This is a plaintext resource", **text)
    blob = {"resourceType": "Blob", "resourceId": 2}
    server.call("get-resource-reference", r"\[resource demo://\S+ is not text\]", **blob)
    server.call("get-resource-reference", "Invalid", is_error=True, **{**text, "resourceId": -1})
    data = {"name": "a.gz", "data": "data:text/plain,hello"}
    server.call("gzip-file-as-resource", r"\[resource demo://\S+ is not text\]|\[resource", **data)
    server.call("toggle-simulated-logging", "^Started")
    server.call("toggle-simulated-logging", "^Stopped")
    server.call("toggle-subscriber-updates", "^Started")
    server.call("toggle-subscriber-updates", "^Stopped")
    server.call("simulate-research-query", "requires task", is_error=True, topic="birds")
    environment = server.call("get-env", "PATH")
    if server.server == "everything":
        is_right = '"GIVEN": "1"' in environment and SECRET not in environment
        server.checks.expect("everything: it gets its own variables only", is_right, environment)


def check_files(server: Caller, allowed: Path) -> None:
    """Check the tools of server-filesystem, inside and outside of its folder `allowed`."""
    file = str(allowed / "a.txt")
    server.call("list_allowed_directories", re.escape(str(allowed)))
    server.call("write_file", "wrote", path=file, content="one\ntwo\nthree\n")
    server.checks.expect(
        "files: the file is written", Path(file).read_text() == "one\ntwo\nthree\n", file
    )
    server.call("read_text_file", "^one\ntwo\nthree\n$", path=file)
    server.call("read_text_file", "^one$", path=file, head=1)
    server.call("read_file", "^one\ntwo", path=file)
    edits = [{"oldText": "two", "newText": "2"}]
    server.call("edit_file", r"\+2", path=file, edits=edits)
    server.call("create_directory", "created", path=str(allowed / "sub"))
    server.call("move_file", "moved", source=file, destination=str(allowed / "sub/b.txt"))
    server.call("list_directory", r"^\[DIR\] sub$", path=str(allowed))
    server.call("list_directory_with_sizes", r"b\.txt", path=str(allowed / "sub"))
    server.call("directory_tree", r'"b\.txt"', path=str(allowed))
    server.call("search_files", r"sub/b\.txt", path=str(allowed), pattern="**/*.txt")
    server.call("get_file_info", "size: 12", path=str(allowed / "sub/b.txt"))
    server.call("read_multiple_files", "one\n2\n", paths=[str(allowed / "sub/b.txt")])
    (allowed / "dot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    server.call("read_media_file", r"\[image of", path=str(allowed / "dot.png"))
    outside = str(allowed.parent / "secret.txt")
    (allowed / "link").symlink_to(outside)
    for path in (outside, f"{allowed}/../secret.txt", str(allowed / "link"), "/etc/passwd"):
        text = server.call("read_text_file", "Access denied", is_error=True, path=path)
        is_hidden = HIDDEN not in text and "root:" not in text
        server.checks.expect("files: nothing of it is read", is_hidden, text)
    server.call("write_file", "Access denied", is_error=True, path=outside, content="x")
    server.call("list_directory", "Access denied", is_error=True, path=str(allowed.parent))
    server.call("read_text_file", "ENOENT", is_error=True, path=str(allowed / "missing"))
    server.checks.expect(
        "files: the file outside is as before", Path(outside).read_text() == HIDDEN, outside
    )


def check_model(model: list[str], file: Path, checks: Checks) -> None:
    """Check that a model calls a tool by itself and uses its result, in `run`, and that `chat`
    lists the tools.
    """
    run = [sys.executable, "-m", "llmcli.app", "run", *model, "--mcp", str(file)]
    run += ["--temp", "0", "-n", "120", "--json", QUESTION]
    answer, calls = read_answer(run_llmcli([*run, "--allow-tool", "time/*"]))
    is_called = any(c["name"] == "convert_time" and TOKYO_TIME.search(c["result"]) for c in calls)
    checks.expect("run: the model calls convert_time", is_called, calls)
    checks.expect("run: its answer has the result", ANSWER.search(answer) is not None, answer)
    print(f"  {QUESTION}\n  {answer!r}")
    # without --allow-tool, and without a terminal
    _, calls = read_answer(run_llmcli(run))
    is_refused = bool(calls) and all(c["result"].startswith("not called") for c in calls)
    checks.expect("run: a tool that is not allowed is not called", is_refused, calls)
    chat = [sys.executable, "-m", "llmcli.app", "chat", *model, "--mcp", str(file)]
    listed = run_llmcli(chat, "/tools\n/tools deny convert_time\n/tools\n/exit\n")
    is_listed = re.search(r"time +ready", listed) is not None
    checks.expect("chat: /tools lists the server", is_listed, listed)
    is_denied = re.search(r"convert_time.*deny|deny.*convert_time", listed) is not None
    checks.expect("chat: /tools lists a denied tool", is_denied, listed)


def read_answer(output: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the calls in the output of `run --json`; nothing if it has failed."""
    document = json.loads(output or "{}")
    calls = [call for step in document.get("tool_steps", ()) for call in step["calls"]]
    return document.get("text", ""), calls


def run_llmcli(command: list[str], typed: str = "") -> str:
    """Run llmcli, and return its standard output. `typed`: its standard input."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, env=environ, timeout=RUN_SECONDS
    )
    if done.returncode:
        print(f"  exit code {done.returncode}: {done.stderr[-500:]}", flush=True)
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
