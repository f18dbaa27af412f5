"""`quantize --verify`: the file is compared with its source; the results are in it and next to it."""

import hashlib
import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmcli import config
from llmcli.bench.statistics.paired_test import Comparison
from llmcli.runtime.binding.model import open_model
from llmcli.ui import UI
from llmcli.workflows.certification import certify
from llmcli.workflows.certification import verify as verifying
from quant import folds
from quant.calibration import imatrix, moments, moments_writer
from quant.calibration.imatrix_collector import ImatrixCollector
from quant.calibration.imatrix_writer import build_imatrix_file
from quant.calibration.moments_writer import MomentSums
from quant.certificate import certificate
from quant.folds import folded_plan
from quant.model_file import read_header
from quant.quantize import plan as plan_module
from quant.quantize import write
from quant.recipes import tensor_types
from quant.recipes.tensor_types import TypeOverrides
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is as if it had been measured."""
    alike = Comparison(1.0, 0.9, 1.1, 0.95, (9.0, 10.0, 11.0), (9.0, 10.0, 11.0))
    monkeypatch.setattr(
        verifying.interleaved, "compare_tests", lambda pairs, design, ui: [alike for _ in pairs]
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chunks of the model's tokens, and a little more."""
    whole = (resources.files("quant") / "texts" / "evaluation.txt").read_text(encoding="utf-8")
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(whole[:2200] + "\n", encoding="utf-8")
    return path


