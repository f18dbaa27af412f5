"""`llmcli quantize` collects missing statistics once, with the built-in text."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmcli.workflows.calibration import texts
from llmcli.workflows.calibration.texts import BUILTIN_NAME, CalibrationText
from quant.calibration import imatrix
from quant.model_file import read_header
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

WORDS = (
    "Once there was a bird that sang of rain, and the rain came down on the roofs of the town. " * 9
)


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that ships is a short one."""
    monkeypatch.setattr(texts, "builtin_texts", lambda *_: [CalibrationText(BUILTIN_NAME, WORDS)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=1)


def codes(path: Path) -> list[bytes]:
    """What a file holds behind its header, which names the moments' file."""
    raw = path.read_bytes()
    return [
        raw[one.offset : one.offset + one.nbytes] for one in read_header.read_header(path).tensors
    ]


def test_second_moments_are_those_of_calibrate_and_are_kept(
    llmcli: Callable[..., Done], model: Path, home: Path, tmp_path: Path
) -> None:
    one, two, three = (tmp_path / f"{name}.gguf" for name in ("one", "two", "three"))
    words = ("quantize", str(model), "--q4_0", "--method", "gptq", "--threads", "1", "-o")
    done = llmcli(*words, str(one))
    assert done.code == 0, done.err
    assert "--method gptq needs second moments: collecting from" in done.err
    (kept,) = (home / "cache" / "calibrations").glob("*.moments.gguf")
    again = llmcli(*words, str(two))
    assert "collecting from" not in again.err
    assert str(kept) in again.err
    own, ctx = tmp_path / "own.moments", str(read_header.read_header(model).context_length)
    said = ("-o", str(tmp_path / "s"), "--moments", str(own), "--ctx", ctx, "-t", "1")
    assert llmcli("calibrate", str(model), *said).code == 0
    assert llmcli(*words, str(three), "--moments", str(own)).code == 0
    assert one.read_bytes() == two.read_bytes()
    assert codes(one) == codes(three)
    told = llmcli(*words, str(tmp_path / "none.gguf"), "--dry-run")
    assert (told.code, "would first collect statistics" in told.err) == (0, True)


def test_folds_gather_an_imatrix(
    llmcli: Callable[..., Done], model: Path, home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf"
    done = llmcli(
        "quantize", str(model), "--q4_0", "--fold", "awq", "--threads", "1", "-o", str(out)
    )
    assert done.code == 0, done.err
    assert "--fold awq needs an imatrix: collecting from" in done.err
    assert "quantize.imatrix.file" in read_header.read_header(out).metadata
    assert not list((home / "cache" / "calibrations").glob("*.moments.gguf"))


def test_a_size_and_a_plan_go_by_what_is_gathered_where_nothing_is_written_too(
    llmcli: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    plan, words = (
        str(tmp_path / "plan.json"),
        ("quantize", str(model), "--method", "gptq", "--threads", "1", "--json"),
    )
    words = (*words, "-o", str(tmp_path / "out.gguf"))
    size = ("--target-bpw", "7.5", "--quick")
    planned = llmcli(*words, *size, "--dry-run")
    assert planned.code == 0, planned.err
    assert "--method gptq needs second moments: collecting from" in planned.err
    made = llmcli(*words, *size)
    for key in ("bytes", "methods", "fallbacks"):
        assert json.loads(planned.out)[key] == json.loads(made.out)[key]
    assert llmcli(*words, "-t", "q5_0", "--dry-run", "--plan-out", plan).code == 0
    for more in (("--dry-run",), ()):
        done = llmcli(*words, "--plan", plan, *more)
        assert done.code == 0, done.err


def test_measurements_of_a_model_with_other_folds_steer_nothing(
    llmcli: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    plain, text = model, tmp_path / "words.txt"
    text.write_text(WORDS, encoding="utf-8")
    folded, again, out = (tmp_path / f"{name}.gguf" for name in ("folded", "again", "out"))
    found = {}
    for one in (plain, folded):
        found[one] = one.with_suffix(".moments")
        words = ("--moments", str(found[one]), "--text", str(text), "--ctx", "64", "-t", "1")
        assert (
            llmcli("calibrate", str(one), "-o", str(one.with_suffix(".imatrix")), *words).code == 0
        )
        if one is plain:
            own = ("--moments", str(found[plain]), "--fold", "awq", "--threads", "1")
            assert llmcli("quantize", str(plain), "--q8_0", "-o", str(folded), *own).code == 0
    assert llmcli("quantize", str(folded), "--q5_0", "-o", str(again), "--threads", "1").code == 0
    for source, file, fits in (
        (folded, folded, True),
        (again, folded, True),
        (folded, plain, False),
        (plain, folded, False),
        (again, plain, False),
    ):
        words = (
            "--q4_0",
            "--method",
            "gptq",
            "--moments",
            str(found[file]),
            "-o",
            str(out),
            "--threads",
            "1",
        )
        done = llmcli("quantize", str(source), *words, "--force", "--dry-run")
        assert done.code == (0 if fits else 1), done.err
        assert ("contains the moments of a model with" in done.err) is not fits
        sums = found[file].with_suffix(".imatrix")
        done = llmcli(
            "quantize", str(source), "--q4_k_m", "--imatrix", str(sums), "-o", str(out), "--dry-run"
        )
        assert done.code == (0 if fits else 1), done.err
        assert ("is the imatrix of a model with" in done.err) is not fits
    both = [str(file.with_suffix(".imatrix")) for file in (plain, folded)]
    done = llmcli("calibrate", "--merge", *both, "-o", str(tmp_path / "merged"))
    assert done.code == 1 and "was collected with other folds than" in done.err


def test_what_another_file_gave_is_told_and_one_kind_is_not_taken_for_the_other(
    tmp_path: Path, llmcli: Callable[..., Done]
) -> None:
    model, other = (
        tiny_gguf.llama(tmp_path / f"{seed}.gguf", hidden=64, ff=64, layers=1, seed=seed)
        for seed in (0, 1)
    )
    sums, second, merged = (tmp_path / name for name in ("s", "m", "merged"))
    text = tmp_path / "words.txt"
    text.write_text(WORDS, encoding="utf-8")
    words = ("--text", str(text), "--ctx", "32", "-t", "1")
    assert (
        llmcli("calibrate", str(model), "-o", str(sums), "--moments", str(second), *words).code == 0
    )
    assert llmcli("calibrate", "--merge", str(sums), str(sums), "-o", str(merged)).code == 0
    words = ("--text", str(text), "--ctx", "32", "-t", "1")
    assert llmcli("calibrate", str(other), "-o", str(tmp_path / "t"), *words).code == 0
    for two, apart in ((sums, False), (tmp_path / "t", True)):
        done = llmcli("calibrate", "--merge", str(sums), str(two), "-o", str(tmp_path / "both"))
        assert (done.code, f"{two} was collected from another file than {sums}" in done.err) == (
            0,
            apart,
        )
    out = ("--q4_k_m", "-o", str(tmp_path / "o.gguf"), "--dry-run")
    for flag, file in (("--imatrix", sums), ("--imatrix", merged), ("--moments", second)):
        for source in (model, other):
            done = llmcli("quantize", str(source), flag, str(file), *out)
            assert done.code == 0, done.err
            assert (f"{file} was collected from another file than" in done.err) is (source == other)
    done = llmcli("quantize", str(model), "--imatrix", str(second), *out)
    assert done.code == 1 and f"hint: use --moments {second}" in done.err
    done = llmcli("quantize", str(model), "--moments", str(sums), *out)
    assert done.code == 1 and f"hint: --imatrix {sums}" in done.err


def test_a_checkpoint_is_not_rounded_before_it_is_read(
    llmcli: Callable[..., Done], stories: Path, stories_gguf: Path, tmp_path: Path, home: Path
) -> None:
    text = tmp_path / "words.txt"
    text.write_text(WORDS, encoding="utf-8")
    words = ("--text", str(text), "--ctx", "64", "-t", "1")
    for name, source in (("folder", stories), ("file", stories_gguf)):
        done = llmcli("calibrate", str(source), "-o", str(tmp_path / name), *words)
        assert done.code == 0, done.err
    one, other = (imatrix.load_imatrix(tmp_path / name) for name in ("folder", "file"))
    for name, entry in other.entries.items():
        np.testing.assert_array_equal(one.entries[name].sums(), entry.sums())
    assert list((home / "cache" / "bases").glob("*.gguf")) == []
    out = ("--q4_0", "-o", str(tmp_path / "o.gguf"), "--dry-run")
    for file, source, told in (
        ("folder", stories, False),
        ("file", stories_gguf, False),
        ("file", stories, True),
    ):
        done = llmcli("quantize", str(source), "--imatrix", str(tmp_path / file), *out)
        assert ("was collected from another file than" in done.err) is told


@pytest.mark.parametrize("more", [(), ("--sequential",)])
def test_a_text_that_is_too_short_is_told_before_a_checkpoint_is_copied(
    llmcli: Callable[..., Done],
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
) -> None:
    for copying in (
        "quant.quantize.write.write_model",
        "quant.quantize.blockwise.BlockwiseModel.write_missing",
    ):
        monkeypatch.delattr(copying)
    text = tmp_path / "short.txt"
    text.write_text("Once there was a bird.", encoding="utf-8")
    words = (
        "--q4_0",
        "--method",
        "gptq",
        "--calibration",
        str(text),
        "-o",
        str(tmp_path / "o.gguf"),
        *more,
    )
    done = llmcli("quantize", str(stories), *words, "--threads", "1")
    assert done.code == 1, done.err
    assert "hint: use a longer --calibration text" in done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tensor-type", "nonsense=Q4_K"), "'nonsense' matches no tensor"),
        (("--target-size", "1K"), "no mix of these types makes a file of"),
        (("--plan", "WORDS"), "is no plan file"),
        (("--imatrix", "OTHER"), "is the imatrix of another model"),
        (("-o", "nowhere/out.gguf"), "there is no folder"),
    ],
)
@pytest.mark.parametrize(
    "wanted", [("--method", "gptq"), ("--method", "gptq", "--fold", "awq"), ("--fold", "awq")]
)
def test_what_would_be_refused_is_refused_before_anything_is_gathered(
    flags: tuple[str, str],
    said: str,
    wanted: tuple[str, ...],
    llmcli: Callable[..., Done],
    model: Path,
    tmp_path: Path,
) -> None:
    other, sums, text = tmp_path / "other.gguf", tmp_path / "other.imatrix", tmp_path / "words"
    text.write_text(WORDS)
    tiny_gguf.llama(other, hidden=128, ff=96, layers=1)
    assert (
        llmcli(
            "calibrate", str(other), "-o", str(sums), "-f", str(text), "-c", "32", "-t", "1"
        ).code
        == 0
    )
    value = {"WORDS": str(text), "OTHER": str(sums)}.get(flags[1], flags[1])
    done = llmcli(
        "quantize", str(model), *wanted, "-o", str(tmp_path / "out.gguf"), flags[0], value
    )
    assert (done.code, said in done.err, "collecting from" in done.err) == (1, True, False), (
        done.err
    )


def test_a_text_too_short_to_verify_with_is_refused_before_anything_is_gathered(
    llmcli: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("hi")
    words = (
        "quantize",
        str(model),
        "--method",
        "gptq",
        "-o",
        str(tmp_path / "out.gguf"),
        "--verify",
        "--verify-text",
    )
    done = llmcli(*words, str(short))
    assert (done.code, "has 2 bytes; verification needs 1024 tokens" in done.err) == (1, True), (
        done.err
    )
    assert "collecting from" not in done.err


def test_types_that_are_noise_without_an_imatrix_are_planned_with_the_one_that_is_gathered(
    llmcli: Callable[..., Done], tmp_path: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "wide.gguf", layers=1)
    words = (
        "quantize",
        str(model),
        "-t",
        "IQ2_XXS",
        "-o",
        str(tmp_path / "out.gguf"),
        "--threads",
        "1",
    )
    assert "needs an importance matrix" in llmcli(*words, "--dry-run").err
    for wanted in (("--method", "gptq"), ("--fold", "awq")):
        planned = json.loads(llmcli(*words, *wanted, "--dry-run", "--json").out)
        done = llmcli(*words, *wanted, "--json", "--force")
        assert done.code == 0, done.err
        made = json.loads(done.out)["types"]
        assert {name: (row["tensors"], row["bytes"]) for name, row in planned["types"].items()} == {
            name: (row["tensors"], row["bytes"]) for name, row in made.items()
        }


@pytest.mark.parametrize(
    ("letters", "said"),
    [(50, "fewer rows than columns"), (800, "16 rows per column"), (4000, "")],
)
def test_too_little_text_is_told(
    letters: int, said: str, llmcli: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "words"
    text.write_text((WORDS * 9)[:letters])
    sums, second = str(tmp_path / "sums"), str(tmp_path / "moments")
    words = ("-f", str(text), "-c", "32", "-t", "1", "-o", sums, "--moments", second)
    assert llmcli("calibrate", str(model), *words).code == 0
    out = ("-o", str(tmp_path / "out.gguf"), "--dry-run")
    done = llmcli("quantize", str(model), "--q4_0", "--method", "gptq", "--moments", second, *out)
    assert done.code == 0, done.err
    assert said in done.err
    assert bool(said) == ("have fewer" in done.err)
