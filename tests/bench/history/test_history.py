"""The history of runs survives a second writer, a lock, a damaged file and a newer format."""

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


class Listener:
    """A watcher that remembers what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def history(tmp_path, listener):
    return History(tmp_path / "data" / "bench.sqlite", listener)


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


def test_runs_come_back_as_they_were_kept_with_numbers(history):
    assert history.runs() == []
    assert not history.path.exists()
    assert history.append([run("a"), run("b", 2.5)]) == [1, 2]
    assert history.append([run("a")]) == [3]
    kept = history.runs()
    assert [(one.id, one.model, one.samples_ts) for one in kept] == [
        (1, "a", (50.0, 50.0)),
        (2, "b", (2.5, 2.5)),
        (3, "a", (50.0, 50.0)),
    ]
    assert history.find_run(2) == kept[1]
    for number in (0, 4, 10**30):
        with pytest.raises(UserError, match=f"no run {number}"):
            history.find_run(number)


def test_a_name_that_is_no_utf_8_is_kept_readable(history):
    odd = run("/models/\udcff.gguf")
    assert history.append(
        [replace(odd, document={**odd.document, "model_filename": odd.model})]
    ) == [1]
    (kept,) = history.runs()
    assert (kept.model, kept.document["model_filename"]) == ("/models/\\udcff.gguf", odd.model)


def test_the_last_of_a_model_by_name_or_hash(history):
    history.append([run("SmolLM2:135m"), run("gemma"), run("smollm2:135m"), run("smollm2:135m")])
    assert [one.id for one in history.runs(model="smollm2", last=2)] == [3, 4]
    assert [one.id for one in history.runs(last=1)] == [4]
    assert len(history.runs(model="c0ffeec")) == 4
    assert history.runs(model="other") == []


def test_bandwidth_is_kept_for_each_machine_and_unknown_is_an_answer(history):
    assert history.bandwidth("here") is None
    history.save_bandwidth("here", 1.5e10)
    history.save_bandwidth("there", None)
    assert history.bandwidth("here") == (1.5e10,)
    assert history.bandwidth("there") == (None,)
    history.save_bandwidth("here", 2e10)
    assert history.bandwidth("here") == (2e10,)
    assert history.bandwidth("elsewhere") is None


def test_two_processes_write_at_once_and_nothing_is_lost(history):
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
    kept = history.runs()
    assert [one.id for one in kept] == list(range(1, 51))
    for name in ("one", "two"):
        assert [one.samples_ts[0] for one in kept if one.model == name] == [
            float(n + 1) for n in range(25)
        ]


def test_a_garbled_file_is_set_aside_and_what_can_be_read_goes_on(history, listener):
    history.append([run(pad=3000) for _ in range(40)])
    before = bytearray(history.path.read_bytes())
    page = 4096
    middle = len(before) // 2 // page * page
    before[middle : middle + 2 * page] = b"\x99" * 2 * page
    history.path.write_bytes(before)
    found = history.runs()
    assert 0 < len(found) < 40
    assert "damaged" in listener.notes[0]
    history.path.write_bytes(b"\0" * 100 + before[100:])  # its head, too
    assert history.append([run("new")]) == [1]
    (aside,) = history.path.parent.glob("bench.sqlite.damaged-*")
    assert aside.read_bytes() == b"\0" * 100 + before[100:]
    assert str(aside) in listener.notes[-1]
    assert [one.model for one in history.runs()] == ["new"]


def test_a_truncated_file_keeps_its_first_runs_and_its_numbers(history, listener):
    history.append([run(pad=3000) for _ in range(40)])
    whole = history.path.read_bytes()
    history.path.write_bytes(whole[: len(whole) // 2])
    assert history.append([run("new")]) == [41]
    kept = history.runs()
    assert kept[-1].model == "new"
    assert 10 < len(kept) <= 40
    assert [one.id for one in kept[:-1]] == list(range(1, len(kept)))
    (aside,) = history.path.parent.glob("bench.sqlite.damaged-*")
    assert aside.read_bytes() == whole[: len(whole) // 2]


def test_wherever_bytes_change_the_next_run_is_kept_and_found(history, listener):
    history.append([run(pad=1500) for _ in range(12)])
    good, numbers = history.path.read_bytes(), random.Random(3)
    named = good.index(b"CREATE TABLE runs") + 20
    places = [named, *(numbers.randrange(100, len(good) - 40) for _ in range(12))]
    for place in places:
        spoilt = good[:place] + b"\xe5" * 40 + good[place + 40 :]
        history.path.write_bytes(spoilt)
        history.runs()
        history.append([run("new")])
        assert [one.model for one in history.runs()][-1] == "new"
        for aside in history.path.parent.glob("*.damaged-*"):
            assert aside.read_bytes() == spoilt
            aside.unlink()


@pytest.mark.parametrize("content", [b"", b"no database at all, but a text of some length\n" * 100])
def test_a_file_that_is_no_database_is_not_lost_either(history, content):
    history.path.parent.mkdir()
    history.path.write_bytes(content)
    assert history.append([run()]) == [1]
    aside = list(history.path.parent.glob("bench.sqlite.damaged-*"))
    assert [one.read_bytes() for one in aside] == ([content] if content else [])


def test_rows_that_are_no_runs_are_passed_over(history):
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
    assert [one.model for one in history.runs()] == ["good"]


def test_a_newer_form_is_left_alone(history):
    history.append([run()])
    with sqlite3.connect(history.path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    before = history.path.read_bytes()
    for act in (history.runs, lambda: history.append([run()]), lambda: history.bandwidth("here")):
        with pytest.raises(UserError, match="newer llmcli"):
            act()
    assert history.path.read_bytes() == before
    assert [one.name for one in history.path.parent.iterdir()] == ["bench.sqlite"]


def test_a_lock_that_is_not_let_go_is_told(history, monkeypatch):
    history.append([run()])
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.05)
    other = sqlite3.connect(history.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match="another program is using it"):
        history.append([run()])
    other.execute("COMMIT")
    other.close()
    assert history.append([run()]) == [2]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_can_be_read(history):
    history.append([run()])
    history.path.parent.chmod(0o500)
    history.path.chmod(0o400)
    try:
        assert len(history.runs()) == 1
        with pytest.raises(UserError, match="cannot be"):
            history.append([run()])
    finally:
        history.path.parent.chmod(0o700)


def test_a_folder_in_its_place_is_told(history):
    history.path.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be opened"):
        history.append([run()])


def test_what_a_killed_writer_left_is_undone_by_a_reader(history, tmp_path):
    """A transaction that was never finished leaves a journal: the runs before it are there."""
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
    assert [one.model for one in history.runs()] == ["first"]
