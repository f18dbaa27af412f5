import hashlib
import os
from pathlib import Path

import pytest

from llmcli import file_lock
from llmcli.atomic_files import Partial, write_whole
from llmcli.catalog import cleanup, fetch, scratch_folders, store
from llmcli.catalog.model_ref import Ref
from llmcli.config import load
from llmcli.errors import UserError

REPO = "someone/Tiny-GGUF"


@pytest.fixture
def mine(tmp_path, gguf, notes) -> fetch.Model:
    """A file of the user's that was pulled by its path."""
    path = tmp_path / "mine.gguf"
    path.write_bytes(gguf)
    return fetch.register(str(path), load(), notes)


def made_of(model: fetch.Model, file_type: str) -> Path:
    path = store.derived_path(load(), model, file_type)
    path.parent.mkdir(parents=True)
    path.write_bytes(model.path.read_bytes())
    store.record_derived(load(), model, file_type)
    return path


def test_a_warm_start_does_not_read_the_file(mine, notes, monkeypatch):
    monkeypatch.setattr(store, "measure", lambda *_: pytest.fail("hashed again"))
    assert store.present(load(), mine.name, notes).sha256 == mine.sha256


def test_a_file_that_was_only_touched_is_hashed_once_and_stays(mine, notes, monkeypatch):
    os.utime(mine.path, ns=(1, 1))
    assert store.present(load(), mine.name, notes).sha256 == mine.sha256
    monkeypatch.setattr(store, "measure", lambda *_: pytest.fail("hashed again"))
    assert store.present(load(), mine.name, notes) is not None


def test_a_file_named_by_its_path_is_used_without_hashing_or_listing(
    tmp_path, gguf, notes, monkeypatch
):
    (tmp_path / "m.gguf").write_bytes(gguf)
    monkeypatch.setattr(store, "measure", lambda *_: pytest.fail("hashed"))
    model = fetch.obtain(str(tmp_path / "m.gguf"), load(), notes)
    assert (model.path, model.bytes, model.sha256) == (tmp_path / "m.gguf", len(gguf), "")
    assert store.manifests(load()) == []


def test_a_second_shard_is_answered_with_the_first(tmp_path, gguf, notes):
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(gguf)
    with pytest.raises(UserError, match="is shard 2 of a split") as raised:
        fetch.obtain(str(tmp_path / "m-00002-of-00002.gguf"), load(), notes)
    assert raised.value.hint.endswith("m-00001-of-00002.gguf")
    assert fetch.obtain(str(tmp_path / "m-00001-of-00002.gguf"), load(), notes).bytes == 2 * len(
        gguf
    )


def test_a_folder_that_is_no_model_names_what_is_missing(tmp_path, notes):
    with pytest.raises(UserError, match=r"no config\.json and no \*\.safetensors"):
        fetch.obtain(str(tmp_path), load(), notes)


def test_a_folder_with_several_ggufs_asks_which(tmp_path, gguf, notes):
    (tmp_path / "a.gguf").write_bytes(gguf)
    assert fetch.obtain(str(tmp_path), load(), notes).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(gguf)
    with pytest.raises(UserError, match=r"contains 2 GGUF files: a\.gguf, b\.gguf"):
        fetch.obtain(str(tmp_path), load(), notes)


def test_what_was_quantized_is_listed_under_its_type(mine):
    path = made_of(mine, "Q8_0")
    found = store.load_derived(load(), mine, "Q8_0")
    assert (found.path, found.derived_from, found.file_type) == (str(path), mine.name, "Q8_0")
    assert [manifest.name for manifest in store.manifests(load())] == [
        mine.name,
        f"{mine.name}:Q8_0",
    ]


def test_what_was_quantized_from_other_content_does_not_count(mine, gguf, notes):
    made_of(mine, "Q8_0")
    mine.path.write_bytes(gguf[:-1] + b"\x01")
    assert store.load_derived(load(), fetch.register(mine.name, load(), notes), "Q8_0") is None


def test_removing_one_type_leaves_the_rest(mine):
    made_of(mine, "Q8_0")
    other = made_of(mine, "Q4_0")
    cleanup.remove(Ref("path", mine.name, "Q8_0"), load())
    assert [manifest.name for manifest in store.manifests(load())] == [
        mine.name,
        f"{mine.name}:Q4_0",
    ]
    assert other.exists()


def test_removing_a_path_forgets_it_and_leaves_the_file(mine):
    made_of(mine, "Q8_0")
    items = cleanup.remove(Ref("path", mine.name), load())
    assert mine.path.exists()
    assert items[0].why == "your own file stays; only its record goes"
    assert store.manifests(load()) == []
    with pytest.raises(UserError, match="is not on this disk"):
        cleanup.remove(Ref("path", mine.name), load())


def test_removing_a_hub_model_frees_the_cache_and_leaves_what_others_use(hub, gguf, notes):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": gguf + bytes(32)})
    kept = fetch.obtain(f"{REPO}:Q8_0", load(), notes)
    first = fetch.obtain(REPO, load(), notes)
    second = fetch.obtain(f"{REPO}:Q4_K_M", load(), notes)
    assert first.path == second.path
    assert cleanup.remove(Ref("hub", REPO), load())[0].bytes == 0
    assert first.path.exists()
    assert cleanup.remove(Ref("hub", REPO, "Q4_K_M"), load())[0].bytes == len(gguf)
    assert not first.path.exists()
    assert kept.path.read_bytes() == gguf + bytes(32)


