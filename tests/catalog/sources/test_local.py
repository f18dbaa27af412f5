"""The model in a folder on this disk: which files are passed over, and what the error says."""

import shutil
from pathlib import Path

import pytest

from llmcli.catalog.sources.local import find_model_files
from llmcli.errors import UserError

APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        "


def test_a_model_is_found_among_files_that_are_none(tmp_path: Path, gguf: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf)
    (tmp_path / "._model.gguf").write_bytes(APPLE_DOUBLE)
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(gguf)
    (tmp_path / "imatrix.gguf").write_bytes(gguf)
    (tmp_path / "mtp-model.gguf").write_bytes(gguf)
    (tmp_path / "old.gguf").symlink_to("nowhere.gguf")
    (tmp_path / "more.gguf").mkdir()
    assert find_model_files(tmp_path) == ("gguf", [tmp_path / "model.gguf"])


def test_hidden_files_are_no_part_of_a_checkpoint(tmp_path: Path, stories: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "mac")
    names = [path.name for path in find_model_files(folder)[1]]
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        (folder / f"._{name}").write_bytes(APPLE_DOUBLE)
    kind, files = find_model_files(folder)
    assert (kind, [path.name for path in files]) == ("folder", names)


def test_the_error_says_why_a_file_is_no_model(tmp_path: Path, gguf: bytes) -> None:
    (tmp_path / "._model.gguf").write_bytes(APPLE_DOUBLE)
    (tmp_path / "mmproj-f16.gguf").write_bytes(gguf)
    (tmp_path / "m.gguf").symlink_to("../blobs/1f")
    with pytest.raises(UserError) as raised:
        find_model_files(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path} is not a model: no config.json and no *.safetensors; skipped: ._model.gguf "
        "(hidden); m.gguf (a link to a missing file, ../blobs/1f); mmproj-f16.gguf (not a language "
        "model)"
    )
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UserError, match=r"folder\.gguf \(a folder\); m\.gguf .*; and 1 more$"):
        find_model_files(tmp_path)


def test_a_shard_that_is_a_link_to_nothing_is_missing(tmp_path: Path, stories: Path) -> None:
    shutil.copy(stories / "config.json", tmp_path)
    (tmp_path / "model.safetensors").symlink_to("../../blobs/2e")
    with pytest.raises(UserError, match=r"model\.safetensors \(a link to a missing file, "):
        find_model_files(tmp_path)
