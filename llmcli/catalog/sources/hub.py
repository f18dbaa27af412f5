"""Weights on the Hugging Face hub, in its ordinary cache: with catalog/hub the only door to
huggingface_hub.

huggingface_hub 2.4 neither checks what it downloaded nor resumes in a later run (its temporary file
has a random name and is deleted on any failure), and it reads in steps of 10 MB that a broken
connection loses. So the bytes come through its session into a partial file of ours beside the blob,
hashed while they come, and only a blob that is what its name says enters the cache; the library
then places it. Xet transfers are not used: they can neither be resumed nor hashed on the way. A
checkpoint may also stay on the hub, and be read there part by part (catalog/hub/ranges.py).
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

from llmcli.catalog.catalog import Spec
from llmcli.catalog.hub.patience import patiently
from llmcli.catalog.hub.ranges import RemoteFile, first_bytes
from llmcli.catalog.hub.words import in_words, retries_noted
from llmcli.catalog.partial import Partial, write_whole
from llmcli.catalog.sources.base import Fetched, Remote, make_room
from llmcli.catalog.sources.choose import Blob, Choice, choose
from llmcli.catalog.store import File, locked, measure, recorded
from llmcli.config import Config, quiet_hub
from llmcli.errors import UserError
from llmcli.types import Bar, Watcher
from llmcli.units import size

COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]*")
PARTIAL = ".llmcli.incomplete"  # the ending by which `hf cache` knows partials too
TIMEOUT_SECONDS = 15.0
TRIES = 5


class Hub:
    """One repository at one commit."""

    name, needs = "hub", ("repo",)

    def fetch(self, spec: Spec, where: Path, config: Config, watcher: Watcher) -> Fetched:
        quiet_hub()
        _check_revision(spec)
        if config.offline:
            return _from_cache(spec, config, watcher)
        with in_words(spec, config), retries_noted(watcher):
            commit, blobs = _listing(spec, config)
            choice = choose(spec, blobs, config.allow_pickle)
            if choice.remark:
                watcher.note(choice.remark)
            files = _bring(spec, commit, choice.files, config, watcher)
            _point(spec, commit, config)
        return _fetched(spec, commit, choice, files, config)


def remote(spec: Spec, config: Config, watcher: Watcher) -> Remote | None:
    """The checkpoint of a repository, its safetensors left on the hub; None where there is none, or
    it is here.

    Config, tokenizer and index come into the cache as ever. Raises NoRanges where the server gives
    no parts.
    """
    quiet_hub()
    _check_revision(spec)
    with in_words(spec, config), retries_noted(watcher):
        commit, blobs = _listing(spec, config)
        choice = choose(spec, blobs, config.allow_pickle)
        weights = [blob for blob in choice.files if blob.name.endswith(".safetensors")]
        place = _repo_folder(spec, config)
        here = all((place / "blobs" / blob.digest).is_file() for blob in weights)
        if choice.kind != "folder" or here or any(len(blob.digest) != 64 for blob in weights):
            return None
        side = [blob for blob in choice.files if blob not in weights]
        files = {blob.name: RemoteFile(spec, commit, blob, config, watcher) for blob in weights}
        first_bytes(list(files.values()))
        brought = dict(zip(side, _bring(spec, commit, side, config, watcher), strict=True))
    folder = place / "snapshots" / commit
    listed = tuple(
        brought.get(blob) or File(str(folder / blob.name), blob.size, blob.digest, 0)
        for blob in choice.files
    )
    paths = tuple(Path(file.path) for file in brought.values())
    return Remote("folder", folder, listed, spec.label, commit, blobs=files, here=paths)


def distant(spec: Spec, config: Config, watcher: Watcher) -> tuple[RemoteFile, ...] | None:
    """The GGUF that a pull would take, left on the hub: its file, or its shards in order; None for
    a checkpoint.
    """
    quiet_hub()
    _check_revision(spec)
    with in_words(spec, config), retries_noted(watcher):
        commit, blobs = _listing(spec, config)
        choice = choose(spec, blobs, config.allow_pickle)
    if choice.kind != "gguf":
        return None
    if choice.remark:
        watcher.note(choice.remark)
    return tuple(RemoteFile(spec, commit, blob, config, watcher) for blob in choice.files)


def _check_revision(spec: Spec) -> None:
    if spec.revision and not REVISION.fullmatch(spec.revision):
        raise UserError(f"{spec.revision!r} is not a revision", hint="a branch, a tag or a commit")


def _fetched(
    spec: Spec, commit: str, choice: Choice, files: tuple[File, ...], config: Config
) -> Fetched:
    snapshot = _repo_folder(spec, config) / "snapshots" / commit
    path = snapshot if choice.kind == "folder" else snapshot / choice.files[0].name
    return Fetched(cast(Literal["gguf", "folder"], choice.kind), path, files, spec.label, commit)


def _listing(spec: Spec, config: Config) -> tuple[str, list[Blob]]:
    """The commit that the revision is now, and its files."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=config.hub_endpoint, token=config.hub_token or False)
    revision = spec.revision or None
    try:
        info = patiently(
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
    ):  # the library takes any JSON for a listing
        raise UserError(
            f"{config.hub_endpoint} does not answer like a hub",
            hint="check HF_ENDPOINT and the proxy's settings",
        ) from None
    blobs = []
    for name, nbytes, digest in listed:
        if not isinstance(name, str) or not _inside(name):
            continue
        if (
            type(nbytes) is not int
            or nbytes < 0
            or not isinstance(digest, str)
            or not DIGEST.fullmatch(digest)
        ):
            raise UserError(
                f"{config.hub_endpoint} does not say what {name} of {spec.repo} should be",
                hint="is HF_ENDPOINT a complete mirror of the hub?",
            )
        blobs.append(Blob(name, nbytes, digest))
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        raise UserError(
            f"{config.hub_endpoint} gives no commit for {spec.repo}",
            hint="is HF_ENDPOINT a mirror of the hub?",
        )
    return info.sha, blobs


