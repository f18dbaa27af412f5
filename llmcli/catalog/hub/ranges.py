"""A file that stays on the hub: any of its bytes, asked for by range, tried again until they are
there.

Every request names the commit; sizes, ETags and what the hub says of the file are held against its
listing, so that no two parts are of different files. What cannot be checked is the sha256: parts
come in another order.
"""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.catalog.catalog import Spec
from llmcli.catalog.hub.words import in_words
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import Watcher

if TYPE_CHECKING:
    from llmcli.catalog.sources.choose import Blob
    from quant.native import U8

TIMEOUT_SECONDS = 15.0  # without a byte: the connection has stalled
TRIES = 6  # in vain, one after another
AGAIN = (408, 429, 500, 502, 503, 504)
EXPIRED = (400, 401, 403, 404, 410)  # what an address that was good for a while may answer later
HEAD = 1 << 16  # bytes of each file that are fetched at once: its table of tensors, mostly
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


class NoRanges(UserError):
    """The server sends whole files only."""


class RemoteFile:
    """One file of a repository at one commit: a quant.blob.Blob."""

    def __init__(
        self, spec: Spec, commit: str, blob: "Blob", config: Config, watcher: Watcher
    ) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers

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
            **build_hf_headers(token=config.hub_token or False),
            "Accept-Encoding": "identity",
        }
        self.direct: str | None = None  # where the hub sends us for the content, while that is good
        self.tags: dict[str, str] = {}  # host -> what it calls this content
        self.head = b""
        self.lock, self.told = threading.Lock(), False

    def read(self, offset: int, nbytes: int) -> "U8":
        """Exactly `nbytes` from `offset` on; raises UserError when the hub does not give them after
        TRIES.
        """
        import numpy as np

        if offset + nbytes <= len(self.head):
            return np.frombuffer(self.head[offset : offset + nbytes], np.uint8)
        out = np.empty(nbytes, np.uint8)
        with in_words(self.spec, self.config):
            self._fill(out.data, offset)
        return out

    def _fill(self, out: memoryview, offset: int) -> None:
        """Go on where a broken answer ended, until all is there."""
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        at, vain = 0, 0
        while at < len(out):
            before, pause = at, 0.0
            error: Exception | None = None
            try:
                for chunk in self._ask(offset + at, len(out) - at):
                    out[at : at + len(chunk)] = chunk
                    at += len(chunk)
            except httpx2.TransportError as broken:
                error = broken
            except HfHubHTTPError as refused:
                if refused.response.status_code not in AGAIN:
                    raise
                error, pause = refused, _patience(refused.response)
            if at == len(out):
                return
            vain = 0 if at > before else vain + 1
            if vain == TRIES:
                raise error or httpx2.ReadError("the server ends the answer early")
            self._tell(pause)
            time.sleep(pause or (min(2 ** (vain - 1), 8) if vain else 0))

    def _ask(self, start: int, nbytes: int, hub: bool = False) -> Iterator[bytes]:
        """One request for `nbytes` from `start` on; may end early. The token goes to the hub alone.

        It reads to the end of the answer, and no further than it must: only then is the connection
        used again.
        """
        from huggingface_hub import get_session
        from huggingface_hub.utils._http import hf_raise_for_status

        direct = None if hub else self.direct
        asked = {**self.headers, "Range": f"bytes={start}-{start + nbytes - 1}"}
        if direct:
            asked = {
                name: value for name, value in asked.items() if name.lower() != "authorization"
            }
        with get_session().stream(
            "GET", direct or self.url, headers=asked, timeout=TIMEOUT_SECONDS
        ) as response:
            expired = bool(direct) and response.status_code in EXPIRED
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
            self.direct = None
            yield from self._ask(start, nbytes, hub=True)

    def _check(self, response: Any, start: int) -> None:
        """Whether this is the part that was asked for, of the file that was listed."""
        import httpx2

        if response.status_code != 206:
            raise self._no_ranges(response)
        found = CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if (
            not found
            or int(found[1]) != start
            or response.headers.get("content-encoding", "identity") != "identity"
        ):
            raise httpx2.RemoteProtocolError("the server sends another part than was asked for")
        linked = [_tag(step.headers.get("x-linked-etag")) for step in (*response.history, response)]
        commits = [step.headers.get("x-repo-commit") for step in (*response.history, response)]
        host, tag = response.url.host, _tag(response.headers.get("etag"))
        with self.lock:
            same = tag == (self.tags.setdefault(host, tag) if tag else tag)
        if (
            found[2] not in (str(self.size), "*")
            or not {*linked} <= {self.digest, ""}
            or not {*commits} <= {self.commit, None}
            or not same
        ):
            raise UserError(
                f"{self.path.name} of {self.spec.repo} is another file now than it was at {self.commit[:12]}",
                hint="give the same command again: it begins with what is there then",
            )
        if response.history and not self.config.hub_endpoint.startswith(
            f"{response.url.scheme}://{host}"
        ):
            self.direct = str(response.url)

    def _no_ranges(self, response: Any) -> NoRanges:
        return NoRanges(
            f"{response.url.host} gives no parts of {self.path.name} (status {response.status_code})",
            hint="add --keep-source: it downloads the whole checkpoint first",
        )

    def _tell(self, pause: float) -> None:
        """One line a file, however often its connections break."""
        if pause > 10:
            self.watcher.note(f"the hub says: too many requests; waiting {pause:.0f} s")
        elif not self.told:
            self.told = True
            self.watcher.note(
                f"a connection broke in {self.path.name}; taking it up again, as often as it takes"
            )


def first_bytes(files: Sequence[RemoteFile]) -> None:
    """Fetch the beginning of every file, several at once; raises NoRanges where the server gives no
    parts.
    """
    with ThreadPoolExecutor(8, thread_name_prefix="head") as pool:
        heads = pool.map(lambda file: file.read(0, min(HEAD, file.size)).tobytes(), files)
        for file, head in zip(files, heads, strict=True):
            file.head = head


def _patience(response: Any) -> float:
    """Seconds that the server asks us to wait, within reason; 0 where it does not say."""
    text = response.headers.get("retry-after", "")
    return min(float(text), 300.0) if re.fullmatch("[0-9]+", text) else 0.0


def _tag(value: str | None) -> str:
    """A strong ETag without its quotes; "" for a weak one or none."""
    return "" if not value or value.startswith("W/") else value.strip('"')
