"""Downloading llama.cpp's converter, with a stand-in archive in a folder that is pip's only index."""

import hashlib
import io
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.catalog import converter_source
from llmcli.config import load_config
from llmcli.errors import UserError

ROOT = "llama_cpp_python-9.9.9"
FILES = {
    f"{ROOT}/pyproject.toml": '[build-system]\nrequires = ["scikit-build-core"]\n'
    'build-backend = "scikit_build_core.build"\n',
    f"{ROOT}/PKG-INFO": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 9.9.9\n",
    f"{ROOT}/setup.py": "raise SystemExit('this must not run')\n",
    f"{ROOT}/llama_cpp/__init__.py": "",
    **{
        f"{ROOT}/vendor/llama.cpp/{name}": f"# {name}\n"
        for name in (*converter_source.NEEDED_FILES, "conversion/llama.py", "src/llama.cpp")
    },
}


def publish(folder: Path, files: dict[str, str], *others: tarfile.TarInfo) -> Path:
    """Write a source archive, and return its path."""
    path = folder / f"{ROOT}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
        for member in others:
            archive.addfile(member)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stand-in archive that is the only place where pip finds packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    set_archive(monkeypatch, publish(folder, FILES))
    return folder


def set_archive(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make the archive at `path` the one that llmcli requires."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    archive = replace(
        converter_source.ARCHIVE, version="9.9.9", sha256=digest, nbytes=path.stat().st_size
    )
    monkeypatch.setattr(converter_source, "ARCHIVE", archive)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_the_converter_is_unpacked_and_nothing_is_run(index, notes):
    folder = converter_source.fetch_converter(load_config(), notes)
    assert files_in(folder) == sorted([*converter_source.NEEDED_FILES, "conversion/llama.py"])
    assert folder.is_relative_to(load_config().cache)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert len(notes.bars) == 1


def test_the_second_run_needs_no_index(index, notes):
    folder = converter_source.fetch_converter(load_config(), notes)
    next(index.iterdir()).unlink()
    assert converter_source.fetch_converter(load_config(), notes) == folder


def test_a_converter_with_a_missing_file_is_replaced(index, notes):
    folder = converter_source.fetch_converter(load_config(), notes)
    (folder / converter_source.NEEDED_FILES[0]).unlink()
    assert converter_source.fetch_converter(load_config(), notes) == folder
    assert files_in(folder) == sorted([*converter_source.NEEDED_FILES, "conversion/llama.py"])


def test_another_file_than_the_released_one_is_refused(index, notes):
    publish(index, FILES | {f"{ROOT}/README.md": "changed"})
    with pytest.raises(UserError, match="pip cannot download"):
        converter_source.fetch_converter(load_config(), notes)
    assert converter_source.find_converter(load_config()) is None
    assert files_in(load_config().cache / "converter") == []


def test_offline_names_the_missing_archive(index, notes, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"llama-cpp-python==9\.9\.9 is not on this disk"):
        converter_source.fetch_converter(load_config(), notes)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def test_links_and_names_outside_the_folder_are_left_out(tmp_path):
    vendored = f"{ROOT}/vendor/llama.cpp"
    archive = publish(
        tmp_path,
        FILES
        | {
            f"{vendored}/conversion/../../../evil.py": "",
            f"{vendored}/../llama.cpp/conversion/evil.py": "",
            "/vendor/llama.cpp/conversion/evil.py": "",
            f"{vendored}/conversion/notes.txt": "",
        },
        link(f"{vendored}/conversion/link.py", "/etc/passwd"),
        link(f"{vendored}/gguf-py/gguf/hard.py", f"{ROOT}/setup.py", tarfile.LNKTYPE),
    )
    target = tmp_path / "out"
    converter_source.unpack_converter(archive, target)
    assert files_in(target) == sorted([*converter_source.NEEDED_FILES, "conversion/llama.py"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", archive.name, "out"]


@pytest.mark.parametrize("missing", converter_source.NEEDED_FILES)
def test_an_archive_without_a_needed_file_is_refused(tmp_path, missing):
    files = {
        name: text for name, text in FILES.items() if not name.endswith(f"llama.cpp/{missing}")
    }
    with pytest.raises(UserError, match="cannot be used: it has no"):
        converter_source.unpack_converter(publish(tmp_path, files), tmp_path / "out")


def test_a_damaged_archive_is_refused(tmp_path):
    path = publish(tmp_path, FILES)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="cannot be used"):
        converter_source.unpack_converter(path, tmp_path / "out")


def test_a_huge_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(converter_source, "MAX_FILE_BYTES", 5)
    with pytest.raises(UserError, match="too large"):
        converter_source.unpack_converter(publish(tmp_path, FILES), tmp_path / "out")


def test_the_folder_that_the_user_has_set_is_used(tmp_path, monkeypatch, notes):
    monkeypatch.setenv("LLMCLI_CONVERTER", str(tmp_path))
    with pytest.raises(UserError, match=r"which has no convert_hf_to_gguf\.py"):
        converter_source.fetch_converter(load_config(), notes)
    for name in converter_source.NEEDED_FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert converter_source.fetch_converter(load_config(), notes) == tmp_path
    assert converter_source.describe_converter(load_config()) == str(tmp_path)
