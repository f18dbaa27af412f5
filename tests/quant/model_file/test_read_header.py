import os
import shutil
from pathlib import Path

import pytest

from quant.errors import UserError
from quant.model_file import read_header

HOUR = 3600


def make_old(path: Path, seconds: float) -> None:
    """Set the time of the last change to so many seconds before the present one."""
    changed = path.stat().st_mtime - seconds
    os.utime(path, (changed, changed))


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return a list that receives the path of every file whose header is read."""
    read, paths = read_header.read_file_header, []
    monkeypatch.setattr(
        read_header, "read_file_header", lambda path: (paths.append(path), read(path))[1]
    )
    return paths


def test_the_header_of_an_unchanged_file_is_read_once(
    stories_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(stories_gguf, path)
    make_old(path, 2 * HOUR)
    paths = count_reads(monkeypatch)
    first = read_header.read_header(path)
    assert read_header.read_header(path) == first
    assert paths == [path]
    path.write_bytes(b"no GGUF" + path.read_bytes()[7:])  # of the same size
    make_old(path, HOUR)
    with pytest.raises(UserError, match="is not a GGUF file"):
        read_header.read_header(path)


def test_a_file_that_has_just_changed_is_read_again(
    stories_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(stories_gguf, path)
    paths = count_reads(monkeypatch)
    read_header.read_header(path)
    read_header.read_header(path)
    assert paths == [path, path]