@pytest.fixture
def verify(llmcli: Llmcli, text: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """The document of one quantization that is verified, and what was noted."""

    def call(*words: str | Path) -> tuple[dict[str, Any], str]:
        own = (
            "--verify",
            "--verify-text",
            str(text),
            "--verify-chunks",
            "2",
            "--threads",
            "1",
            "--json",
        )
        done = llmcli("quantize", *map(str, words), *own)
        assert done.code == 0, done.err
        return json.loads(done.out), done.err

    return call


def test_a_folder_becomes_a_file_with_a_certificate(
    verify: Callable[..., Any],
    llmcli: Llmcli,
    stories: Path,
    stories_gguf: Path,
    tmp_path: Path,
    home: Path,
    text: Path,
) -> None:
    out = tmp_path / "small.gguf"
    document, noted = verify(stories, "--q4_0", "-o", out)
    assert "is run from a temporary copy in F32" in noted
    assert list((home / "cache" / "bases").glob("*.gguf")) == []  # gone again
    header = read_header.read_header(out)
    found = certificate.read_certificate(header)
    assert found is not None
    assert certificate.find_mismatches(header, found, all_bytes=True) == ()
    assert document["bytes"] == out.stat().st_size
    assert json.loads((tmp_path / "small.certificate.json").read_text()) == json.loads(
        found.to_json()
    )
    assert document["certificate"]["answers"] == json.loads(found.to_json())["answers"]
    told = llmcli(
        "eval",
        str(out),
        "--base",
        str(stories_gguf),
        "-f",
        str(text),
        "--chunks",
        "2",
        "-t",
        "1",
        "--json",
    )
    other = json.loads(told.out)
    assert found.answers.kld.value == pytest.approx(other["kl_divergence"]["value"], rel=1e-6)
    assert found.answers.same_top.value == other["same_top"]["value"]
    assert found.mix == {kind: count for kind, (count, _) in header.type_totals.items()}
    assert [(one.test, one.quantized, one.pairs) for one in found.speed] == [
        ("pp256", 10.0, 3),
        ("tg32", 10.0, 3),
    ]
    assert str(tmp_path) not in found.to_json()  # no folder of this machine
    with open_model(out) as model:
        assert model.n_vocab == 512


def test_the_page_and_the_markdown_say_the_same(
    verify: Callable[..., Any], stories_gguf: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copy(stories_gguf, tmp_path / "<img src=x>.gguf"))
    out = tmp_path / "small.gguf"
    document, _ = verify(source, "--q5_0", "-o", out)
    page = (tmp_path / "small.certificate.html").read_text()
    titles = {one.text for one in ElementTree.fromstring(page).iter("h2")}
    assert {
        "Divergence",
        "Speed",
        "Bytes",
        "Error of the weights",
        "Every tensor",
        "Certificate",
    } <= titles
    assert not re.search(r"<(img|script|link|a|iframe)|url\((?!#)|@import", page)
    assert not re.search('(src|href)="', page)
    marked = (tmp_path / "small.certificate.md").read_text()
    assert "<img" not in marked
    for words in (page, marked):
        assert f"{document['certificate']['answers']['kld']['value']:.6f}" in words
        assert document["certificate"]["content"]["data"] in words


def test_a_finished_file_is_verified_without_making_it_again(
    verify: Callable[..., Any], llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    out = tmp_path / "small.gguf"
    assert llmcli("quantize", str(stories_gguf), "--q4_0", "-o", str(out)).code == 0
    first, noted = verify(stories_gguf, "--q4_0", "-o", out)
    assert (first["present"], "nothing to do" in noted) == (True, True)
    again, _ = verify(stories_gguf, "--q4_0", "-o", out)
    same = ("answers", "content", "tensors", "settings", "source")
    assert {key: first["certificate"][key] for key in same} == {
        key: again["certificate"][key] for key in same
    }
    done = llmcli("quantize", str(stories_gguf), "--q4_0", "-o", str(out), "--force")
    assert "small.certificate.json belongs to an earlier file" in done.err
    assert certificate.read_certificate(read_header.read_header(out)) is None


def test_shards_are_verified_together(
    verify: Callable[..., Any], stories_gguf: Path, tmp_path: Path
) -> None:
    document, _ = verify(
        stories_gguf, "--q4_0", "-o", tmp_path / "s.gguf", "--split-max-size", "1M", "--pure"
    )
    (name, *_) = document["files"]
    header = read_header.read_header(Path(name))
    found = certificate.read_certificate(header)
    assert found is not None
    assert certificate.find_mismatches(header, found, all_bytes=True) == ()
    assert len(found.tensors) == len(header.tensors)
    assert (tmp_path / "s.certificate.html").exists()


def test_a_folded_file_is_held_against_what_was_there_before(
    stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    plan = plan_module.plan_quantization(write.open_gguf(stories_gguf), "Q8_0")
    folded = folded_plan.fold_plan(plan, folds.randomize(plan.source, 0), "a test")
    out = tmp_path / "folded.gguf"
    write.write_model(folded, out, threads=1)
    found = verifying.verify(
        folded, out, verifying.VerifyRequest(text, 2, 1), config.load_config(), UI()
    )
    assert found.folds == (f"a test {folded.source.fold_digest}",)
    assert (found.source.types, found.source.fingerprint) == (("F32",), plan.source.fingerprint)
    assert 0 < found.answers.kld.value < 0.01
    assert (
        max(one.error or 0 for one in found.tensors) < 0.02
    )  # against the folded weights, not those before
    assert certificate.read_certificate(read_header.read_header(out)) == found


def test_an_interrupted_verification_leaves_the_finished_file(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "small.gguf"
    words = (
        "quantize",
        str(stories_gguf),
        "--q4_0",
        "-o",
        str(out),
        "--verify",
        "--threads",
        "1",
        "--verify-text",
    )

    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(verifying, "measure_speed", stop)
        assert llmcli(*words, str(text)).code == 130
    assert certificate.read_certificate(read_header.read_header(out)) is None
    done = llmcli(*words, str(text))
    assert done.code == 0
    assert "chunks were computed before" in done.err
    assert certificate.read_certificate(read_header.read_header(out)) is not None
    assert "mean KLD" in done.out


def test_figures_of_the_calibration_text_are_said_to_flatter(
    verify: Callable[..., Any], stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    matrix = tmp_path / "imatrix.gguf"
    writer = gguf.GGUFWriter(matrix, "imatrix")
    writer.add_array("imatrix.datasets", [str(text)])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.linspace(1, 2, 64, dtype=np.float32)[None])
    writer.add_tensor("blk.0.attn_q.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    document, noted = verify(
        stories_gguf, "--q4_0", "-o", tmp_path / "small.gguf", "--imatrix", matrix
    )
    assert "some.txt was also used to quantize the file" in noted
    found = document["certificate"]
    assert found["answers"]["calibrated"] is True
    (steered,) = found["steering"]
    assert (steered["texts"], steered["tokens"]) == (["some.txt"], 512)
    assert steered["hashes"] == [found["answers"]["text_sha256"]]
    assert [one["name"] for one in found["tensors"] if one["weighted"]] == ["blk.0.attn_q.weight"]
    os.utime(matrix, (1, 1))  # what stands there now may be another text than was read
    document, _ = verify(stories_gguf, "--q4_0", "-o", tmp_path / "small.gguf", "--imatrix", matrix)
    (steered,) = document["certificate"]["steering"]
    assert (steered["texts"], steered["hashes"]) == (["some.txt"], [""])


def test_what_another_method_did_is_told(
    verify: Callable[..., Any], llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    rows, out = np.random.default_rng(0).normal(size=(80, 64)), tmp_path / "small.gguf"
    file = moments_writer.write_moments(
        tmp_path / "moments.gguf", [(["blk.0.attn_q.weight"], MomentSums.from_rows(rows))]
    )
    document, _ = verify(stories_gguf, "--q4_0", "-o", out, "--method", "gptq", "--moments", file)
    methods = document["certificate"]["methods"]
    assert methods == document["methods"]
    assert methods["gptq"] == 1 < methods["search"]
    assert f"method gptq ({methods['search']} tensors by search)" in llmcli("show", str(out)).out


def test_moments_that_chose_folds_are_named_whatever_the_method(
    stories_gguf: Path, tmp_path: Path
) -> None:
    source = write.open_gguf(stories_gguf)
    rows = np.random.default_rng(0).normal(size=(80, 64))
    file = moments_writer.write_moments(
        tmp_path / "moments.gguf", [(["blk.0.attn_q.weight"], MomentSums.from_rows(rows))]
    )
    matrix = tmp_path / "imatrix.gguf"
    sums = ImatrixCollector()
    sums.sums["blk.0.attn_q.weight"], sums.counts["blk.0.attn_q.weight"] = (
        np.ones((1, 64)),
        np.ones(1),
    )
    matrix.write_bytes(b"".join(build_imatrix_file(sums.sums, sums.counts, ["a"], 1, 512)))
    plan = plan_module.plan_quantization(
        source, "Q4_0", imatrix=imatrix.load_imatrix(matrix), moments=moments.load_moments(file)
    )
    assert [one.kind for one in verifying.used_statistics(plan)] == ["imatrix"]
    folded = folded_plan.fold_plan(plan, folds.randomize(source, 0), "a test")
    assert [one.kind for one in verifying.used_statistics(folded)] == ["imatrix", "moments"]


def test_a_text_that_types_were_chosen_by_is_said_to_flatter(
    stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    source = write.open_gguf(stories_gguf)
    present = [(one.name, one.shape, one.type) for one in source.weights]
    types = {
        name: "F16" if shape[0] % 32 else "Q8_0" if name.endswith("_q.weight") else "Q4_0"
        for name, shape, _ in tensor_types.quantizable_tensors(present, source.facts)
    }
    plan = plan_module.plan_quantization(source, "Q4_0", TypeOverrides(mix=types))
    out = tmp_path / "mixed.gguf"
    report = write.write_model(plan, out, threads=1)
    digest = hashlib.sha256(text.read_text().removesuffix("\n").encode()).hexdigest()[:32]
    told = {"allocation": {"text": digest, "chunks": 4, "held_out_chunks": 4, "quick": False}}
    made = certify.certify(
        plan, out, report, verifying.VerifyRequest(text, 2, 1), told, config.load_config(), UI()
    )
    assert made is not None
    found = made.certificate
    (steered,) = found.steering
    assert (steered.kind, steered.hashes, steered.chunks, found.answers.calibrated) == (
        "mix",
        (digest,),
        8,
        True,
    )
    assert types.items() <= {one.name: one.type for one in found.tensors}.items()


def test_mistakes_are_one_line_before_anything_is_made(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "small.gguf"
    mute = tiny_gguf.llama(tmp_path / "mute.gguf", hidden=64, ff=64, layers=1)
    raw = mute.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.takens")
    mute.write_bytes(raw)
    text = tmp_path / "short.txt"
    text.write_text("Once upon a time")
    for words, code, why in (
        ((str(stories_gguf), "--verify-chunks", "3"), 2, "--verify-chunks needs --verify"),
        (
            (str(stories_gguf), "--verify", "--verify-text", str(tmp_path / "none")),
            1,
            "cannot read",
        ),
        ((str(stories_gguf), "--verify", "--verify-text", str(text)), 1, "short.txt has 16 bytes"),
        ((str(mute), "--verify"), 1, "has no vocabulary"),
    ):
        done = llmcli("quantize", *words, "--q8_0", "-o", str(out))
        assert (done.code, done.out) == (code, ""), words
        assert why in done.err, words
    assert not out.exists()
    text.write_text("Once upon a time " * 100)  # told when the file is there, which stays
    done = llmcli(
        "quantize",
        str(stories_gguf),
        "--q8_0",
        "-o",
        str(out),
        "--verify",
        "--verify-text",
        str(text),
    )
    assert (done.code, "short.txt has" in done.err) == (1, True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10))
    done = llmcli(
        "quantize", str(stories_gguf), "--q4_0", "-o", str(tmp_path / "other.gguf"), "--verify"
    )
    assert (done.code, "has 10 bytes free" in done.err) == (1, True)
    assert not (tmp_path / "other.gguf").exists()