def _inside(name: str) -> bool:
    """Whether a name that a server gave stays inside the folder it is put in."""
    return bool(name) and not re.search(r"(^|/)\.\.?(/|$)|^/|\\|//|\0|:", name)


def _bring(
    spec: Spec, commit: str, blobs: Sequence[Blob], config: Config, watcher: Watcher
) -> tuple[File, ...]:
    """Have every blob in the cache, verified; what is there already is hashed once."""
    repo = _repo_folder(spec, config)
    have = {
        blob
        for blob in blobs
        if (repo / "blobs" / blob.digest).is_file() and _genuine(repo, blob, watcher)
    }
    partials = {blob: _partial(repo, blob) for blob in blobs if blob not in have}
    done = sum(path.stat().st_size for path in partials.values() if path.exists())
    total = sum(blob.size for blob in partials)
    make_room(total - done, repo)
    files = {
        blob: recorded(repo / "blobs" / blob.digest, blob.digest)
        for blob in have
        if len(blob.digest) == 64
    }
    if partials:
        if done:
            watcher.note(f"resuming {spec.repo} at {size(done)} of {size(total)}")
        with watcher.bar(spec.repo, total, done=done) as bar:
            for blob in partials:
                bar.describe(blob.name)
                files[blob] = _download(spec, commit, blob, config, bar, watcher)
    return tuple(_place(spec, commit, blob, files.get(blob), config) for blob in blobs)


def _genuine(repo: Path, blob: Blob, watcher: Watcher) -> bool:
    """Whether a blob that somebody put into the cache is what its name says; else it is deleted."""
    path = repo / "blobs" / blob.digest
    if path.stat().st_size == blob.size and _is(path, blob.digest, watcher):
        return True
    watcher.note(f"{blob.name} in the Hugging Face cache is damaged; deleted, fetching it again")
    path.unlink()
    return False


def _is(path: Path, digest: str, watcher: Watcher) -> bool:
    """Whether a file's content is what its blob's name says: a sha256, or a git blob id."""
    if len(digest) == 64:
        return measure(path, watcher).sha256 == digest
    data = path.read_bytes()
    return (
        hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == digest
    )


