"""`llmcli quantize --method gptq --sequential`, which collects the moments of each block with the
blocks before it already quantized.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmcli.workflows.calibration import calibrate
from llmcli.workflows.certification import verify
from quant.calibration import moments
from quant.calibration.expected_moments import ExpectedMoments
from quant.calibration.statistics import SecondMoments
from quant.calibration.text_record import TextRecord
from quant.model_file import read_header
from quant.quantize import write
from quant.quantize.blockwise import BlockwiseModel, TensorGroup, group_tensors
from quant.quantize.plan import SETTINGS_KEY, plan_quantization
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
Quantize = Callable[..., Done]
TEXT = (
    "Once there was a bird that sang of rain, and the rain came down on the roofs of the town. " * 6
)
LAYERS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=LAYERS, tied=True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def quantize(llmcli: Llmcli, model: Path, text: Path) -> Quantize:
    """Return a function that quantizes the model to Q4_0 with gptq on one thread."""

    def call(out: Path, *words: str) -> Done:
        flags = (
            "--q4_0",
            "--method",
            "gptq",
            "--threads",
            "1",
            "--calibration",
            str(text),
            "-o",
            str(out),
        )
        return llmcli("quantize", str(model), *flags, *words)

    return call


def tensor_bytes(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a file by name."""
    raw = path.read_bytes()
    return {
        tensor.name: raw[tensor.offset : tensor.offset + tensor.nbytes]
        for tensor in read_header.read_header(path).tensors
    }


