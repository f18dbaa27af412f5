"""Reads byte ranges of files that stay on the hub, with retries.

Every request names the commit. Sizes, ETags and the hub's headers are compared with the hub's file
listing, so that all parts come from the same file. The sha256 cannot be checked, because the parts
arrive in another order.
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
READ_STATUSES = (429, *RETRIED_STATUSES)  # retried: many small reads may exceed a rate limit
# answers of a redirect address that is no longer valid
EXPIRED_STATUSES = (400, 401, 403, 404, 410)
# bytes fetched in advance from each file, which usually contain its tensor table
HEAD_BYTES = 1 << 16
CONTENT_RANGE_PATTERN = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


class RangesUnsupported(UserError):
    """The server does not support byte ranges."""


class RemoteFile:
    """One file of a repository at one commit; implements quant.source.blob.Blob."""

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
        # the address to which the hub redirects for the content; None if unknown or expired
        self.content_url: str | None = None
        self.etags: dict[str, str] = {}  # host -> the ETag it sends for this content
        self.first_bytes = b""
        self.lock, self.noted_break = threading.Lock(), False

    def read(self, offset: int, nbytes: int) -> "U8":
        """Return exactly `nbytes` bytes from `offset` as uint8 `[nbytes]`.

        Raises UserError if MAX_FAILURES consecutive requests fail.
        """
        import numpy as np

        if offset + nbytes <= len(self.first_bytes):
            return np.frombuffer(self.first_bytes[offset : offset + nbytes], np.uint8)
        out = np.empty(nbytes, np.uint8)
        with explain_error(self.spec, self.config):
            self._fill(out.data, offset)
        return out

    def _fill(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on, resuming after every broken answer."""
        filled = 0

        def fetch() -> None:
            nonlocal filled
            for chunk in self._ask(offset + filled, len(out) - filled):
                out[filled : filled + len(chunk)] = chunk
                filled += len(chunk)

        resume_transfer(fetch, lambda: len(out) - filled, self._report_break, READ_STATUSES)

    def _ask(self, start: int, nbytes: int, hub: bool = False) -> Iterator[bytes]:
        """Yield up to `nbytes` bytes from one request for the range that begins at `start`.

        The token is sent to the hub only. With `hub`, the known address of the content is not used.
        The answer is read to its end, so that the connection can be reused, unless it is longer
        than requested.
        """
        from huggingface_hub import get_session, hf_raise_for_status

        direct = None if hub else self.content_url
        headers = {**self.headers, "Range": f"bytes={start}-{start + nbytes - 1}"}
        if direct:
            headers = {
                name: value for name, value in headers.items() if name.lower() != "authorization"
            }
        with get_session().stream(
            "GET", direct or self.url, headers=headers, timeout=TIMEOUT_SECONDS
        ) as response:
            expired = bool(direct) and response.status_code in EXPIRED_STATUSES
            if not expired:
                if response.status_code == 416:
                    raise self._no_ranges(response)
                hf_raise_for_status(response)
                self._check(response, start)
                for chunk in response.iter_raw():
                    yield chunk[:nbytes]
                    nbytes -= len(chunk)
                    if nbytes < 0:
                        return
        if expired:
            self.content_url = None
            yield from self._ask(start, nbytes, hub=True)

    def _check(self, response: Any, start: int) -> None:
        """Raise an error unless the answer is the requested range of the listed file."""
        import httpx2

        if response.status_code != 206:
            raise self._no_ranges(response)
        content_range = CONTENT_RANGE_PATTERN.fullmatch(response.headers.get("content-range", ""))
        if (
            not content_range
            or int(content_range[1]) != start
            or response.headers.get("content-encoding", "identity") != "identity"
        ):
            raise httpx2.RemoteProtocolError("the server sent another range than requested")
        linked = [_tag(step.headers.get("x-linked-etag")) for step in (*response.history, response)]
        commits = [step.headers.get("x-repo-commit") for step in (*response.history, response)]
        host, tag = response.url.host, _tag(response.headers.get("etag"))
        with self.lock:
            is_same_content = tag == (self.etags.setdefault(host, tag) if tag else tag)
        if (
            content_range[2] not in (str(self.size), "*")
            or not {*linked} <= {self.digest, ""}
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

    def _no_ranges(self, response: Any) -> RangesUnsupported:
        return RangesUnsupported(
            f"{response.url.host} does not send parts of {self.path.name} "
            f"(status {response.status_code})",
            hint="add --keep-source: it downloads the whole checkpoint first",
        )

    def _report_break(self, pause: float) -> None:
        """Print a note about the first broken connection of a file, and about every long wait."""
        if pause > 10:
            self.watcher.note(f"the hub reports too many requests; waiting {pause:.0f} s")
        elif not self.noted_break:
            self.noted_break = True
            self.watcher.note(f"a connection broke in {self.path.name}; resuming, with retries")


def fetch_heads(files: Sequence[RemoteFile]) -> None:
    """Fetch the first HEAD_BYTES of every file, several files at once. Raises RangesUnsupported."""
    with ThreadPoolExecutor(8, thread_name_prefix="head") as pool:
        heads = pool.map(lambda file: file.read(0, min(HEAD_BYTES, file.size)).tobytes(), files)
        for file, head in zip(files, heads, strict=True):
            file.first_bytes = head


def _tag(value: str | None) -> str:
    """Return a strong ETag without its quotes; "" for a weak one or none."""
    return "" if not value or value.startswith("W/") else value.strip('"')
