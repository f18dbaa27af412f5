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
OUTSIDE_KEYS = (
    "swapped_bytes",
    "finished_bytes",
    "checkpoint_bytes",
)  # states outside of the cache
MAX_COUNT = 1 << 62  # of a number in a server's report


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
    limit_bytes = _count(memory.get("limit_bytes"))
    if ui.json:
        ui.result({"url": base, "limit_bytes": limit_bytes, "models": rows})
        return
    ui.table(COLUMNS, [_cells(row) for row in rows], right=RIGHT_COLUMNS)
    if limit_bytes:
        from llmcli.units import format_size

        taken = format_size(_count(memory.get("reserved_bytes")) or 0)
        ui.text(f"{taken} of {format_size(limit_bytes)} are taken")


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
    report = _object(_object(memory.get("models")).get(name))
    if "models" not in memory:  # a server of one model, which is always loaded
        report = {
            "state": "loaded",
            "running": memory.get("running"),
            "waiting": memory.get("waiting"),
            "cache": memory,
        }
    cache = _object(report.get("cache"))
    outside = _object(cache.get("outside"))
    weights = _count(_object(document.get("meta")).get("size"))
    planned = _count(_object(report.get("planned")).get("weights"))
    is_loaded = report.get("state") == "loaded"
    states = [_count(outside.get(key)) or 0 for key in OUTSIDE_KEYS]
    return {
        "model": name,
        "state": _text(report.get("state")),
        "memory_bytes": _count(report.get("bytes")),
        "weights_bytes": weights or planned,
        "kv_bytes": _count(cache.get("allocated_bytes")) if is_loaded else None,
        "states_bytes": sum(states) if is_loaded else None,
        "n_ctx": _count(cache.get("cells")) if is_loaded else None,
        "running": _count(report.get("running")),
        "waiting": _count(report.get("waiting")),
        "pinned": bool(report.get("pinned")),
        "idle_ms": _count(report.get("idle_ms")),
        "expires_ms": _count(report.get("expires_ms")),
        "loads": _count(report.get("loads")),
        "crashes": _count(report.get("crashes")),
        "error": _text(report.get("error")),
    }


def _object(value: Any) -> dict[str, Any]:
    """Return a value of a server's report as a JSON object, which is empty if the value is none."""
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    """Return a value of a server's report as a number; None if it is no possible one."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def _text(value: Any) -> str | None:
    """Return a value of a server's report as a text; None if it is none."""
    return value if isinstance(value, str) else None


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a model's row of the table."""
    from llmcli.units import format_duration, format_size

    def size(key: str) -> str:
        return "-" if row[key] is None else format_size(row[key])

    def duration(key: str) -> str:
        return "-" if row[key] is None else format_duration(row[key] / 1e3)

    is_loaded = row["state"] == "loaded"
    expiry = "pinned" if row["pinned"] else duration("expires_ms")
    if is_loaded and expiry == "-":
        expiry = "never"
    requests = "-" if row["running"] is None else f"{row['running']} + {row['waiting']}"
    state = f"{row['state']}: {row['error']}" if row["error"] else row["state"] or "-"
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
