"""The store of models, the removal of models and garbage, and atomic file writes."""

import hashlib
import os
from pathlib import Path

import pytest

from llmcli import file_lock
from llmcli.atomic_files import AtomicWriter, write_atomically
from llmcli.catalog import cleanup, fetch, scratch_folders, store
from llmcli.catalog.model_ref import ModelRef
from llmcli.config import load_config
from llmcli.errors import UserError

REPO = "someone/Tiny-GGUF"


@pytest.fixture
def local_model(tmp_path, gguf, notes) -> fetch.FetchedModel:
    """A GGUF of the user that was pulled by its path."""
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf)
    return fetch.register_local(str(path), load_config(), notes)


def add_quantized(model: fetch.FetchedModel, file_type: str) -> Path:
    """Record a copy of the model as its quantization to `file_type`, and return the path."""
    path = store.quantized_path(load_config(), model, file_type)
    path.parent.mkdir(parents=True)
    path.write_bytes(model.path.read_bytes())
    store.record_quantized(load_config(), model, file_type)
    return path


def test_an_unchanged_file_is_not_hashed_again(local_model, notes, monkeypatch):
    monkeypatch.setattr(store, "hash_file", lambda *_: pytest.fail("hashed again"))
    assert store.load_unchanged(load_config(), local_model.name, notes).sha256 == local_model.sha256


def test_a_file_with_a_new_modification_time_is_hashed_once(local_model, notes, monkeypatch):
    os.utime(local_model.path, ns=(1, 1))
    assert store.load_unchanged(load_config(), local_model.name, notes).sha256 == local_model.sha256
    monkeypatch.setattr(store, "hash_file", lambda *_: pytest.fail("hashed again"))
    assert store.load_unchanged(load_config(), local_model.name, notes) is not None


def test_a_file_given_by_its_path_is_not_hashed_and_gets_no_manifest(
    tmp_path, gguf, notes, monkeypatch
):
    (tmp_path / "m.gguf").write_bytes(gguf)
    monkeypatch.setattr(store, "hash_file", lambda *_: pytest.fail("hashed"))
    model = fetch.fetch_model(str(tmp_path / "m.gguf"), load_config(), notes)
    assert (model.path, model.nbytes, model.sha256) == (tmp_path / "m.gguf", len(gguf), "")
    assert store.list_manifests(load_config()) == []


def test_the_error_for_a_second_shard_names_the_first(tmp_path, gguf, notes):
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(gguf)
    with pytest.raises(UserError, match="is shard 2 of a split") as raised:
        fetch.fetch_model(str(tmp_path / "m-00002-of-00002.gguf"), load_config(), notes)
    assert raised.value.hint.endswith("m-00001-of-00002.gguf")
    assert fetch.fetch_model(
        str(tmp_path / "m-00001-of-00002.gguf"), load_config(), notes
    ).nbytes == 2 * len(gguf)


def test_the_error_for_a_folder_without_a_model_lists_what_is_missing(tmp_path, notes):
    with pytest.raises(UserError, match=r"no config\.json and no \*\.safetensors"):
        fetch.fetch_model(str(tmp_path), load_config(), notes)


def test_a_folder_with_several_ggufs_raises_an_error(tmp_path, gguf, notes):
    (tmp_path / "a.gguf").write_bytes(gguf)
    assert fetch.fetch_model(str(tmp_path), load_config(), notes).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(gguf)
    with pytest.raises(UserError, match=r"contains 2 GGUF files: a\.gguf, b\.gguf"):
        fetch.fetch_model(str(tmp_path), load_config(), notes)


def test_a_quantized_model_is_listed_with_its_type(local_model):
    path = add_quantized(local_model, "Q8_0")
    manifest = store.load_quantized(load_config(), local_model, "Q8_0")
    assert (manifest.path, manifest.derived_from, manifest.file_type) == (
        str(path),
        local_model.name,
        "Q8_0",
    )
    assert [manifest.name for manifest in store.list_manifests(load_config())] == [
        local_model.name,
        f"{local_model.name}:Q8_0",
    ]


def test_a_model_quantized_from_other_content_is_not_used(local_model, gguf, notes):
    add_quantized(local_model, "Q8_0")
    local_model.path.write_bytes(gguf[:-1] + b"\x01")
    assert (
        store.load_quantized(
            load_config(), fetch.register_local(local_model.name, load_config(), notes), "Q8_0"
        )
        is None
    )


def test_removing_a_type_leaves_other_types(local_model):
    add_quantized(local_model, "Q8_0")
    other_type = add_quantized(local_model, "Q4_0")
    cleanup.remove_model(ModelRef("path", local_model.name, "Q8_0"), load_config())
    assert [manifest.name for manifest in store.list_manifests(load_config())] == [
        local_model.name,
        f"{local_model.name}:Q4_0",
    ]
    assert other_type.exists()


