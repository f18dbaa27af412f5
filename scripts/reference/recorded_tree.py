"""Running the commands and the server of a source tree, and recording their output."""

import csv
import hashlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripts.load.server_process import free_port
from scripts.reference.recorded_commands import Command
from scripts.reference.recorded_requests import (
    GRPC_CALLS,
    KEY,
    REQUESTS,
    SERVER_OPTIONS,
    WEBSOCKET_MESSAGES,
    HttpRequest,
)

PROGRAM = "import sys; sys.argv[0] = 'llmcli'; from llmcli.app import main; main()"
LOCATIONS = "import llmcli, quant; print(llmcli.__file__); print(quant.__file__)"
LIMIT_SECONDS = 300
START_SECONDS = 60
UNUSED_VARIABLES = (
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HUB_CACHE",
    "LLMCLI_OFFLINE",
    "LLMCLI_DEBUG",
)
Entry = dict[str, Any]


class RecordedTree:
    """A source tree, its work folder, and the recorded output of its commands.

    `python` runs the tree. `entries`: for each command or request, by name, its exit code, its
    parsed output ("document") and the paths of all keys in it. `unexpected`: the names of commands
    with an unexpected exit code.
    """

    def __init__(self, tree: Path, python: str, work: Path) -> None:
        self.tree, self.python, self.work, self.home = tree, python, work, work / "home"
        self.entries: dict[str, Entry] = {}
        self.began = time.monotonic()
        self.unexpected: list[str] = []
        inherited = {
            name: value for name, value in os.environ.items() if name not in UNUSED_VARIABLES
        }
        self.environment = inherited | {
            "PYTHONPATH": str(tree),
            "PYTHONPYCACHEPREFIX": str(work / "bytecode"),
            "LLMCLI_HOME": str(self.home),
            "HF_HOME": str(self.home / "huggingface"),
            "NO_COLOR": "1",
            "TERM": "dumb",
            # Threads that spin while they wait take the cores of other programs.
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def check_imports(self) -> None:
        """Raise SystemExit unless Python imports llmcli and quant from this tree."""
        locations = (
            self._run([self.python, "-c", LOCATIONS], self.environment).stdout.decode().split()
        )
        if (
            not all(Path(file).is_relative_to(self.tree) for file in locations)
            or len(locations) != 2
        ):
            raise SystemExit(f"{self.tree} is not what Python imports: {locations}")

    def run(self, line: str, stdin: str = "") -> subprocess.CompletedProcess[bytes]:
        """Run a command line of llmcli in the work folder, without recording it."""
        return self._run(self._command(shlex.split(line)), self.environment, stdin.encode())

    def run_all(self, commands: Iterable[Command]) -> None:
        """Run commands one after another, and record their output and files."""
        for command in commands:
            self._run_command(command)

    def record_flags(self) -> None:
        """Record the subcommands, flags and default values of every --help."""
        self._record_help(())

    def record_server(self) -> None:
        """Serve SmolLM2, and record the answers to all HTTP, WebSocket and gRPC requests and the
        exit code at SIGTERM.
        """
        words = ["serve", *SERVER_OPTIONS.split(), "--grpc-port", str(free_port())]
        log = self.work / "serve.log"
        with log.open("wb") as stream:
            server = subprocess.Popen(
                self._command(words),
                cwd=self.work,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=stream,
            )
            try:
                assert server.stdout
                if line := server.stdout.readline():
                    self._store("serve", None, json.loads(line))
                    self._record_requests(json.loads(line))
            finally:
                server.send_signal(signal.SIGTERM)
                code = server.wait(START_SECONDS)
        entry = self._store("serve: SIGTERM", code, None)
        if not line:
            entry["messages"] = log.read_text(encoding="utf-8", errors="replace")
            self.unexpected.append("serve: SIGTERM")

    def _record_requests(self, ready: Mapping[str, Any]) -> None:
        for request in REQUESTS:
            self._store(f"serve: {request.name}", None, answer(ready["url"], request))
        self._store("serve: WebSocket", None, websocket_messages(ready["url"]))
        self._store("serve: gRPC", None, grpc_messages(self.tree, ready["grpc_port"]))

    def record_worker(self, commands: Iterable[Command]) -> None:
        """Run and record commands while a worker of this tree serves llama.cpp's RPC protocol.
        WORKER in a command line is replaced by the worker's address.
        """
        port = free_port()
        words = ["worker", "--rpc", "-p", str(port)]
        with (self.work / "worker.log").open("wb") as log:
            worker = subprocess.Popen(
                self._command(words), cwd=self.work, env=self.environment, stderr=log
            )
            try:
                wait_for_port(port, worker)
                address = f"127.0.0.1:{port}"
                for command in commands:
                    self._run_command(
                        replace(command, line=command.line.replace("WORKER", address))
                    )
            finally:
                worker.send_signal(signal.SIGTERM)
                code = worker.wait(START_SECONDS)
        self._store("worker: SIGTERM", code, None)

    def record_home(self) -> None:
        """Record the names of all files in LLMCLI_HOME, the contents of JSON, JSONL and TOML files
        outside the cache, and the tables of databases.
        """
        files = [path for path in self.home.rglob("*") if path.is_file()]
        names = {path: without_numbers(str(path.relative_to(self.home))) for path in files}
        self._store("home: files", None, sorted(set(names.values())))
        for path in sorted(files, key=lambda path: (names[path], path.stat().st_mtime_ns)):
            if path.suffix in (".json", ".jsonl", ".toml") and not names[path].startswith("cache"):
                self._store(self._unused_name(f"home: {names[path]}"), None, read_document(path))
            elif path.suffix == ".sqlite":
                with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
                    rows = database.execute("SELECT sql FROM sqlite_master ORDER BY name")
                    self._store(f"home: {path.name}", None, [row[0] for row in rows])

    def _run_command(self, command: Command) -> None:
        environment = self.environment | dict(command.environment)
        done = self._run(
            self._command(shlex.split(command.line)), environment, command.stdin.encode()
        )
        messages = done.stderr.decode("utf-8", "replace")
        document = parse_output(done.stdout.decode("utf-8"), command.output, done.returncode)
        name = self._unused_name(command.line)
        entry = self._store(name, done.returncode, document)
        entry |= {
            "messages": self._without_paths(messages),
            "has_error": bool(re.search(r"^(error|Error): ", messages, re.MULTILINE)),
            "has_hint": bool(re.search(r"^hint: ", messages, re.MULTILINE)),
            "has_traceback": "Traceback (most recent" in messages,
        }  # fmt: skip
        if done.returncode != command.exit_code:
            self.unexpected.append(name)
        for file in command.documents:
            self._store(f"{name} > {file}", None, read_document(self.work / file))
        for file in command.hashes:
            self._store(f"{name} > sha256 of {file}", None, file_sha256(self.work / file))

    def _unused_name(self, line: str) -> str:
        """Return a name for the entry of a command line: the line itself, with a number if the same
        line has run before.
        """
        line, number = self._without_paths(line), 2
        name = line
        while name in self.entries:
            name, number = f"{line} ({number})", number + 1
        return name

    def _record_help(self, words: tuple[str, ...]) -> None:
        text = self._run(self._command([*words, "--help"]), self.environment).stdout.decode()
        document = parse_help(text)
        self._store(f"flags of llmcli {' '.join(words)}".rstrip(), None, document)
        for word in document["commands"]:
            self._record_help((*words, word.removeprefix("bench ")))

    def _store(self, name: str, code: int | None, document: Any) -> Entry:
        assert name not in self.entries, name
        document = self._without_paths(document)
        self.entries[name] = {
            "exit": code,
            "keys": sorted(key_paths(document)),
            "document": document,
        }
        print(f"{time.monotonic() - self.began:6.1f} s  {name}", file=sys.stderr)
        return self.entries[name]

    def _without_paths(self, value: Any) -> Any:
        """Return a JSON value with this run's folders and ports replaced by fixed names."""
        if isinstance(value, dict):
            return {
                self._without_paths(key): self._without_paths(item) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._without_paths(item) for item in value]
        if not isinstance(value, str):
            return value
        for path, name in ((self.work, "WORK"), (self.tree, "TREE")):
            value = value.replace(str(path), name)
        return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", value)

    def _command(self, words: Iterable[str]) -> list[str]:
        return [self.python, "-c", PROGRAM, *words]

    def _run(
        self, command: list[str], environment: Mapping[str, str], stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command,
            cwd=self.work,
            env=environment,
            input=stdin,
            capture_output=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )


def key_paths(value: Any, path: str = "") -> set[str]:
    """Return the paths of all keys of a JSON value, such as ".usage.tokens[]". All items of a list
    have the same path.
    """
    if isinstance(value, dict):
        return {path + "{}"}.union(
            *(key_paths(item, f"{path}.{key}") for key, item in value.items())
        )
    if isinstance(value, list):
        return {path + "[]"}.union(*(key_paths(item, path + "[]") for item in value))
    return {path}


def parse_output(text: str, output: str, code: int) -> Any:
    """Parse the stdout of a command. `output`: its format (see `recorded_commands.Output`). Of a
    table, only the columns and the number of rows are returned, because its cells are measurements.
    """
    if code != 0 and not text and output != "messages":
        return None
    if output == "json":
        return json.loads(text)
    if output == "json lines":
        return [json.loads(line) for line in text.splitlines()]
    if output == "csv":
        rows = list(csv.DictReader(text.splitlines()))
        return {"columns": list(rows[0]), "rows": rows}
    if output == "table":
        rows = [line for line in text.splitlines() if line.startswith("|")]
        return {
            "columns": [cell.strip() for cell in rows[0].strip("|").split("|")],
            "rows": len(rows) - 2,
        }
    if output == "messages":
        return {"stdout_is_empty": not text}
    return text.splitlines()


def parse_help(text: str) -> dict[str, Any]:
    """Parse the text of --help. Return its usage line, its flags with default values and ranges,
    and its subcommands.
    """
    flags: dict[str, str] = {}
    commands, section, spellings = [], "", ""
    for line in map(unframe, text.splitlines()):
        section = line if line and not line.startswith(" ") else section
        if section.startswith("Options") and line.startswith("  -"):
            spellings, _, help_text = re.sub(r"'[^']*'", "", line).strip().partition("  ")
            spellings = " ".join(re.findall(r"(?<![\w-])--?\w[\w-]*", spellings))
            flags[spellings] = help_text.strip()
        elif section.startswith("Options") and line.startswith("    ") and spellings:
            flags[spellings] = f"{flags[spellings]} {line.strip()}".strip()
        elif line.lstrip().startswith("bench ") or (
            section == "Commands:" and re.match(r"  \w", line)
        ):
            commands.append(line.strip().partition("  ")[0])
    usage = " ".join(text.strip().partition("\n\n")[0].split())
    defaults = r"\[(default: [^\]]+|[^\] ]*x[<>][^\]]*|[\w.-]+)\]$"
    return {
        "usage": re.sub(r"^Usage: llmcli ", "", usage),
        "flags": {name: re.findall(defaults, help_text) for name, help_text in flags.items()},
        "commands": commands,
    }


def unframe(line: str) -> str:
    """Return a line of --help without the frame of its panel. The title of a panel becomes that of
    a section; all panels of options are one section.
    """
    if title := re.match(r"╭─ (.+?) ─", line):
        return f"{title[1]}:" if title[1] in ("Arguments", "Commands") else "Options:"
    return f"  {line[2:-2].rstrip()}" if line.startswith("│") else line


def read_document(path: Path) -> Any:
    """Return the contents of a file: JSON parsed, JSONL as a list of documents, other text as a
    list of lines. Return None if the file does not exist.
    """
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else text.splitlines()
    )


