"""Downloads files of a hub repository into the Hugging Face cache (cache.py), and verifies them.

A download is written to a partial file beside the blobs and hashed while it arrives. It becomes a
blob only if it has the size and the digest that the hub lists. What a server sends beyond the size
is not written.

The download function of huggingface_hub 2.4 is not used. It does not verify files, does not resume
in a later run, has no limit of size or time, and loses up to 10 MB when a connection breaks. Its
Xet transfers can neither be resumed nor be hashed while they arrive.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmcli.atomic_files import AtomicWriter
from llmcli.catalog.disk_space import require_free_space
from llmcli.catalog.hub import cache
from llmcli.catalog.hub.choose_files import HubFile
from llmcli.catalog.hub.exchange import (
    COMPLETE_STATUSES,
    HubReply,
    HubUnreachable,
    ProgressClock,
    open_reply,
)
from llmcli.catalog.hub.headers import hub_headers
from llmcli.catalog.hub.retry import resume_transfer
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile, describe_file, hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.file_lock import hold_lock
from llmcli.types import ProgressBar, ProgressDisplay
from llmcli.units import format_size

# Ends with .incomplete, so that `hf cache` also recognizes the file as partial.
PARTIAL_SUFFIX = ".llmcli.incomplete"
CONTENT_RANGE_PATTERN = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


def download_files(
    spec: Spec, commit: str, blobs: Sequence[HubFile], config: Config, watcher: ProgressDisplay
) -> tuple[VerifiedFile, ...]:
    """Download those files of a commit that are not in the cache, and verify all of them. Damaged
    files in the cache are replaced. Return the files, which are in the folder of the commit, in the
    order of `blobs`. Nothing is written if the cache is complete.

    Raises UserError if the disk has too little space or a download does not match its digest.
    RefusedRequest and errors of the network are raised unchanged.
    """
    repo = cache.repo_folder(spec, config)
    files = {
        blob: file
        for blob in blobs
        if (path := cache.find_content(repo, commit, blob))
        and (file := _verify_cached(path, blob, watcher))
    }
    partial_paths = {blob: _partial_path(repo, blob) for blob in blobs if blob not in files}
    done = sum(path.stat().st_size for path in partial_paths.values() if path.exists())
    total = sum(blob.size for blob in partial_paths)
    if partial_paths:
        require_free_space(total - done, repo)
        cache.write_cache_tag(config)
        if done:
            watcher.note(f"resuming {spec.repo} at {format_size(done)} of {format_size(total)}")
        with watcher.bar(spec.repo, total, done=done) as bar:
            for blob in partial_paths:
                bar.describe(blob.name)
                files[blob] = _download_file(spec, commit, blob, config, bar, watcher)
    uses = Counter(blob.digest for blob in blobs)
    linked = []
    for blob in blobs:
        uses[blob.digest] -= 1
        # In a cache without links, the content may have become another file of the commit.
        content = cache.find_content(repo, commit, blob) or Path(files[blob].path)
        path = cache.link_content(repo, commit, blob, content, not uses[blob.digest])
        linked.append(describe_file(path, files[blob].sha256))
    return tuple(linked)


def _verify_cached(path: Path, blob: HubFile, watcher: ProgressDisplay) -> VerifiedFile | None:
    """Return a file of the cache if it has the size and the digest that the hub lists. If not,
    delete it and return None.
    """
    has_size = path.stat().st_size == blob.size
    if has_size and (file := cache.verify_content(path, blob.digest, watcher)):
        return file
    watcher.note(f"{blob.name} in the Hugging Face cache is damaged; downloading it again")
    path.unlink()
    return None


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

    repo = cache.repo_folder(spec, config)
    target = cache.blob_path(repo, blob)
    url = hf_hub_url(spec.repo, blob.name, revision=commit, endpoint=config.hub_endpoint)
    lock = config.hub_cache / ".locks" / repo.name / f"{blob.digest}.lock"
    with hold_lock(lock, watcher, blob.name):
        if target.is_file():  # another process has downloaded it while this one waited
            bar.advance(blob.size)
            return hash_file(target)
        with AtomicWriter(_partial_path(repo, blob), blob.size, bar.advance) as file:
            _transfer(url, hub_headers(config), file, blob.name, watcher)
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
    url: str, headers: dict[str, str], file: AtomicWriter, name: str, watcher: ProgressDisplay
) -> None:
    """Download the missing bytes of a partial file, with as many requests as broken connections
    make necessary. `name`: of the file, for messages.
    """
    clock, may_resume = ProgressClock(), True

    def report_break(pause: float) -> None:
        n_bytes = f"{format_size(file.position)} of {format_size(file.size)}"
        waiting = f"; waiting {pause:.0f} s, as the hub asks" if pause > 10 else ""
        watcher.note(f"the connection broke at {n_bytes}; resuming{waiting}")

    def fetch() -> None:
        nonlocal may_resume
        range_header = {"Range": f"bytes={file.position}-"} if file.position and may_resume else {}
        with open_reply(url, {**headers, **range_header}, clock) as reply:
            if range_header and reply.status == 416:  # this host cannot continue the file
                may_resume = False
                return
            reply.require_status(*COMPLETE_STATUSES, *[206] * bool(range_header))
            start = file.position if reply.status == 206 else 0
            _check_announced_part(reply, start, file.size, name)
            if start != file.position:
                file.restart()
            for chunk in reply.chunks():
                missing = file.size - file.position
                file.write(chunk[:missing])
                if len(chunk) > missing:
                    watcher.note(
                        f"{reply.host} sends more than the {format_size(file.size)} of {name} that "
                        "the hub lists; the rest is not read"
                    )
                    return

    resume_transfer(fetch, lambda: file.size - file.position, report_break, clock)


def _check_announced_part(reply: HubReply, start: int, size: int, name: str) -> None:
    """Raise HubUnreachable if the headers of a response announce another part than the bytes of a
    file from `start` to its end, or a file that does not have `size` bytes.
    """
    length, missing = reply.headers.get("content-length", ""), size - start
    is_other_part = False
    if reply.status == 206:
        content_range = CONTENT_RANGE_PATTERN.fullmatch(reply.headers.get("content-range", ""))
        is_other_part = (
            not content_range
            or int(content_range[1]) != start
            or content_range[2] not in (str(size), "*")
        )
    if is_other_part or length not in ("", str(missing)):
        raise HubUnreachable(
            f"{reply.host} sends {length[:20] or 'other'} bytes of {name} instead of the {missing} "
            "that the hub lists",
            hint="try again; if it happens twice, the mirror or a proxy changes files",
        )


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