def test_removing_a_path_deletes_its_manifest_and_not_the_file(local_model):
    add_quantized(local_model, "Q8_0")
    items = cleanup.remove_model(ModelRef("path", local_model.name), load_config())
    assert local_model.path.exists()
    assert items[0].reason == "your own file stays; only its record goes"
    assert store.list_manifests(load_config()) == []
    with pytest.raises(UserError, match="is not on this disk"):
        cleanup.remove_model(ModelRef("path", local_model.name), load_config())


def test_removing_a_hub_model_leaves_files_that_other_models_use(hub, gguf, notes):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": gguf + bytes(32)})
    other_model = fetch.fetch_model(f"{REPO}:Q8_0", load_config(), notes)
    first = fetch.fetch_model(REPO, load_config(), notes)
    second = fetch.fetch_model(f"{REPO}:Q4_K_M", load_config(), notes)
    assert first.path == second.path
    assert cleanup.remove_model(ModelRef("hub", REPO), load_config())[0].nbytes == 0
    assert first.path.exists()
    assert cleanup.remove_model(ModelRef("hub", REPO, "Q4_K_M"), load_config())[0].nbytes == len(
        gguf
    )
    assert not first.path.exists()
    assert other_model.path.read_bytes() == gguf + bytes(32)


def test_garbage_is_exactly_what_interrupted_runs_left(local_model, hub, gguf, notes):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    fetch.fetch_model(REPO, load_config(), notes)
    quantized = add_quantized(local_model, "Q8_0")
    home = load_config()
    junk = {
        store.model_folder(home, local_model.name)
        / "Q4_0"
        / ".x.gguf.part": "unfinished quantization",
        store.model_folder(home, local_model.name) / "m.gguf.part": "unfinished file",
        store.model_folder(home, "broken:1") / "manifest.json": "record without its files",
        home.cache / "downloads" / "p-1.0" / "p.whl": "downloaded wheel",
        home.cache / "bases" / "abc-F32.gguf": "a checkpoint's copy for a verification",
        home.cache / "bases" / ".abc-F32.gguf.part": "a checkpoint's copy for a verification",
        home.cache / "sensitivity" / "abc.gguf": "a model copy for measurements",
        home.cache
        / "calibrations"
        / "abc.moments.gguf": "second moments that can be measured again",
        home.cache
        / "calibrations"
        / ".abc.imatrix.gguf.state": "second moments that can be measured again",
        home.cache / "pareto" / "abc" / "base.logits": "unfinished comparison",
        home.hub_cache
        / "models--someone--Tiny-GGUF"
        / "blobs"
        / f"{'0' * 64}.llmcli.incomplete": "partial download",
    }
    for path in junk:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"junk!")
    needed = [
        quantized.with_name(f"{quantized.stem}.certificate.html"),
        home.cache / "bases" / "abc-F32.lock",
        home.cache / "sensitivity" / "abc.lock",
        home.cache / "sensitivity" / "abc.records",
        home.cache / "calibrations" / "abc.lock",
        home.cache / "calibrations" / "abc.imatrix.gguf",
        home.cache / "pareto" / "abc" / "lock",
        home.cache / "pareto" / "abc" / "finished.json",
    ]
    for path in needed:
        path.touch()
    items = cleanup.find_garbage(home)
    assert sorted(item.reason for item in items) == sorted(junk.values())
    assert sum(item.nbytes for item in items) == 5 * len(junk)
    assert cleanup.find_garbage(home, delete=True) == items
    assert cleanup.find_garbage(home) == []
    assert not any(path.exists() for path in junk)
    assert quantized.exists()
    assert all(path.exists() for path in needed)
    assert fetch.find_model(REPO, home, notes) is not None


def test_a_scratch_folder_of_a_killed_run_is_garbage_when_its_lock_is_free(tmp_path, notes):
    user_folder = tmp_path / "user_folder"
    user_folder.mkdir()
    home, out = load_config(), user_folder / "out.gguf"
    with scratch_folders.claim_work_folder(out, home, notes) as folder:
        folder.mkdir()
        (folder / "model-00001-of-00002.gguf").write_bytes(b"shard")
        assert cleanup.find_garbage(home, delete=True) == []
    items = cleanup.find_garbage(home)
    assert items == [
        cleanup.RemovableItem(
            user_folder / ".out.gguf.sequential", 5, "unfinished quantize --sequential"
        )
    ]
    assert cleanup.find_garbage(home, delete=True) == items
    assert cleanup.find_garbage(home) == []
    assert list(user_folder.iterdir()) == []  # the folder itself is the user's


