"""The source "hub": weights in a repository on the Hugging Face hub.

The files of the model are either downloaded into the Hugging Face cache (catalog/hub/download.py),
or stay on the hub and are read in parts (catalog/hub/range_reader.py).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from llmcli.atomic_files import write_atomically
from llmcli.catalog.hub.choose_files import ChosenFiles, HubFile, choose_files
from llmcli.catalog.hub.download import download_files, has_digest, repo_folder
from llmcli.catalog.hub.error_messages import explain_error, note_retries
from llmcli.catalog.hub.range_reader import RemoteFile, fetch_heads
from llmcli.catalog.hub.retry import with_retries
from llmcli.catalog.sources.base import FetchedFiles, RemoteCheckpoint
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile, hash_file
from llmcli.config import Config, disable_hub_telemetry
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay

COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
DIGEST_PATTERN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REVISION_PATTERN = re.compile(r"(?!.*\.\.)[\w][\w./-]*")
TIMEOUT_SECONDS = 15.0  # of the request for a listing


class HubSource:
    """The kind of source for repositories on the hub."""

    name, required_fields = "hub", ("repo",)

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Download a GGUF or a checkpoint into the Hugging Face cache. If llmcli is offline, use
        what is already in the cache. Raises UserError if neither is possible.
        """
        disable_hub_telemetry()
        _check_revision(spec)
        if config.offline:
            return _from_cache(spec, config, watcher)
        with explain_error(spec, config), note_retries(watcher):
            commit, blobs = _list_files(spec, config)
            choice = choose_files(spec, blobs, config.allow_pickle)
            if choice.note:
                watcher.note(choice.note)
            files = download_files(spec, commit, choice.files, config, watcher)
            _record_commit(spec, commit, config)
        return _describe_files(spec, commit, choice, files, config)


def find_remote_checkpoint(
    spec: Spec, config: Config, watcher: ProgressDisplay
) -> RemoteCheckpoint | None:
    """Return the checkpoint in a repository without downloading its safetensors. Its small files
    (config, tokenizer, index) are downloaded into the cache. Return None if the repository has no
    checkpoint with safetensors, or if these are already in the cache.

    Raises RangesUnsupported if the server does not send parts of files, and UserError for other
    failures.
    """
    disable_hub_telemetry()
    _check_revision(spec)
    with explain_error(spec, config), note_retries(watcher):
        commit, blobs = _list_files(spec, config)
        choice = choose_files(spec, blobs, config.allow_pickle)
        weights = [blob for blob in choice.files if blob.name.endswith(".safetensors")]
        repo = repo_folder(spec, config)
        is_cached = all((repo / "blobs" / blob.digest).is_file() for blob in weights)
        if choice.kind != "folder" or is_cached or any(len(blob.digest) != 64 for blob in weights):
            return None
        small_files = [blob for blob in choice.files if blob not in weights]
        files = {blob.name: RemoteFile(spec, commit, blob, config, watcher) for blob in weights}
        fetch_heads(list(files.values()))
        downloaded = dict(
            zip(
                small_files, download_files(spec, commit, small_files, config, watcher), strict=True
            )
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
    """Return the GGUF that HubSource.fetch would download, without downloading it: one file, or all
    shards in order. Return None if it would download a checkpoint. Raises UserError if the
    repository cannot be read.
    """
    disable_hub_telemetry()
    _check_revision(spec)
    with explain_error(spec, config), note_retries(watcher):
        commit, blobs = _list_files(spec, config)
        choice = choose_files(spec, blobs, config.allow_pickle)
    if choice.kind != "gguf":
        return None
    if choice.note:
        watcher.note(choice.note)
    return tuple(RemoteFile(spec, commit, blob, config, watcher) for blob in choice.files)


def _check_revision(spec: Spec) -> None:
    """Raise UserError if the requested revision cannot be the name of a branch, tag or commit."""
    if spec.revision and not REVISION_PATTERN.fullmatch(spec.revision):
        raise UserError(
            f"{spec.revision!r} is not a valid revision", hint="give a branch, a tag or a commit"
        )


def _describe_files(
    spec: Spec, commit: str, choice: ChosenFiles, files: tuple[VerifiedFile, ...], config: Config
) -> FetchedFiles:
    """Return the files of a commit in the cache with the path to load."""
    snapshot = repo_folder(spec, config) / "snapshots" / commit
    path = snapshot if choice.kind == "folder" else snapshot / choice.files[0].name
    return FetchedFiles(
        cast(Literal["gguf", "folder"], choice.kind), path, files, spec.label, commit
    )


def _list_files(spec: Spec, config: Config) -> tuple[str, list[HubFile]]:
    """Ask the hub for the commit that the requested revision points to. Return its id, and the
    files in it. Files whose names are unsafe as paths are left out. Raises UserError if the
    response is not that of a hub.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=config.hub_endpoint, token=config.hub_token or False)
    revision = spec.revision or None
    try:
        info = with_retries(
            lambda: api.model_info(
                spec.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS
            )
        )
        properties = [
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
    for name, nbytes, digest in properties:
        if not isinstance(name, str) or not _is_safe_name(name):
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


def _is_safe_name(name: str) -> bool:
    """Return whether a file name that a server sent is safe as a relative path: it cannot lead out
    of the folder for the files.
    """
    return bool(name) and not re.search(r"(^|/)\.\.?(/|$)|^/|\\|//|\0|:", name)


def _record_commit(spec: Spec, commit: str, config: Config) -> None:
    """Write the commit of a branch or tag into the cache, as huggingface_hub does. Without this
    file, the model could not be found offline.
    """
    revision = spec.revision or "main"
    if not COMMIT_PATTERN.fullmatch(revision):
        write_atomically(repo_folder(spec, config) / "refs" / revision, commit.encode())


def _from_cache(spec: Spec, config: Config, watcher: ProgressDisplay) -> FetchedFiles:
    """Return the model's files from the cache, without using the network. Each file is verified
    with its digest, which is the name of its blob. Raises UserError if files are missing or
    damaged.
    """
    repo = repo_folder(spec, config)
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
    if missing := _missing_shard(snapshot, choice):
        raise UserError(
            f"only a part of {spec.repo} is in the Hugging Face cache ({missing} is missing), "
            "and llmcli is offline",
            hint="leave out --offline (or unset HF_HUB_OFFLINE) and try again",
        )
    for blob in choice.files:
        if DIGEST_PATTERN.fullmatch(blob.digest) and not has_digest(
            snapshot / blob.name, blob.digest, watcher
        ):
            raise UserError(
                f"{blob.name} of {spec.repo} in the Hugging Face cache is damaged",
                hint="pull it again online",
            )
    return _describe_files(
        spec,
        commit,
        choice,
        tuple(hash_file(snapshot / blob.name, watcher) for blob in choice.files),
        config,
    )


def _missing_shard(snapshot: Path, choice: ChosenFiles) -> str:
    """Return the name of a safetensors shard that the index of a cached checkpoint lists but that
    is not in the cache, or "" if none is missing.
    """
    names = {blob.name for blob in choice.files}
    for index in (snapshot / name for name in names if name.endswith(".index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # the error will be reported when the weights are read
        if missing := sorted(str(shard) for shard in shards - names):
            return missing[0]
    return ""


def remove_files(config: Config, files: Sequence[Path]) -> int:
    """Delete files from the Hugging Face cache with huggingface_hub, which keeps blobs that another
    commit links to. Return the number of freed bytes.
    """
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


SOURCES = (HubSource(),)
