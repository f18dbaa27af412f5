"""`llmcli quantize --method gptq --sequential`: each block is calibrated after the quantized ones
before it.
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
from quant.model_file import read_header
from quant.quantize import plan as plan_module
from quant.quantize import plan as planning
from quant.quantize import write
from quant.quantize.blockwise import BlockwiseModel, TensorGroup, group_tensors
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]
Quantize = Callable[..., Done]
WORDS = (
    "Once there was a bird that sang of rain, and the rain came down on the roofs of the town. " * 6
)
LAYERS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "tiny.gguf", hidden=64, ff=96, layers=LAYERS, tied=True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(WORDS, encoding="utf-8")
    return path


@pytest.fixture
def quantized(llmcli: Llmcli, model: Path, text: Path) -> Quantize:
    """To Q4_0 by gptq, on one thread."""

    def call(out: Path, *words: str) -> Done:
        own = (
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
        return llmcli("quantize", str(model), *own, *words)

    return call


def codes(path: Path) -> dict[str, bytes]:
    raw = path.read_bytes()
    return {
        one.name: raw[one.offset : one.offset + one.nbytes]
        for one in read_header.read_header(path).tensors
    }


def mixed(source: Path, made: Path, names: set[str], out: Path) -> Path:
    """The source with tensors of another file in their places, as the gguf package writes it."""
    reader, other = gguf.GGUFReader(source), gguf.GGUFReader(made)
    writer = gguf.GGUFWriter(out, "llama")
    for key, found in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = found.types[0]
            sub = found.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, found.contents(), kind, sub)
    theirs = {tensor.name: tensor for tensor in other.tensors}
    for tensor in reader.tensors:
        one = theirs[tensor.name] if tensor.name in names else tensor
        writer.add_tensor(one.name, one.data, raw_dtype=one.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_a_blocks_moments_are_those_behind_the_blocks_that_are_quantized(
    quantized: Quantize,
    llmcli: Llmcli,
    model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, np.ndarray] = {}
    make = BlockwiseModel.quantize_group

    def spied(
        self: BlockwiseModel,
        group: TensorGroup,
        seconds: Mapping[str, SecondMoments],
        work: write.WriteRun,
    ) -> Any:
        seen.update({name: second.mean() for name, second in seconds.items()})
        return make(self, group, seconds, work)

    monkeypatch.setattr(BlockwiseModel, "quantize_group", spied)
    out = tmp_path / "out.gguf"
    done = quantized(out, "--sequential", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["methods"] == {"search": 1, "gptq": 7 * LAYERS}  # the head is Q8_0
    assert "are read 3 times" in done.err
    # a file as it was when block 2 was made, and one that was never touched, read by `calibrate`
    first = {name for name in codes(out) if name.startswith(("blk.0.", "blk.1."))}
    half = mixed(model, out, first, tmp_path / "half.gguf")
    found = {}
    for name, path in (("half", half), ("plain", model)):
        own, words = tmp_path / f"{name}.moments", ("--text", str(text), "--ctx", "64", "-t", "1")
        assert (
            llmcli(
                "calibrate", str(path), "-o", str(tmp_path / "s"), "--moments", str(own), *words
            ).code
            == 0
        )
        found[name] = moments.load_moments(own)
    for name in ("blk.2.attn_q.weight", "blk.2.attn_v.weight", "blk.2.ffn_down.weight"):
        want, plain = (found[kind].input_of(name).mean() for kind in ("half", "plain"))
        np.testing.assert_allclose(seen[name], want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
        assert np.linalg.norm(plain - want) > 1e-3 * np.linalg.norm(want)
    whole = found["plain"].input_of("blk.0.ffn_down.weight").mean()
    np.testing.assert_allclose(
        seen["blk.0.ffn_down.weight"], whole, rtol=1e-5, atol=1e-6 * np.abs(whole).max()
    )


def test_the_first_block_has_the_bytes_of_the_plain_method_and_the_others_their_own(
    quantized: Quantize, llmcli: Llmcli, model: Path, text: Path, tmp_path: Path
) -> None:
    sums, one, two = (tmp_path / f"{name}.gguf" for name in ("sums", "one", "two"))
    assert (
        llmcli("calibrate", str(model), "-o", str(sums), "--text", str(text), "--ctx", "64").code
        == 0
    )
    assert quantized(one, "--imatrix", str(sums)).code == 0
    assert quantized(two, "--imatrix", str(sums), "--sequential").code == 0
    plain, behind = codes(one), codes(two)
    same = {name for name in plain if name.startswith("blk.0.")}
    assert {name: behind[name] for name in same} == {name: plain[name] for name in same}
    assert behind["blk.1.ffn_down.weight"] != plain["blk.1.ffn_down.weight"]


def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    quantized: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert quantized(whole, "--sequential").code == 0
    make, run = BlockwiseModel.quantize_group, calibrate.run_calibration

    def stops(here: Callable[..., Any], at: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if at(*args):
                raise KeyboardInterrupt
            return here(*args, **more)

        return call

    # before block 1 is made, its moments being there; in the middle of the pass for block 2; at the
    # last file
    for owner, name, patched in (
        (
            BlockwiseModel,
            "quantize_group",
            stops(make, lambda prefix, group, *_: group.name == "block 1"),
        ),
        (
            calibrate,
            "run_calibration",
            stops(run, lambda wish, *_: "blk.2.attn_q.weight" in (wish.weights or ())),
        ),
        (BlockwiseModel, "merged_plan", stops(BlockwiseModel.merged_plan, lambda prefix: True)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, patched)
            assert quantized(out, "--sequential").code == 130
    assert not out.exists()
    done = quantized(out, "--sequential", "--json")
    assert done.code == 0, done.err
    assert "resuming an earlier run: 0 groups" in done.err
    assert json.loads(done.out)["resumed_tensors"] == len(codes(out))
    assert out.read_bytes() == whole.read_bytes()
    assert not (tmp_path / ".out.gguf.sequential").exists()
    assert "nothing to do" in quantized(out, "--sequential").err


def test_what_goes_before_is_made_first_and_a_tied_embedding_last(tmp_path: Path) -> None:
    for tied, first in ((True, ()), (False, ("token_embd.weight",))):
        source = write.open_gguf(
            tiny_gguf.llama(tmp_path / f"{tied}.gguf", hidden=64, ff=96, layers=12, tied=tied)
        )
        plan = plan_module.plan_quantization(
            source, "Q4_0", method="gptq", expected=ExpectedMoments("x")
        )
        names = list(BlockwiseModel(plan, plan, tmp_path).ordered_groups)
        blocks = [f"block {number}" for number in range(12)]
        assert [group.name for group in names] == [
            *(["embeddings"] if first else []),
            *blocks,
            "other tensors",
        ]
        found = {
            name: tuple(step.weight.name for step in steps)
            for name, steps in group_tensors(plan.steps).items()
        }
        assert found.get("embeddings", ()) == first
        assert sum(map(len, found.values())) == len(plan.steps)


def test_the_file_and_its_certificate_say_so(
    quantized: Quantize, model: Path, text: Path, tmp_path: Path
) -> None:
    out, mix = tmp_path / "out.gguf", tmp_path / "plan.json"
    assert quantized(out, "--sequential", "--plan-out", str(mix)).code == 0
    said = json.loads(str(read_header.read_header(out).metadata[planning.SETTINGS_KEY]))
    assert (said["method"], len(said["sequential"]), "moments" in said) == ("gptq", 32, False)
    assert json.loads(mix.read_text())["steered"]["sequential"] == said["sequential"]
    pending = ExpectedMoments(said["sequential"], (str(text),), 8, 64)
    plan = plan_module.plan_quantization(
        write.open_gguf(model), "Q4_0", method="gptq", expected=pending
    )
    assert plan.settings == json.dumps(
        {**json.loads(plan.settings), "sequential": said["sequential"]}, sort_keys=True
    )
    (one,) = verify.used_statistics(plan)
    assert (one.kind, one.digest, one.texts, one.tokens) == (
        "sequential",
        said["sequential"],
        ("words.txt",),
        512,
    )
    assert len(one.hashes[0]) == 64


def test_a_folder_is_run_from_its_shards_and_folds_go_before(
    llmcli: Llmcli, stories: Path, text: Path, tmp_path: Path
) -> None:
    out, words = (
        tmp_path / "out.gguf",
        ("--sequential", "--calibration", str(text), "--calibration-chunks", "1"),
    )
    text.write_text(WORDS * 6, encoding="utf-8")
    own = shutil.copytree(stories, tmp_path / "stories")
    done = llmcli(
        "quantize",
        str(own),
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
    told = json.loads(done.out)
    assert told["fold"]["kinds"] == ["awq"]
    assert {tensor.type for tensor in read_header.read_header(out).tensors} >= {"Q4_0", "F32"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_run_that_is_only_planned_names_the_method_that_would_do_it(
    quantized: Quantize, tmp_path: Path
) -> None:
    for words in ((), ("--sequential",), ("--fold", "awq")):
        done = quantized(tmp_path / "none.gguf", "--dry-run", "--json", *words)
        assert done.code == 0, done.err
        assert json.loads(done.out)["methods"] == {"search": 1, "gptq": 7 * LAYERS}, done.err


@pytest.mark.parametrize(
    ("words", "why"),
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
def test_wishes_that_make_no_sense_are_told(
    llmcli: Llmcli,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    why: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("Once there was a bird.")
    done = llmcli("quantize", str(model), *words, "-o", str(tmp_path / "out.gguf"))
    assert done.code in (1, 2)
    assert why in done.err
    assert not (tmp_path / "out.gguf").exists()


def test_a_plan_made_by_other_moments_serves(
    quantized: Quantize, llmcli: Llmcli, model: Path, text: Path, tmp_path: Path
) -> None:
    mix = tmp_path / "plan.json"
    assert quantized(tmp_path / "one.gguf", "--plan-out", str(mix), "--dry-run").code == 0
    told = json.loads(mix.read_text())
    mix.write_text(
        json.dumps(
            {**told, "steered": {**told["steered"], "moments": "others", "imatrix": "another"}}
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
    assert llmcli("quantize", str(model), "--plan", str(mix), *words).code == 0
    done = llmcli(
        "quantize",
        str(model),
        "--plan",
        str(mix),
        "--method",
        "ggml",
        "-o",
        str(tmp_path / "three.gguf"),
    )
    assert (done.code, "the plan was made with" in done.err) == (1, True)