def write_with_tensors_of(source: Path, donor: Path, names: set[str], out: Path) -> Path:
    """Write a copy of `source` whose tensors called `names` are those of another file.

    The gguf package reads and writes the files.
    """
    reader, donor_reader = gguf.GGUFReader(source), gguf.GGUFReader(donor)
    writer = gguf.GGUFWriter(out, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value_type = field.types[0]
            element_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), value_type, element_type)
    donor_tensors = {tensor.name: tensor for tensor in donor_reader.tensors}
    for tensor in reader.tensors:
        chosen = donor_tensors[tensor.name] if tensor.name in names else tensor
        writer.add_tensor(chosen.name, chosen.data, raw_dtype=chosen.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_the_moments_of_a_block_are_collected_after_quantized_blocks(
    quantize: Quantize,
    llmcli: Llmcli,
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_moments: dict[str, np.ndarray] = {}
    quantize_group = BlockwiseModel.quantize_group

    def record_moments(
        self: BlockwiseModel,
        group: TensorGroup,
        moments_by_name: Mapping[str, SecondMoments],
        work: write.WriteRun,
    ) -> Any:
        used_moments.update(
            {name: input_moments.mean() for name, input_moments in moments_by_name.items()}
        )
        return quantize_group(self, group, moments_by_name, work)

    monkeypatch.setattr(BlockwiseModel, "quantize_group", record_moments)
    out = tmp_path / "out.gguf"
    done = quantize(out, "--sequential", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["methods"] == {"search": 1, "gptq": 7 * LAYERS}  # the head is Q8_0
    assert "are read 3 times" in done.err
    # Calibrate a file whose blocks 0 and 1 are quantized, and the original file.
    quantized_names = {name for name in tensor_bytes(out) if name.startswith(("blk.0.", "blk.1."))}
    partly_quantized = write_with_tensors_of(model, out, quantized_names, tmp_path / "half.gguf")
    calibrated = {}
    for path in (partly_quantized, model):
        file, words = path.with_suffix(".moments"), ("--text", str(text), "--ctx", "64", "-t", "1")
        done = llmcli(
            "calibrate", str(path), "-o", str(tmp_path / "s"), "--moments", str(file), *words
        )
        assert done.code == 0, done.err
        calibrated[path] = moments.load_moments(file)
    for name in ("blk.2.attn_q.weight", "blk.2.attn_v.weight", "blk.2.ffn_down.weight"):
        expected, unquantized = (
            calibrated[path].input_of(name).mean() for path in (partly_quantized, model)
        )
        np.testing.assert_allclose(
            used_moments[name], expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()
        )
        assert np.linalg.norm(unquantized - expected) > 1e-3 * np.linalg.norm(expected)
    # Block 0 has no quantized block before it.
    expected = calibrated[model].input_of("blk.0.ffn_down.weight").mean()
    np.testing.assert_allclose(
        used_moments["blk.0.ffn_down.weight"],
        expected,
        rtol=1e-5,
        atol=1e-6 * np.abs(expected).max(),
    )


def test_only_the_first_block_has_the_bytes_of_a_run_without_sequential(
    quantize: Quantize, llmcli: Llmcli, model: Path, text: Path, tmp_path: Path
) -> None:
    sums, plain_out, sequential_out = (tmp_path / f"{name}.gguf" for name in ("sums", "one", "two"))
    assert (
        llmcli("calibrate", str(model), "-o", str(sums), "--text", str(text), "--ctx", "64").code
        == 0
    )
    assert quantize(plain_out, "--imatrix", str(sums)).code == 0
    assert quantize(sequential_out, "--imatrix", str(sums), "--sequential").code == 0
    plain, sequential = tensor_bytes(plain_out), tensor_bytes(sequential_out)
    names = {name for name in plain if name.startswith("blk.0.")}
    assert {name: sequential[name] for name in names} == {name: plain[name] for name in names}
    assert sequential["blk.1.ffn_down.weight"] != plain["blk.1.ffn_down.weight"]


def test_an_interrupted_run_resumes_and_writes_the_same_bytes(
    quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert quantize(uninterrupted, "--sequential").code == 0
    quantize_group, run_calibration = BlockwiseModel.quantize_group, calibrate.run_calibration

    def interrupt(
        function: Callable[..., Any], condition: Callable[..., bool]
    ) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if condition(*args):
                raise KeyboardInterrupt
            return function(*args, **options)

        return call

    # Interrupt before block 1 is quantized, when its moments are collected; then during the
    # calibration for block 2; then before the final file is written.
    for owner, name, replacement in (
        (
            BlockwiseModel,
            "quantize_group",
            interrupt(quantize_group, lambda blockwise, group, *_: group.name == "block 1"),
        ),
        (
            calibrate,
            "run_calibration",
            interrupt(
                run_calibration,
                lambda settings, *_: "blk.2.attn_q.weight" in (settings.weights or ()),
            ),
        ),
        (
            BlockwiseModel,
            "merged_plan",
            interrupt(BlockwiseModel.merged_plan, lambda blockwise: True),
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, replacement)
            assert quantize(out, "--sequential").code == 130
    assert not out.exists()
    done = quantize(out, "--sequential", "--json")
    assert done.code == 0, done.err
    assert "resuming an earlier run: 0 groups" in done.err
    assert json.loads(done.out)["resumed_tensors"] == len(tensor_bytes(out))
    assert out.read_bytes() == uninterrupted.read_bytes()
    assert not (tmp_path / ".out.gguf.sequential").exists()
    assert "nothing to do" in quantize(out, "--sequential").err


def test_embeddings_are_the_first_group_unless_they_are_tied_to_the_head(tmp_path: Path) -> None:
    for tied, embedding_names in ((True, ()), (False, ("token_embd.weight",))):
        source = write.open_gguf(
            tiny_gguf.llama(tmp_path / f"{tied}.gguf", hidden=64, ff=96, layers=12, tied=tied)
        )
        plan = plan_quantization(source, "Q4_0", method="gptq", expected=ExpectedMoments("x"))
        groups = list(BlockwiseModel(plan, plan, tmp_path).ordered_groups)
        blocks = [f"block {number}" for number in range(12)]
        assert [group.name for group in groups] == [
            *(["embeddings"] if embedding_names else []),
            *blocks,
            "other tensors",
        ]
        names_by_group = {
            name: tuple(step.weight.name for step in steps)
            for name, steps in group_tensors(plan.steps).items()
        }
        assert names_by_group.get("embeddings", ()) == embedding_names
        assert sum(map(len, names_by_group.values())) == len(plan.steps)


def test_the_file_and_its_certificate_record_sequential(
    quantize: Quantize, model: Path, text: Path, tmp_path: Path
) -> None:
    out, plan_file = tmp_path / "out.gguf", tmp_path / "plan.json"
    assert quantize(out, "--sequential", "--plan-out", str(plan_file)).code == 0
    settings = json.loads(str(read_header.read_header(out).metadata[SETTINGS_KEY]))
    assert (settings["method"], len(settings["sequential"]), "moments" in settings) == (
        "gptq",
        32,
        False,
    )
    assert json.loads(plan_file.read_text())["steered"]["sequential"] == settings["sequential"]
    pending = ExpectedMoments(settings["sequential"], TextRecord((str(text),)), 8, 64)
    plan = plan_quantization(write.open_gguf(model), "Q4_0", method="gptq", expected=pending)
    assert plan.settings == json.dumps(
        {**json.loads(plan.settings), "sequential": settings["sequential"]}, sort_keys=True
    )
    (statistics,) = verify.used_statistics(plan, ())
    assert (statistics.kind, statistics.digest, statistics.texts, statistics.tokens) == (
        "sequential",
        settings["sequential"],
        ("words.txt",),
        512,
    )
    assert len(statistics.hashes[0]) == 64


def test_a_checkpoint_is_folded_and_then_quantized_block_by_block(
    llmcli: Llmcli, stories: Path, text: Path, tmp_path: Path
) -> None:
    out, words = (
        tmp_path / "out.gguf",
        ("--sequential", "--calibration", str(text), "--calibration-chunks", "1"),
    )
    text.write_text(TEXT * 6, encoding="utf-8")
    checkpoint = shutil.copytree(stories, tmp_path / "stories")
    done = llmcli(
        "quantize",
        str(checkpoint),
        "--q4_0",
        "--method",
        "gptq",
        "--fold",
        "awq",
        *words,
        "--threads",
        "1",
        "-o",
        str(out),
        "--json",
    )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["fold"]["kinds"] == ["awq"]
    assert {tensor.type for tensor in read_header.read_header(out).tensors} >= {"Q4_0", "F32"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_dry_run_counts_the_tensors_of_each_method(quantize: Quantize, tmp_path: Path) -> None:
    for words in ((), ("--sequential",), ("--fold", "awq")):
        done = quantize(tmp_path / "none.gguf", "--dry-run", "--json", *words)
        assert done.code == 0, done.err
        assert json.loads(done.out)["methods"] == {"search": 1, "gptq": 7 * LAYERS}, done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--method", "search", "--sequential"),
            "--sequential needs a method that uses second moments",
        ),
        (
            ("--method", "gptq", "--sequential", "--moments", "m"),
            "pass its text with --calibration FILE",
        ),
        (
            ("--method", "gptq", "--sequential", "--target-bpw", "5"),
            "then --plan FILE --sequential",
        ),
        (("--method", "search", "--calibration", "t"), "--calibration has no effect"),
        (("--method", "gptq", "--sequential", "--calibration", "none.txt"), "cannot read none.txt"),
        (
            ("--method", "gptq", "--sequential", "--calibration", "short.txt"),
            "hint: use a longer --calibration text",
        ),
    ],
)
def test_invalid_flags_are_an_error(
    llmcli: Llmcli,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("Once there was a bird.")
    done = llmcli("quantize", str(model), *words, "-o", str(tmp_path / "out.gguf"))
    assert done.code in (1, 2)
    assert message in done.err
    assert not (tmp_path / "out.gguf").exists()


def test_a_plan_made_with_other_moments_can_be_used(
    quantize: Quantize, llmcli: Llmcli, model: Path, text: Path, tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.json"
    assert quantize(tmp_path / "one.gguf", "--plan-out", str(plan_file), "--dry-run").code == 0
    plan_json = json.loads(plan_file.read_text())
    plan_file.write_text(
        json.dumps(
            {
                **plan_json,
                "steered": {**plan_json["steered"], "moments": "others", "imatrix": "another"},
            }
        )
    )
    words = (
        "--method",
        "gptq",
        "--sequential",
        "--threads",
        "1",
        "--calibration",
        str(text),
        "-o",
        str(tmp_path / "two.gguf"),
        "--dry-run",
    )
    assert llmcli("quantize", str(model), "--plan", str(plan_file), *words).code == 0
    done = llmcli(
        "quantize",
        str(model),
        "--plan",
        str(plan_file),
        "--method",
        "ggml",
        "-o",
        str(tmp_path / "three.gguf"),
    )
    assert (done.code, "the plan was made with" in done.err) == (1, True)
