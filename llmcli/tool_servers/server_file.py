"""Reads the file of `--mcp`: which tool servers there are, in the usual JSON form.

{"mcpServers": {NAME: {"command": …, "args": […], "env": {…}, "cwd": …}
                or {"type": "http", "url": …, "headers": {…}}}}
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmcli.errors import UserError
from llmcli.loopback import is_loopback
from quant.json_dataclasses import decode_value, read_json

MAX_FILE_BYTES = 1 << 20
MAX_SERVERS = 32
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")
HTTP_TYPES = ("http", "streamable-http", "streamableHttp", "streamable_http")
HINT = (
    'write {"mcpServers": {"NAME": {"command": "…", "args": []}}} or {"NAME": {"url": "http://…"}}'
)


@dataclass(frozen=True, slots=True)
class ToolServer:
    """A server of tools: a program that is started (`command`), or a URL of streamable HTTP.

    - `env`: environment variables of the program, besides a few such as PATH and HOME.
    - `cwd`: the folder in which the program runs; "" for the present one.
    - `headers`: HTTP headers of all requests.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine: a program, or an address of the loopback."""
        return not self.url or is_loopback(self.url)

    @property
    def address(self) -> str:
        """The URL without user names, passwords and queries, or the command line of the program."""
        if not self.url:
            return " ".join((self.command, *self.args))
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


@dataclass(frozen=True, slots=True)
class _Entry:
    """The JSON object of a server."""

    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    type: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    disabled: bool = False


@dataclass(frozen=True, slots=True)
class _ServerTable:
    """The JSON document of the file."""

    mcpServers: Mapping[str, Any]


def read_servers(path: Path) -> tuple[ToolServer, ...]:
    """Return the servers of a file, without those with `"disabled": true`. Raises UserError if the
    file cannot be read or something in it is wrong.
    """
    try:
        table = read_json(_ServerTable, path, MAX_FILE_BYTES).mcpServers
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint=HINT) from None
    except ValueError as error:
        raise UserError(f"{path} is no list of tool servers: {error}", hint=HINT) from None
    if len(table) > MAX_SERVERS:
        raise UserError(
            f"{path} has {len(table)} servers, more than {MAX_SERVERS}",
            hint="remove those that are not needed",
        )
    servers = (_parse_server(path, name, value) for name, value in table.items())
    return tuple(server for server in servers if server is not None)


def _parse_server(path: Path, name: str, value: Any) -> ToolServer | None:
    """Return the server of an entry, or None if it is disabled. Raises UserError."""
    label = f"{path}: server {name[:60]!r}"
    if not NAME_PATTERN.fullmatch(name):
        raise UserError(
            f"{label} has no valid name", hint="use letters, digits and . _ - (at most 40)"
        )
    try:
        entry: _Entry = decode_value(_Entry, value, name)
    except ValueError as error:
        raise UserError(f"{label}: {error}", hint=HINT) from None
    if bool(entry.command) == bool(entry.url):
        raise UserError(f"{label} needs either a command or a url", hint=HINT)
    if any("\0" in text for text in (entry.command or "", *entry.args, entry.cwd or "")):
        raise UserError(f"{label} has a NUL character in its command", hint="remove it")
    if entry.type not in (None, *(HTTP_TYPES if entry.url else ("stdio",))):
        raise UserError(
            f"{label} has the type {entry.type!r}, which is not supported",
            hint='use "type": "http" with a url, or "type": "stdio" with a command',
        )
    if entry.url and (urlsplit(entry.url).scheme not in ("http", "https") or not _host(entry.url)):
        raise UserError(f"{label} has no valid url", hint="a url begins with http:// or https://")
    if any(
        "\r" in text or "\n" in text or not text.isascii()
        for pair in entry.headers.items()
        for text in pair
    ):
        raise UserError(f"{label} has a header that is no ASCII text", hint="correct its headers")
    if entry.disabled:
        return None
    return ToolServer(
        name,
        entry.command or "",
        entry.args,
        entry.env,
        entry.cwd or "",
        entry.url or "",
        entry.headers,
    )


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for a port that is no number
    except ValueError:
        return ""
    return parts.hostname or ""
