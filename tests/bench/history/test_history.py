"""The benchmark history: parallel writers, locks, damaged files and newer formats."""

import os
import random
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.bench.history import database
from llmcli.bench.history.history import BenchRun, History
from llmcli.errors import UserError

ROOT = Path(__file__).parents[3]


class NoteRecorder:
    """A ProgressDisplay that records the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def watcher():
    return NoteRecorder()


@pytest.fixture
def history(tmp_path, watcher):
    return History(tmp_path / "data" / "bench.sqlite", watcher)


def run(model: str = "tiny", rate: float = 50.0, pad: int = 0) -> BenchRun:
    document = {"samples_ts": [rate, rate], "samples_ns": [10**9, 10**9], "pad": "x" * pad}
    return BenchRun(
        "2026-11-22T04:00:00Z",
        "a machine",
        "a build",
        model,
        None,
        "c0ffee" * 10,
        "pp512",
        document,
    )


def test_saved_runs_are_returned_with_their_numbers(history):
    assert history.runs() == []
    assert not history.path.exists()
    assert history.append([run("a"), run("b", 2.5)]) == [1, 2]
    assert history.append([run("a")]) == [3]
    saved = history.runs()
    assert [(entry.id, entry.model, entry.samples_ts) for entry in saved] == [
        (1, "a", (50.0, 50.0)),
        (2, "b", (2.5, 2.5)),
        (3, "a", (50.0, 50.0)),
    ]
    assert history.find_run(2) == saved[1]
    for number in (0, 4, 10**30):
        with pytest.raises(UserError, match=f"no run {number}"):
            history.find_run(number)


def test_a_model_name_that_is_not_utf_8_is_escaped(history):
    unescaped = run("/models/\udcff.gguf")
    assert history.append(
        [replace(unescaped, document={**unescaped.document, "model_filename": unescaped.model})]
    ) == [1]
    (saved,) = history.runs()
    assert (saved.model, saved.document["model_filename"]) == (
        "/models/\\udcff.gguf",
        unescaped.model,
    )


def test_runs_are_filtered_by_model_name_or_hash(history):
    history.append([run("SmolLM2:135m"), run("gemma"), run("smollm2:135m"), run("smollm2:135m")])
    assert [entry.id for entry in history.runs(model="smollm2", last=2)] == [3, 4]
    assert [entry.id for entry in history.runs(last=1)] == [4]
    assert len(history.runs(model="c0ffeec")) == 4
    assert history.runs(model="other") == []


def test_the_bandwidth_is_saved_per_machine_and_may_be_unknown(history):
    assert history.bandwidth("here") is None
    history.save_bandwidth("here", 1.5e10)
    history.save_bandwidth("there", None)
    assert history.bandwidth("here") == (1.5e10,)
    assert history.bandwidth("there") == (None,)
    history.save_bandwidth("here", 2e10)
    assert history.bandwidth("here") == (2e10,)
    assert history.bandwidth("elsewhere") is None


def test_parallel_writers_lose_no_runs(history):
    program = """
import sys
from dataclasses import replace
from pathlib import Path
from llmcli.bench.history.history import History
from llmcli.ui import UI
from tests.bench.history.test_history import run
history = History(Path(sys.argv[1]), UI())
sys.stdin.readline()
for number in range(25):
    history.append([run(sys.argv[2], number + 1)])
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(history.path), name],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
        )
        for name in ("one", "two")
    ]
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.close()
    assert [writer.wait(120) for writer in writers] == [0, 0]
    saved = history.runs()
    assert [entry.id for entry in saved] == list(range(1, 51))
    for name in ("one", "two"):
        assert [entry.samples_ts[0] for entry in saved if entry.model == name] == [
            float(n + 1) for n in range(25)
        ]


def test_a_garbled_file_is_renamed_and_its_readable_runs_are_kept(history, watcher):
    history.append([run(pad=3000) for _ in range(40)])
    content = bytearray(history.path.read_bytes())
    page = 4096
    middle = len(content) // 2 // page * page
    content[middle : middle + 2 * page] = b"\x99" * 2 * page
    history.path.write_bytes(content)
    readable = history.runs()
    assert 0 < len(readable) < 40
    assert "damaged" in watcher.notes[0]
    history.path.write_bytes(b"\0" * 100 + content[100:])  # also overwrite the file header
    assert history.append([run("new")]) == [1]
    (renamed,) = history.path.parent.glob("bench.sqlite.damaged-*")
    assert renamed.read_bytes() == b"\0" * 100 + content[100:]
    assert str(renamed) in watcher.notes[-1]
    assert [entry.model for entry in history.runs()] == ["new"]


