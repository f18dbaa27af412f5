"""Weights on the Hugging Face hub, stored in its ordinary cache.

Downloads go through huggingface_hub's session into a partial file beside the blob and are hashed
while they arrive; only a blob that matches its digest enters the cache, and huggingface_hub then
links it. The download function of huggingface_hub 2.4 is not used because it does not verify the
files, does not resume in a later run, and loses up to 10 MB on a broken connection. Xet transfers
can neither be resumed nor hashed on arrival. A checkpoint may also stay on the hub and be read in
parts (catalog/hub/range_reader.py).
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

from llmcli.atomic_files import AtomicWriter, write_atomically
from llmcli.catalog.hub.choose_files import ChosenFiles, HubFile, choose_files
from llmcli.catalog.hub.error_messages import explain_error, note_retries
from llmcli.catalog.hub.headers import hub_headers
from llmcli.catalog.hub.range_reader import RemoteFile, fetch_heads
from llmcli.catalog.hub.retry import resume_transfer, with_retries
from llmcli.catalog.sources.base import FetchedFiles, RemoteCheckpoint, require_free_space
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile, describe_file, hash_file
from llmcli.config import Config, disable_hub_telemetry
from llmcli.errors import UserError
from llmcli.file_lock import hold_lock
from llmcli.types import ProgressBar, ProgressDisplay
from llmcli.units import format_size

COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REVISION_PATTERN = re.compile(r"(?!.*\.\.)[\w][\w./-]*")
# ends with .incomplete, by which `hf cache` recognizes partial files, too
PARTIAL_SUFFIX = ".llmcli.incomplete"
TIMEOUT_SECONDS = 15.0


class HubSource:
    """A repository on the hub, at one commit."""

    name, required_fields = "hub", ("repo",)

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        disable_hub_telemetry()
        _check_revision(spec)
        if config.offline:
            return _from_cache(spec, config, watcher)
        with explain_error(spec, config), note_retries(watcher):
            commit, blobs = _listing(spec, config)
            choice = choose_files(spec, blobs, config.allow_pickle)
            if choice.note:
                watcher.note(choice.note)
            files = _bring(spec, commit, choice.files, config, watcher)
            _point(spec, commit, config)
        return _fetched(spec, commit, choice, files, config)


def find_remote_checkpoint(
    spec: Spec, config: Config, watcher: ProgressDisplay
) -> RemoteCheckpoint | None:
    """Return a repository's checkpoint whose safetensors stay on the hub.

    Returns None if the repository has no such checkpoint or if it is already in the cache. Config,
    tokenizer and index are downloaded into the cache. Raises RangesUnsupported if the server does
    not send parts, and UserError.
    """
    disable_hub_telemetry()
    _check_revision(spec)
    with explain_error(spec, config), note_retries(watcher):
        commit, blobs = _listing(spec, config)
        choice = choose_files(spec, blobs, config.allow_pickle)
        weights = [blob for blob in choice.files if blob.name.endswith(".safetensors")]
        repo = _repo_folder(spec, config)
        is_cached = all((repo / "blobs" / blob.digest).is_file() for blob in weights)
        if choice.kind != "folder" or is_cached or any(len(blob.digest) != 64 for blob in weights):
            return None
        small_files = [blob for blob in choice.files if blob not in weights]
        files = {blob.name: RemoteFile(spec, commit, blob, config, watcher) for blob in weights}
        fetch_heads(list(files.values()))
        downloaded = dict(
            zip(small_files, _bring(spec, commit, small_files, config, watcher), strict=True)
        )
    folder = repo / "snapshots" / commit
    all_files = tuple(
        downloaded.get(blob) or VerifiedFile(str(folder / blob.name), blob.size, blob.digest, 0)
        for blob in choice.files
    )
    paths = tuple(Path(file.path) for file in downloaded.values())
    return RemoteCheckpoint(
        "folder", folder, all_files, spec.label, commit, blobs=files, local_paths=paths
    )


def find_remote_gguf(
    spec: Spec, config: Config, watcher: ProgressDisplay
) -> tuple[RemoteFile, ...] | None:
    """Return the GGUF that a pull would download: one file, or all shards in order.

    The files stay on the hub. Returns None if a pull would download a checkpoint. Raises UserError.
    """
    disable_hub_telemetry()
    _check_revision(spec)
    with explain_error(spec, config), note_retries(watcher):
        commit, blobs = _listing(spec, config)
        choice = choose_files(spec, blobs, config.allow_pickle)
    if choice.kind != "gguf":
        return None
    if choice.note:
        watcher.note(choice.note)
    return tuple(RemoteFile(spec, commit, blob, config, watcher) for blob in choice.files)


def _check_revision(spec: Spec) -> None:
    if spec.revision and not REVISION_PATTERN.fullmatch(spec.revision):
        raise UserError(
            f"{spec.revision!r} is not a valid revision", hint="give a branch, a tag or a commit"
        )


def _fetched(
    spec: Spec, commit: str, choice: ChosenFiles, files: tuple[VerifiedFile, ...], config: Config
) -> FetchedFiles:
    snapshot = _repo_folder(spec, config) / "snapshots" / commit
    path = snapshot if choice.kind == "folder" else snapshot / choice.files[0].name
    return FetchedFiles(
        cast(Literal["gguf", "folder"], choice.kind), path, files, spec.label, commit
    )


def _listing(spec: Spec, config: Config) -> tuple[str, list[HubFile]]:
    """Return the commit that the requested revision points to, and the files of that commit."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=config.hub_endpoint, token=config.hub_token or False)
    revision = spec.revision or None
    try:
        info = with_retries(
            lambda: api.model_info(
                spec.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS
            )
        )
        listed = [
            (item.rfilename, item.size, item.lfs.sha256 if item.lfs else item.blob_id)
            for item in info.siblings or ()
        ]
    except (
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # the library does not check the JSON of a listing
        raise UserError(
            f"{config.hub_endpoint} does not answer like a hub",
            hint="check HF_ENDPOINT and the proxy settings",
        ) from None
    blobs = []
    for name, nbytes, digest in listed:
        if not isinstance(name, str) or not _inside(name):
            continue
        if (
            type(nbytes) is not int
            or nbytes < 0
            or not isinstance(digest, str)
            or not DIGEST_PATTERN.fullmatch(digest)
        ):
            raise UserError(
                f"{config.hub_endpoint} gives no valid size and digest for {name} of {spec.repo}",
                hint="check that HF_ENDPOINT is a complete mirror of the hub",
            )
        blobs.append(HubFile(name, nbytes, digest))
    if not isinstance(info.sha, str) or not COMMIT_PATTERN.fullmatch(info.sha):
        raise UserError(
            f"{config.hub_endpoint} gives no valid commit for {spec.repo}",
            hint="check that HF_ENDPOINT is a mirror of the hub",
        )
    return info.sha, blobs


def _inside(name: str) -> bool:
    """Return whether a file name from a server does not lead out of the folder for the files."""
    return bool(name) and not re.search(r"(^|/)\.\.?(/|$)|^/|\\|//|\0|:", name)


def _bring(
    spec: Spec, commit: str, blobs: Sequence[HubFile], config: Config, watcher: ProgressDisplay
) -> tuple[VerifiedFile, ...]:
    """Download every blob that is not in the cache, verify all of them, and link them."""
    repo = _repo_folder(spec, config)
    valid = {
        blob
        for blob in blobs
        if (repo / "blobs" / blob.digest).is_file() and _genuine(repo, blob, watcher)
    }
    partials = {blob: _partial(repo, blob) for blob in blobs if blob not in valid}
    done = sum(path.stat().st_size for path in partials.values() if path.exists())
    total = sum(blob.size for blob in partials)
    require_free_space(total - done, repo)
    files = {
        blob: describe_file(repo / "blobs" / blob.digest, blob.digest)
        for blob in valid
        if len(blob.digest) == 64
    }
    if partials:
        if done:
            watcher.note(f"resuming {spec.repo} at {format_size(done)} of {format_size(total)}")
        with watcher.bar(spec.repo, total, done=done) as bar:
            for blob in partials:
                bar.describe(blob.name)
                files[blob] = _download(spec, commit, blob, config, bar, watcher)
    return tuple(_link_file(spec, commit, blob, files.get(blob), config) for blob in blobs)


def _genuine(repo: Path, blob: HubFile, watcher: ProgressDisplay) -> bool:
    """Return whether a cached blob matches its digest; delete it if it does not."""
    path = repo / "blobs" / blob.digest
    if path.stat().st_size == blob.size and _is(path, blob.digest, watcher):
        return True
    watcher.note(f"{blob.name} in the Hugging Face cache is damaged; downloading it again")
    path.unlink()
    return False


def _is(path: Path, digest: str, watcher: ProgressDisplay) -> bool:
    """Return whether a file's content has `digest`, a sha256 or a git blob id."""
    if len(digest) == 64:
        return hash_file(path, watcher).sha256 == digest
    data = path.read_bytes()
    return (
        hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == digest
    )


def _download(
    spec: Spec,
    commit: str,
    blob: HubFile,
    config: Config,
    bar: ProgressBar,
    watcher: ProgressDisplay,
) -> VerifiedFile:
    """Download one blob into its partial file, resuming at the end of that file, and verify it."""
    from huggingface_hub import hf_hub_url

    repo = _repo_folder(spec, config)
    target = repo / "blobs" / blob.digest
    url = hf_hub_url(spec.repo, blob.name, revision=commit, endpoint=config.hub_endpoint)
    headers = {**hub_headers(config), "Accept-Encoding": "identity"}
    with hold_lock(
        config.hub_cache / ".locks" / repo.name / f"{blob.digest}.lock", watcher, blob.name
    ):
        if target.is_file():  # another process downloaded it while this one waited
            bar.advance(blob.size)
            return hash_file(target)
        with AtomicWriter(_partial(repo, blob), blob.size, bar.advance) as file:
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
    """Fill the partial file, resuming after failures."""

    def report_break(pause: float) -> None:
        n_bytes = f"{format_size(file.position)} of {format_size(file.size)}"
        watcher.note(f"the connection broke at {n_bytes}; resuming")

    resume_transfer(
        lambda: _stream(url, headers, file), lambda: max(0, file.size - file.position), report_break
    )


def _stream(url: str, headers: dict[str, str], file: AtomicWriter) -> None:
    """Make one request for the bytes after the end of the partial file, and append them."""
    from huggingface_hub import get_session, hf_raise_for_status

    all_headers = {**headers, "Range": f"bytes={file.position}-"} if file.position else headers
    with get_session().stream("GET", url, headers=all_headers, timeout=TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        if file.position and response.status_code != 206:
            file.restart()  # a server without range support sends everything again
        for chunk in response.iter_bytes():
            file.write(chunk)


def _link_file(
    spec: Spec, commit: str, blob: HubFile, file: VerifiedFile | None, config: Config
) -> VerifiedFile:
    """Let huggingface_hub link the blob into the snapshot; return the record of the link."""
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


def _point(spec: Spec, commit: str, config: Config) -> None:
    """Record the commit of a branch or tag as huggingface_hub does, for later use offline."""
    revision = spec.revision or "main"
    if not COMMIT_PATTERN.fullmatch(revision):
        write_atomically(_repo_folder(spec, config) / "refs" / revision, commit.encode())


def _from_cache(spec: Spec, config: Config, watcher: ProgressDisplay) -> FetchedFiles:
    """Return the files that are already in the cache.

    Each blob is verified by its digest, which is its name in the cache. Raises UserError if files
    are missing or damaged.
    """
    repo = _repo_folder(spec, config)
    revision = spec.revision or "main"
    ref = repo / "refs" / revision
    commit = (
        revision
        if COMMIT_PATTERN.fullmatch(revision)
        else ref.read_text().strip()
        if ref.is_file()
        else ""
    )
    snapshot = repo / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        raise UserError(
            f"{spec.repo} is not in the Hugging Face cache ({config.hub_cache}), "
            "and llmcli is offline",
            hint="leave out --offline (or unset HF_HUB_OFFLINE) and try again",
        )
    blobs = [
        HubFile(
            str(path.relative_to(snapshot)),
            path.stat().st_size,
            path.readlink().name if path.is_symlink() else "",
        )
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    ]
    choice = choose_files(spec, blobs, config.allow_pickle)
    if missing := _unlinked(snapshot, choice):
        raise UserError(
            f"only a part of {spec.repo} is in the Hugging Face cache ({missing} is missing), "
            "and llmcli is offline",
            hint="leave out --offline (or unset HF_HUB_OFFLINE) and try again",
        )
    for blob in choice.files:
        if DIGEST_PATTERN.fullmatch(blob.digest) and not _is(
            snapshot / blob.name, blob.digest, watcher
        ):
            raise UserError(
                f"{blob.name} of {spec.repo} in the Hugging Face cache is damaged",
                hint="pull it again online",
            )
    return _fetched(
        spec,
        commit,
        choice,
        tuple(hash_file(snapshot / blob.name, watcher) for blob in choice.files),
        config,
    )


def _unlinked(snapshot: Path, choice: ChosenFiles) -> str:
    """Return the name of a shard that a cached index lists and that is not in the cache, or ""."""
    names = {blob.name for blob in choice.files}
    for index in (snapshot / name for name in names if name.endswith(".index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # the error is reported when the weights are read
        if missing := sorted(str(shard) for shard in shards - names):
            return missing[0]
    return ""


def find_partial_files(config: Config) -> Iterator[Path]:
    """Yield the partial files that llmcli left in the Hugging Face cache.

    Each file is locked until the next one is requested; files that another process is writing are
    skipped.
    """
    for path in sorted(config.hub_cache.glob(f"models--*/blobs/*{PARTIAL_SUFFIX}")):
        lock = (
            config.hub_cache
            / ".locks"
            / path.parents[1].name
            / f"{path.name.removesuffix(PARTIAL_SUFFIX)}.lock"
        )
        with hold_lock(lock) as free:
            if free:
                yield path


def remove_files(config: Config, files: Sequence[Path]) -> int:
    """Delete files from the Hugging Face cache through the library; return the freed bytes."""
    disable_hub_telemetry()
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        info = scan_cache_dir(config.hub_cache)
    except CacheNotFound:
        return 0
    paths = {
        path.parent.resolve() / path.name for path in files
    }  # huggingface_hub resolves symlinks of the folder, but not of the file
    cached = [
        file
        for repo in info.repos
        for revision in repo.revisions
        for file in revision.files
        if file.file_path in paths
    ]
    strategy = info.delete_files(*cached)
    strategy.execute()
    return strategy.expected_freed_size


def _repo_folder(spec: Spec, config: Config) -> Path:
    return config.hub_cache / f"models--{spec.repo.replace('/', '--')}"


def _partial(repo: Path, blob: HubFile) -> Path:
    return repo / "blobs" / f"{blob.digest}{PARTIAL_SUFFIX}"


SOURCES = (HubSource(),)
