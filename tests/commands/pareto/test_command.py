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
NOTHING = CertifiedEstimate(0.0, 0.0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is measured in a moment."""
    monkeypatch.setattr(verify, "SPEED_TESTS", ((8, 0), (0, 4)))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole = (resources.files("quant") / "texts" / "evaluation.txt").read_text(encoding="utf-8")
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(whole[:1200] + "\n", encoding="utf-8")
    return path


@pytest.fixture
def pareto(llmcli: Llmcli, text: Path) -> Callable[..., Done]:
    """Two types, in chunks of 64, on one thread."""

    def call(*words: str | Path) -> Done:
        own = ("--text", str(text), "--ctx", "64", "--chunks", "4", "-t", "1")
        types = () if "--types" in words else ("--types", "Q4_0,Q8_0")
        return llmcli("pareto", *map(str, words), *own, *types)

    return call


def test_every_setting_is_made_read_and_timed_and_goes_again(
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
    assert [one["test"] for one in first["speed"]] == ["pp8", "tg4"]
    assert "disk: " in done.err
    assert "Ctrl-C keeps what is finished" in done.err
    left = {path.suffix for path in (home / "cache" / "pareto").rglob("*") if path.is_file()}
    assert left == {".json", ""}  # the figures, and the lock
    made = tmp_path / "q4.gguf"
    llmcli("quantize", str(stories_gguf), "--q4_0", "-o", str(made), "--threads", "1")
    words = ("--text", str(text), "--ctx", "64", "--chunks", "4", "-t", "1", "--json")
    exact = json.loads(llmcli("eval", str(made), "--base", str(stories_gguf), *words).out)
    assert first["tensor_bytes"] == read_header.read_header(made).tensor_bytes
    kld = exact["kl_divergence"]["value"]
    assert first["answers"]["kld"]["value"] == pytest.approx(
        kld, abs=5 * first["doubt"] + 1e-4 * kld + 1e-6
    )
    drawn = page.read_text()
    titles = {one.text for one in ElementTree.fromstring(drawn).iter("h2")}
    assert {"Divergence over size", "Speed over size", "All settings"} <= titles
    assert not re.search(r'<(img|script|link|a|iframe)|url\((?!#)|@import|(src|href)="', drawn)


def test_what_was_interrupted_goes_on_with_the_settings_that_are_left(
    pareto: Callable[..., Done], stories: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: tuple[Any, ...] = (stories, "--seconds", "0", "-o", "csv")
    point, made = compare._measure_setting, 0

    def interrupted(*given: Any) -> ParetoPoint:
        nonlocal made
        made += 1
        if made == 2:
            raise KeyboardInterrupt
        return point(*given)

    with monkeypatch.context() as patched:
        patched.setattr(compare, "_measure_setting", interrupted)
        assert pareto(*words).code == 130
    assert list((home / "cache" / "bases").glob("*.gguf")) == []
    done = pareto(*words)
    assert done.code == 0
    assert "1 of 2 settings were finished before" in done.err
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [one["setting"] for one in rows] == ["Q4_0", "Q8_0"]
    whole = pareto(*words, "--fresh")
    assert "finished before" not in whole.err
    again = list(csv.DictReader(io.StringIO(whole.out)))
    for one, other in zip(rows, again, strict=True):
        assert {**one, "seconds": ""} == {**other, "seconds": ""}
    more = pareto(*words, "--types", "Q4_0,Q5_0,Q8_0")
    assert "2 of 3 settings were finished before" in more.err


def test_files_stay_where_they_are_to_be_kept_and_people_get_a_table(
    pareto: Callable[..., Done], stories_gguf: Path, tmp_path: Path
) -> None:
    keep = tmp_path / "kept"
    done = pareto(stories_gguf, "--seconds", "0", "--keep", keep, "--chart")
    assert done.code == 0
    assert {one.name for one in keep.iterdir()} == {
        "stories260K-F32-Q4_0.gguf",
        "stories260K-F32-Q8_0.gguf",
    }
    assert "| setting |" in done.out
    assert "Divergence over size" in done.out
    assert "Speed over size" not in done.out
    kept = keep / "stories260K-F32-Q4_0.gguf"
    whole = kept.read_bytes()
    kept.unlink()
    assert (
        "1 of 2 settings were finished before"
        in pareto(stories_gguf, "--seconds", "0", "--keep", keep).err
    )
    kept.write_bytes((keep / "stories260K-F32-Q8_0.gguf").read_bytes())  # another file of that name
    assert (
        "1 of 2 settings were finished before"
        in pareto(stories_gguf, "--seconds", "0", "--keep", keep).err
    )
    assert kept.read_bytes() == whole


def test_what_was_finished_goes_by_the_name_that_it_has_now(
    pareto: Callable[..., Done], stories_gguf: Path
) -> None:
    words: tuple[Any, ...] = (stories_gguf, "--seconds", "0", "--types", "Q4_0", "--json")
    (alone,) = json.loads(pareto(*words).out)["settings"]
    done = pareto(*words, "--methods", "ggml,search")
    assert "1 of 2 settings were finished before" in done.err
    first, second = json.loads(done.out)["settings"]
    assert (first["name"], second["name"]) == ("Q4_0 ggml", "Q4_0 search")
    assert first == {**alone, "name": "Q4_0 ggml", "dominated_by": first["dominated_by"]}


def test_the_time_of_a_part_is_not_told_as_that_of_the_whole(
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

    def killed(draft: ResumableWriter) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(ResumableWriter, "finish", killed)
    assert pareto(*words).code == 130
    monkeypatch.setattr(ResumableWriter, "finish", finish)
    (one,) = json.loads(pareto(*words).out)["settings"]
    assert one["elapsed_ms"] == 0


def test_folds_and_sizes_are_settings_too(
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
    plain, folded = json.loads(done.out)["settings"]
    assert (plain["name"], folded["name"]) == ("Q4_0 fold none", "Q4_0 fold awq")
    assert (plain["fold"], folded["fold"], plain["tensor_bytes"]) == (
        "",
        "awq",
        folded["tensor_bytes"],
    )
    assert plain["answers"]["kld"] != folded["answers"]["kld"]
    sized = pareto(*words, "--types", "", "--target-size", "0.26M,0.33M")
    assert sized.code == 0, sized.err
    less, more = json.loads(sized.out)["settings"]
    assert (less["name"], more["name"]) == ("0.26M", "0.33M")
    assert less["tensor_bytes"] < 260_000 < more["tensor_bytes"] < 330_000
    measured = {path.name for path in (home / "cache" / "sensitivity").glob("*.records")}
    alone = (
        "--target-size",
        "0.26M",
        "--threads",
        "1",
        "--dry-run",
        "-o",
        str(tmp_path / "o.gguf"),
    )
    assert llmcli("quantize", str(stories_gguf), *alone).code == 0
    assert measured == {
        path.name for path in (home / "cache" / "sensitivity").glob("*.records")
    }  # it knew all


def test_a_damaged_figure_is_made_anew(
    pareto: Callable[..., Done], stories_gguf: Path, home: Path
) -> None:
    words: tuple[Any, ...] = (stories_gguf, "--seconds", "0", "--types", "Q8_0")
    pareto(*words)
    (file,) = (home / "cache" / "pareto").rglob("*.json")
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "nbytes": "many"}))
    assert "finished before" not in pareto(*words).err
    assert json.loads(file.read_text())["nbytes"] == said["nbytes"]


def test_mistakes_are_one_line(
    pareto: Callable[..., Done], stories_gguf: Path, tmp_path: Path
) -> None:
    for words, code, why in (
        (("--types", "Q9_X"), 1, "Q9_X"),
        (("--types", ","), 2, "nothing to compare"),
        (("--target-size", "some"), 2, "'some' is not a size"),
        (("--fold", "magic"), 1, "unknown fold 'magic'"),
        (("--methods", "magic"), 1, "unknown method 'magic'"),
        (("--imatrix", tmp_path / "none"), 1, "there is no file"),
    ):
        done = pareto(stories_gguf, *words)
        assert (done.code, done.out) == (code, ""), words
        assert why in done.err, words


def test_every_size_is_held_against_what_there_is_before_the_first_is_measured(
    pareto: Callable[..., Done], stories_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(scratch_model, "open_scratch_model", never)
    monkeypatch.setattr(ensure_statistics, "_statistics_file", never)
    done = pareto(stories_gguf, "--target-size", "330K,10K", "--methods", "gptq")
    assert (done.code, done.out) == (1, "")
    assert "no mix of these types makes a file of 10,000 bytes" in done.err


def point(
    name: str,
    nbytes: int,
    kld: float,
    ratio: tuple[float, float] | None = None,
    klds: tuple[float, ...] = (),
) -> ParetoPoint:
    speed = (
        (SpeedComparison("tg32", 1.0, 1.0, (), (), 1.0, ratio[0], ratio[1], 12),) if ratio else ()
    )
    answers = AnswerMetrics(
        "t",
        "h",
        512,
        1,
        255,
        "F32",
        NOTHING,
        NOTHING,
        NOTHING,
        CertifiedEstimate(kld, 0.0),
        kld,
        {},
        kld,
        NOTHING,
        NOTHING,
    )
    return ParetoPoint(
        name, name, "ggml", "", "{}", nbytes, 4.5, answers, 0.0, speed, 0.0, klds or (kld, kld)
    )


def test_a_setting_is_beaten_by_one_that_is_no_larger_and_nearer() -> None:
    small, large, near = point("small", 10, 0.5), point("large", 20, 0.1), point("near", 10, 0.2)
    assert dominated_by([small, large]) == {}
    assert dominated_by([small, large, near]) == {"small": "near"}
    assert dominated_by([large, replace(large, name="twin")]) == {}
    assert dominated_by([large, point("waste", 30, 0.1)]) == {"waste": "large"}


def test_of_one_size_the_nearer_is_better_only_where_the_chunks_support_it() -> None:
    one = point("one", 10, 0.2, klds=(0.1, 0.2, 0.3))
    nearer = point(
        "nearer", 10, 0.19, klds=(0.09, 0.19, 0.289)
    )  # chunks differ far more than the files
    assert dominated_by([one, nearer]) == {"one": "nearer"}
    assert dominated_by([one, point("luck", 10, 0.19, klds=(0.02, 0.3, 0.25))]) == {}
    assert dominated_by([one, point("small luck", 9, 0.19, klds=(0.02, 0.3, 0.25))]) == {
        "one": "small luck"
    }


def test_a_slower_one_beats_nothing_where_the_noise_supports_it() -> None:
    fast, slow = point("fast", 20, 0.2, (1.9, 2.1)), point("slow", 10, 0.1, (0.9, 1.1))
    assert dominated_by([fast, slow]) == {}
    assert dominated_by([fast, point("unsure", 10, 0.1, (1.8, 2.0))]) == {"fast": "unsure"}
