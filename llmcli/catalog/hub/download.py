"""Downloads files of a hub repository into the cache of huggingface_hub, and verifies them.

The cache stores the content of a file as a blob, whose name is its digest, and links the blob under
the file's name into the folder of a commit. A download is written to a partial file beside the
blobs and hashed while it arrives. It becomes a blob only if it has the digest that the hub lists.
huggingface_hub then creates the link.

The download function of huggingface_hub 2.4 is not used. It does not verify files, does not resume
in a later run, and loses up to 10 MB when a connection breaks. Its Xet transfers can neither be
resumed nor be hashed while they arrive.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmcli.atomic_files import AtomicWriter
from llmcli.catalog.disk_space import require_free_space
from llmcli.catalog.hub.choose_files import HubFile
from llmcli.catalog.hub.headers import hub_headers
from llmcli.catalog.hub.retry import resume_transfer, with_retries
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile, describe_file, hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.file_lock import hold_lock
from llmcli.types import ProgressBar, ProgressDisplay
from llmcli.units import format_size

# Ends with .incomplete, so that `hf cache` also recognizes the file as partial.
PARTIAL_SUFFIX = ".llmcli.incomplete"
TIMEOUT_SECONDS = 15.0  # the longest wait for the next byte


def repo_folder(spec: Spec, config: Config) -> Path:
    """Return the folder of the repository in the Hugging Face cache. It may not exist yet."""
    return config.hub_cache / f"models--{spec.repo.replace('/', '--')}"


def download_files(
    spec: Spec, commit: str, blobs: Sequence[HubFile], config: Config, watcher: ProgressDisplay
) -> tuple[VerifiedFile, ...]:
    """Download those files of a commit that are not in the cache, and verify all of them. Damaged
    blobs in the cache are replaced. Return the files, which are in the folder of the commit, in the
    order of `blobs`.

    Raises UserError if the disk has too little space or a download does not match its digest.
    Errors of huggingface_hub and of the network are raised unchanged.
    """
    repo = repo_folder(spec, config)
    valid = {
        blob
        for blob in blobs
        if (repo / "blobs" / blob.digest).is_file() and _is_valid_blob(repo, blob, watcher)
    }
    partial_paths = {blob: _partial_path(repo, blob) for blob in blobs if blob not in valid}
    done = sum(path.stat().st_size for path in partial_paths.values() if path.exists())
    total = sum(blob.size for blob in partial_paths)
    require_free_space(total - done, repo)
    files = {
        blob: describe_file(repo / "blobs" / blob.digest, blob.digest)
        for blob in valid
        if len(blob.digest) == 64
    }
    if partial_paths:
        if done:
            watcher.note(f"resuming {spec.repo} at {format_size(done)} of {format_size(total)}")
        with watcher.bar(spec.repo, total, done=done) as bar:
            for blob in partial_paths:
                bar.describe(blob.name)
                files[blob] = _download_file(spec, commit, blob, config, bar, watcher)
    return tuple(_link_file(spec, commit, blob, files.get(blob), config) for blob in blobs)


def has_digest(path: Path, digest: str, watcher: ProgressDisplay) -> bool:
    """Return whether the content of a file has this digest, in hex: a sha256 (64 digits), or the id
    of a git blob (40 digits).
    """
    if len(digest) == 64:
        return hash_file(path, watcher).sha256 == digest
    data = path.read_bytes()
    return (
        hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == digest
    )


def _is_valid_blob(repo: Path, blob: HubFile, watcher: ProgressDisplay) -> bool:
    """Return whether a blob in the cache has the size and the digest that the hub lists. If not,
    delete it.
    """
    path = repo / "blobs" / blob.digest
    if path.stat().st_size == blob.size and has_digest(path, blob.digest, watcher):
        return True
    watcher.note(f"{blob.name} in the Hugging Face cache is damaged; downloading it again")
    path.unlink()
    return False


def _download_file(
    spec: Spec,
    commit: str,
    blob: HubFile,
    config: Config,
    bar: ProgressBar,
    watcher: ProgressDisplay,
) -> VerifiedFile:
    """Download one file and store it as a blob. A partial file of an earlier run is resumed. The
    blob is locked meanwhile; if another process downloads it, wait for that.

    Raises UserError if the content does not have its digest.
    """
    from huggingface_hub import hf_hub_url

    repo = repo_folder(spec, config)
    target = repo / "blobs" / blob.digest
    url = hf_hub_url(spec.repo, blob.name, revision=commit, endpoint=config.hub_endpoint)
    headers = {**hub_headers(config), "Accept-Encoding": "identity"}
    with hold_lock(
        config.hub_cache / ".locks" / repo.name / f"{blob.digest}.lock", watcher, blob.name
    ):
        if target.is_file():  # another process has downloaded it while this one waited
            bar.advance(blob.size)
            return hash_file(target)
        with AtomicWriter(_partial_path(repo, blob), blob.size, bar.advance) as file:
            _transfer(url, headers, file, watcher)
            if not file.has_digest(blob.digest):
                file.discard()
                raise UserError(
                    f"{blob.name} of {spec.repo} does not match its digest on the hub "
                    f"({blob.digest[:12]}…); the download was deleted",
                    hint="try again; if it happens twice, the mirror or a proxy changes files",
                )
            sha256 = file.sha256
            file.commit(target)
    return describe_file(target, sha256)


def _transfer(
    url: str, headers: dict[str, str], file: AtomicWriter, watcher: ProgressDisplay
) -> None:
    """Download the missing bytes of a partial file, with as many requests as broken connections
    make necessary.
    """

    def report_break(pause: float) -> None:
        n_bytes = f"{format_size(file.position)} of {format_size(file.size)}"
        watcher.note(f"the connection broke at {n_bytes}; resuming")

    resume_transfer(
        lambda: _append_response(url, headers, file),
        lambda: max(0, file.size - file.position),
        report_break,
    )


def _append_response(url: str, headers: dict[str, str], file: AtomicWriter) -> None:
    """Request the bytes after the end of a partial file, and append what the server sends. If the
    server ignores the range and sends the complete file, start the partial file again.
    """
    from huggingface_hub import get_session, hf_raise_for_status

    all_headers = {**headers, "Range": f"bytes={file.position}-"} if file.position else headers
    with get_session().stream("GET", url, headers=all_headers, timeout=TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        if file.position and response.status_code != 206:
            file.restart()
        for chunk in response.iter_bytes():
            file.write(chunk)


def _link_file(
    spec: Spec, commit: str, blob: HubFile, file: VerifiedFile | None, config: Config
) -> VerifiedFile:
    """Let huggingface_hub link a blob into the folder of the commit. Return the linked file with
    its sha256. `file`: the blob with its sha256; None if the sha256 is not known.
    """
    from huggingface_hub import hf_hub_download

    path = Path(
        with_retries(
            lambda: hf_hub_download(
                spec.repo,
                blob.name,
                revision=commit,
                cache_dir=config.hub_cache,
                endpoint=config.hub_endpoint,
                token=config.hub_token or False,
                etag_timeout=TIMEOUT_SECONDS,
            )
        )
    )
    if file is None or not path.resolve().samefile(file.path):
        file = hash_file(path)
    return describe_file(path, file.sha256)


def find_partial_files(config: Config) -> Iterator[Path]:
    """Yield the partial files that interrupted downloads of llmcli left in the Hugging Face cache.
    Each file is locked until the next one is requested. Files that another process is writing are
    left out.
    """
    for path in sorted(config.hub_cache.glob(f"models--*/blobs/*{PARTIAL_SUFFIX}")):
        lock = (
            config.hub_cache
            / ".locks"
            / path.parents[1].name
            / f"{path.name.removesuffix(PARTIAL_SUFFIX)}.lock"
        )
        with hold_lock(lock) as is_locked:
            if is_locked:
                yield path


def _partial_path(repo: Path, blob: HubFile) -> Path:
    """Return the path of the file into which a blob is downloaded."""
    return repo / "blobs" / f"{blob.digest}{PARTIAL_SUFFIX}"
