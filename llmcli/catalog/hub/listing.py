"""The files of a repository, as the hub lists them: names, sizes and digests at one commit.

The listing is read within limits of time and size. Nothing in it is trusted: names become paths in
the cache, and sizes limit what is downloaded.
"""

import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from llmcli.catalog.hub.choose_files import HubFile
from llmcli.catalog.hub.exchange import HubUnreachable, ProgressClock, read_document
from llmcli.catalog.hub.headers import hub_headers
from llmcli.catalog.hub.retry import with_retries
from llmcli.catalog.spec import Spec
from llmcli.config import Config
from llmcli.types import ProgressDisplay
from llmcli.units import format_count

COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
LISTING_SECONDS = 20.0  # for all tries together
MAX_LISTING_BYTES = 1 << 25  # a file takes about 300 bytes of the listing
MAX_NAME_BYTES = 255  # of each part of a path, as most file systems allow
# Parts of a path that lead elsewhere, and characters that are not part of a file's name anywhere.
UNSAFE_NAME_PATTERN = re.compile(r"(^|/)\.\.?(/|$)|^/|/$|\\|//|:|[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at a commit."""

    commit: str
    files: tuple[HubFile, ...]


def list_files(spec: Spec, config: Config, watcher: ProgressDisplay) -> Listing:
    """Ask the hub for the commit that the requested revision points to, and for its files. Files
    whose names cannot be paths are left out, after a note.

    Raises HubUnreachable if the response is not that of a hub, or incomplete after LISTING_SECONDS.
    Errors of the network, and RefusedRequest, are raised unchanged.
    """
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    validate_repo_id(spec.repo)
    revision = f"/revision/{quote(spec.revision, safe='')}" if spec.revision else ""
    url = f"{config.hub_endpoint}/api/models/{spec.repo}{revision}?blobs=true"
    clock = ProgressClock(LISTING_SECONDS, MAX_LISTING_BYTES)
    raw = with_retries(
        lambda: read_document(url, hub_headers(config), clock, MAX_LISTING_BYTES), clock
    )
    document = _parse_object(raw, config)
    commit, siblings = document.get("sha"), document.get("siblings")
    if not isinstance(commit, str) or not COMMIT_PATTERN.fullmatch(commit):
        raise HubUnreachable(
            f"{config.hub_endpoint} gives no valid commit for {spec.repo}",
            hint="check that HF_ENDPOINT is a mirror of the hub",
        )
    if not isinstance(siblings, list | None):
        raise _not_a_hub(config)
    files, unsafe_names = [], []
    for item in siblings or ():
        name = item.get("rfilename") if isinstance(item, dict) else None
        if not isinstance(name, str):
            raise _not_a_hub(config)
        if is_safe_name(name):
            files.append(_parse_file(name, item, spec, config))
        else:
            unsafe_names.append(name)
    if unsafe_names:
        first = unsafe_names[0][:60].encode("unicode_escape").decode()
        watcher.note(
            f"{spec.repo}: {format_count(len(unsafe_names), 'file')} left out, because of a name "
            f"that cannot be a path: {first}"
        )
    return Listing(commit, tuple(files))


def is_safe_name(name: str) -> bool:
    """Return whether a file name that a server sent is safe as a relative path: it cannot lead out
    of the folder for the files, has no control characters, and can be encoded.
    """
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return (
        bool(name)
        and not UNSAFE_NAME_PATTERN.search(name)
        and max(map(len, parts)) <= MAX_NAME_BYTES
    )


def _parse_object(raw: bytes, config: Config) -> dict[str, Any]:
    """Return the JSON object of a listing. Raises HubUnreachable for anything else."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _not_a_hub(config)
    return document


def _parse_file(name: str, item: dict[str, Any], spec: Spec, config: Config) -> HubFile:
    """Return a file of the listing. Raises HubUnreachable if it has no valid size and digest."""
    lfs = item.get("lfs")
    size, digest = (
        item.get("size"),
        lfs.get("sha256") if isinstance(lfs, dict) else item.get("blobId"),
    )
    if (
        type(size) is not int
        or not 0 <= size < 1 << 63
        or not isinstance(digest, str)
        or not DIGEST_PATTERN.fullmatch(digest)
    ):
        raise HubUnreachable(
            f"{config.hub_endpoint} gives no valid size and digest for {name} of {spec.repo}",
            hint="check that HF_ENDPOINT is a complete mirror of the hub",
        )
    return HubFile(name, size, digest)


def _not_a_hub(config: Config) -> HubUnreachable:
    """Return the error for a response that is not a listing."""
    return HubUnreachable(
        f"{config.hub_endpoint} does not answer like a hub",
        hint="check HF_ENDPOINT and the proxy settings",
    )
