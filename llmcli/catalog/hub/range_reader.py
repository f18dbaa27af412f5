"""Reads byte ranges of files that stay on the hub, and retries after failures.

Every request names the commit. The size, the ETag and other headers of each response are compared
with the hub's file listing, so that all ranges are of the same content. The sha256 of the file
cannot be checked, because the ranges are not read in order.
"""

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.catalog.hub.error_messages import explain_error
from llmcli.catalog.hub.headers import hub_headers
from llmcli.catalog.hub.retry import RETRIED_STATUSES, resume_transfer
from llmcli.catalog.spec import Spec
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay

if TYPE_CHECKING:
    from llmcli.catalog.hub.choose_files import HubFile
    from quant.native.ggml import U8

TIMEOUT_SECONDS = 15.0  # the longest wait for the next byte
# Statuses after which a read is retried. Many small reads can exceed the hub's rate limit (429).
READ_STATUSES = (429, *RETRIED_STATUSES)
# Statuses with which a host answers if the address to which the hub redirected has expired.
EXPIRED_STATUSES = (400, 401, 403, 404, 410)
# Bytes that are read in advance from each file. They usually contain its tensor table.
HEAD_BYTES = 1 << 16
CONTENT_RANGE_PATTERN = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


class RangesUnsupported(UserError):
    """The server ignores the requested byte range, so that a file cannot be read in parts."""


class RemoteFile:
    """A file of a repository at one commit, which can be read in parts. Implements
    quant.source.blob.Blob, so that quant can quantize a checkpoint that stays on the hub.
    """

    def __init__(
        self, spec: Spec, commit: str, blob: "HubFile", config: Config, watcher: ProgressDisplay
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
        self.headers = {
            **hub_headers(config),
            "Accept-Encoding": "identity",
        }
        # The address to which the hub redirects for the content. None if unknown or expired.
        self.content_url: str | None = None
        self.etags: dict[str, str] = {}  # the ETag of the file, by the host that sends it
        self.first_bytes = b""
        self.lock, self.noted_break = threading.Lock(), False

    def read(self, offset: int, nbytes: int) -> "U8":
        """Return `nbytes` bytes of the file from `offset` on, as a uint8 array `[nbytes]`. Raises
        UserError if retry.MAX_FAILURES consecutive requests receive nothing, or if the file has
        changed on the hub.
        """
        import numpy as np

        if offset + nbytes <= len(self.first_bytes):
            return np.frombuffer(self.first_bytes[offset : offset + nbytes], np.uint8)
        out = np.empty(nbytes, np.uint8)
        with explain_error(self.spec, self.config):
            self._fill(out.data, offset)
        return out

    def _fill(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes of the file from `offset` on. After a broken connection,
        request only the missing bytes.
        """
        filled = 0

        def fetch() -> None:
            nonlocal filled
            for chunk in self._request_range(offset + filled, len(out) - filled):
                out[filled : filled + len(chunk)] = chunk
                filled += len(chunk)

        resume_transfer(fetch, lambda: len(out) - filled, self._report_break, READ_STATUSES)

    def _request_range(self, start: int, nbytes: int, hub: bool = False) -> Iterator[bytes]:
        """Request `nbytes` bytes from `start` on, and yield them in chunks as they arrive.

        The request goes to `content_url` if that is known and `hub` is False, otherwise to the hub.
        Only the hub receives the user's token. The response is read to its end, so that the
        connection can be reused, except if it is longer than the requested range.
        """
        from huggingface_hub import get_session, hf_raise_for_status

        content_url = None if hub else self.content_url
        headers = {**self.headers, "Range": f"bytes={start}-{start + nbytes - 1}"}
        if content_url:
            headers = {
                name: value for name, value in headers.items() if name.lower() != "authorization"
            }
        with get_session().stream(
            "GET", content_url or self.url, headers=headers, timeout=TIMEOUT_SECONDS
        ) as response:
            is_expired = bool(content_url) and response.status_code in EXPIRED_STATUSES
            if not is_expired:
                if response.status_code == 416:
                    raise self._ranges_unsupported(response)
                hf_raise_for_status(response)
                self._check_response(response, start)
                for chunk in response.iter_raw():
                    yield chunk[:nbytes]
                    nbytes -= len(chunk)
                    if nbytes < 0:
                        return
        if is_expired:
            self.content_url = None
            yield from self._request_range(start, nbytes, hub=True)

    def _check_response(self, response: Any, start: int) -> None:
        """Check the headers of a response to a request for the range from `start` on. Raises
        RangesUnsupported if it is not a range, httpx2.RemoteProtocolError if it is another range,
        and UserError if the file has changed. Store the address to which the hub has redirected.
        """
        import httpx2

        if response.status_code != 206:
            raise self._ranges_unsupported(response)
        content_range = CONTENT_RANGE_PATTERN.fullmatch(response.headers.get("content-range", ""))
        if (
            not content_range
            or int(content_range[1]) != start
            or response.headers.get("content-encoding", "identity") != "identity"
        ):
            raise httpx2.RemoteProtocolError("the server sent another range than requested")
        steps = (*response.history, response)  # the redirects and the final response
        linked_etags = [_strong_etag(step.headers.get("x-linked-etag")) for step in steps]
        commits = [step.headers.get("x-repo-commit") for step in steps]
        host, etag = response.url.host, _strong_etag(response.headers.get("etag"))
        with self.lock:
            is_same_content = etag == (self.etags.setdefault(host, etag) if etag else etag)
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
        if response.history and not self.config.hub_endpoint.startswith(
            f"{response.url.scheme}://{host}"
        ):
            self.content_url = str(response.url)

    def _ranges_unsupported(self, response: Any) -> RangesUnsupported:
        """Return the error for a response that is not the requested range."""
        return RangesUnsupported(
            f"{response.url.host} does not send parts of {self.path.name} "
            f"(status {response.status_code})",
            hint="add --keep-source: it downloads the whole checkpoint first",
        )

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
    """Read the first HEAD_BYTES of every file in parallel and store them, so that reading the
    tensor tables needs no further requests. Raises RangesUnsupported if the server does not send
    ranges.
    """
    with ThreadPoolExecutor(8, thread_name_prefix="head") as pool:
        all_first_bytes = pool.map(
            lambda file: file.read(0, min(HEAD_BYTES, file.size)).tobytes(), files
        )
        for file, first_bytes in zip(files, all_first_bytes, strict=True):
            file.first_bytes = first_bytes


def _strong_etag(value: str | None) -> str:
    """Return an ETag without its quotes, or "" if it is missing or weak (W/...). Weak ETags do not
    guarantee identical bytes.
    """
    return "" if not value or value.startswith("W/") else value.strip('"')
