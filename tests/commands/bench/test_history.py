"""`llmcli bench history`: the list, its filters, an empty history and a database of a newer
version.
"""

import json
from collections.abc import Callable
from pathlib import Path

from llmcli import config
from llmcli.bench.history.history import BenchRun, History, history_path
from llmcli.ui import UI
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]


def save_runs(*models: str) -> None:
    row = {"n_threads": 2, "samples_ts": [10.0, 12.0], "samples_ns": [100, 120], "sampling": False}
    runs = [
        BenchRun("2026-11-22T04:00:00Z", "a machine", "b", name, None, "c" * 64, "tg128", row)
        for name in models
    ]
    History(history_path(config.load_config()), UI()).append(runs)


def test_runs_are_listed_oldest_first_and_filtered(llmcli: Llmcli) -> None:
    save_runs("one", "two", "one")
    lines = llmcli("bench", "history").out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert "11.00 ± 1.41" in lines[1]
    assert "machine: a machine" in lines[-1]
    assert [
        row["id"] for row in json.loads(llmcli("bench", "history", "--model", "one", "--json").out)
    ] == [1, 3]
    (row,) = json.loads(llmcli("bench", "history", "--last", "1", "--json").out)
    assert (row["id"], row["test"], row["samples_ts"]) == (3, "tg128", [10.0, 12.0])


def test_an_empty_history_is_reported_without_creating_the_database(
    llmcli: Llmcli, home: Path
) -> None:
    assert "nothing was measured yet" in llmcli("bench", "history").out
    assert llmcli("bench", "history", "--json").out == "[]\n"
    assert not list(home.rglob("bench.sqlite*"))


def test_a_database_of_a_newer_llmcli_is_an_error(llmcli: Llmcli) -> None:
    import sqlite3

    save_runs("one")
    with sqlite3.connect(history_path(config.load_config())) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    done = llmcli("bench", "history")
    assert (done.code, done.out) == (1, "")
    assert "newer llmcli" in done.err