def test_a_damaged_lock_file_does_not_make_other_files_garbage(tmp_path, notes):
    home, user_folder = load_config(), tmp_path / "user_folder"
    user_folder.mkdir()
    with scratch_folders.claim_work_folder(user_folder / "out.gguf", home, notes) as folder:
        folder.symlink_to(user_folder)
    assert cleanup.find_garbage(home) == []
    (lock,) = (home.cache / "elsewhere").iterdir()
    for content in (b"", b"\0", bytes(user_folder), b".x.sequential", b"/.x.sequential" * 10_000):
        lock.write_bytes(content)
        assert cleanup.find_garbage(home) == []


def test_a_complete_model_with_a_damaged_manifest_is_not_garbage(hub, gguf, local_model, notes):
    path = add_quantized(local_model, "Q8_0")
    path.write_bytes(gguf)
    (path.parent / "manifest.json").write_text("{ half a rec")
    assert [item.path for item in cleanup.find_garbage(load_config(), delete=True)] == [
        path.parent / "manifest.json"
    ]
    assert path.read_bytes() == gguf


def test_the_built_llama_cpp_is_not_garbage():
    wheel = load_config().cache / "wheels" / "llama_cpp_python-1-abc" / "llama_cpp_python-1.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"three minutes")
    cleanup.find_garbage(load_config(), delete=True)
    assert wheel.exists()


def test_a_manifest_without_its_files_is_garbage(local_model):
    local_model.path.unlink()
    assert [item.reason for item in cleanup.find_garbage(load_config())] == [
        "record without its files"
    ]


def test_files_of_a_locked_model_are_not_garbage(local_model):
    path = store.model_folder(load_config(), local_model.name) / "m.gguf.part"
    path.write_bytes(b"growing")
    with file_lock.hold_lock(store.lock_path(load_config(), local_model.name)) as is_locked:
        assert is_locked
        assert cleanup.find_garbage(load_config()) == []
    assert [item.path for item in cleanup.find_garbage(load_config())] == [path]


def test_a_locked_model_is_not_removed(local_model):
    path = add_quantized(local_model, "Q8_0")
    with file_lock.hold_lock(store.lock_path(load_config(), local_model.name)):
        for quant in (None, "Q8_0"):
            with pytest.raises(UserError, match="another llmcli is working"):
                cleanup.remove_model(ModelRef("path", local_model.name, quant), load_config())
    assert path.exists()


def test_garbage_is_locked_while_it_is_deleted(local_model, monkeypatch):
    path = store.model_folder(load_config(), local_model.name) / "m.gguf.part"
    path.write_bytes(b"left")
    could_lock = []

    def unlink(self: Path, missing_ok: bool = False) -> None:
        with file_lock.hold_lock(store.lock_path(load_config(), local_model.name)) as is_locked:
            could_lock.append(is_locked)

    monkeypatch.setattr(Path, "unlink", unlink)
    cleanup.find_garbage(load_config(), delete=True)
    assert could_lock == [False]


def test_two_threads_download_a_model_once(hub, gguf, notes):
    """The second thread waits for the first and uses its download."""
    import threading

    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    hub.gate = threading.Event()
    models = []
    threads = [
        threading.Thread(
            target=lambda: models.append(fetch.fetch_model(REPO, load_config(), notes))
        )
        for _ in range(2)
    ]
    threads[0].start()
    assert hub.reached.wait(120)
    waiting = threading.Event()
    notes.note = lambda text: (notes.lines.append(text), waiting.set())
    threads[1].start()
    assert waiting.wait(120)
    hub.gate.set()
    for thread in threads:
        thread.join(120)
    assert notes.lines == [f"another llmcli is working on {REPO}; waiting for it"]
    assert [model.path.read_bytes() for model in models] == [gguf, gguf]
    assert hub.gets("tiny-Q4_K_M.gguf") == [None]


def test_a_resumed_partial_file_has_the_digest_of_the_complete_file(tmp_path):
    data = bytes(range(256)) * 9
    steps: list[int] = []
    with AtomicWriter(tmp_path / "p", len(data), steps.append) as file:
        file.write(data[:100])
    with AtomicWriter(tmp_path / "p", len(data), steps.append) as file:
        assert file.position == 100
        file.restart()
        file.write(data[:50])
        file.write(data[50:])
        assert file.has_digest(hashlib.sha256(data).hexdigest())
        assert file.has_digest(hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())
        assert not file.has_digest("0" * 64)
        file.commit(tmp_path / "complete")
    assert (tmp_path / "complete").read_bytes() == data
    assert steps == [100, len(data) - 100]


def test_a_partial_file_that_is_too_long_is_started_again(tmp_path):
    (tmp_path / "p").write_bytes(b"too long")
    with AtomicWriter(tmp_path / "p", 3) as file:
        assert file.position == 0
        file.write(b"abc")
    assert (tmp_path / "p").read_bytes() == b"abc"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "folder" / "f"
    write_atomically(target, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(target.parent.iterdir()) == [target]
