"""The layout of the Hugging Face cache, which other programs share.

The content of a file is a blob, whose name is its digest. The folder of a commit has a link to the
blob under the file's name. On a file system without symbolic links, the file itself is in the
folder of the commit, as huggingface_hub does it. `refs` has the commit of each branch and tag.
"""

import errno
import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

from llmcli.atomic_files import write_atomically
from llmcli.catalog.hub.choose_files import HubFile
from llmcli.catalog.hub.listing import COMMIT_PATTERN
from llmcli.catalog.spec import Spec
from llmcli.catalog.store import VerifiedFile, hash_file
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.types import ProgressDisplay

MAX_REF_BYTES = 1000
# Errors of os.symlink on file systems that have no symbolic links, and for users who may not
# create them.
NO_LINK_ERRORS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
# Marks the folder as a cache for backup programs (bford.info/cachedir).
CACHE_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n"


def repo_folder(spec: Spec, config: Config) -> Path:
    """Return the folder of the repository in the cache. It may not exist yet."""
    return config.hub_cache / f"models--{spec.repo.replace('/', '--')}"


def blob_path(repo: Path, file: HubFile) -> Path:
    """Return the path of the content of a file."""
    return repo / "blobs" / file.digest


def linked_path(repo: Path, commit: str, file: HubFile) -> Path:
    """Return the path of a file in the folder of a commit."""
    return repo / "snapshots" / commit / file.name


def find_content(repo: Path, commit: str, file: HubFile) -> Path | None:
    """Return where the content of a file is in the cache: its blob or, in a cache without links,
    the file of the commit. None if there is neither.
    """
    candidates = blob_path(repo, file), linked_path(repo, commit, file)
    return next((path for path in candidates if path.is_file()), None)


def verify_content(path: Path, digest: str, watcher: ProgressDisplay) -> VerifiedFile | None:
    """Hash a file. Return it with its sha256, or None if it does not have this digest, in hex: a
    sha256 (64 digits), or the id of a git blob (40 digits).
    """
    file = hash_file(path, watcher)
    if len(digest) == 64:
        return file if file.sha256 == digest else None
    data = path.read_bytes()
    git_hash = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return file if git_hash.hexdigest() == digest else None


def link_content(repo: Path, commit: str, file: HubFile, content: Path, is_last: bool) -> Path:
    """Make the file of a commit a link to its content, and return its path. Where links cannot be
    created, the content is moved there, or copied unless `is_last`: another file has it, too.
    """
    target = linked_path(repo, commit, file)
    if target == content or (target.is_symlink() and target.exists() and target.samefile(content)):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{os.getpid()}.link")
    with suppress(FileNotFoundError):
        temporary.unlink()
    if _may_link():
        try:
            temporary.symlink_to(os.path.relpath(content, target.parent))
            temporary.replace(target)
            return target
        except OSError as error:
            if error.errno not in NO_LINK_ERRORS:
                raise
    if is_last:
        content.replace(target)
    else:
        shutil.copyfile(content, temporary)
        temporary.replace(target)
    return target


def _may_link() -> bool:
    """Return whether the user has not forbidden symbolic links (HF_HUB_DISABLE_SYMLINKS)."""
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_SYMLINKS


def record_commit(spec: Spec, commit: str, config: Config, watcher: ProgressDisplay) -> None:
    """Write the commit of a branch or tag into the cache, as huggingface_hub does. Without this
    file, the model could not be found offline. If the cache cannot be written, print a note.
    """
    revision = spec.revision or "main"
    if COMMIT_PATTERN.fullmatch(revision) or read_commit(spec, config) == commit:
        return
    try:
        write_atomically(repo_folder(spec, config) / "refs" / revision, commit.encode())
    except UserError as error:
        watcher.note(
            f"{error}: offline, {spec.repo} will be found only as commit {commit} (--revision)"
        )


def read_commit(spec: Spec, config: Config) -> str:
    """Return the commit of the requested revision that the cache records, or "" if it records
    none.
    """
    revision = spec.revision or "main"
    if COMMIT_PATTERN.fullmatch(revision):
        return revision
    try:
        with (repo_folder(spec, config) / "refs" / revision).open("rb") as file:
            commit = file.read(MAX_REF_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return commit if COMMIT_PATTERN.fullmatch(commit) else ""


def write_cache_tag(config: Config) -> None:
    """Mark the cache as a cache for backup programs, if it is not marked. A failure is no error."""
    path = config.hub_cache / "CACHEDIR.TAG"
    with suppress(OSError):
        config.hub_cache.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(CACHE_TAG)
