"""`llmcli quantize` collects missing statistics once, with the built-in text, and checks those that
it is given.
"""

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

TEXT = (
    "Once there was a bird that sang of rain, and the rain came down on the roofs of the town. " * 9
)


@pytest.fixture(autouse=True)
def short_builtin_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the built-in calibration text by a short one."""
    monkeypatch.setattr(texts, "builtin_texts", lambda *_: [CalibrationText(BUILTIN_NAME, TEXT)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=1)


def tensor_bytes(path: Path) -> list[bytes]:
    """Return the bytes of each tensor of a file.

    The header is left out, because it names the moments file.
    """
    raw = path.read_bytes()
    return [
        raw[tensor.offset : tensor.offset + tensor.nbytes]
        for tensor in read_header.read_header(path).tensors
    ]


def test_collected_moments_equal_those_of_calibrate_and_are_reused(
    llmcli: Callable[..., Done], model: Path, home: Path, tmp_path: Path
) -> None:
    first_out, second_out, third_out = (
        tmp_path / f"{name}.gguf" for name in ("one", "two", "three")
    )
    words = ("quantize", str(model), "--q4_0", "--method", "gptq", "--threads", "1", "-o")
    done = llmcli(*words, str(first_out))
    assert done.code == 0, done.err
    assert "--method gptq needs second moments: collecting from" in done.err
    (collected_file,) = (home / "cache" / "calibrations").glob("*.moments.gguf")
    second_run = llmcli(*words, str(second_out))
    assert "collecting from" not in second_run.err
    assert str(collected_file) in second_run.err
    own_moments, ctx = tmp_path / "own.moments", str(read_header.read_header(model).context_length)
    flags = ("-o", str(tmp_path / "s"), "--moments", str(own_moments), "--ctx", ctx, "-t", "1")
    assert llmcli("calibrate", str(model), *flags).code == 0
    assert llmcli(*words, str(third_out), "--moments", str(own_moments)).code == 0
    assert first_out.read_bytes() == second_out.read_bytes()
    assert tensor_bytes(first_out) == tensor_bytes(third_out)
    dry_run = llmcli(*words, str(tmp_path / "none.gguf"), "--dry-run")
    assert (dry_run.code, "would first collect statistics" in dry_run.err) == (0, True)


def test_folds_collect_only_an_imatrix(
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


def test_a_dry_run_of_a_size_or_plan_uses_collected_statistics(
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
    written = llmcli(*words, *size)
    for key in ("bytes", "methods", "fallbacks"):
        assert json.loads(planned.out)[key] == json.loads(written.out)[key]
    assert llmcli(*words, "-t", "q5_0", "--dry-run", "--plan-out", plan).code == 0
    for dry_run_flag in (("--dry-run",), ()):
        done = llmcli(*words, "--plan", plan, *dry_run_flag)
        assert done.code == 0, done.err


def test_statistics_of_a_model_with_other_folds_are_refused(
    llmcli: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    unfolded, text = model, tmp_path / "words.txt"
    text.write_text(TEXT, encoding="utf-8")
    folded, requantized, out = (tmp_path / f"{name}.gguf" for name in ("folded", "again", "out"))
    moments_files = {}
    for source in (unfolded, folded):
        moments_files[source] = source.with_suffix(".moments")
        words = (
            "--moments",
            str(moments_files[source]),
            "--text",
            str(text),
            "--ctx",
            "64",
            "-t",
            "1",
        )
        assert (
            llmcli("calibrate", str(source), "-o", str(source.with_suffix(".imatrix")), *words).code
            == 0
        )
        if source is unfolded:
            flags = ("--moments", str(moments_files[unfolded]), "--fold", "awq", "--threads", "1")
            assert llmcli("quantize", str(unfolded), "--q8_0", "-o", str(folded), *flags).code == 0
    assert (
        llmcli("quantize", str(folded), "--q5_0", "-o", str(requantized), "--threads", "1").code
        == 0
    )
    for source, calibrated, matches in (
        (folded, folded, True),
        (requantized, folded, True),
        (folded, unfolded, False),
        (unfolded, folded, False),
        (requantized, unfolded, False),
    ):
        words = (
            "--q4_0",
            "--method",
            "gptq",
            "--moments",
            str(moments_files[calibrated]),
            "-o",
            str(out),
            "--threads",
            "1",
        )
        done = llmcli("quantize", str(source), *words, "--force", "--dry-run")
        assert done.code == (0 if matches else 1), done.err
        assert ("contains the moments of a model with" in done.err) is not matches
        imatrix_file = moments_files[calibrated].with_suffix(".imatrix")
        done = llmcli(
            "quantize",
            str(source),
            "--q4_k_m",
            "--imatrix",
            str(imatrix_file),
            "-o",
            str(out),
            "--dry-run",
        )
        assert done.code == (0 if matches else 1), done.err
        assert ("is the imatrix of a model with" in done.err) is not matches
    imatrix_files = [str(model_file.with_suffix(".imatrix")) for model_file in (unfolded, folded)]
    done = llmcli("calibrate", "--merge", *imatrix_files, "-o", str(tmp_path / "merged"))
    assert done.code == 1 and "was collected with other folds than" in done.err


def test_statistics_of_another_file_are_a_warning_and_a_wrong_kind_is_an_error(
    tmp_path: Path, llmcli: Callable[..., Done]
) -> None:
    model, other_model = (
        tiny_gguf.llama(tmp_path / f"{seed}.gguf", hidden=64, ff=64, layers=1, seed=seed)
        for seed in (0, 1)
    )
    imatrix_file, moments_file, merged = (tmp_path / name for name in ("s", "m", "merged"))
    text = tmp_path / "words.txt"
    text.write_text(TEXT, encoding="utf-8")
    words = ("--text", str(text), "--ctx", "32", "-t", "1")
    assert (
        llmcli(
            "calibrate", str(model), "-o", str(imatrix_file), "--moments", str(moments_file), *words
        ).code
        == 0
    )
    assert (
        llmcli("calibrate", "--merge", str(imatrix_file), str(imatrix_file), "-o", str(merged)).code
        == 0
    )
    words = ("--text", str(text), "--ctx", "32", "-t", "1")
    assert llmcli("calibrate", str(other_model), "-o", str(tmp_path / "t"), *words).code == 0
    for second_file, warns in ((imatrix_file, False), (tmp_path / "t", True)):
        done = llmcli(
            "calibrate",
            "--merge",
            str(imatrix_file),
            str(second_file),
            "-o",
            str(tmp_path / "both"),
        )
        assert (
            done.code,
            f"{second_file} was collected from another file than {imatrix_file}" in done.err,
        ) == (
            0,
            warns,
        )
    out = ("--q4_k_m", "-o", str(tmp_path / "o.gguf"), "--dry-run")
    for flag, file in (
        ("--imatrix", imatrix_file),
        ("--imatrix", merged),
        ("--moments", moments_file),
    ):
        for source in (model, other_model):
            done = llmcli("quantize", str(source), flag, str(file), *out)
            assert done.code == 0, done.err
            assert (f"{file} was collected from another file than" in done.err) is (
                source == other_model
            )
    done = llmcli("quantize", str(model), "--imatrix", str(moments_file), *out)
    assert done.code == 1 and f"hint: use --moments {moments_file}" in done.err
    done = llmcli("quantize", str(model), "--moments", str(imatrix_file), *out)
    assert done.code == 1 and f"hint: --imatrix {imatrix_file}" in done.err


def test_calibration_of_a_checkpoint_equals_that_of_its_f32_file(
    llmcli: Callable[..., Done], stories: Path, stories_gguf: Path, tmp_path: Path, home: Path
) -> None:
    text = tmp_path / "words.txt"
    text.write_text(TEXT, encoding="utf-8")
    words = ("--text", str(text), "--ctx", "64", "-t", "1")
    for name, source in (("folder", stories), ("file", stories_gguf)):
        done = llmcli("calibrate", str(source), "-o", str(tmp_path / name), *words)
        assert done.code == 0, done.err
    of_checkpoint, of_file = (imatrix.load_imatrix(tmp_path / name) for name in ("folder", "file"))
    for name, entry in of_file.entries.items():
        np.testing.assert_array_equal(of_checkpoint.entries[name].sums(), entry.sums())
    assert list((home / "cache" / "bases").glob("*.gguf")) == []
    out = ("--q4_0", "-o", str(tmp_path / "o.gguf"), "--dry-run")
    for file, source, warns in (
        ("folder", stories, False),
        ("file", stories_gguf, False),
        ("file", stories, True),
    ):
        done = llmcli("quantize", str(source), "--imatrix", str(tmp_path / file), *out)
        assert ("was collected from another file than" in done.err) is warns


@pytest.mark.parametrize("flags", [(), ("--sequential",)])
def test_a_text_that_is_too_short_is_an_error_before_the_checkpoint_is_copied(
    llmcli: Callable[..., Done],
    stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    for copy_function in (
        "quant.quantize.write.write_model",
        "quant.quantize.blockwise.BlockwiseModel.write_missing",
    ):
        monkeypatch.delattr(copy_function)
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
        *flags,
    )
    done = llmcli("quantize", str(stories), *words, "--threads", "1")
    assert done.code == 1, done.err
    assert "hint: use a longer --calibration text" in done.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-type", "nonsense=Q4_K"), "'nonsense' matches no tensor"),
        (("--target-size", "1K"), "no mix of these types makes a file of"),
        (("--plan", "WORDS"), "is no plan file"),
        (("--imatrix", "OTHER"), "is the imatrix of another model"),
        (("-o", "nowhere/out.gguf"), "there is no folder"),
    ],
)
@pytest.mark.parametrize(
    "method_flags", [("--method", "gptq"), ("--method", "gptq", "--fold", "awq"), ("--fold", "awq")]
)
def test_invalid_arguments_are_an_error_before_anything_is_collected(
    flags: tuple[str, str],
    message: str,
    method_flags: tuple[str, ...],
    llmcli: Callable[..., Done],
    model: Path,
    tmp_path: Path,
) -> None:
    other_model, other_imatrix, text = (
        tmp_path / "other.gguf",
        tmp_path / "other.imatrix",
        tmp_path / "words",
    )
    text.write_text(TEXT)
    tiny_gguf.llama(other_model, hidden=128, ff=96, layers=1)
    assert (
        llmcli(
            "calibrate",
            str(other_model),
            "-o",
            str(other_imatrix),
            "-f",
            str(text),
            "-c",
            "32",
            "-t",
            "1",
        ).code
        == 0
    )
    value = {"WORDS": str(text), "OTHER": str(other_imatrix)}.get(flags[1], flags[1])
    done = llmcli(
        "quantize", str(model), *method_flags, "-o", str(tmp_path / "out.gguf"), flags[0], value
    )
    assert (done.code, message in done.err, "collecting from" in done.err) == (1, True, False), (
        done.err
    )


def test_a_verify_text_that_is_too_short_is_an_error_before_anything_is_collected(
    llmcli: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("hi")
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
    done = llmcli(*words, str(text))
    assert (done.code, "has 2 bytes; verification needs 1024 tokens" in done.err) == (1, True), (
        done.err
    )
    assert "collecting from" not in done.err


def test_types_that_need_an_imatrix_are_planned_with_the_collected_one(
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
    for method_flags in (("--method", "gptq"), ("--fold", "awq")):
        planned = json.loads(llmcli(*words, *method_flags, "--dry-run", "--json").out)
        done = llmcli(*words, *method_flags, "--json", "--force")
        assert done.code == 0, done.err
        written_types = json.loads(done.out)["types"]
        assert {name: (row["tensors"], row["bytes"]) for name, row in planned["types"].items()} == {
            name: (row["tensors"], row["bytes"]) for name, row in written_types.items()
        }


@pytest.mark.parametrize(
    ("characters", "message"),
    [(50, "fewer rows than columns"), (800, "16 rows per column"), (4000, "")],
)
def test_too_few_rows_of_statistics_are_a_warning(
    characters: int, message: str, llmcli: Callable[..., Done], model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "words"
    text.write_text((TEXT * 9)[:characters])
    imatrix_file, moments_file = str(tmp_path / "sums"), str(tmp_path / "moments")
    words = ("-f", str(text), "-c", "32", "-t", "1", "-o", imatrix_file, "--moments", moments_file)
    assert llmcli("calibrate", str(model), *words).code == 0
    out = ("-o", str(tmp_path / "out.gguf"), "--dry-run")
    done = llmcli(
        "quantize", str(model), "--q4_0", "--method", "gptq", "--moments", moments_file, *out
    )
    assert done.code == 0, done.err
    assert message in done.err
    assert bool(message) == ("have fewer" in done.err)
