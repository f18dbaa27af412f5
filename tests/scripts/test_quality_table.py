"""scripts/quality/table.py, summary.py and compare.py: storage of rows, and tables with figures
computed by hand.
"""

import csv

import numpy as np
import pytest

from quant.evaluation.divergence import PositionScores
from scripts.quality import compare
from scripts.quality.runs import Failed, Setting
from scripts.quality.summary import change_table, csv_table
from scripts.quality.table import Key, Ledger, Row, ratio, results, table


def row(method: str, seed: int = 0, nbytes: int = 1000) -> Row:
    key = Key("tiny", "0", "Q4_K_M", method, "", seed, "text 512 48", "wiki")
    return Row(key, nbytes, nbytes + 50, 2.0, 1.5, 1 << 20, 3.0, 2 << 20, "", "v1")


def scores(kld: list[float]) -> dict[str, tuple[PositionScores, int]]:
    """Return scores of one text whose divergences are `kld`, in chunks of two positions."""
    nll, some = np.full(len(kld), 2.0), np.array(kld)
    return {"wiki": (PositionScores(nll, nll, some, np.ones(len(kld)), np.zeros(len(kld))), 2)}


def test_half_the_divergence_in_every_chunk_is_a_ratio_of_one_half():
    baseline = np.array([1.0, 3.0, 2.0])
    result = ratio([baseline / 2], [baseline])
    assert (result.value, result.low, result.high) == pytest.approx((0.5, 0.5, 0.5))


def test_interval_contains_the_ratio_and_is_the_same_in_every_run():
    rng = np.random.default_rng(0)
    baseline, method = rng.random(50), rng.random(50)
    result = ratio([method], [baseline])
    assert result == ratio([method], [baseline])
    assert result.low < method.sum() / baseline.sum() < result.high


def test_ratio_averages_calibration_texts_before_chunks_are_drawn():
    result = ratio(
        [np.array([1.0, 1.0]), np.array([3.0, 3.0])], [np.array([4.0, 4.0]), np.array([4.0, 4.0])]
    )
    assert (result.value, result.low, result.high) == pytest.approx((0.5, 0.5, 0.5))