def _download(
    spec: Spec, commit: str, blob: Blob, config: Config, bar: Bar, watcher: Watcher
) -> File:
    """Fetch one blob into its partial file, from where that ends, and verify it."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers

    repo = _repo_folder(spec, config)
    target = repo / "blobs" / blob.digest
    url = hf_hub_url(spec.repo, blob.name, revision=commit, endpoint=config.hub_endpoint)
    headers = {**build_hf_headers(token=config.hub_token or False), "Accept-Encoding": "identity"}
    with locked(
        config.hub_cache / ".locks" / repo.name / f"{blob.digest}.lock", watcher, blob.name
    ):
        if target.is_file():  # the one we waited for brought it
            bar.advance(blob.size)
            return measure(target)
        with Partial(_partial(repo, blob), blob.size, bar.advance) as file:
            _transfer(url, headers, file, watcher)
            if not file.matches(blob.digest):
                file.discard()
                raise UserError(
                    f"{blob.name} of {spec.repo} is not what the hub says it is ({blob.digest[:12]}…); it is deleted",
                    hint="try again; if it happens twice, the mirror or a proxy changes files",
                )
            sha256 = file.sha256
            file.commit(target)
    return recorded(target, sha256)


def _transfer(url: str, headers: dict[str, str], file: Partial, watcher: Watcher) -> None:
    """Fill the partial file, taking up the thread after every break that is not the last of TRIES
    in vain.
    """
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    vain = 0
    while file.position < file.size:
        before = file.position
        error: Exception | None = None
        try:
            _stream(url, headers, file)
        except httpx2.TransportError as broken:
            error = broken
        except HfHubHTTPError as refused:
            if refused.response.status_code not in (408, 500, 502, 503, 504):
                raise
            error = refused
        if file.position >= file.size:
            return
        vain = 0 if file.position > before else vain + 1
        if vain == TRIES:
            raise error or httpx2.ReadError("the server ends the file early")
        watcher.note(
            f"the connection broke at {size(file.position)} of {size(file.size)}; resuming"
        )
        time.sleep(min(2**vain, 8))


def _stream(url: str, headers: dict[str, str], file: Partial) -> None:
    """One request, from the end of the partial file on."""
    from huggingface_hub import get_session
    from huggingface_hub.utils._http import hf_raise_for_status

    asked = {**headers, "Range": f"bytes={file.position}-"} if file.position else headers
    with get_session().stream("GET", url, headers=asked, timeout=TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        if file.position and response.status_code != 206:
            file.restart()  # a server that does not know ranges sends everything again
        for chunk in response.iter_bytes():
            file.write(chunk)


def _place(spec: Spec, commit: str, blob: Blob, file: File | None, config: Config) -> File:
    """Let the library link the blob into the snapshot; describe it under its own name."""
    from huggingface_hub import hf_hub_download

    path = Path(
        patiently(
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
        file = measure(path)
    return recorded(path, file.sha256)


def _point(spec: Spec, commit: str, config: Config) -> None:
    """Note which commit the branch is, as the library does, so that it works offline afterwards."""
    revision = spec.revision or "main"
    if not COMMIT.fullmatch(revision):
        write_whole(_repo_folder(spec, config) / "refs" / revision, commit.encode())


def _from_cache(spec: Spec, config: Config, watcher: Watcher) -> Fetched:
    """What is in the cache already, whoever fetched it, verified by the blobs' own names."""
    repo = _repo_folder(spec, config)
    revision = spec.revision or "main"
    ref = repo / "refs" / revision
    commit = (
        revision if COMMIT.fullmatch(revision) else ref.read_text().strip() if ref.is_file() else ""
    )
    snapshot = repo / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        raise UserError(
            f"{spec.repo} is not in the Hugging Face cache ({config.hub_cache}), and this is offline",
            hint="drop --offline (or HF_HUB_OFFLINE) and try again",
        )
    blobs = [
        Blob(
            str(path.relative_to(snapshot)),
            path.stat().st_size,
            path.readlink().name if path.is_symlink() else "",
        )
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    ]
    choice = choose(spec, blobs, config.allow_pickle)
    if lost := _unlinked(snapshot, choice):
        raise UserError(
            f"only a part of {spec.repo} is in the Hugging Face cache ({lost} is not), and this is offline",
            hint="drop --offline (or HF_HUB_OFFLINE) and try again",
        )
    for blob in choice.files:
        if DIGEST.fullmatch(blob.digest) and not _is(snapshot / blob.name, blob.digest, watcher):
            raise UserError(
                f"{blob.name} of {spec.repo} in the Hugging Face cache is damaged",
                hint="pull it again while online",
            )
    return _fetched(
        spec,
        commit,
        choice,
        tuple(measure(snapshot / blob.name, watcher) for blob in choice.files),
        config,
    )


def _unlinked(snapshot: Path, choice: Choice) -> str:
    """A shard that an index in the cache names and that is not there; "" where all are."""
    names = {blob.name for blob in choice.files}
    for index in (snapshot / name for name in names if name.endswith(".index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # whoever reads the weights will say what is wrong with it
        if lost := sorted(str(shard) for shard in shards - names):
            return lost[0]
    return ""


def incomplete(config: Config) -> Iterator[Path]:
    """The partial files that llmcli left in the Hugging Face cache; each is locked until the next
    is asked for.
    """
    for path in sorted(config.hub_cache.glob(f"models--*/blobs/*{PARTIAL}")):
        lock = (
            config.hub_cache
            / ".locks"
            / path.parents[1].name
            / f"{path.name.removesuffix(PARTIAL)}.lock"
        )
        with locked(lock) as free:
            if free:
                yield path


def remove(config: Config, files: Sequence[Path]) -> int:
    """Delete files from the Hugging Face cache through the library; the bytes that frees."""
    quiet_hub()
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        info = scan_cache_dir(config.hub_cache)
    except CacheNotFound:
        return 0
    wanted = {
        path.parent.resolve() / path.name for path in files
    }  # the folder is resolved, the link is not
    cached = [
        file
        for repo in info.repos
        for revision in repo.revisions
        for file in revision.files
        if file.file_path in wanted
    ]
    strategy = info.delete_files(*cached)
    strategy.execute()
    return strategy.expected_freed_size


def _repo_folder(spec: Spec, config: Config) -> Path:
    return config.hub_cache / f"models--{spec.repo.replace('/', '--')}"


def _partial(repo: Path, blob: Blob) -> Path:
    return repo / "blobs" / f"{blob.digest}{PARTIAL}"


SOURCES = (Hub(),)
