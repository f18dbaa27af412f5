"""`/v1/batches`: many requests in a file, answered beside the others, with OpenAI's objects."""

import re
import time
import uuid
from typing import Annotated, Any, ClassVar, Literal

from starlette.requests import Request
from starlette.responses import Response

from llmcli.api.bodies.base import JsonObject, RequestBody, WholeNumber, honored
from llmcli.api.bodies.checks import MAX_PATH_CHARACTERS, wrong_value
from llmcli.api.errors import ApiError
from llmcli.api.forms import FORMS
from llmcli.batch.request_line import EMBEDDINGS_PATH
from llmcli.serve.batches.file_store import BATCH_PREFIX, ID_DIGITS
from llmcli.serve.batches.records import KEPT_SECONDS, StoredBatch
from llmcli.serve.http import api_keys
from llmcli.serve.http.exchange import json_response, read_checked_body
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


class ExpiryBody(RequestBody):
    """When the files of a batch are deleted."""

    origin: ClassVar[str] = "OpenAI"
    anchor: Literal["created_at"] = honored("when the time begins", ...)
    seconds: Annotated[int, WholeNumber(MIN_EXPIRY_SECONDS, KEPT_SECONDS)] = honored(
        "how long the output files are kept", ...
    )


class BatchBody(RequestBody):
    """A batch of requests, which are the lines of an uploaded file."""

    origin: ClassVar[str] = "OpenAI"
    input_file_id: str = honored("the id of the uploaded file", ...)
    endpoint: Literal[*ENDPOINTS] = honored("the path of all requests", ...)  # type: ignore[valid-type]
    completion_window: str = honored("the time for the batch, such as 24h, up to 30d", ...)
    metadata: Annotated[dict[str, Any], JsonObject("an object of texts")] | None = honored(
        "texts that are returned with the batch"
    )
    output_expires_after: ExpiryBody | None = honored("when the output files are deleted")

    @classmethod
    def advice_about(cls, name: str) -> str:
        """Return what a batch has instead of a field that it does not have. Such a field is
        refused, because a batch has no place for a note.
        """
        return f"a batch has {', '.join(cls.effects())}"

    @property
    def window_seconds(self) -> int:
        """The completion window in seconds. Raises ApiError."""
        match = WINDOW.fullmatch(self.completion_window)
        seconds = int(match.group(1)) * UNIT_SECONDS[match.group(2)] if match else 0
        if not 0 < seconds <= KEPT_SECONDS:
            raise ApiError(
                "completion_window must be a time such as 24h, at most 30d",
                param="completion_window",
            )
        return seconds

    @property
    def checked_metadata(self) -> dict[str, str] | None:
        """The metadata. Raises ApiError if it has too many or too long texts, or other values."""
        metadata = self.metadata or {}
        for name, value in metadata.items():
            if not isinstance(value, str):
                raise wrong_value(f"metadata.{name}"[:MAX_PATH_CHARACTERS], value, "text")
        if len(metadata) > MAX_METADATA or any(
            len(name) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS
            for name, value in metadata.items()
        ):
            raise ApiError(
                f"metadata may have {MAX_METADATA} names of {MAX_KEY_CHARACTERS} characters with"
                f" values of {MAX_VALUE_CHARACTERS}",
                param="metadata",
            )
        return self.metadata


async def create_batch(service: Service, request: Request) -> Response:
    """Create a batch. Its input is checked before the first line is answered."""
    await service.batches.open_store()
    body = await read_checked_body(request, service.settings.max_body, BatchBody)
    seconds, metadata = body.window_seconds, body.checked_metadata
    expiry = body.output_expires_after
    file = await find_file(service, request, body.input_file_id)
    if file.purpose != PURPOSE:
        raise ApiError(f"the purpose of {file.id} is not {PURPOSE}", param="input_file_id")
    now = int(time.time())
    batch = StoredBatch(
        f"{BATCH_PREFIX}{uuid.uuid4().hex[:ID_DIGITS]}",
        body.endpoint,
        file.id,
        body.completion_window,
        now,
        now + seconds,
        file.owner,
        metadata,
        kept_seconds=expiry.seconds if expiry else KEPT_SECONDS,
    )
    with report_disk_errors():
        batch = await service.batches.add(batch)
    return json_response(service.batches.to_document(batch))


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
    Route("/v1/batches", handle_batches, ("GET", "POST"), ("/batches",), body_type=BatchBody),
    Route("/v1/batches/{batch_id}", show_batch, ("GET",), ("/batches/{batch_id}",)),
    Route(
        "/v1/batches/{batch_id}/cancel", cancel_batch, ("POST",), ("/batches/{batch_id}/cancel",)
    ),
)
