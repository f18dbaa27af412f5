"""Options of `llmcli serve` for its addresses, its keys and the pages that may use it."""

from pathlib import Path
from typing import Annotated

import typer

from llmcli import text_input
from llmcli.commands.command_line import panels
from llmcli.errors import UserError
from llmcli.loopback import LOOPBACK_HOSTS

MIN_KEY_CHARACTERS = 8  # characters of an API key

Addresses = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on; repeatable, or several with commas. Beyond this machine a key "
        "is required. [127.0.0.1]",
        rich_help_panel=panels.NETWORK,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, help="Port; 0 chooses a free one.", rich_help_panel=panels.NETWORK
    ),
]
GrpcPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Also serve gRPC on this port (pip install 'llmcli[grpc]').",
        rich_help_panel=panels.NETWORK,
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "-a", "--alias", help="Model name in the API; repeatable.", rich_help_panel=panels.NETWORK
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="API key that requests must carry; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]
KeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="File of API keys, one per line; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TLS: the private key, PEM.", rich_help_panel=panels.NETWORK),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TLS: the certificate, PEM.", rich_help_panel=panels.NETWORK),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Allow web pages of this origin, * for any; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Another Host name to accept besides localhost, * for any; repeatable.",
        rich_help_panel=panels.NETWORK,
    ),
]


def split_hosts(typed: list[str]) -> tuple[str, ...]:
    """Return the addresses of --host, each once; by default that of this machine."""
    hosts = [host.strip() for text in typed for host in text.split(",")]
    return tuple(dict.fromkeys(host for host in hosts if host)) or (LOOPBACK_HOSTS[0],)


def read_keys(typed: list[str], files: list[Path], hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the API keys of the command line and of the key files.

    Empty lines and # comments of a key file are skipped. Raises UserError for an invalid key, or if
    one of `hosts` is reachable from other machines and there is no key.
    """
    lines = [line.strip() for file in files for line in text_input.read_text(file).splitlines()]
    keys = [*typed, *(line for line in lines if line and not line.startswith("#"))]
    if files and not keys:
        raise UserError(f"there is no key in {files[0]}", hint="write one key per line")
    for key in keys:
        if len(key) < MIN_KEY_CHARACTERS or not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(
                "an API key is too short, or contains characters that HTTP headers do not allow",
                hint=f"use {MIN_KEY_CHARACTERS} or more ASCII characters without spaces, "
                "such as the output of: openssl rand -hex 16",
            )
    public_hosts = [host for host in hosts if host not in LOOPBACK_HOSTS]
    if public_hosts and not keys:
        raise UserError(
            f"{public_hosts[0]} can be reached from other machines, and no API key is set",
            hint="add --api-key KEY (or --api-key-file FILE), or leave out --host",
        )
    return tuple(keys)


def check_grpc(in_other_process: bool) -> None:
    """Raise UserError if gRPC cannot be served. `in_other_process`: the model runs in another
    process.
    """
    from llmcli.serve.grpc import service

    if in_other_process:
        raise UserError(
            "--grpc-port needs the model in this process, but it runs in another",
            hint="leave out --rpc, --replicas and --ray, or use HTTP",
        )
    service.require_grpc()