def file_sha256(path: Path) -> str | None:
    """Return the sha256 of a file in hexadecimal, or None if it does not exist."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def without_numbers(name: str) -> str:
    """Return a file name with times, process ids and hashes replaced by fixed words."""
    return re.sub(r"[0-9a-f]{12,}", "HASH", re.sub(r"\d{8}T\d{6}-\d+", "TIME-PROCESS", name))


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process accepts connections at a port. Raises SystemExit if it ends or takes too
    long.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing answers at port {port}")


def answer(url: str, request: HttpRequest) -> dict[str, Any]:
    """Send a request; return the result of `request_document`, or {"failed": error} if the
    connection fails.
    """
    try:
        return request_document(url, request)
    except (OSError, http.client.HTTPException) as error:
        return {"failed": type(error).__name__}


def request_document(url: str, request: HttpRequest) -> dict[str, Any]:
    """Send a request; return the status, the names of the headers, the content type and the parsed
    body of its answer.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=LIMIT_SECONDS
    )
    body = request.raw if request.body is None else json.dumps(request.body).encode()
    headers = request.headers | ({} if body is None else {"Content-Type": "application/json"})
    connection.request("GET" if body is None else "POST", request.path, body, headers)
    response = connection.getresponse()
    text, content_type = response.read().decode("utf-8"), response.headers.get_content_type()
    header_names = sorted(name.lower() for name in response.headers)
    connection.close()
    return {
        "status": response.status,
        "headers": header_names,
        "type": content_type,
        "body": parse_body(text, content_type, request.path),
    }


