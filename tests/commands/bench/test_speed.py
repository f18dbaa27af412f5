"""`llmcli bench REF`: its output, and what it stores."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from llmcli import config
from llmcli.bench.history import database
from llmcli.bench.history.history import history_path
from llmcli.bench.speed import bandwidth_share
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
WORDS = ("-p", "8", "-n", "4", "-r", "2", "-t", "1")


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bandwidth_share,
        "machine_bandwidth",
        lambda history, watcher, *, remeasure: 2e10 if remeasure else 1e10,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=128, layers=2)


def rows(done: Done) -> list[dict]:
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_every_row_is_kept_with_what_it_holds_for(llmcli: Llmcli, model: Path) -> None:
    told = rows(llmcli("bench", str(model), *WORDS, "-np", "1,2", "-o", "json"))
    assert [row["id"] for row in told] == [1, 2, 3, 4]
    kept = rows(llmcli("bench", "history", "--json"))
    for row, saved in zip(told, kept, strict=True):
        assert saved.items() >= row.items()
        assert (saved["model"], saved["build"]) == (str(model), row["build_commit"])
        assert len(saved["content"]) == 64
        assert saved["machine"]
    assert [saved["test"] for saved in kept] == ["pp8", "tg4", "pp8 x2", "tg4 x2"]


def test_json_tells_bandwidth_share_and_sequences(llmcli: Llmcli, model: Path) -> None:
    told = rows(
        llmcli("bench", str(model), *WORDS, "-np", "2", "--sampling", "--remeasure", "--json")
    )
    assert [(row["n_parallel"], row["sampling"]) for row in told] == [
        (2, False),
        (2, False),
        (2, True),
    ]
    prompt, alone, sampled = told
    assert {row["read_bandwidth_bytes_per_second"] for row in told} == {2e10}
    assert prompt["roofline_fraction"] is None
    assert alone["roofline_fraction"] > 0
    assert alone["avg_ts_each"] == pytest.approx(alone["avg_ts"] / 2, rel=1e-5)
    assert alone["sampling_extra"] is None
    assert set(sampled["sampling_extra"]) == {"ms_per_token", "low", "high", "share"}


def test_people_get_a_column_for_sequences_and_words_for_the_rest(
    llmcli: Llmcli, model: Path
) -> None:
    out = llmcli("bench", str(model), *WORDS, "-np", "1,4", "--sampling").out
    columns = [cell.strip() for cell in out.splitlines()[0].strip("|").split("|")]
    assert columns == [
        "model",
        "size",
        "params",
        "backend",
        "threads",
        "np",
        "sampling",
        "test",
        "t/s",
        "t/s each",
    ]
    assert "tg4 x4: sampling and detokenizing add" in out
    assert "memory gives 10.0 GB/s" in out
    assert "np" not in llmcli("bench", str(model), *WORDS).out.splitlines()[0]


def test_more_than_memory_gives_is_explained(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "above 100%: the last-level cache helps"
    for bandwidth, told in ((1.0, True), (1e15, False)):
        monkeypatch.setattr(
            bandwidth_share,
            "machine_bandwidth",
            lambda history, watcher, *, remeasure, rate=bandwidth: rate,
        )
        assert (words in llmcli("bench", str(model), *WORDS).out) is told


def test_a_history_in_use_is_a_warning_and_the_results_are_there(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(llmcli("bench", str(model), *WORDS, "--json"))
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.05)
    other = sqlite3.connect(history_path(config.load_config()), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    done = llmcli("bench", str(model), *WORDS, "--json")
    other.close()
    assert [row["id"] for row in rows(done)] == [None, None]
    assert done.err.count("are not saved") == 1
    assert "another program is using it" in done.err


def test_a_damaged_history_is_set_aside_and_the_results_are_kept(
    llmcli: Llmcli, model: Path
) -> None:
    rows(llmcli("bench", str(model), *WORDS, "--json"))
    file = history_path(config.load_config())
    file.write_bytes(b"garbled" * 1000)
    done = llmcli("bench", str(model), *WORDS, "--json")
    assert [row["id"] for row in rows(done)] == [1, 2]
    (aside,) = file.parent.glob("bench.sqlite.damaged-*")
    assert aside.read_bytes() == b"garbled" * 1000
    assert aside.name in done.err


def test_nothing_is_kept_where_that_is_wished(llmcli: Llmcli, model: Path, home: Path) -> None:
    assert rows(llmcli("bench", str(model), *WORDS, "--json", "--no-history"))[0]["id"] is None
    assert not list(home.rglob("bench.sqlite*"))


def test_repetitions_that_are_far_apart_are_told(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llmcli.bench.speed.measure.SpeedResult.spread",
        property(lambda one: 0.5 if one.test.n_gen else 0.01),
    )
    err = llmcli("bench", str(model), "-p", "8", "-n", "4", "-r", "3", "-t", "1").err
    assert "the repetitions of tg4 differ by 50%" in err
    monkeypatch.setattr("llmcli.bench.speed.measure.SpeedResult.spread", property(lambda one: 0.01))
    assert (
        "differ" not in llmcli("bench", str(model), "-p", "8", "-n", "4", "-r", "3", "-t", "1").err
    )


def test_beyond_the_training_length_is_told(llmcli: Llmcli, model: Path) -> None:
    assert "trained for" not in llmcli("bench", str(model), *WORDS).err
    assert "tokens exceed the" in llmcli("bench", str(model), *WORDS, "-d", "4096").err


def test_a_cache_that_memory_cannot_hold_is_refused_before_it_is_made(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.hardware.host.available_memory", lambda: 1 << 20)
    done = llmcli("bench", str(model), *WORDS, "-d", "100000")
    assert (done.code, done.out) == (1, "")
    assert "pp8 @ d100000 needs" in done.err
    assert "1.0 MiB of memory are free" in done.err
    monkeypatch.setattr("llmcli.hardware.host.available_memory", lambda: 250 << 10)
    done = llmcli("bench", str(model), *WORDS)
    assert done.code == 0
    assert "the disk's speed is measured" in done.err


def test_ctrl_c_leaves_what_was_finished_in_the_history(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.bench.speed import measure as kernel

    measure = kernel.measure_test

    def interrupted(model, about, test, *more, **how):  # type: ignore[no-untyped-def]
        if test.n_gen:
            raise KeyboardInterrupt
        return measure(model, about, test, *more, **how)

    monkeypatch.setattr(kernel, "measure_test", interrupted)
    done = llmcli("bench", str(model), *WORDS)
    assert done.code == 130
    assert "saved 1 result" in done.err
    assert [row["test"] for row in rows(llmcli("bench", "history", "--json"))] == ["pp8"]


def test_mistakes_are_one_line(llmcli: Llmcli, model: Path) -> None:
    for words, why in (
        (["-np", "0"], "-np is 0"),
        (["-np", "257"], "-np is 257"),
        (["-np", "x"], "-np: invalid value"),
    ):
        done = llmcli("bench", str(model), *words)
        assert (done.code, done.out) == (1, "")
        assert why in done.err
    assert "leave out --sampling" in llmcli("bench", str(model), "--sampling", "--fa-sweep").err


def test_help_names_the_other_measurements(llmcli: Llmcli) -> None:
    from llmcli.commands.bench import DEFAULT_BENCH
    from quant.registry import collect

    out = llmcli("bench", "--help").out
    assert "--sampling" in out
    others = set(collect("llmcli.commands.bench", "BENCHES", "__name__")) - {DEFAULT_BENCH}
    lines = out[out.index("Other measurements:") :].splitlines()[1:]
    assert {line.split()[1] for line in lines if line.strip()} == others
    assert all(len(line.split()) > 3 for line in lines if line.strip())
    assert "Other measurements" not in llmcli("bench", "history", "--help").out
