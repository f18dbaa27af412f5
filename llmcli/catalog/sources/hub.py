"""The source "hub": weights in a repository on the Hugging Face hub.

The files of the model are either downloaded into the Hugging Face cache (catalog/hub/download.py),
or stay on the hub and are read in parts (catalog/hub/range_reader.py).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from llmcli.catalog.hub import cache
from llmcli.catalog.hub.choose_files import ChosenFiles, HubFile, choose_files
from llmcli.catalog.hub.content_check import WaitingBytes
from llmcli.catalog.hub.download import download_files
from llmcli.catalog.hub.error_messages import explain_error
from llmcli.catalog.hub.exchange import HubUnreachable
from llmcli.catalog.hub.listing import DIGEST_PATTERN, list_files
from llmcli.catalog.hub.range_reader import RemoteFile, fetch_heads
from llmcli.catalog.names.gguf_names import COMPANION_KINDS, companion_kind
from llmcli.catalog.sources.base import FetchedFiles, RemoteCheckpoint
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile, hash_file
from llmcli.config import Config, disable_hub_telemetry
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay
from quant.json_dataclasses import decode_value, parse_object, read_file

REVISION_PATTERN = re.compile(r"(?!.*\.\.)[\w][\w./-]*")
MAX_INDEX_BYTES = 1 << 25  # maximum size of the index of a checkpoint


class HubSource:
    """The kind of source for repositories on the hub."""

    name, required_fields = "hub", ("repo",)

    def fetch(
        self, spec: Spec, folder: Path, config: Config, watcher: ProgressDisplay
    ) -> FetchedFiles:
        """Download a GGUF or a checkpoint into the Hugging Face cache. If llmcli is offline, or the
        hub does not answer, use what is already in the cache. Raises UserError if neither is
        possible.
        """
        disable_hub_telemetry()
        _check_revision(spec)
        if config.offline:
            return _from_cache(spec, config, watcher)
        try:
            with explain_error(spec, config):
                listing = list_files(spec, config, watcher)
        except HubUnreachable as error:
            return replace(_cached_instead(spec, config, watcher, error), hub_error=error)
        with explain_error(spec, config):
            choice = choose_files(spec, listing.files, config.allow_pickle)
            if choice.note:
                watcher.note(choice.note)
            if choice.kind == "gguf" and (kinds := companion_kinds(listing.files)):
                names = ",".join(kinds)
                watcher.note(
                    f"{spec.repo} also has {', '.join(kinds)}; `llmcli pull {spec.repo} --with {names}` "
                    "downloads them"
                )
            files = download_files(spec, listing.commit, choice.files, config, watcher)
            cache.record_commit(spec, listing.commit, config, watcher)
        return _describe_files(spec, listing.commit, choice, files, config)


def companion_kinds(files: Sequence[HubFile]) -> list[str]:
    """Return the kinds of companions among the files of a repository."""
    found = {companion_kind(file.name) for file in files}
    return [kind for kind in COMPANION_KINDS if kind in found]


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
    with explain_error(spec, config):
        listing = list_files(spec, config, watcher)
        commit = listing.commit
        choice = choose_files(spec, listing.files, config.allow_pickle)
        weights = [blob for blob in choice.files if blob.name.endswith(".safetensors")]
        repo = cache.repo_folder(spec, config)
        is_cached = all(cache.find_content(repo, commit, blob) for blob in weights)
        if choice.kind != "folder" or is_cached or any(len(blob.digest) != 64 for blob in weights):
            return None
        small_files = [blob for blob in choice.files if blob not in weights]
        waiting = WaitingBytes()
        files = {
            blob.name: RemoteFile(spec, commit, blob, config, watcher, waiting) for blob in weights
        }
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
    with explain_error(spec, config):
        listing = list_files(spec, config, watcher)
        choice = choose_files(spec, listing.files, config.allow_pickle)
    if choice.kind != "gguf":
        return None
    if choice.note:
        watcher.note(choice.note)
    return tuple(RemoteFile(spec, listing.commit, blob, config, watcher) for blob in choice.files)


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
    snapshot = cache.repo_folder(spec, config) / "snapshots" / commit
    path = snapshot if choice.kind == "folder" else snapshot / choice.files[0].name
    return FetchedFiles(
        cast(Literal["gguf", "folder"], choice.kind), path, files, spec.label, commit
    )


def _cached_instead(
    spec: Spec, config: Config, watcher: ProgressDisplay, error: HubUnreachable
) -> FetchedFiles:
    """Return the model's files from the cache after the hub has not answered, with a note. Raises
    `error` if they are not there completely.
    """
    try:
        fetched = _from_cache(spec, config, watcher)
    except UserError:
        raise error from None
    watcher.note(cache_note(error, spec.repo, fetched.revision))
    return fetched


def cache_note(error: HubUnreachable, name: str, commit: str | None) -> str:
    """Return a note that a model in the cache is used because the hub does not answer."""
    return (
        f"{error}; using {name} from the Hugging Face cache, commit {(commit or '')[:12]} "
        "(--offline does not ask the hub)"
    )


def _from_cache(spec: Spec, config: Config, watcher: ProgressDisplay) -> FetchedFiles:
    """Return the model's files from the cache, without using the network. Each file is verified
    with its digest, which is the name of its blob. Raises UserError if files are missing or
    damaged.
    """
    repo, commit = cache.repo_folder(spec, config), cache.read_commit(spec, config)
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
    files = []
    for blob in choice.files:
        path = snapshot / blob.name
        # In a cache without links, nothing says which digest a file had on the hub.
        has_digest = DIGEST_PATTERN.fullmatch(blob.digest)
        file = (
            cache.verify_content(path, blob.digest, watcher)
            if has_digest
            else hash_file(path, watcher)
        )
        if file is None:
            raise UserError(
                f"{blob.name} of {spec.repo} in the Hugging Face cache is damaged",
                hint="pull it again online",
            )
        files.append(file)
    return _describe_files(spec, commit, choice, tuple(files), config)


def _missing_shard(snapshot: Path, choice: ChosenFiles) -> str:
    """Return the name of a safetensors shard that the index of a cached checkpoint lists but that
    is not in the cache, or "" if none is missing.
    """
    names = {blob.name for blob in choice.files}
    for index in (snapshot / name for name in names if name.endswith(".index.json")):
        try:
            document = parse_object(read_file(index, MAX_INDEX_BYTES), MAX_INDEX_BYTES)
            weight_map = decode_value(dict[str, str], document.get("weight_map"), "weight_map")
            shards = set(weight_map.values())
        except (OSError, ValueError):
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
