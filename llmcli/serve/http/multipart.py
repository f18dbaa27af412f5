"""Reads a body of multipart/form-data (RFC 7578) piece by piece, as it arrives. Only one piece is in
memory at a time.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from llmcli.api.errors import ApiError

CONTENT_TYPE = "multipart/form-data"
MAX_BOUNDARY_CHARACTERS = 70  # RFC 2046
MAX_HEAD_BYTES = 8192  # of the headers of one part
MAX_PARTS = 32
BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
PARAMETER = re.compile(r';\s*([\w*-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
# What browsers and Python's clients write for characters that a quoted text cannot have.
ESCAPES = {"%22": '"', "%0D": "\r", "%0A": "\n"}


@dataclass(frozen=True, slots=True)
class PartPiece:
    """Bytes of a part. `name`: the part's field. `filename`: None if it is no file. `is_last`: they
    are the last ones of this part.
    """

    name: str
    filename: str | None
    raw: bytes
    is_last: bool


class MultipartReader:
    """Splits a body into its parts. `content_type`: the header of the request. Raises ApiError if this
    is not multipart/form-data.
    """

    def __init__(self, content_type: str) -> None:
        kind, match = content_type.partition(";")[0].strip().lower(), BOUNDARY.search(content_type)
        boundary = (match.group(1) or match.group(2)) if match else ""
        if kind != CONTENT_TYPE:
            raise ApiError(f"send the file as {CONTENT_TYPE}", 415)
        if not (boundary.isascii() and 0 < len(boundary) <= MAX_BOUNDARY_CHARACTERS):
            raise ApiError("the content-type has no valid boundary")
        self._delimiter = b"\r\n--" + boundary.encode()
        # the first delimiter may be at the start of the body
        self._buffer = bytearray(b"\r\n")
        self._n_parts = 0
        self._part: tuple[str, str | None] | None = None  # name and file name
        self._has_started = self.is_complete = False

    def feed(self, chunk: bytes) -> Iterator[PartPiece]:
        """Yield what the next bytes of the body contain. Raises ApiError if they are damaged."""
        self._buffer += chunk
        while not self.is_complete:
            if self._part is None:
                if not self._read_head():
                    return
                continue
            end = self._buffer.find(self._delimiter)
            # bytes that may be the beginning of a delimiter stay in the buffer
            size = end if end >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
            if end >= 0 or size:
                yield PartPiece(*self._part, bytes(self._buffer[:size]), end >= 0)
                del self._buffer[:size]
            if end < 0:
                return
            self._part = None

    def finish(self) -> None:
        """Raise ApiError if the body ended too early."""
        if not self.is_complete:
            raise ApiError("the multipart body ends too early, or lacks its last boundary")

    def _read_head(self) -> bool:
        """Read a delimiter and the headers of the part after it. Return False if they have not
        arrived yet.
        """
        buffer, size = self._buffer, len(self._delimiter)
        start = buffer.find(self._delimiter)
        if start < 0 and not self._has_started:
            del buffer[: max(0, len(buffer) - size + 1)]  # text before the first part
            return False
        if start > 0:
            del buffer[:start]
        tail = buffer[size : size + 2]
        if tail == b"--":
            self.is_complete = True
            buffer.clear()
            return False
        end = buffer.find(b"\r\n\r\n", size)
        if end < 0:
            if len(buffer) > MAX_HEAD_BYTES:
                raise ApiError("a part of the multipart body has too large headers")
            return False
        self._has_started = True
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise ApiError(f"the multipart body has more than {MAX_PARTS} parts")
        self._part = _read_disposition(bytes(buffer[size:end]))
        del buffer[: end + 4]
        return True


def _read_disposition(head: bytes) -> tuple[str, str | None]:
    """Return the field name and the file name in the headers of a part. Raises ApiError if there is
    no field name.
    """
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            parameters = {
                key.lower(): _unescape(quoted) or plain
                for key, quoted, plain in PARAMETER.findall(value)
            }
            if "name" in parameters:
                return parameters["name"], parameters.get("filename")
    raise ApiError("a part of the multipart body has no name")


def _unescape(text: str) -> str:
    """Return a quoted text without its escapes."""
    text = re.sub(r"\\([\"\\])", r"\1", text)
    for escape, character in ESCAPES.items():
        text = text.replace(escape, character)
    return text
