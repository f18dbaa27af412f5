"""`llmcli gc` and the folders of `serve --cache-dir`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli import file_lock
from llmcli.catalog import cleanup, prefix_folders
from llmcli.config import load_config
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.disk_cache.folder import LOCK_NAME, StateFolder
from tests.fixtures.cli import Done

BUILD = llama_cpp_version()


def make_states(root: Path, model: Path, build: str = BUILD) -> Path:
    """Record a model in a folder, with a file of 1,000 bytes, and return its sub-folder."""
    found = StateFolder(root, {"model": model.name, "build": build}, 1 << 30, [model])
    found.open()
    (found.path / f"{'0' * 32}.cells.kv").write_bytes(bytes(1000))
    return found.path


@pytest.mark.parametrize("is_default", [True, False])
def test_states_of_removed_models_are_garbage(tmp_path: Path, is_default: bool) -> None:
    config = load_config()
    root = prefix_folders.default_folder(config) if is_default else tmp_path / "states"
    prefix_folders.record_folder(root, config)
    removed, kept, changed = (tmp_path / f"{number}.gguf" for number in range(3))
    for path in (removed, kept, changed):
        path.write_bytes(b"model")
    lost, valid, other = (make_states(root, path) for path in (removed, kept, changed))
    old = make_states(root, kept, "0.0.1")
    leftover = valid / f".{'0' * 32}.cells.kv.0123456789abcdef.part"
    leftover.write_bytes(bytes(10))
    removed.unlink()
    changed.write_bytes(b"another model")
    items = cleanup.find_garbage(config)
    assert {item.path for item in items} == {lost, old, other, leftover}
    sizes = {item.path: item.nbytes for item in items}
    assert sizes[lost] == 1000 + (lost / "model.json").stat().st_size
    reasons = {item.path: item.reason for item in items}
    assert reasons[lost] == "saved states of a model that is not here any more"
    assert reasons[old] == "saved states of another version of llama.cpp"
    cleanup.find_garbage(config, delete=True)
    assert {path for path in root.iterdir() if path.is_dir()} == {valid}
    assert not leftover.exists()
    assert cleanup.find_garbage(config) == []


def test_a_folder_in_which_a_server_writes_is_left_alone(tmp_path: Path) -> None:
    config, root = load_config(), tmp_path / "states"
    prefix_folders.record_folder(root, config)
    make_states(root, tmp_path / "missing.gguf")
    with file_lock.hold_lock(root / LOCK_NAME):
        assert cleanup.find_garbage(config) == []
    assert len(cleanup.find_garbage(config)) == 1


def test_other_files_in_the_folder_are_no_garbage(tmp_path: Path) -> None:
    config, root = load_config(), tmp_path / "home"
    prefix_folders.record_folder(root, config)
    # other programs also name folders by hashes
    for name in ("documents", "0123456789abcdef" * 2):
        (root / name).mkdir(parents=True)
        (root / name / "letter.kv").write_text("mine")
        (root / name / ".letter.part").write_text("mine")
    assert cleanup.find_garbage(config) == []


def test_a_copy_elsewhere_keeps_the_states(tmp_path: Path) -> None:
    config, root = load_config(), tmp_path / "states"
    prefix_folders.record_folder(root, config)
    paths = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for path in paths:
        path.write_bytes(b"model")
        StateFolder(root, {"model": "same", "build": BUILD}, 1 << 30, [path]).open()
    paths[0].unlink()
    assert cleanup.find_garbage(config) == []
    paths[1].unlink()
    assert len(cleanup.find_garbage(config)) == 1


def test_gc_lists_the_bytes(llmcli: Callable[..., Done], tmp_path: Path) -> None:
    root = prefix_folders.default_folder(load_config())
    folder = make_states(root, tmp_path / "missing.gguf")
    (item,) = json.loads(llmcli("gc", "--dry-run", "--json").out)["items"]
    assert (item["path"], item["bytes"] >= 1000) == (str(folder), True)
    assert folder.exists()
