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
def mine(tmp_path, gguf, notes) -> fetch.FetchedModel:
    """A file of the user's that was pulled by its path."""
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf)
    return fetch.register_local(str(path), load_config(), notes)


def made_of(model: fetch.FetchedModel, file_type: str) -> Path:
    path = store.quantized_path(load_config(), model, file_type)
    path.parent.mkdir(parents=True)
    path.write_bytes(model.path.read_bytes())
    store.record_quantized(load_config(), model, file_type)
    return path


def test_a_warm_start_does_not_read_the_file(mine, notes, monkeypatch):
    monkeypatch.setattr(store, "hash_file", lambda *_: pytest.fail("hashed again"))
    assert store.load_unchanged(load_config(), mine.name, notes).sha256 == mine.sha256


def test_a_file_that_was_only_touched_is_hashed_once_and_stays(mine, notes, monkeypatch):
    os.utime(mine.path, ns=(1, 1))
    assert store.load_unchanged(load_config(), mine.name, notes).sha256 == mine.sha256
    monkeypatch.setattr(store, "hash_file", lambda *_: pytest.fail("hashed again"))
    assert store.load_unchanged(load_config(), mine.name, notes) is not None


def test_a_file_named_by_its_path_is_used_without_hashing_or_listing(
    tmp_path, gguf, notes, monkeypatch
):
    (tmp_path / "m.gguf").write_bytes(gguf)
    monkeypatch.setattr(store, "hash_file", lambda *_: pytest.fail("hashed"))
    model = fetch.fetch_model(str(tmp_path / "m.gguf"), load_config(), notes)
    assert (model.path, model.nbytes, model.sha256) == (tmp_path / "m.gguf", len(gguf), "")
    assert store.list_manifests(load_config()) == []


def test_a_second_shard_is_answered_with_the_first(tmp_path, gguf, notes):
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(gguf)
    with pytest.raises(UserError, match="is shard 2 of a split") as raised:
        fetch.fetch_model(str(tmp_path / "m-00002-of-00002.gguf"), load_config(), notes)
    assert raised.value.hint.endswith("m-00001-of-00002.gguf")
    assert fetch.fetch_model(
        str(tmp_path / "m-00001-of-00002.gguf"), load_config(), notes
    ).nbytes == 2 * len(gguf)


def test_a_folder_that_is_no_model_names_what_is_missing(tmp_path, notes):
    with pytest.raises(UserError, match=r"no config\.json and no \*\.safetensors"):
        fetch.fetch_model(str(tmp_path), load_config(), notes)


def test_a_folder_with_several_ggufs_asks_which(tmp_path, gguf, notes):
    (tmp_path / "a.gguf").write_bytes(gguf)
    assert fetch.fetch_model(str(tmp_path), load_config(), notes).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(gguf)
    with pytest.raises(UserError, match=r"contains 2 GGUF files: a\.gguf, b\.gguf"):
        fetch.fetch_model(str(tmp_path), load_config(), notes)


def test_what_was_quantized_is_listed_under_its_type(mine):
    path = made_of(mine, "Q8_0")
    found = store.load_quantized(load_config(), mine, "Q8_0")
    assert (found.path, found.derived_from, found.file_type) == (str(path), mine.name, "Q8_0")
    assert [manifest.name for manifest in store.list_manifests(load_config())] == [
        mine.name,
        f"{mine.name}:Q8_0",
    ]


def test_what_was_quantized_from_other_content_does_not_count(mine, gguf, notes):
    made_of(mine, "Q8_0")
    mine.path.write_bytes(gguf[:-1] + b"\x01")
    assert (
        store.load_quantized(
            load_config(), fetch.register_local(mine.name, load_config(), notes), "Q8_0"
        )
        is None
    )


def test_removing_one_type_leaves_the_rest(mine):
    made_of(mine, "Q8_0")
    other = made_of(mine, "Q4_0")
    cleanup.remove_model(ModelRef("path", mine.name, "Q8_0"), load_config())
    assert [manifest.name for manifest in store.list_manifests(load_config())] == [
        mine.name,
        f"{mine.name}:Q4_0",
    ]
    assert other.exists()


def test_removing_a_path_forgets_it_and_leaves_the_file(mine):
    made_of(mine, "Q8_0")
    items = cleanup.remove_model(ModelRef("path", mine.name), load_config())
    assert mine.path.exists()
    assert items[0].reason == "your own file stays; only its record goes"
    assert store.list_manifests(load_config()) == []
    with pytest.raises(UserError, match="is not on this disk"):
        cleanup.remove_model(ModelRef("path", mine.name), load_config())


def test_removing_a_hub_model_frees_the_cache_and_leaves_what_others_use(hub, gguf, notes):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": gguf + bytes(32)})
    kept = fetch.fetch_model(f"{REPO}:Q8_0", load_config(), notes)
    first = fetch.fetch_model(REPO, load_config(), notes)
    second = fetch.fetch_model(f"{REPO}:Q4_K_M", load_config(), notes)
    assert first.path == second.path
    assert cleanup.remove_model(ModelRef("hub", REPO), load_config())[0].nbytes == 0
    assert first.path.exists()
    assert cleanup.remove_model(ModelRef("hub", REPO, "Q4_K_M"), load_config())[0].nbytes == len(
        gguf
    )
    assert not first.path.exists()
    assert kept.path.read_bytes() == gguf + bytes(32)


