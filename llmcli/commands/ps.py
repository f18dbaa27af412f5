"""`llmcli ps`: the models of a running server, and the memory that they take."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Json
from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.http_client.client import ConnectionSettings

DEFAULT_URL = "http://127.0.0.1:8080"  # the usual address of `llmcli serve`
TIMEOUT_SECONDS = 20.0
COLUMNS = ("model", "state", "memory", "weights", "KV", "states", "requests", "idle", "unloads in")
RIGHT_COLUMNS = COLUMNS[2:]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("ps")(ps)


def ps(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="Address of the server.")
    ] = DEFAULT_URL,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="API key of the server, if it needs one.")
    ] = None,
    json: Json = False,
) -> None:
    """List the models of a running server, and the memory that they take."""
    from llmcli.http_client.client import ConnectionSettings, RequestError

    _, ui = start_command(json)
    base = _parse_url(url)
    settings = ConnectionSettings(
        base.startswith("https://"), api_key, timeout_seconds=TIMEOUT_SECONDS
    )
    try:
        import asyncio

        models, memory = asyncio.run(_ask(base, settings))
    except RequestError as error:
        raise UserError(
            f"{base} does not answer: {error}",
            hint="llmcli serve starts a server; llmcli ps URL asks another address",
        ) from None
    rows = [_row(document, memory) for document in models]
    if ui.json:
        ui.result({"url": base, "limit_bytes": memory.get("limit_bytes"), "models": rows})
        return
    ui.table(COLUMNS, [_cells(row) for row in rows], right=RIGHT_COLUMNS)
    if memory.get("limit_bytes"):
        from llmcli.units import format_size

        ui.text(
            f"{format_size(memory['reserved_bytes'])} of {format_size(memory['limit_bytes'])}"
            " are taken"
        )


def _parse_url(text: str) -> str:
    """Return the address of a server without a path. Raises UsageError if it is none."""
    from urllib.parse import urlsplit

    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"{text!r} is no address of a server", hint=f"llmcli ps {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}"


async def _ask(base: str, settings: "ConnectionSettings") -> tuple[list[dict[str, Any]], Any]:
    """Return the server's list of models and its report on memory. Raises RequestError."""
    from llmcli.http_client.client import RequestError, open_http_client

    async with open_http_client(settings) as client:
        models = await client.fetch_json(f"{base}/v1/models")
        memory = await client.fetch_json(f"{base}/v1/kv")
    data = models.get("data")
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise RequestError("bad answer", "it is no server of llmcli")
    return data, memory


def _row(document: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    """Return a model as a JSON object. `document`: its entry in /v1/models. `memory`: the report of
    /v1/kv, of all models or of the only one.
    """
    name = str(document.get("id"))
    report = (memory.get("models") or {}).get(name) or {}
    if "models" not in memory:  # a server of one model, which is always loaded
        report = {
            "state": "loaded",
            "running": memory.get("running"),
            "waiting": memory.get("waiting"),
            "cache": memory,
        }
    cache = report.get("cache") or {}
    outside = cache.get("outside") or {}
    planned = report.get("planned") or {}
    is_loaded = report.get("state") == "loaded"
    states = [
        outside.get(key, 0) for key in ("swapped_bytes", "finished_bytes", "checkpoint_bytes")
    ]
    return {
        "model": name,
        "state": report.get("state"),
        "memory_bytes": report.get("bytes"),
        "weights_bytes": (document.get("meta") or {}).get("size") or planned.get("weights"),
        "kv_bytes": cache.get("allocated_bytes") if is_loaded else None,
        "states_bytes": sum(states) if is_loaded else None,
        "n_ctx": cache.get("cells") if is_loaded else None,
        "running": report.get("running"),
        "waiting": report.get("waiting"),
        "pinned": bool(report.get("pinned")),
        "idle_ms": report.get("idle_ms"),
        "expires_ms": report.get("expires_ms"),
        "loads": report.get("loads"),
        "crashes": report.get("crashes"),
        "error": report.get("error"),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a model's row of the table."""
    from llmcli.units import format_duration, format_size

    def size(key: str) -> str:
        return "-" if not isinstance(row[key], int) else format_size(row[key])

    def duration(key: str) -> str:
        return "-" if not isinstance(row[key], int) else format_duration(row[key] / 1e3)

    is_loaded = row["state"] == "loaded"
    expiry = "pinned" if row["pinned"] else duration("expires_ms")
    if is_loaded and expiry == "-":
        expiry = "never"
    requests = "-" if row["running"] is None else f"{row['running']} + {row['waiting']}"
    state = f"{row['state']}: {row['error']}" if row["error"] else str(row["state"])
    return (
        row["model"],
        state,
        size("memory_bytes"),
        size("weights_bytes"),
        size("kv_bytes"),
        size("states_bytes"),
        requests,
        duration("idle_ms"),
        expiry,
    )