def test_garbage_is_what_interrupted_runs_left_and_nothing_else(mine, hub, gguf, notes):
    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    fetch.obtain(REPO, load(), notes)
    kept = made_of(mine, "Q8_0")
    home = load()
    junk = {
        store.folder(home, mine.name) / "Q4_0" / ".x.gguf.part": "unfinished quantization",
        store.folder(home, mine.name) / "m.gguf.part": "unfinished file",
        store.folder(home, "broken:1") / "manifest.json": "record without its files",
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
    items = cleanup.garbage(home)
    assert sorted(item.why for item in items) == sorted(junk.values())
    assert sum(item.bytes for item in items) == 5 * len(junk)
    assert cleanup.garbage(home, delete=True) == items
    assert cleanup.garbage(home) == []
    assert not any(path.exists() for path in junk)
    assert kept.exists()
    assert all(path.exists() for path in stay)
    assert fetch.find(REPO, home, notes) is not None


def test_what_a_killed_run_left_beside_the_users_files_is_garbage_once_nobody_works_in_it(
    tmp_path, notes
):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    home, out = load(), theirs / "out.gguf"
    with scratch_folders.at_work(out, home, notes) as folder:
        folder.mkdir()
        (folder / "model-00001-of-00002.gguf").write_bytes(b"shard")
        assert cleanup.garbage(home, delete=True) == []
    items = cleanup.garbage(home)
    assert items == [
        cleanup.Item(theirs / ".out.gguf.sequential", 5, "unfinished quantize --sequential")
    ]
    assert cleanup.garbage(home, delete=True) == items
    assert cleanup.garbage(home) == []
    assert list(theirs.iterdir()) == []  # the folder itself is the user's


def test_a_lock_that_names_what_is_not_ours_leads_nowhere(tmp_path, notes):
    home, theirs = load(), tmp_path / "theirs"
    theirs.mkdir()
    with scratch_folders.at_work(theirs / "out.gguf", home, notes) as folder:
        folder.symlink_to(theirs)
    assert cleanup.garbage(home) == []
    (lock,) = (home.cache / "elsewhere").iterdir()
    for place in (b"", b"\0", bytes(theirs), b".x.sequential", b"/.x.sequential" * 10_000):
        lock.write_bytes(place)
        assert cleanup.garbage(home) == []


def test_a_whole_model_with_a_damaged_record_is_no_garbage_and_is_taken_up_again(
    hub, gguf, mine, notes
):
    kept = made_of(mine, "Q8_0")
    kept.write_bytes(gguf)
    (kept.parent / "manifest.json").write_text("{ half a rec")
    assert [item.path for item in cleanup.garbage(load(), delete=True)] == [
        kept.parent / "manifest.json"
    ]
    assert kept.read_bytes() == gguf


def test_the_llama_cpp_that_was_built_is_no_garbage():
    built = load().cache / "wheels" / "llama_cpp_python-1-abc" / "llama_cpp_python-1.whl"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"three minutes")
    cleanup.garbage(load(), delete=True)
    assert built.exists()


def test_a_record_whose_files_are_gone_is_garbage(mine):
    mine.path.unlink()
    assert [item.why for item in cleanup.garbage(load())] == ["record without its files"]


def test_what_another_process_works_on_is_no_garbage(mine):
    path = store.folder(load(), mine.name) / "m.gguf.part"
    path.write_bytes(b"growing")
    with file_lock.locked(store.lock_file(load(), mine.name)) as free:
        assert free
        assert cleanup.garbage(load()) == []
    assert [item.path for item in cleanup.garbage(load())] == [path]


def test_what_another_process_works_on_is_not_removed(mine):
    made = made_of(mine, "Q8_0")
    with file_lock.locked(store.lock_file(load(), mine.name)):
        for quant in (None, "Q8_0"):
            with pytest.raises(UserError, match="another llmcli is working"):
                cleanup.remove(Ref("path", mine.name, quant), load())
    assert made.exists()


def test_what_is_thrown_away_cannot_be_begun_meanwhile(mine, monkeypatch):
    path = store.folder(load(), mine.name) / "m.gguf.part"
    path.write_bytes(b"left")
    free_meanwhile = []

    def unlink(self: Path, missing_ok: bool = False) -> None:
        with file_lock.locked(store.lock_file(load(), mine.name)) as free:
            free_meanwhile.append(free)

    monkeypatch.setattr(Path, "unlink", unlink)
    cleanup.garbage(load(), delete=True)
    assert free_meanwhile == [False]


def test_two_at_once_fetch_it_once(hub, gguf, notes):
    """The second waits for the first and takes what it brought."""
    import threading

    hub.add(REPO, {"tiny-Q4_K_M.gguf": gguf})
    hub.gate = threading.Event()
    models = []
    threads = [
        threading.Thread(target=lambda: models.append(fetch.obtain(REPO, load(), notes)))
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
    with Partial(tmp_path / "p", len(data), steps.append) as file:
        file.write(data[:100])
    with Partial(tmp_path / "p", len(data), steps.append) as file:
        assert file.position == 100
        file.restart()
        file.write(data[:50])
        file.write(data[50:])
        assert file.matches(hashlib.sha256(data).hexdigest())
        assert file.matches(hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())
        assert not file.matches("0" * 64)
        file.commit(tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == data
    assert steps == [100, len(data) - 100]


def test_a_partial_that_is_too_long_is_started_anew(tmp_path):
    (tmp_path / "p").write_bytes(b"too long")
    with Partial(tmp_path / "p", 3) as file:
        assert file.position == 0
        file.write(b"abc")
    assert (tmp_path / "p").read_bytes() == b"abc"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "folder" / "f"
    write_whole(target, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_whole(target, b"new")
    assert target.read_bytes() == b"old"
    assert list(target.parent.iterdir()) == [target]