def test_ledger_returns_stored_rows_and_ignores_a_partial_line(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(row("+ llama-imatrix"), scores([1.0, 2.0, 3.0, 4.0]))
    with ledger.file.open("a") as file:
        file.write('{"key": {"teach')
    again = Ledger(tmp_path)
    (result,) = again.rows().values()
    assert result == row("+ llama-imatrix")
    assert again.scores(result.key)["wiki"][2].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_row_without_scores_does_not_count(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(row("search"), scores([1.0, 2.0]))
    ledger.scores_path(row("search").key).unlink()
    assert ledger.rows() == {}


def test_table_compares_methods_with_the_baseline_for_each_seed(tmp_path):
    ledger = Ledger(tmp_path)
    for seed in (0, 1):
        ledger.add(row("base", seed), scores([0.2, 0.2, 0.4, 0.4]))
        ledger.add(row("search", seed, nbytes=1004), scores([0.1, 0.1, 0.2, 0.2]))
    lines = table(ledger.rows().values(), ledger, "base").splitlines()
    assert lines[2].startswith("| tiny | Q4_K_M | base | wiki | 1,000 | 0.300000 ± ")
    assert "| 1,004 (+0.40%) | 0.150000" in lines[3]  # the difference in size is shown
    assert "| -50.0% [-50.0%, -50.0%] | 2: -50.0%, -50.0% |  | 3 + 2.0 | 1.5 | 2 |" in lines[3]


def test_table_compares_own_methods_with_the_best_of_the_others(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(row("base"), scores([0.4, 0.4, 0.4, 0.4]))
    ledger.add(row("mix"), scores([0.2, 0.2, 0.2, 0.2]))
    ledger.add(row("large mix", nbytes=1100), scores([0.1, 0.1, 0.1, 0.1]))
    ledger.add(row("made", seed=-1), scores([0.3, 0.3, 0.3, 0.3]))
    ledger.add(row("ours"), scores([0.1, 0.1, 0.2, 0.2]))
    lines = table(ledger.rows().values(), ledger, "base", {"ours"}).splitlines()
    assert "| -25.0% [-50.0%, +0.0%] (mix) |" in lines[-1]
    assert not any("(mix)" in line or "(made)" in line for line in lines[:-1])
    assert "-25.0% [-25.0%, -25.0%]" in next(line for line in lines if "| made |" in line)


def test_figures_of_a_text(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(row("base"), scores([0.4, 0.4]))
    np.savez(
        ledger.scores_path(row("base").key),
        wiki=np.array([[[2.0, 1.0]], [[1.5, 1.0]], [[0.5, 0.1]], [[0.0, 1.0]]]),
    )
    line = table(ledger.rows().values(), ledger, "base").splitlines()[-1]
    assert "| 0.300000 ± 0.2000" in line
    assert "| 0.4996 | 50.00% | 1.2840 |" in line


@pytest.fixture
def compared(tmp_path):
    """The results of a baseline, another method and two of ours, one of them lower on each text."""
    ledger = Ledger(tmp_path)
    ledger.add(row("base"), scores([0.4, 0.4, 0.4, 0.4]))
    ledger.add(row("gptq"), scores([0.1, 0.1, 0.2, 0.2]))
    ledger.add(row("mix"), scores([0.2, 0.2, 0.2, 0.2]))
    ledger.add(row("search"), scores([0.1, 0.1, 0.1, 0.1]))
    return [*results(ledger.rows().values(), ledger, "base", {"gptq", "search"})]


def test_summary_has_the_changes_and_both_comparisons_with_the_best_of_the_others(compared):
    head, _, line = change_table(compared, "base").splitlines()
    assert "| baseline KLD | mix | gptq | search |" in head
    assert line == (
        "| tiny | Q4_K_M | wiki | 0.400000 | −50.0 | −62.5 | −75.0"
        " | −25.0 (−50.0 to +0.0), mix | −50.0 (−50.0 to −50.0), search |"
    )


def test_summary_marks_a_method_without_a_row_for_a_type(tmp_path, compared):
    ledger = Ledger(tmp_path)
    other = Key("tiny", "0", "Q2_K", "base", "", 0, "text 512 48", "wiki")
    ledger.add(Row(other, 500, 550, 2.0, 1.5, 1, 3.0, 2, "", "v1"), scores([0.8, 0.8]))
    found = results(ledger.rows().values(), ledger, "base", {"gptq", "search"})
    assert change_table(found, "base").splitlines()[-1] == (
        "| tiny | Q2_K | wiki | 0.800000 | – | – | – |  |  |"
    )


def test_csv_of_a_summary_has_every_figure(compared):
    base, gptq, *_ = csv.DictReader(csv_table(compared).splitlines())
    assert base["change_percent"] == base["best_other"] == ""
    assert gptq == {
        "model": "tiny",
        "calibration_chunks": "48",
        "calibration_texts": "1",
        "type": "Q4_K_M",
        "method": "gptq",
        "scored_on": "wiki",
        "tensor_bytes": "1000",
        "kld": "0.150000",
        "kld_standard_error": gptq["kld_standard_error"],
        "kld_99_9": "0.2000",
        "same_top_percent": "100.00",
        "perplexity_ratio": "1.0000",
        "change_percent": "-62.5",
        "change_low": "-75.0",
        "change_high": "-50.0",
        "best_other": "mix",
        "best_other_percent": "-25.0",
        "best_other_low": "-50.0",
        "best_other_high": "+0.0",
        "statistics_seconds": "3",
        "quantization_seconds": "2.0",
        "peak_bytes": "2097152",
    }
    assert float(gptq["kld_standard_error"]) == pytest.approx(0.05 / 3**0.5, rel=1e-4)


def test_row_without_the_field_answers_is_read(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.add(row("search"), scores([1.0, 2.0]))
    ledger.file.write_text(ledger.file.read_text().replace(', "answers": ""', ""))
    (result,) = ledger.rows().values()
    assert '"answers"' not in ledger.file.read_text()
    assert result.answers == ""


def test_refused_method_is_reported_with_the_reason_and_recorded_for_the_exit_code(
    tmp_path, monkeypatch, capsys
):
    ledger, text = Ledger(tmp_path), tmp_path / "text"
    text.write_text("words")
    setting = Setting(tmp_path, tmp_path, 512, {}, [text], None, None, 1, None)
    work = compare.Work(tmp_path / "tiny.gguf", "0", setting, None, ledger, keep=False)
    for method, seed in ((compare.PLAIN, -1), (compare.BASELINE, 0)):
        key = work.key("Q4_K_M", method, "", seed)
        ledger.add(Row(key, 1000, 1050, 2.0, 1.5, 1 << 20, 0.0, 0, "", "v1"), scores([0.1, 0.2]))

    def refuse(*_):
        raise Failed("1 of 2 tensors\nerror: --method gptq needs torch\nhint: install it")

    monkeypatch.setattr(compare, "make_file", refuse)
    keys = list(compare.rows(work, "Q4_K_M", {"gptq": ""}, range(1), []))
    assert [key.method for key in keys] == [compare.PLAIN, compare.BASELINE]
    assert work.refused == ["gptq"]
    assert (
        capsys.readouterr().err
        == "tiny Q4_K_M gptq: error: --method gptq needs torch; hint: install it\n"
    )
