"""The folder of the prefix cache: one sub-folder for each model with its settings, in which each
entry is a file. Several processes may use the folder at once.

- A file is written under a temporary name and renamed, so that readers see all of it or nothing.
- The lock file is held while a file is written and old ones are dropped for it. The bytes of all
  models together stay within the quota. Each writer sets the time of the root folder, by which
  another one sees that its own count of the bytes is out of date. Readers need no lock: a file that
  is dropped while it is read stays readable.
- The least recently used files are dropped first. When a text is used, its later parts are marked
  as slightly older than its earlier ones, because they are of no use without them.
- `model.json` in a sub-folder names the model and the settings of its entries, and the place of the
  model's file, so that `llmcli gc` can delete what belongs to no model any more.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcli import file_lock
from llmcli.atomic_files import make_folder, write_atomically, write_error
from llmcli.errors import UserError
from llmcli.runtime.disk_cache.entry import NAME, Entry, read_entry_head
from llmcli.runtime.disk_cache.token_hashes import HASH_BYTES, world_digest
from llmcli.runtime.model_identity import file_stamp
from llmcli.runtime.state_file_format import (
    Bytes,
    StateBody,
    UnusableState,
    encode_file,
    read_body,
    read_head,
)
from quant.json_dataclasses import parse_object
from quant.link_safety import open_without_links

LOCK_NAME, MODEL_NAME = "lock", "model.json"
LOCK_SECONDS = 10.0  # how long a writer waits for the writers of other processes
SCAN_SECONDS = 5.0  # for how long a measurement of the folder is used while there is much room
ROOMY_SHARE = 0.75  # of the quota
MAX_MODEL_BYTES = 1 << 16
MAX_COPIES = 8  # files of one model whose places are recorded
FOLDER_NAME = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")
# temporary files of an entry and of model.json (quant/link_safety.py)
LEFTOVER_NAME = re.compile(rf"\.({NAME.pattern}|{re.escape(MODEL_NAME)})\.[0-9a-f]+\.part")


class ForeignFile(UnusableState):
    """Raised for a file of another user, which is not deleted."""


class QuotaTooSmall(Exception):
    """Raised for a state that is larger than the quota of the folder."""


@dataclass(frozen=True, slots=True)
class FoundEntry:
    """A file of the folder. `used_ns`: when it was written or used last."""

    path: Path
    nbytes: int
    used_ns: int


class StateFolder:
    """The entries of one model with its settings (`world`) in the folder `root`, whose files take at
    most `max_bytes` together with those of other models. `model_files`: the file of the model, or
    its shards.
    """

    def __init__(
        self, root: Path, world: Mapping[str, Any], max_bytes: int, model_files: Sequence[Path]
    ) -> None:
        self.root, self.world, self.max_bytes = root, dict(world), max_bytes
        self.model_files = tuple(model_files)
        self.digest = world_digest(world)
        self.path = root / self.digest
        self.used_bytes = self.n_dropped = 0
        self._scanned_at, self._changed_ns = -SCAN_SECONDS, -1

    def open(self) -> None:
        """Make the folder, measure it, record where the model is, and delete temporary files of
        killed writers.

        Raises UserError if the folder cannot be written. What is in it can be read nevertheless.
        """
        with suppress(OSError):
            self._measure()
        make_private_folder(self.root)
        make_private_folder(self.path)
        with file_lock.hold_lock(self.root / LOCK_NAME, seconds=LOCK_SECONDS) as is_locked:
            if is_locked:
                self._delete_leftovers()
                _record_model(self.path, self.world, self.model_files)

    def list_names(self) -> set[str]:
        """Return the names of the entries. It is empty if the folder cannot be read."""
        with suppress(OSError), os.scandir(self.path) as items:
            return {item.name for item in items if NAME.fullmatch(item.name)}
        return set()

    def changed_ns(self) -> int:
        """Return when files were last added to or removed from the folder; -1 if there is none."""
        try:
            return self.path.stat().st_mtime_ns
        except OSError:
            return -1

    def read_head(self, name: str) -> Entry:
        """Return what the head of an entry says. Raises UnusableState, and OSError if the file cannot
        be read.
        """
        with open_without_links(self.path / name, "rb") as file:
            _check_owner(file.fileno())
            return read_entry_head(file, name, self.world)

    def read(self, name: str, n_vocab: int) -> tuple[Entry, StateBody]:
        """Return an entry with its tokens and its state, of which everything is checked. Raises like
        `read_head`.
        """
        with open_without_links(self.path / name, "rb", buffering=0) as file:
            _check_owner(file.fileno())
            entry = read_entry_head(file, name, self.world)
            file.seek(0)
            return entry, read_body(file, read_head(file), n_vocab)

    def write(self, entry: Entry, tokens: Sequence[int], state: Bytes) -> bool:
        """Write an entry unless it is there. Files that were not used for long are dropped for it.
        Return False if other processes kept the folder locked for too long.

        Raises QuotaTooSmall, and UserError if the folder cannot be written.
        """
        pieces = encode_file(tokens, state, self.world, **entry.head_fields())
        nbytes = sum(map(len, pieces))
        if nbytes > self.max_bytes:
            raise QuotaTooSmall
        make_private_folder(self.path)
        with file_lock.hold_lock(self.root / LOCK_NAME, seconds=LOCK_SECONDS) as is_locked:
            if not is_locked:
                return False
            path = self.path / entry.name
            if path.exists():
                return True
            self._make_room(nbytes)
            # only the operator may read the file, because it reveals the conversation
            write_atomically(path, *pieces, mode=0o600)
            self.used_bytes += nbytes
            if not (self.path / MODEL_NAME).exists():  # the folder was removed while serving
                _record_model(self.path, self.world, self.model_files)
        return True

    def touch(self, names: Iterable[str]) -> None:
        """Mark entries of one text as used now. `names`: those of its earlier parts first."""
        now = time.time_ns()
        for depth, name in enumerate(names):
            with suppress(OSError):
                os.utime(self.path / name, ns=(now, now - depth * 1000))

    def delete(self, name: str) -> None:
        """Delete an entry. If this is not possible, it stays."""
        with suppress(OSError):
            (self.path / name).unlink()

    def _make_room(self, nbytes: int) -> None:
        """Drop the least recently used files until `nbytes` more bytes fit. The lock must be held."""
        is_recent = time.monotonic() - self._scanned_at < SCAN_SECONDS and self._is_unchanged()
        self._mark_change()
        if is_recent and self.used_bytes + nbytes < ROOMY_SHARE * self.max_bytes:
            return
        files = self._measure()
        self._delete_leftovers()
        for file in sorted(files, key=lambda file: file.used_ns):
            if self.used_bytes + nbytes <= self.max_bytes:
                return
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                raise write_error(file.path, error) from None
            self.n_dropped += 1
            self.used_bytes -= file.nbytes

    def _is_unchanged(self) -> bool:
        """Return whether no other process has written since this one did."""
        try:
            return self.root.stat().st_mtime_ns == self._changed_ns
        except OSError:
            return False

    def _mark_change(self) -> None:
        """Show other processes that this one writes now. The lock must be held."""
        self._changed_ns = -1
        with suppress(OSError):
            now = time.time_ns()  # finer than the clock of the file system
            os.utime(self.root, ns=(now, now))
            self._changed_ns = self.root.stat().st_mtime_ns

    def _delete_leftovers(self) -> None:
        """Delete temporary files of killed writers. The lock must be held: no process writes."""
        leftovers: list[Path] = []
        with suppress(OSError):
            leftovers = find_leftovers(self.root)
        for path in leftovers:
            with suppress(OSError):  # one that cannot be deleted must not keep the others
                path.unlink()

    def _measure(self) -> list[FoundEntry]:
        """Return the files of all models, and record their bytes."""
        files = list(list_files(self.root))
        self.used_bytes, self._scanned_at = sum(file.nbytes for file in files), time.monotonic()
        return files


def make_private_folder(path: Path) -> None:
    """Create a folder that only its owner can read. Raises UserError, also for a folder of another
    user: what is in it could be anything, and llama.cpp does not check states.
    """
    if not path.is_dir():
        make_folder(path.parent)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise write_error(path, error) from None
    if not _is_own(path.stat().st_uid):
        raise UserError(
            f"{path} belongs to another user", hint="name a folder of your own with --cache-dir"
        )


def list_files(root: Path) -> Iterator[FoundEntry]:
    """Yield the entries of all models in a folder. Raises OSError if the folder cannot be read."""
    for folder in list_model_folders(root):
        with suppress(OSError), os.scandir(folder) as items:
            for item in items:
                if NAME.fullmatch(item.name):
                    with suppress(OSError):
                        status = item.stat(follow_symlinks=False)
                        yield FoundEntry(Path(item.path), status.st_size, status.st_mtime_ns)


def list_model_folders(root: Path) -> list[Path]:
    """Return the sub-folders of the models. Raises OSError if the folder cannot be read."""
    with os.scandir(root) as items:
        return sorted(
            Path(item.path)
            for item in items
            if FOLDER_NAME.fullmatch(item.name) and item.is_dir(follow_symlinks=False)
        )


def find_leftovers(root: Path) -> list[Path]:
    """Return temporary files of killed writers. While the lock is not held, they may be those of a
    running writer.
    """
    leftovers = []
    for folder in list_model_folders(root):
        with suppress(OSError), os.scandir(folder) as items:
            leftovers += [Path(item.path) for item in items if LEFTOVER_NAME.fullmatch(item.name)]
    return leftovers


def is_obsolete(folder: Path, build: str) -> str:
    """Return why no process will use the entries of a model any more, or "". A folder with other
    files is another program's, whatever its name is. `build`: the version of llama.cpp. Raises
    OSError if the folder cannot be read.
    """
    with os.scandir(folder) as items:
        if not all(map(_is_own_name, (item.name for item in items))):
            return ""
    record = _read_model(folder)
    world, copies = record.get("world"), record.get("files")
    if not isinstance(world, dict) or not isinstance(copies, list):
        return "a model that is unknown"
    if world.get("build") != build:
        return "another version of llama.cpp"
    return "" if any(map(_is_present, copies)) else "a model that is not here any more"


def _is_own_name(name: str) -> bool:
    """Return whether a file of this name belongs to the cache."""
    return name == MODEL_NAME or any(form.fullmatch(name) for form in (NAME, LEFTOVER_NAME))


def _record_model(folder: Path, world: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Write `model.json`, with the places of earlier copies of the model that still exist."""
    record = _read_model(folder)
    copies: list[Any] = record.get("files") or [] if record.get("world") == dict(world) else []
    new = [
        {"path": str(path.absolute()), "stamp": list(stamp)}
        for path, stamp in zip(files, file_stamp(files), strict=True)
    ]
    kept = [copy for copy in copies if copy != new and _is_present(copy)]
    copies = [*([new] if new else []), *kept][:MAX_COPIES]
    document = {"version": 1, "world": dict(world), "files": copies}
    if document != record:
        write_atomically(folder / MODEL_NAME, json.dumps(document).encode(), mode=0o600)


def _read_model(folder: Path) -> dict[str, Any]:
    """Return the contents of `model.json`; empty if it is missing or damaged."""
    try:
        with open_without_links(folder / MODEL_NAME, "rb") as file:
            return parse_object(file.read(MAX_MODEL_BYTES), MAX_MODEL_BYTES)
    except (OSError, ValueError):
        return {}


def _is_present(copy: Any) -> bool:
    """Return whether all files of a copy of a model are still as they were recorded."""
    try:
        paths = [Path(file["path"]) for file in copy]
        stamps = [tuple(file["stamp"]) for file in copy]
    except (KeyError, TypeError):
        return False
    # a file that is missing has zeros
    return bool(paths) and list(file_stamp(paths)) == stamps and (0, 0, 0) not in stamps


def _check_owner(descriptor: int) -> None:
    """Raise ForeignFile for a file of another user, whose contents could be anything."""
    if not _is_own(os.fstat(descriptor).st_uid):
        raise ForeignFile("it belongs to another user")


def _is_own(owner: int) -> bool:
    return not hasattr(os, "geteuid") or owner == os.geteuid()
