"""Reads byte ranges of files that stay on the hub, and retries after failures.

Every request names the commit. The size, the ETag and other headers of each response are compared
with the hub's file listing, so that all ranges are of the same content. The bytes are checked
against the digest of the file when all of it has been read (content_check.py).
"""

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from llmcli.catalog.hub.content_check import ContentCheck, WaitingBytes
from llmcli.catalog.hub.error_messages import explain_error
from llmcli.catalog.hub.exchange import COMPLETE_STATUSES, HubReply, ProgressClock, open_reply
from llmcli.catalog.hub.headers import hub_headers
from llmcli.catalog.hub.retry import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    RETRIED_STATUSES,
    resume_transfer,
)
from llmcli.catalog.spec import Spec
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from llmcli.units import format_size
from quant.checkpoint.safetensors import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from llmcli.catalog.hub.choose_files import HubFile
    from quant.native.ggml import U8

# Statuses after which a read is retried. Many small reads can exceed the hub's rate limit (429).
READ_STATUSES = (429, *RETRIED_STATUSES)
# Statuses with which a host answers if the address to which the hub redirected has expired.
EXPIRED_STATUSES = (400, 401, 403, 404, 410)
# Bytes that are read in advance from each file. They usually contain its tensor table. A longer
# table is read in advance, too.
HEAD_BYTES = 1 << 16
ALIGNMENT_BYTES = 64  # of the addresses of the bytes that a read returns, for vector instructions
NOTED_REST_BYTES = 1 << 25  # the user is told before more than this is read only for a check
CONTENT_RANGE_PATTERN = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


class RangesUnsupported(UserError):
    """The server ignores the requested byte range, so that a file cannot be read in parts."""