def test_garbage_is_what_interrupted_runs_left_and_nothing_else(mine, hub, gguf, notes):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    fetch.fetch_model(REPO, load_config(), notes)
    kept = made_of(mine, "Q8_0")
    home = load_config()
    junk = {
        store.model_folder(home, mine.name) / "Q4_0" / ".x.gguf.part": "unfinished quantization",
        store.model_folder(home, mine.name) / "m.gguf.part": "unfinished file",
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
    stay = [
        kept.with_name(f"{kept.stem}.certificate.html"),
        home.cache / "bases" / "abc-F32.lock",
        home.cache / "sensitivity" / "abc.lock",
        home.cache / "sensitivity" / "abc.records",
        home.cache / "calibrations" / "abc.lock",
        home.cache / "calibrations" / "abc.imatrix.gguf",
        home.cache / "pareto" / "abc" / "lock",
        home.cache / "pareto" / "abc" / "finished.json",
    ]
    for path in stay:
        path.touch()
    items = cleanup.find_garbage(home)
    assert sorted(item.reason for item in items) == sorted(junk.values())
    assert sum(item.nbytes for item in items) == 5 * len(junk)
    assert cleanup.find_garbage(home, delete=True) == items
    assert cleanup.find_garbage(home) == []
    assert not any(path.exists() for path in junk)
    assert kept.exists()
    assert all(path.exists() for path in stay)
    assert fetch.find_model(REPO, home, notes) is not None


def test_what_a_killed_run_left_beside_the_users_files_is_garbage_once_nobody_works_in_it(
    tmp_path, notes
):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    home, out = load_config(), theirs / "out.gguf"
    with scratch_folders.claim_work_folder(out, home, notes) as folder:
        folder.mkdir()
        (folder / "model-00001-of-00002.gguf").write_bytes(b"shard")
        assert cleanup.find_garbage(home, delete=True) == []
    items = cleanup.find_garbage(home)
    assert items == [
        cleanup.RemovableItem(
            theirs / ".out.gguf.sequential", 5, "unfinished quantize --sequential"
        )
    ]
    assert cleanup.find_garbage(home, delete=True) == items
    assert cleanup.find_garbage(home) == []
    assert list(theirs.iterdir()) == []  # the folder itself is the user's


def test_a_lock_that_names_what_is_not_ours_leads_nowhere(tmp_path, notes):
    home, theirs = load_config(), tmp_path / "theirs"
    theirs.mkdir()
    with scratch_folders.claim_work_folder(theirs / "out.gguf", home, notes) as folder:
        folder.symlink_to(theirs)
    assert cleanup.find_garbage(home) == []
    (lock,) = (home.cache / "elsewhere").iterdir()
    for place in (b"", b"\0", bytes(theirs), b".x.sequential", b"/.x.sequential" * 10_000):
        lock.write_bytes(place)
        assert cleanup.find_garbage(home) == []


def test_a_whole_model_with_a_damaged_record_is_no_garbage_and_is_taken_up_again(
    hub, gguf, mine, notes
):
    kept = made_of(mine, "Q8_0")
    kept.write_bytes(gguf)
    (kept.parent / "manifest.json").write_text("{ half a rec")
    assert [item.path for item in cleanup.find_garbage(load_config(), delete=True)] == [
        kept.parent / "manifest.json"
    ]
    assert kept.read_bytes() == gguf


def test_the_llama_cpp_that_was_built_is_no_garbage():
    built = load_config().cache / "wheels" / "llama_cpp_python-1-abc" / "llama_cpp_python-1.whl"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"three minutes")
    cleanup.find_garbage(load_config(), delete=True)
    assert built.exists()


def test_a_record_whose_files_are_gone_is_garbage(mine):
    mine.path.unlink()
    assert [item.reason for item in cleanup.find_garbage(load_config())] == [
        "record without its files"
    ]


def test_what_another_process_works_on_is_no_garbage(mine):
    path = store.model_folder(load_config(), mine.name) / "m.gguf.part"
    path.write_bytes(b"growing")
    with file_lock.hold_lock(store.lock_path(load_config(), mine.name)) as free:
        assert free
        assert cleanup.find_garbage(load_config()) == []
    assert [item.path for item in cleanup.find_garbage(load_config())] == [path]


def test_what_another_process_works_on_is_not_removed(mine):
    made = made_of(mine, "Q8_0")
    with file_lock.hold_lock(store.lock_path(load_config(), mine.name)):
        for quant in (None, "Q8_0"):
            with pytest.raises(UserError, match="another llmcli is working"):
                cleanup.remove_model(ModelRef("path", mine.name, quant), load_config())
    assert made.exists()


def test_what_is_thrown_away_cannot_be_begun_meanwhile(mine, monkeypatch):
    path = store.model_folder(load_config(), mine.name) / "m.gguf.part"
    path.write_bytes(b"left")
    free_meanwhile = []

    def unlink(self: Path, missing_ok: bool = False) -> None:
        with file_lock.hold_lock(store.lock_path(load_config(), mine.name)) as free:
            free_meanwhile.append(free)

    monkeypatch.setattr(Path, "unlink", unlink)
    cleanup.find_garbage(load_config(), delete=True)
    assert free_meanwhile == [False]


def test_two_at_once_fetch_it_once(hub, gguf, notes):
    """The second waits for the first and takes what it brought."""
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


def test_a_partial_continues_and_knows_the_digest_of_the_whole(tmp_path):
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
        file.commit(tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == data
    assert steps == [100, len(data) - 100]


def test_a_partial_that_is_too_long_is_started_anew(tmp_path):
    (tmp_path / "p").write_bytes(b"too long")
    with AtomicWriter(tmp_path / "p", 3) as file:
        assert file.position == 0
        file.write(b"abc")
    assert (tmp_path / "p").read_bytes() == b"abc"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "folder" / "f"
    write_atomically(target, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(target.parent.iterdir()) == [target]
