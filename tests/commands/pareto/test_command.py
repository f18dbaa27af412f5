"""`llmcli pareto`: size, divergence and speed of several settings, and which are dominated."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from llmcli.workflows.calibration import ensure_statistics, texts
from llmcli.workflows.calibration.texts import BUILTIN_NAME, CalibrationText
from llmcli.workflows.certification import verify
from llmcli.workflows.pareto import compare
from llmcli.workflows.pareto.compare import ParetoPoint, dominated_by
from llmcli.workflows.quantization import scratch_model
from quant.certificate.certificate import AnswerMetrics, CertifiedEstimate, SpeedComparison
from quant.gguf.resumable_writer import ResumableWriter
from quant.model_file import read_header
from tests.fixtures.cli import Done

Llmcli = Callable[..., Done]
ZERO = CertifiedEstimate(0.0, 0.0)


@pytest.fixture(autouse=True)
def short_speed_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the speed tests to 8 prompt tokens and 4 generated tokens."""
    monkeypatch.setattr(verify, "SPEED_TESTS", ((8, 0), (0, 4)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 1,200 characters of the evaluation text."""
    evaluation_text = (resources.files("quant") / "texts" / "evaluation.txt").read_text(
        encoding="utf-8"
    )
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(evaluation_text[:1200] + "\n", encoding="utf-8")
    return path


@pytest.fixture
def pareto(llmcli: Llmcli, text: Path) -> Callable[..., Done]:
    """Return a function that runs `pareto` on 4 chunks of 64 tokens with one thread.

    The types are Q4_0 and Q8_0 unless the words name others.
    """

    def call(*words: str | Path) -> Done:
        flags = ("--text", str(text), "--ctx", "64", "--chunks", "4", "-t", "1")
        types = () if "--types" in words else ("--types", "Q4_0,Q8_0")
        return llmcli("pareto", *map(str, words), *flags, *types)

    return call


def test_every_setting_is_measured_and_its_file_is_deleted(
    pareto: Callable[..., Done],
    llmcli: Llmcli,
    stories_gguf: Path,
    text: Path,
    home: Path,
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.html"
    done = pareto(stories_gguf, "--seconds", "0.01", "--json", "--report", page)
    assert done.code == 0, done.err
    first, second = json.loads(done.out)["settings"]
    assert (first["name"], second["name"]) == ("Q4_0", "Q8_0")
    assert first["tensor_bytes"] < second["tensor_bytes"]
    assert min(first["elapsed_ms"], second["elapsed_ms"]) > 0
    assert first["answers"]["kld"]["value"] > second["answers"]["kld"]["value"] > 0
    assert [speed["test"] for speed in first["speed"]] == ["pp8", "tg4"]
    assert "disk: " in done.err
    assert "Ctrl-C keeps what is finished" in done.err
    suffixes = {path.suffix for path in (home / "cache" / "pareto").rglob("*") if path.is_file()}
    assert suffixes == {".json", ""}  # the results, and the lock file
    q4_file = tmp_path / "q4.gguf"
    llmcli("quantize", str(stories_gguf), "--q4_0", "-o", str(q4_file), "--threads", "1")
    words = ("--text", str(text), "--ctx", "64", "--chunks", "4", "-t", "1", "--json")
    eval_document = json.loads(
        llmcli("eval", str(q4_file), "--base", str(stories_gguf), *words).out
    )
    assert first["tensor_bytes"] == read_header.read_header(q4_file).tensor_bytes
    kld = eval_document["kl_divergence"]["value"]
    assert first["answers"]["kld"]["value"] == pytest.approx(
        kld, abs=5 * first["doubt"] + 1e-4 * kld + 1e-6
    )
    html = page.read_text()
    titles = {heading.text for heading in ElementTree.fromstring(html).iter("h2")}
    assert {"Divergence over size", "Speed over size", "All settings"} <= titles
    assert not re.search(r'<(img|script|link|a|iframe)|url\((?!#)|@import|(src|href)="', html)


def test_an_interrupted_run_resumes_with_the_remaining_settings(
    pareto: Callable[..., Done], stories: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: tuple[Any, ...] = (stories, "--seconds", "0", "-o", "csv")
    measure_setting, calls = compare._measure_setting, 0

    def interrupt_second_call(*args: Any) -> ParetoPoint:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return measure_setting(*args)

    with monkeypatch.context() as patched:
        patched.setattr(compare, "_measure_setting", interrupt_second_call)
        assert pareto(*words).code == 130
    assert list((home / "cache" / "bases").glob("*.gguf")) == []
    done = pareto(*words)
    assert done.code == 0
    assert "1 of 2 settings were finished before" in done.err
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [row["setting"] for row in rows] == ["Q4_0", "Q8_0"]
    fresh = pareto(*words, "--fresh")
    assert "finished before" not in fresh.err
    fresh_rows = list(csv.DictReader(io.StringIO(fresh.out)))
    for row, fresh_row in zip(rows, fresh_rows, strict=True):
        assert {**row, "seconds": ""} == {**fresh_row, "seconds": ""}
    with_third_type = pareto(*words, "--types", "Q4_0,Q5_0,Q8_0")
    assert "2 of 3 settings were finished before" in with_third_type.err


def test_keep_saves_the_files_and_the_printed_result_is_a_table(
    pareto: Callable[..., Done], stories_gguf: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    done = pareto(stories_gguf, "--seconds", "0", "--keep", folder, "--chart")
    assert done.code == 0
    assert {file.name for file in folder.iterdir()} == {
        "stories260K-F32-Q4_0.gguf",
        "stories260K-F32-Q8_0.gguf",
    }
    assert "| setting |" in done.out
    assert "Divergence over size" in done.out
    assert "Speed over size" not in done.out
    q4_file = folder / "stories260K-F32-Q4_0.gguf"
    q4_bytes = q4_file.read_bytes()
    q4_file.unlink()
    assert (
        "1 of 2 settings were finished before"
        in pareto(stories_gguf, "--seconds", "0", "--keep", folder).err
    )
    # A file of the same name with other content is written again.
    q4_file.write_bytes((folder / "stories260K-F32-Q8_0.gguf").read_bytes())
    assert (
        "1 of 2 settings were finished before"
        in pareto(stories_gguf, "--seconds", "0", "--keep", folder).err
    )
    assert q4_file.read_bytes() == q4_bytes


def test_a_finished_setting_is_reported_under_its_current_name(
    pareto: Callable[..., Done], stories_gguf: Path
) -> None:
    words: tuple[Any, ...] = (stories_gguf, "--seconds", "0", "--types", "Q4_0", "--json")
    (unnamed,) = json.loads(pareto(*words).out)["settings"]
    done = pareto(*words, "--methods", "ggml,search")
    assert "1 of 2 settings were finished before" in done.err
    first, second = json.loads(done.out)["settings"]
    assert (first["name"], second["name"]) == ("Q4_0 ggml", "Q4_0 search")
    assert first == {**unnamed, "name": "Q4_0 ggml", "dominated_by": first["dominated_by"]}


def test_an_interrupted_quantization_reports_no_elapsed_time(
    pareto: Callable[..., Done], stories_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: tuple[Any, ...] = (
        stories_gguf,
        "--seconds",
        "0",
        "--types",
        "Q4_0",
        "--keep",
        tmp_path / "kept",
        "--json",
    )
    finish = ResumableWriter.finish

    def interrupt(writer: ResumableWriter) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(ResumableWriter, "finish", interrupt)
    assert pareto(*words).code == 130
    monkeypatch.setattr(ResumableWriter, "finish", finish)
    (setting,) = json.loads(pareto(*words).out)["settings"]
    assert setting["elapsed_ms"] == 0


def test_folds_and_target_sizes_are_settings(
    pareto: Callable[..., Done],
    llmcli: Llmcli,
    stories_gguf: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        texts,
        "builtin_texts",
        lambda *_: [CalibrationText(BUILTIN_NAME, "The rain sang on the roofs of the town. " * 60)],
    )
    monkeypatch.setattr(scratch_model, "PROBE_CHUNK_TOKENS", 32)
    words: tuple[Any, ...] = (stories_gguf, "--seconds", "0", "--json")
    done = pareto(*words, "--types", "Q4_0", "--fold", "none", "--fold", "awq")
    assert done.code == 0, done.err
    assert "--fold awq needs an imatrix: collecting from" in done.err
    unfolded, folded = json.loads(done.out)["settings"]
    assert (unfolded["name"], folded["name"]) == ("Q4_0 fold none", "Q4_0 fold awq")
    assert (unfolded["fold"], folded["fold"], unfolded["tensor_bytes"]) == (
        "",
        "awq",
        folded["tensor_bytes"],
    )
    assert unfolded["answers"]["kld"] != folded["answers"]["kld"]
    done = pareto(*words, "--types", "", "--target-size", "0.26M,0.33M")
    assert done.code == 0, done.err
    smaller, larger = json.loads(done.out)["settings"]
    assert (smaller["name"], larger["name"]) == ("0.26M", "0.33M")
    assert smaller["tensor_bytes"] < 260_000 < larger["tensor_bytes"] < 330_000
    measured = {path.name for path in (home / "cache" / "sensitivity").glob("*.records")}
    quantize_flags = (
        "--target-size",
        "0.26M",
        "--threads",
        "1",
        "--dry-run",
        "-o",
        str(tmp_path / "o.gguf"),
    )
    assert llmcli("quantize", str(stories_gguf), *quantize_flags).code == 0
    # quantize needed no measurement beyond those that pareto saved.
    assert measured == {path.name for path in (home / "cache" / "sensitivity").glob("*.records")}


def test_a_damaged_result_file_is_measured_again(
    pareto: Callable[..., Done], stories_gguf: Path, home: Path
) -> None:
    words: tuple[Any, ...] = (stories_gguf, "--seconds", "0", "--types", "Q8_0")
    pareto(*words)
    (file,) = (home / "cache" / "pareto").rglob("*.json")
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "nbytes": "many"}))
    assert "finished before" not in pareto(*words).err
    assert json.loads(file.read_text())["nbytes"] == saved["nbytes"]


def test_invalid_arguments_are_an_error(
    pareto: Callable[..., Done], stories_gguf: Path, tmp_path: Path
) -> None:
    for words, code, message in (
        (("--types", "Q9_X"), 1, "Q9_X"),
        (("--types", ","), 2, "nothing to compare"),
        (("--target-size", "some"), 2, "'some' is not a size"),
        (("--fold", "magic"), 1, "unknown fold 'magic'"),
        (("--methods", "magic"), 1, "unknown method 'magic'"),
        (("--imatrix", tmp_path / "none"), 1, "there is no file"),
    ):
        done = pareto(stories_gguf, *words)
        assert (done.code, done.out) == (code, ""), words
        assert message in done.err, words


def test_an_impossible_target_size_is_an_error_before_any_measurement(
    pareto: Callable[..., Done], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(scratch_model, "open_scratch_model", fail)
    monkeypatch.setattr(ensure_statistics, "_statistics_file", fail)
    done = pareto(stories_gguf, "--target-size", "330K,10K", "--methods", "gptq")
    assert (done.code, done.out) == (1, "")
    assert "no mix of these types makes a file of 10,000 bytes" in done.err


def point(
    name: str,
    nbytes: int,
    kld: float,
    speed_interval: tuple[float, float] | None = None,
    klds: tuple[float, ...] = (),
) -> ParetoPoint:
    """Return a measured setting with this file size, mean KL divergence, and interval of the
    relative speed; `klds` are the divergences of the chunks.
    """
    speed = (
        (SpeedComparison("tg32", 1.0, 1.0, (), (), 1.0, speed_interval[0], speed_interval[1], 12),)
        if speed_interval
        else ()
    )
    answers = AnswerMetrics(
        "t",
        "h",
        512,
        1,
        255,
        "F32",
        ZERO,
        ZERO,
        ZERO,
        CertifiedEstimate(kld, 0.0),
        kld,
        {},
        kld,
        ZERO,
        ZERO,
    )
    return ParetoPoint(
        name, name, "ggml", "", "{}", nbytes, 4.5, answers, 0.0, speed, 0.0, klds or (kld, kld)
    )


def test_a_setting_is_dominated_by_a_smaller_one_of_lower_divergence() -> None:
    small, large, better = (
        point("small", 10, 0.5),
        point("large", 20, 0.1),
        point("better", 10, 0.2),
    )
    assert dominated_by([small, large]) == {}
    assert dominated_by([small, large, better]) == {"small": "better"}
    assert dominated_by([large, replace(large, name="twin")]) == {}
    assert dominated_by([large, point("waste", 30, 0.1)]) == {"waste": "large"}


def test_at_equal_size_a_lower_divergence_must_be_significant_over_the_chunks() -> None:
    first = point("first", 10, 0.2, klds=(0.1, 0.2, 0.3))
    # Lower in every chunk, although the chunks differ far more than the two settings.
    lower = point("lower", 10, 0.19, klds=(0.09, 0.19, 0.289))
    assert dominated_by([first, lower]) == {"first": "lower"}
    assert dominated_by([first, point("chance", 10, 0.19, klds=(0.02, 0.3, 0.25))]) == {}
    assert dominated_by([first, point("smaller", 9, 0.19, klds=(0.02, 0.3, 0.25))]) == {
        "first": "smaller"
    }


def test_a_significantly_slower_setting_dominates_nothing() -> None:
    fast, slow = point("fast", 20, 0.2, (1.9, 2.1)), point("slow", 10, 0.1, (0.9, 1.1))
    assert dominated_by([fast, slow]) == {}
    assert dominated_by([fast, point("unsure", 10, 0.1, (1.8, 2.0))]) == {"fast": "unsure"}
