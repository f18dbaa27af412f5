"""The SHA-256 of a file is kept with its size, time and inode, so that the file is read once."""

import os
from pathlib import Path
from typing import Any

import pytest

from llmcli.catalog import file_hashes
from llmcli.config import load_config
from llmcli.ui import UI


def test_a_file_is_read_once_for_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for file in files:
        file.write_bytes(file.name.encode())
        os.utime(file, (1e9, 1e9))
    read: list[Path] = []
    plain = file_hashes.hash_file

    def hash_file(path: Path, watcher: Any) -> Any:
        read.append(path)
        return plain(path)

    monkeypatch.setattr(file_hashes, "hash_file", hash_file)
    config, ui = load_config(), UI()
    first = file_hashes.hash_files(files, config, ui)
    assert file_hashes.hash_files(files, config, ui) == first
    assert read == files
    # Other content, another time or another inode: the file is read again.
    os.utime(files[0], (1e9 + 5, 1e9 + 5))
    assert file_hashes.hash_files(files, config, ui) == first
    files[1].rename(tmp_path / "old")
    files[1].write_bytes(b"c.bin")
    os.utime(files[1], (1e9, 1e9))
    assert file_hashes.hash_files(files, config, ui) != first
    assert read == [*files, files[0], files[1]]
    # A damaged record is no error.
    for record in (config.cache / "hashes").iterdir():
        record.write_bytes(b"{")
    file_hashes.hash_files(files, config, ui)
    assert len(read) == 6


def test_a_hash_of_a_file_that_may_still_change_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(b"new")
    os.utime(file, (4e9, 4e9))  # no clock says that this is long ago
    config = load_config()
    file_hashes.hash_files([file], config, UI())
    assert not (config.cache / "hashes").exists()
