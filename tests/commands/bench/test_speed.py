"""`llmcli bench REF`: what it prints and what it saves in the history."""

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
QUICK = ("-p", "8", "-n", "4", "-r", "2", "-t", "1")


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a memory bandwidth of 10 GB/s, or 20 GB/s with --remeasure."""
    monkeypatch.setattr(
        bandwidth_share,
        "machine_bandwidth",
        lambda history, watcher, *, remeasure: 2e10 if remeasure else 1e10,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=128, layers=2)


def json_rows(done: Done) -> list[dict]:
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_every_row_is_saved_with_model_build_and_machine(llmcli: Llmcli, model: Path) -> None:
    printed = json_rows(llmcli("bench", str(model), *QUICK, "-np", "1,2", "-o", "json"))
    assert [row["id"] for row in printed] == [1, 2, 3, 4]
    history = json_rows(llmcli("bench", "history", "--json"))
    for row, saved in zip(printed, history, strict=True):
        assert saved.items() >= row.items()
        assert (saved["model"], saved["build"]) == (str(model), row["build_commit"])
        assert len(saved["content"]) == 64
        assert saved["machine"]
    assert [saved["test"] for saved in history] == ["pp8", "tg4", "pp8 x2", "tg4 x2"]


def test_json_has_the_bandwidth_the_sequences_and_the_sampling_cost(
    llmcli: Llmcli, model: Path
) -> None:
    rows = json_rows(
        llmcli("bench", str(model), *QUICK, "-np", "2", "--sampling", "--remeasure", "--json")
    )
    assert [(row["n_parallel"], row["sampling"]) for row in rows] == [
        (2, False),
        (2, False),
        (2, True),
    ]
    prompt, generation, with_sampling = rows
    assert {row["read_bandwidth_bytes_per_second"] for row in rows} == {2e10}
    assert prompt["roofline_fraction"] is None
    assert generation["roofline_fraction"] > 0
    assert generation["avg_ts_each"] == pytest.approx(generation["avg_ts"] / 2, rel=1e-5)
    assert generation["sampling_extra"] is None
    assert set(with_sampling["sampling_extra"]) == {"ms_per_token", "low", "high", "share"}


def test_the_table_has_a_column_for_sequences_and_notes_below(llmcli: Llmcli, model: Path) -> None:
    out = llmcli("bench", str(model), *QUICK, "-np", "1,4", "--sampling").out
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
    assert "np" not in llmcli("bench", str(model), *QUICK).out.splitlines()[0]


def test_more_than_100_percent_of_the_bandwidth_is_explained(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = "above 100%: the last-level cache helps"
    for bandwidth, expected in ((1.0, True), (1e15, False)):
        monkeypatch.setattr(
            bandwidth_share,
            "machine_bandwidth",
            lambda history, watcher, *, remeasure, rate=bandwidth: rate,
        )
        assert (explanation in llmcli("bench", str(model), *QUICK).out) is expected


def test_a_locked_history_is_a_warning_and_the_results_are_printed(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_rows(llmcli("bench", str(model), *QUICK, "--json"))
    monkeypatch.setattr(database, "LOCK_SECONDS", 0.05)
    connection = sqlite3.connect(history_path(config.load_config()), isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    done = llmcli("bench", str(model), *QUICK, "--json")
    connection.close()
    assert [row["id"] for row in json_rows(done)] == [None, None]
    assert done.err.count("are not saved") == 1
    assert "another program is using it" in done.err


def test_a_damaged_history_is_renamed_and_the_results_are_saved(
    llmcli: Llmcli, model: Path
) -> None:
    json_rows(llmcli("bench", str(model), *QUICK, "--json"))
    file = history_path(config.load_config())
    file.write_bytes(b"garbled" * 1000)
    done = llmcli("bench", str(model), *QUICK, "--json")
    assert [row["id"] for row in json_rows(done)] == [1, 2]
    (renamed,) = file.parent.glob("bench.sqlite.damaged-*")
    assert renamed.read_bytes() == b"garbled" * 1000
    assert renamed.name in done.err


def test_no_history_saves_nothing(llmcli: Llmcli, model: Path, home: Path) -> None:
    assert json_rows(llmcli("bench", str(model), *QUICK, "--json", "--no-history"))[0]["id"] is None
    assert not list(home.rglob("bench.sqlite*"))


def test_repetitions_that_differ_much_are_a_warning(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llmcli.bench.speed.measure.SpeedResult.spread",
        property(lambda result: 0.5 if result.test.n_gen else 0.01),
    )
    err = llmcli("bench", str(model), "-p", "8", "-n", "4", "-r", "3", "-t", "1").err
    assert "the repetitions of tg4 differ by 50%" in err
    monkeypatch.setattr("llmcli.bench.speed.measure.SpeedResult.spread", 0.01)
    assert (
        "differ" not in llmcli("bench", str(model), "-p", "8", "-n", "4", "-r", "3", "-t", "1").err
    )


def test_more_tokens_than_the_training_length_are_a_warning(llmcli: Llmcli, model: Path) -> None:
    assert "trained for" not in llmcli("bench", str(model), *QUICK).err
    assert "tokens exceed the" in llmcli("bench", str(model), *QUICK, "-d", "4096").err


def test_a_kv_cache_larger_than_the_free_memory_is_refused(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcli.hardware.host.available_memory", lambda: 1 << 20)
    done = llmcli("bench", str(model), *QUICK, "-d", "100000")
    assert (done.code, done.out) == (1, "")
    assert "pp8 @ d100000 needs" in done.err
    assert "1.0 MiB of memory are free" in done.err
    monkeypatch.setattr("llmcli.hardware.host.available_memory", lambda: 250 << 10)
    done = llmcli("bench", str(model), *QUICK)
    assert done.code == 0
    assert "the disk's speed is measured" in done.err


def test_ctrl_c_saves_the_finished_tests_in_the_history(
    llmcli: Llmcli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmcli.bench.speed import measure

    measure_test = measure.measure_test

    def interrupt_generation(model, about, test, *args, **options):  # type: ignore[no-untyped-def]
        if test.n_gen:
            raise KeyboardInterrupt
        return measure_test(model, about, test, *args, **options)

    monkeypatch.setattr(measure, "measure_test", interrupt_generation)
    done = llmcli("bench", str(model), *QUICK)
    assert done.code == 130
    assert "saved 1 result" in done.err
    assert [row["test"] for row in json_rows(llmcli("bench", "history", "--json"))] == ["pp8"]


def test_invalid_arguments_are_an_error_without_output(llmcli: Llmcli, model: Path) -> None:
    for words, message in (
        (["-np", "0"], "-np is 0"),
        (["-np", "257"], "-np is 257"),
        (["-np", "x"], "-np: invalid value"),
    ):
        done = llmcli("bench", str(model), *words)
        assert (done.code, done.out) == (1, "")
        assert message in done.err
    assert "leave out --sampling" in llmcli("bench", str(model), "--sampling", "--fa-sweep").err


def test_help_lists_the_other_measurements(llmcli: Llmcli) -> None:
    from llmcli.commands.bench import DEFAULT_BENCH
    from quant.registry import collect

    out = llmcli("bench", "--help").out
    assert "--sampling" in out
    expected = set(collect("llmcli.commands.bench", "BENCHES", "__name__")) - {DEFAULT_BENCH}
    lines = out[out.index("Other measurements") :].splitlines()[1:]
    rows = [words for line in lines if (words := line.strip("│ ").split())[:1] == ["bench"]]
    assert {words[1] for words in rows} == expected
    assert all(len(words) > 3 for words in rows)
    assert "Other measurements" not in llmcli("bench", "history", "--help").out