def parse_body(text: str, kind: str, path: str) -> Any:
    """Parse an HTTP body of the content type `kind`. Return the document, the list of documents or
    events of a stream, or the names of metrics without values.
    """
    if kind == "application/json":
        return json.loads(text)
    if kind == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    if kind == "text/event-stream":
        return [parse_event(block) for block in text.split("\n\n") if block.strip()]
    if path == "/metrics":
        samples = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {
            "types": sorted(line for line in text.splitlines() if line.startswith("# TYPE")),
            "samples": sorted(
                {re.sub(r'="[^"]*"', "", line.rpartition(" ")[0]) for line in samples}
            ),
        }
    return text if kind == "text/plain" else {"has_text": bool(text)}


def parse_event(block: str) -> dict[str, Any]:
    """Return the fields of a server-sent event, with JSON in its data parsed."""
    event: dict[str, Any] = {}
    for line in block.splitlines():
        name, _, value = line.partition(": ")
        event[name or "comment"] = (
            json.loads(value) if name == "data" and value.startswith("{") else value
        )
    return event


def websocket_messages(url: str) -> dict[str, list[Any]]:
    """Send WEBSOCKET_MESSAGES over one WebSocket; return all answering messages by request id."""
    from websockets.sync.client import connect

    messages_by_id: dict[str, list[Any]] = {}
    address = f"{url.replace('http', 'ws')}/v1/ws"
    with connect(address, additional_headers={"Authorization": f"Bearer {KEY}"}) as client:
        for message in WEBSOCKET_MESSAGES:
            client.send(json.dumps(message))
            received = messages_by_id.setdefault(str(message["id"]), [])
            while not received or not ("done" in received[-1] or "error" in received[-1]):
                received.append(json.loads(client.recv(timeout=LIMIT_SECONDS)))
    return messages_by_id


