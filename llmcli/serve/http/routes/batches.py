"""`/v1/batches`: many requests in a file, answered beside the others, with OpenAI's objects."""

import re
import time
import uuid

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.errors import ApiError
from llmcli.api.fields import Fields
from llmcli.api.forms import FORMS
from llmcli.batch.request_line import EMBEDDINGS_PATH
from llmcli.serve.batches.file_store import BATCH_PREFIX, ID_DIGITS
from llmcli.serve.batches.records import KEPT_SECONDS, StoredBatch
from llmcli.serve.http import api_keys
from llmcli.serve.http.exchange import json_response, read_body
from llmcli.serve.http.object_list import read_page
from llmcli.serve.http.routes.files import (
    MIN_EXPIRY_SECONDS,
    PURPOSE,
    find_file,
    report_disk_errors,
)
from llmcli.serve.http.service import Route, Service

ENDPOINTS = tuple(sorted({path for path in FORMS if path.startswith("/v1/")} | {EMBEDDINGS_PATH}))
UNIT_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])")
MAX_METADATA, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512  # OpenAI's limits
DEFAULT_LISTED, MAX_LISTED = 20, 100
FIELDS = (
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
)


async def create_batch(service: Service, request: Request) -> Response:
    """Create a batch. Its input is checked before the first line is answered."""
    await service.batches.open_store()
    fields = Fields(await read_body(request, service.settings.max_body))
    for name in fields.values:
        if name not in FIELDS and fields.has(name):
            raise ApiError(f"a batch has no field {name[:100]!r}", param=name[:100])
    file_id, endpoint = fields.required_text("input_file_id"), fields.required_text("endpoint")
    if endpoint not in ENDPOINTS:
        raise ApiError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    window = fields.required_text("completion_window")
    seconds = _window_seconds(window)
    metadata, kept_seconds = _read_metadata(fields), _read_kept_seconds(fields)
    file = await find_file(service, request, file_id)
    if file.purpose != PURPOSE:
        raise ApiError(f"the purpose of {file.id} is not {PURPOSE}", param="input_file_id")
    now = int(time.time())
    batch = StoredBatch(
        f"{BATCH_PREFIX}{uuid.uuid4().hex[:ID_DIGITS]}",
        endpoint,
        file.id,
        window,
        now,
        now + seconds,
        file.owner,
        metadata,
        kept_seconds=kept_seconds,
    )
    with report_disk_errors():
        batch = await service.batches.add(batch)
    return json_response(service.batches.to_document(batch))


def _window_seconds(window: str) -> int:
    """Return the seconds of a completion window such as 24h. Raises ApiError."""
    match = WINDOW.fullmatch(window)
    seconds = int(match.group(1)) * UNIT_SECONDS[match.group(2)] if match else 0
    if not 0 < seconds <= KEPT_SECONDS:
        raise ApiError(
            "completion_window must be a time such as 24h, at most 30d", param="completion_window"
        )
    return seconds


def _read_metadata(fields: Fields) -> dict[str, str] | None:
    """Return the texts that a client wants to have with its batch. Raises ApiError if they are too
    many or too long.
    """
    table = fields.table("metadata")
    if table is None:
        return None
    metadata = {name: table.required_text(name) for name in table.values}
    if len(metadata) > MAX_METADATA or any(
        len(name) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS
        for name, value in metadata.items()
    ):
        raise ApiError(
            f"metadata may have {MAX_METADATA} names of {MAX_KEY_CHARACTERS} characters with"
            f" values of {MAX_VALUE_CHARACTERS}",
            param="metadata",
        )
    return metadata


def _read_kept_seconds(fields: Fields) -> int:
    """Return for how long the files of a batch are kept. Raises ApiError."""
    table = fields.table("output_expires_after")
    if table is None:
        return KEPT_SECONDS
    table.choice("anchor", ("created_at",), "created_at")
    return table.integer("seconds", MIN_EXPIRY_SECONDS, KEPT_SECONDS) or KEPT_SECONDS


async def list_batches(service: Service, request: Request) -> Response:
    """Respond with the batches of a client."""
    store = await service.batches.open_store()
    owner = api_keys.owner_id(request.headers, service.settings.keys)
    batches = [batch for batch in list(store.batches.values()) if batch.owner == owner]
    to_document = service.batches.to_document
    return json_response(read_page(request, batches, to_document, DEFAULT_LISTED, MAX_LISTED))


async def show_batch(service: Service, request: Request) -> Response:
    """Respond with the present state of a batch."""
    return json_response(service.batches.to_document(await _find_batch(service, request)))


async def cancel_batch(service: Service, request: Request) -> Response:
    """Cancel a batch. The answers that it has so far become its files."""
    batch = await _find_batch(service, request)
    if not batch.is_open:
        raise ApiError(f"Cannot cancel a batch with status '{batch.status}'.", 409)
    with report_disk_errors():
        batch = await service.batches.cancel(batch.id)
    return json_response(service.batches.to_document(batch))


async def _find_batch(service: Service, request: Request) -> StoredBatch:
    """Return the batch in the path, if it is one of the client. Raises ApiError (404)."""
    store, batch_id = await service.batches.open_store(), request.path_params["batch_id"]
    batch = store.batches.get(batch_id)
    if batch is None or batch.owner != api_keys.owner_id(request.headers, service.settings.keys):
        text = f"No batch found with id '{batch_id[:100]}'."
        raise ApiError(text, 404, param="id", code="not_found")
    return batch


async def handle_batches(service: Service, request: Request) -> Response:
    """Create a batch, or list the batches."""
    return await (create_batch if request.method == "POST" else list_batches)(service, request)


ROUTES = (
    Route("/v1/batches", handle_batches, ("GET", "POST"), ("/batches",)),
    Route("/v1/batches/{batch_id}", show_batch, ("GET",), ("/batches/{batch_id}",)),
    Route(
        "/v1/batches/{batch_id}/cancel", cancel_batch, ("POST",), ("/batches/{batch_id}/cancel",)
    ),
)