def test_a_truncated_file_keeps_its_first_runs_and_their_numbers(history, watcher):
    history.append([run(pad=3000) for _ in range(40)])
    content = history.path.read_bytes()
    history.path.write_bytes(content[: len(content) // 2])
    assert history.append([run("new")]) == [41]
    saved = history.runs()
    assert saved[-1].model == "new"
    assert 10 < len(saved) <= 40
    assert [entry.id for entry in saved[:-1]] == list(range(1, len(saved)))
    (renamed,) = history.path.parent.glob("bench.sqlite.damaged-*")
    assert renamed.read_bytes() == content[: len(content) // 2]


def test_a_run_can_be_saved_after_damage_at_any_offset(history, watcher):
    history.append([run(pad=1500) for _ in range(12)])
    content, rng = history.path.read_bytes(), random.Random(3)
    schema_offset = content.index(b"CREATE TABLE runs") + 20
    offsets = [schema_offset, *(rng.randrange(100, len(content) - 40) for _ in range(12))]
    for offset in offsets:
        damaged = content[:offset] + b"\xe5" * 40 + content[offset + 40 :]
        history.path.write_bytes(damaged)
        history.runs()
        history.append([run("new")])
        assert [entry.model for entry in history.runs()][-1] == "new"
        for renamed in history.path.parent.glob("*.damaged-*"):
            assert renamed.read_bytes() == damaged
            renamed.unlink()


@pytest.mark.parametrize("content", [b"", b"no database at all, but a text of some length\n" * 100])
def test_a_file_that_is_not_a_database_is_renamed(history, content):
    history.path.parent.mkdir()
    history.path.write_bytes(content)
    assert history.append([run()]) == [1]
    renamed = list(history.path.parent.glob("bench.sqlite.damaged-*"))
    assert [file.read_bytes() for file in renamed] == ([content] if content else [])


def test_invalid_rows_are_skipped(history):
    history.append([run("good")])
    with sqlite3.connect(history.path) as db:
        for document in (
            "[]",
            "{",
            "null",
            '{"samples_ts": [], "samples_ns": []}',
            '{"samples_ts": "12"}',
            '{"samples_ts": [-1.0], "samples_ns": [1]}',
            "[" * 100_000,
            '{"samples_ts": [1.0], "samples_ns": [1], "more": 1e999}',
        ):
            db.execute(
                "INSERT INTO runs VALUES (NULL, 't', 'm', 'b', 'bad', NULL, 'c', 'pp1', ?)",
                (document,),
            )
    db.close()
    assert [entry.model for entry in history.runs()] == ["good"]


def test_a_newer_schema_is_refused_and_not_changed(history):
    history.append([run()])
    with sqlite3.connect(history.path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    before = history.path.read_bytes()
    for access in (
        history.runs,
        lambda: history.append([run()]),
        lambda: history.bandwidth("here"),
    ):
        with pytest.raises(UserError, match="newer llmcli"):
            access()
    assert history.path.read_bytes() == before
    assert [file.name for file in history.path.parent.iterdir()] == ["bench.sqlite"]


def test_a_lock_of_another_program_is_a_user_error(history, monkeypatch):
    history.append([run()])
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.05)
    locker = sqlite3.connect(history.path, isolation_level=None)
    locker.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="another program is using it"):
        history.append([run()])
    locker.execute("COMMIT")
    locker.close()
    assert history.append([run()]) == [2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_can_be_read(history):
    history.append([run()])
    history.path.parent.chmod(0o500)
    history.path.chmod(0o400)
    try:
        assert len(history.runs()) == 1
        with pytest.raises(UserError, match="cannot be"):
            history.append([run()])
    finally:
        history.path.parent.chmod(0o700)


def test_a_folder_at_the_path_of_the_file_is_a_user_error(history):
    history.path.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be opened"):
        history.append([run()])


def test_a_reader_rolls_back_the_write_of_a_killed_process(history, tmp_path):
    """The unfinished transaction leaves a journal file, with which the earlier runs are
    restored.
    """
    history.append([run("first", pad=3000)])
    program = """
import os, sys, sqlite3
from llmcli.bench.history import database
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE runs SET model = 'spoilt'")
for number in range(50):
    db.execute("INSERT INTO runs SELECT NULL, 't', 'm', 'b', 'spoilt', NULL, 'c', 'pp1', document FROM runs LIMIT 1")
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", program, str(history.path)], cwd=ROOT, check=False)
    assert done.returncode == 9
    assert history.path.with_name("bench.sqlite-journal").exists()
    assert [entry.model for entry in history.runs()] == ["first"]
