"""`/v1/files`: the files of batches, with OpenAI's objects."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from llmcli.api.errors import ApiError
from llmcli.errors import UserError
from llmcli.serve.batches.file_store import FileStore, Upload
from llmcli.serve.batches.records import KEPT_SECONDS, StoredFile
from llmcli.serve.engine_thread.bug_log import LOGGER
from llmcli.serve.http import api_keys
from llmcli.serve.http.exchange import CLIENT_SECONDS, ClientDisconnected, json_response
from llmcli.serve.http.multipart import MultipartReader, PartPiece
from llmcli.serve.http.object_list import read_choice, read_page
from llmcli.serve.http.service import MAX_UPLOADS, Route, Service

FILES_PATH = "/v1/files"
STREAMED_PATHS = (FILES_PATH, "/files")  # their bodies are written to the disk while they arrive
PURPOSE = "batch"  # the only purpose of a file that this server has a use for
PURPOSES = (PURPOSE, "batch_output")
MAX_FIELD_BYTES = 4096  # of a field that is no file
MAX_NAME_CHARACTERS = 255  # of a file
PIECE_BYTES = 1 << 18  # written to the disk, or read from it, at once
MIN_BYTES_PER_SECOND = 4096  # a client that sends less for longer than CLIENT_SECONDS is refused
MAX_LISTED = 10_000
MIN_EXPIRY_SECONDS = 3600  # OpenAI's limit
ANCHOR_FIELD, SECONDS_FIELD = "expires_after[anchor]", "expires_after[seconds]"
FIELDS = ("file", "purpose", ANCHOR_FIELD, SECONDS_FIELD)
FOLDERS_OF_NAME = re.compile(r"^.*[/\\]", re.DOTALL)


async def upload_file(service: Service, request: Request) -> Response:
    """Store a file, which arrives as multipart/form-data with the fields `file` and `purpose`."""
    store = await service.batches.open_store()
    reader = MultipartReader(request.headers.get("content-type", ""))
    if service.uploads.locked():
        raise ApiError(f"{MAX_UPLOADS} files are being uploaded; retry later", 503, code="busy")
    async with service.uploads:
        form = _UploadForm(store)
        try:
            with report_disk_errors():
                await _read_form(request, reader, form)
                file = await form.finish(api_keys.owner_id(request.headers, service.settings.keys))
        finally:
            await asyncio.to_thread(form.abort)
    return json_response(file.to_document())


@contextmanager
def report_disk_errors() -> Iterator[None]:
    """Report an error of the disk in the `with` block on standard error. The client reads a text
    without the server's paths.
    """
    try:
        yield
    except ApiError:
        raise
    except UserError as error:
        LOGGER.warning("files: %s", error)
        raise ApiError("the server cannot write its files at present", 503) from None


@dataclass(slots=True)
class _UploadForm:
    """What an upload contains so far."""

    store: FileStore
    fields: dict[str, bytes] = field(default_factory=dict)
    upload: Upload | None = None
    has_file: bool = False  # completely
    filename: str = ""
    waiting: bytearray = field(default_factory=bytearray)  # not yet written

    async def add(self, piece: PartPiece) -> None:
        """Add a piece of a part. Raises ApiError if it is too large, or not expected."""
        if piece.name not in FIELDS:
            raise ApiError(f"there is no field {piece.name[:100]!r}", param=piece.name[:100])
        if piece.name != "file":
            raw = self.fields.get(piece.name, b"") + piece.raw
            if len(raw) > MAX_FIELD_BYTES:
                raise ApiError(f"the field {piece.name} is too large", param=piece.name)
            self.fields[piece.name] = raw
            return
        if self.has_file:
            raise ApiError("send one file at a time", param="file")
        if self.upload is None:
            self.filename = clean_name(piece.filename or "")
            self.upload = await asyncio.to_thread(self.store.begin_upload)
        self.waiting += piece.raw
        self.has_file = piece.is_last
        if len(self.waiting) >= PIECE_BYTES or piece.is_last:
            raw, self.waiting = bytes(self.waiting), bytearray()
            await asyncio.to_thread(self.upload.write, raw)

    async def finish(self, owner: str) -> StoredFile:
        """Store the file, and return its description. Raises ApiError if a field is missing."""
        if self.upload is None:
            raise ApiError("the field file is missing", param="file")
        if "purpose" not in self.fields:
            raise ApiError("the field purpose is missing", param="purpose")
        if self.fields["purpose"] != PURPOSE.encode():
            text = f"purpose must be {PURPOSE!r}: this server uses files only for batches"
            raise ApiError(text, param="purpose")
        expires_at = int(time.time()) + self._kept_seconds()
        upload, self.upload = self.upload, None
        return await asyncio.to_thread(upload.finish, self.filename, PURPOSE, owner, expires_at)

    def _kept_seconds(self) -> int:
        """Return for how long the file is kept. Raises ApiError for a wrong field."""
        if self.fields.get(ANCHOR_FIELD, b"created_at") != b"created_at":
            raise ApiError(f"{ANCHOR_FIELD} must be created_at", param="expires_after")
        raw = self.fields.get(SECONDS_FIELD)
        if raw is None:
            return KEPT_SECONDS
        seconds = int(raw) if raw.isdigit() and len(raw) < 10 else 0
        if not MIN_EXPIRY_SECONDS <= seconds <= KEPT_SECONDS:
            raise ApiError(
                f"{SECONDS_FIELD} must be {MIN_EXPIRY_SECONDS} to {KEPT_SECONDS}",
                param="expires_after",
            )
        return seconds

    def abort(self) -> None:
        """Discard the file, unless it is finished."""
        if self.upload is not None:
            self.upload.abort()


def clean_name(filename: str) -> str:
    """Return the name of a client's file without folders and control characters. It is only shown:
    the server never uses it as a path.
    """
    name = FOLDERS_OF_NAME.sub("", filename)
    name = "".join(character for character in name if character.isprintable())
    return name[:MAX_NAME_CHARACTERS] or "file"


async def _read_form(request: Request, reader: MultipartReader, form: _UploadForm) -> None:
    """Read a request's body into a form. Raises ApiError if it is damaged or arrives too slowly, and
    ClientDisconnected.
    """
    chunks = request.stream()
    started, n_received = time.monotonic(), 0
    try:
        while not reader.is_complete:
            async with asyncio.timeout(CLIENT_SECONDS):
                chunk = await anext(chunks, None)
            if chunk is None:
                break
            n_received += len(chunk)
            if time.monotonic() - started > CLIENT_SECONDS + n_received / MIN_BYTES_PER_SECOND:
                raise TimeoutError
            for piece in reader.feed(chunk):
                await form.add(piece)
    except TimeoutError:
        raise ApiError("the file arrives too slowly", 408) from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    reader.finish()


async def list_files(service: Service, request: Request) -> Response:
    """Respond with the files of a client."""
    store = await service.batches.open_store()
    purpose = read_choice(request, "purpose", PURPOSES)
    owner = api_keys.owner_id(request.headers, service.settings.keys)
    files = [
        file
        for file in list(store.files.values())  # another thread may add one
        if file.owner == owner and purpose in ("", file.purpose)
    ]
    return json_response(read_page(request, files, StoredFile.to_document, MAX_LISTED, MAX_LISTED))


async def show_file(service: Service, request: Request) -> Response:
    """Respond with the description of a file."""
    return json_response((await find_file(service, request)).to_document())


async def delete_file(service: Service, request: Request) -> Response:
    """Delete a file, unless a batch reads it."""
    file = await find_file(service, request)
    store = service.batches.store
    if file.id in store.needed_files():
        raise ApiError("a batch still reads this file; cancel the batch first", 409)
    with report_disk_errors():
        await asyncio.to_thread(store.delete_file, file.id)
    return json_response({"id": file.id, "object": "file", "deleted": True})


async def send_content(service: Service, request: Request) -> Response:
    """Respond with the content of a file."""
    file = await find_file(service, request)
    try:
        stream = await asyncio.to_thread(service.batches.store.open_content, file.id)
    except OSError:
        text = f"the content of {file.id} is not there any more"
        raise ApiError(text, 404, code="not_found") from None
    size = stream.seek(0, 2)
    stream.seek(0)
    headers = {"content-length": str(size), "content-disposition": "attachment"}
    return StreamingResponse(_read(stream), 200, headers, "application/octet-stream")


async def _read(stream: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the bytes of a file, and close it."""
    with stream:
        while piece := await asyncio.to_thread(stream.read, PIECE_BYTES):
            yield piece


async def find_file(service: Service, request: Request, file_id: str | None = None) -> StoredFile:
    """Return a file of the client by its id; by default that in the path. Raises ApiError (404)."""
    store = await service.batches.open_store()
    file_id = request.path_params["file_id"] if file_id is None else file_id
    file = store.files.get(file_id)
    owner = api_keys.owner_id(request.headers, service.settings.keys)
    if file is None or file.owner != owner:
        raise ApiError(f"No such File object: {file_id[:100]}", 404, param="id", code="not_found")
    return file


async def handle_files(service: Service, request: Request) -> Response:
    """Store a file, or list the files."""
    return await (upload_file if request.method == "POST" else list_files)(service, request)


async def handle_file(service: Service, request: Request) -> Response:
    """Describe a file, or delete it."""
    return await (delete_file if request.method == "DELETE" else show_file)(service, request)


ROUTES = (
    Route(FILES_PATH, handle_files, ("GET", "POST"), ("/files",)),
    Route(f"{FILES_PATH}/{{file_id}}", handle_file, ("GET", "DELETE"), ("/files/{file_id}",)),
    Route(
        f"{FILES_PATH}/{{file_id}}/content", send_content, ("GET",), ("/files/{file_id}/content",)
    ),
)
