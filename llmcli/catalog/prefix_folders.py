"""The folders of `serve --cache-dir`, and what in them belongs to no model any more.

For each folder there is a file in llmcli's cache that contains its path, so that `llmcli gc` finds
it anywhere on the disk.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from llmcli import file_lock
from llmcli.atomic_files import write_atomically
from llmcli.config import Config
from llmcli.errors import UserError

FOLDER_NAME = "prefixes"  # of the folder that `--cache-dir auto` names
RECORDS_NAME = "prefix-folders"
MAX_PATH_BYTES = 4095  # Linux's PATH_MAX without the final zero byte


def default_folder(config: Config) -> Path:
    """Return the folder that `--cache-dir auto` names."""
    return config.cache / FOLDER_NAME


def record_folder(folder: Path, config: Config) -> None:
    """Record that a folder is used. If this cannot be written, `gc` does not find the folder."""
    path_bytes = os.fsencode(folder.absolute())
    record = config.cache / RECORDS_NAME / hashlib.sha256(path_bytes).hexdigest()[:16]
    with suppress(UserError, OSError):
        if not record.exists():
            write_atomically(record, path_bytes)


def find_obsolete(config: Config) -> Iterator[tuple[Path, str]]:
    """Yield the states of models that are not here any more, or of other versions of llama.cpp, and
    the leftovers of killed servers, each with the reason. The lock of their folder is held until
    the next one is requested.
    """
    if not (roots := _recorded_folders(config)):
        return
    from llmcli.runtime.binding.library import llama_cpp_version
    from llmcli.runtime.disk_cache import folder as state_folder

    build = llama_cpp_version()
    for root in roots:
        with suppress(OSError, UserError):
            model_folders = state_folder.list_model_folders(root)
            if not model_folders:
                continue
            with file_lock.hold_lock(root / state_folder.LOCK_NAME) as is_locked:
                for folder in model_folders if is_locked else ():
                    if reason := state_folder.is_obsolete(folder, build):
                        yield folder, f"saved states of {reason}"
                for path in state_folder.find_leftovers(root) if is_locked else ():
                    yield path, "unfinished saved state"


def _recorded_folders(config: Config) -> list[Path]:
    """Return the existing folders that were recorded."""
    folders = [default_folder(config)]
    for record in sorted((config.cache / RECORDS_NAME).glob("*")):
        with suppress(OSError, ValueError), record.open("rb") as file:
            path_bytes = file.read(MAX_PATH_BYTES + 1)
            if path_bytes and len(path_bytes) <= MAX_PATH_BYTES and b"\0" not in path_bytes:
                folders.append(Path(os.fsdecode(path_bytes)))
    return [folder for folder in dict.fromkeys(folders) if folder.is_absolute() and folder.is_dir()]