class RemoteFile:
    """A file of a repository at one commit, which can be read in parts. Implements
    quant.source.blob.Blob, so that quant can quantize a checkpoint that stays on the hub.

    `waiting`: shared by the files of a checkpoint, see content_check.py.
    """

    def __init__(
        self,
        spec: Spec,
        commit: str,
        blob: "HubFile",
        config: Config,
        watcher: ProgressDisplay,
        waiting: WaitingBytes | None = None,
    ) -> None:
        from huggingface_hub import hf_hub_url

        self.spec, self.commit, self.digest, self.config, self.watcher = (
            spec,
            commit,
            blob.digest,
            config,
            watcher,
        )
        self.path, self.size = Path(spec.repo) / blob.name, blob.size
        self.url = hf_hub_url(spec.repo, blob.name, revision=commit, endpoint=config.hub_endpoint)
        self.headers = hub_headers(config)
        # The address to which the hub redirects for the content. None if unknown or expired.
        self.content_url: str | None = None
        self.etags: dict[str, str] = {}  # the ETag of the file, by the host that sends it
        self.first_bytes = b""
        self.lock, self.noted_break = threading.Lock(), False
        self.check = ContentCheck(
            f"{blob.name} of {spec.repo}", blob.size, blob.digest, waiting or WaitingBytes()
        )
        self.reread_lock = threading.Lock()

    def read(self, offset: int, nbytes: int) -> "U8":
        """Return `nbytes` bytes of the file from `offset` on, as a uint8 array `[nbytes]` that must
        not be changed. Bytes around them are read, too, and other bytes if the check of the file
        needs them (content_check.py).

        Raises UserError if retry.MAX_FAILURES consecutive requests receive nothing, or if the file
        has changed on the hub, and DamagedSourceError if the bytes are wrong.
        """
        import numpy as np

        if offset + nbytes <= len(self.first_bytes):
            return np.frombuffer(self.first_bytes[offset : offset + nbytes], np.uint8)
        first, last = self.check.aligned(offset, offset + nbytes)
        data = self._read_blocks(first, last, offset - first)
        self._reread()
        return data[offset - first : offset - first + nbytes]

    def finish_check(self, was_resumed: bool) -> None:
        """Compare the content with its digest after the last read, and read the bytes that this
        needs. If an earlier run has read some of the bytes, nothing more is read, because what that
        run has read cannot be checked any more.
        """
        missing = self.size - self.check.position
        if was_resumed or not missing:
            return
        if missing > NOTED_REST_BYTES:
            self.watcher.note(
                f"reading the other {format_size(missing)} of {self.path.name} to check its sha256"
            )
        self._reread(is_last=True)

    def _reread(self, is_last: bool = False) -> None:
        """Read the bytes that the check needs and whose turn it is. See ContentCheck.next_reread.
        Only one thread does so at a time; the others return at once.
        """
        if not self.reread_lock.acquire(blocking=is_last):
            return
        try:
            while span := self.check.next_reread(is_last):
                self._read_blocks(*span)
                self.check.reread_bytes += span[1] - span[0]
        finally:
            self.reread_lock.release()

    def _read_blocks(self, first: int, last: int, aligned_at: int = 0) -> "U8":
        """Return the bytes first .. last, which are whole blocks, and add them to the check. The
        address of byte number `aligned_at` of the result is a multiple of ALIGNMENT_BYTES.
        """
        import numpy as np

        buffer = np.empty(last - first + ALIGNMENT_BYTES, np.uint8)
        start = -(buffer.ctypes.data + aligned_at) % ALIGNMENT_BYTES
        out = buffer[start : start + last - first]
        with explain_error(self.spec, self.config):
            self._fill(out.data, first)
        out.flags.writeable = False
        self.check.add(first, out)
        return out

    def _fill(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes of the file from `offset` on. After a broken connection,
        request only the missing bytes.
        """
        filled, clock = 0, ProgressClock()

        def fetch() -> None:
            nonlocal filled
            for chunk in self._request_range(offset + filled, len(out) - filled, clock):
                out[filled : filled + len(chunk)] = chunk
                filled += len(chunk)

        resume_transfer(
            fetch,
            lambda: len(out) - filled,
            self._report_break,
            clock,
            READ_STATUSES,
            MAX_PAUSE_SECONDS if self.etags else FIRST_PAUSE_SECONDS,
        )

    def _request_range(
        self, start: int, nbytes: int, clock: ProgressClock, hub: bool = False
    ) -> Iterator[bytes]:
        """Request `nbytes` bytes from `start` on, and yield them in chunks as they arrive.

        The request goes to `content_url` if that is known and `hub` is False, otherwise to the hub.
        Only the hub receives the user's token. The response is read to its end, so that the
        connection can be reused, except if it is longer than the requested range.
        """
        content_url = None if hub else self.content_url
        headers = {**self.headers, "Range": f"bytes={start}-{start + nbytes - 1}"}
        if content_url:
            headers = {
                name: value for name, value in headers.items() if name.lower() != "authorization"
            }
        with open_reply(content_url or self.url, headers, clock) as reply:
            is_expired = bool(content_url) and reply.status in EXPIRED_STATUSES
            if not is_expired:
                self._check_reply(reply, start)
                for chunk in reply.chunks():
                    yield chunk[:nbytes]
                    nbytes -= len(chunk)
                    if nbytes < 0:
                        return
        if is_expired:
            self.content_url = None
            yield from self._request_range(start, nbytes, clock, hub=True)

    def _check_reply(self, reply: HubReply, start: int) -> None:
        """Check the status and headers of a response to a request for the range from `start` on.
        Raises RangesUnsupported if it is not a range, httpx2.RemoteProtocolError if it is another
        range, RefusedRequest for a status of an error, and UserError if the file has changed. Store
        the address to which the hub has redirected.
        """
        import httpx2

        if reply.status in (*COMPLETE_STATUSES, 416):
            raise RangesUnsupported(
                f"{reply.host} does not send parts of {self.path.name} (status {reply.status})",
                hint="add --keep-source: it downloads the whole checkpoint first",
            )
        reply.require_status(206)
        content_range = CONTENT_RANGE_PATTERN.fullmatch(reply.headers.get("content-range", ""))
        if not content_range or int(content_range[1]) != start:
            raise httpx2.RemoteProtocolError("the server sent another range than requested")
        linked_etags = [_strong_etag(step.get("x-linked-etag")) for step in reply.steps]
        commits = [step.get("x-repo-commit") for step in reply.steps]
        etag = _strong_etag(reply.headers.get("etag"))
        with self.lock:
            is_same_content = etag == (self.etags.setdefault(reply.host, etag) if etag else etag)
        if (
            content_range[2] not in (str(self.size), "*")
            or not {*linked_etags} <= {self.digest, ""}
            or not {*commits} <= {self.commit, None}
            or not is_same_content
        ):
            raise UserError(
                f"{self.path.name} of {self.spec.repo} has changed since {self.commit[:12]}",
                hint="run the same command again: it starts with the current file",
            )
        if len(reply.steps) > 1 and not _is_same_origin(reply.url, self.config.hub_endpoint):
            self.content_url = reply.url

    def _report_break(self, pause: float) -> None:
        """Print a note if this is the first broken connection of the file, or if the server has
        asked to wait more than 10 seconds. `pause`: the seconds that it has asked to wait.
        """
        if pause > 10:
            self.watcher.note(f"the hub reports too many requests; waiting {pause:.0f} s")
        elif not self.noted_break:
            self.noted_break = True
            self.watcher.note(f"a connection broke in {self.path.name}; resuming, with retries")


def fetch_heads(files: Sequence[RemoteFile]) -> None:
    """Read the tensor table of every safetensors file in parallel, and at least the first
    HEAD_BYTES, and store these bytes, so that opening the checkpoint needs no further requests for
    tables. Raises RangesUnsupported if the server does not send ranges.
    """
    with ThreadPoolExecutor(8, thread_name_prefix="head") as pool:
        for file, first_bytes in zip(files, pool.map(_read_head, files), strict=True):
            file.first_bytes = first_bytes


def _read_head(file: RemoteFile) -> bytes:
    """Return the first HEAD_BYTES of a safetensors file, or the whole table of its tensors if that
    is longer. A table that is too long to be valid is not read.
    """
    head = file.read(0, min(HEAD_BYTES, file.size)).tobytes()
    table_bytes = int.from_bytes(head[:8], "little")
    end = min(8 + table_bytes, file.size)
    if table_bytes > MAX_HEADER_BYTES or end <= len(head):
        return head
    return head + file.read(len(head), end - len(head)).tobytes()


def _strong_etag(value: str | None) -> str:
    """Return an ETag without its quotes, or "" if it is missing or weak (W/...). Weak ETags do not
    guarantee identical bytes.
    """
    return "" if not value or value.startswith("W/") else value.strip('"')


def _is_same_origin(url: str, other: str) -> bool:
    """Return whether two addresses have the same scheme, host and port."""
    return urlsplit(url)[:2] == urlsplit(other)[:2]