def grpc_messages(tree: Path, port: int) -> dict[str, list[Any]]:
    """Call every gRPC method, described by the file llmcli.binpb of the tree. Return the answering
    messages as JSON by method, and the signatures of all methods as "methods".
    """
    import grpc
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        json_format,
        message_factory,
        struct_pb2,
    )

    (file,) = tree.glob("llmcli/serve/**/llmcli.binpb")
    files = descriptor_pb2.FileDescriptorSet.FromString(file.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    for description in files.file:
        pool.Add(description)
    service = pool.FindServiceByName("llmcli.v1.Llmcli")
    methods = [
        f"{method.name} {method.input_type.name} {method.output_type.name}"
        for method in service.methods
    ]
    messages_by_method: dict[str, list[Any]] = {"methods": sorted(methods)}
    metadata = (("authorization", f"Bearer {KEY}"),)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name, input_type, values in GRPC_CALLS:
            method = service.methods_by_name[name]
            request = message_factory.GetMessageClass(
                pool.FindMessageTypeByName(f"llmcli.v1.{input_type}")
            )
            reply = message_factory.GetMessageClass(method.output_type)
            call = channel.unary_stream(
                f"/llmcli.v1.Llmcli/{name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=reply.FromString,
            )
            replies = call(
                json_format.ParseDict(values, request()), metadata=metadata, timeout=LIMIT_SECONDS
            )
            messages_by_method[name] = [
                json_format.MessageToDict(
                    item,
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                )
                for item in replies
            ]
    return messages_by_method
