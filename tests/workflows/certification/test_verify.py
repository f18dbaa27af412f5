"""`quantize --verify`: the file is compared with its source, and the results are written into the
file and next to it.
"""

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
from llmcli.workflows.calibration import texts
from llmcli.workflows.certification import certify, verify
from quant import folds
from quant.calibration import imatrix, moments, moments_writer
from quant.calibration.imatrix_collector import ImatrixCollector
from quant.calibration.imatrix_writer import build_imatrix_file
from quant.calibration.moments_writer import MomentSums
from quant.calibration.text_overlap import sample_windows
from quant.calibration.text_record import TextRecord
from quant.certificate import certificate
from quant.folds import folded_plan
from quant.model_file import read_header
from quant.quantize import write
from quant.quantize.plan import Plan, plan_quantization
from quant.recipes import tensor_types
from quant.recipes.tensor_types import TypeOverrides
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture(autouse=True)
def fake_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the speed measurement: both files run at 10 tokens per second."""
    comparison = Comparison(1.0, 0.9, 1.1, 0.95, (9.0, 10.0, 11.0), (9.0, 10.0, 11.0))
    monkeypatch.setattr(
        verify.interleaved, "compare_tests", lambda pairs, design, ui: [comparison for _ in pairs]
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of two chunks of 512 tokens and a few more."""
    evaluation_text = (resources.files("quant") / "texts" / "evaluation.txt").read_text(
        encoding="utf-8"
    )
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text(evaluation_text[:2200] + "\n", encoding="utf-8")
    return path


@pytest.fixture
def quantize_and_verify(llmcli: Llmcli, text: Path) -> Callable[..., tuple[dict[str, Any], str]]:
    """Return a function that runs `quantize --verify` on two chunks, and returns its JSON and
    stderr.
    """

    def call(*words: str | Path) -> tuple[dict[str, Any], str]:
        flags = (
            "--verify",
            "--verify-text",
            str(text),
            "--verify-chunks",
            "2",
            "--threads",
            "1",
            "--json",
        )
        done = llmcli("quantize", *map(str, words), *flags)
        assert done.code == 0, done.err
        return json.loads(done.out), done.err

    return call


def test_a_checkpoint_becomes_a_file_with_a_certificate(
    quantize_and_verify: Callable[..., Any],
    llmcli: Llmcli,
    stories: Path,
    stories_gguf: Path,
    tmp_path: Path,
    home: Path,
    text: Path,
) -> None:
    out = tmp_path / "small.gguf"
    document, err = quantize_and_verify(stories, "--q4_0", "-o", out)
    assert "is run from a temporary copy in F32" in err
    assert list((home / "cache" / "bases").glob("*.gguf")) == []  # the copy is deleted
    header = read_header.read_header(out)
    embedded = certificate.read_certificate(header)
    assert embedded is not None
    assert certificate.find_mismatches(header, embedded, all_bytes=True) == ()
    assert document["bytes"] == out.stat().st_size
    assert json.loads((tmp_path / "small.certificate.json").read_text()) == json.loads(
        embedded.to_json()
    )
    assert document["certificate"]["answers"] == json.loads(embedded.to_json())["answers"]
    done = llmcli(
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
    eval_document = json.loads(done.out)
    assert embedded.answers.kld.value == pytest.approx(
        eval_document["kl_divergence"]["value"], rel=1e-6
    )
    assert embedded.answers.same_top.value == eval_document["same_top"]["value"]
    assert embedded.mix == {
        type_name: count for type_name, (count, _) in header.type_totals.items()
    }
    assert [(speed.test, speed.quantized, speed.pairs) for speed in embedded.speed] == [
        ("pp256", 10.0, 3),
        ("tg32", 10.0, 3),
    ]
    assert str(tmp_path) not in embedded.to_json()  # no path of this machine
    with open_model(out) as model:
        assert model.n_vocab == 512


def test_the_html_and_markdown_reports_agree_with_the_certificate(
    quantize_and_verify: Callable[..., Any], stories_gguf: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copy(stories_gguf, tmp_path / "<img src=x>.gguf"))
    out = tmp_path / "small.gguf"
    document, _ = quantize_and_verify(source, "--q5_0", "-o", out)
    page = (tmp_path / "small.certificate.html").read_text()
    titles = {heading.text for heading in ElementTree.fromstring(page).iter("h2")}
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
    markdown = (tmp_path / "small.certificate.md").read_text()
    assert "<img" not in markdown
    for report in (page, markdown):
        assert f"{document['certificate']['answers']['kld']['value']:.6f}" in report
        assert document["certificate"]["content"]["data"] in report


def test_a_finished_file_is_verified_without_writing_it_again(
    quantize_and_verify: Callable[..., Any], llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    out = tmp_path / "small.gguf"
    assert llmcli("quantize", str(stories_gguf), "--q4_0", "-o", str(out)).code == 0
    first, err = quantize_and_verify(stories_gguf, "--q4_0", "-o", out)
    assert (first["present"], "nothing to do" in err) == (True, True)
    second, _ = quantize_and_verify(stories_gguf, "--q4_0", "-o", out)
    keys = ("answers", "content", "tensors", "settings", "source")
    assert {key: first["certificate"][key] for key in keys} == {
        key: second["certificate"][key] for key in keys
    }
    done = llmcli("quantize", str(stories_gguf), "--q4_0", "-o", str(out), "--force")
    assert "small.certificate.json belongs to an earlier file" in done.err
    assert certificate.read_certificate(read_header.read_header(out)) is None


def test_shards_have_one_certificate(
    quantize_and_verify: Callable[..., Any], stories_gguf: Path, tmp_path: Path
) -> None:
    document, _ = quantize_and_verify(
        stories_gguf, "--q4_0", "-o", tmp_path / "s.gguf", "--split-max-size", "1M", "--pure"
    )
    (name, *_) = document["files"]
    header = read_header.read_header(Path(name))
    embedded = certificate.read_certificate(header)
    assert embedded is not None
    assert certificate.find_mismatches(header, embedded, all_bytes=True) == ()
    assert len(embedded.tensors) == len(header.tensors)
    assert (tmp_path / "s.certificate.html").exists()


def test_a_folded_file_is_compared_with_the_source_before_folding(
    stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    plan = plan_quantization(write.open_gguf(stories_gguf), "Q8_0")
    folded = folded_plan.fold_plan(plan, folds.randomize(plan.source, 0), "a test")
    out = tmp_path / "folded.gguf"
    write.write_model(folded, out, threads=1)
    result = verify.verify(
        folded, out, verify.VerifyRequest(text, 2, 1), config.load_config(), UI()
    )
    assert result.folds == (f"a test {folded.source.fold_digest}",)
    assert (result.source.types, result.source.fingerprint) == (("F32",), plan.source.fingerprint)
    assert 0 < result.answers.kld.value < 0.01
    # The errors of the tensors are relative to the folded weights.
    assert max(tensor.error or 0 for tensor in result.tensors) < 0.02
    assert certificate.read_certificate(read_header.read_header(out)) == result


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

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(verify, "measure_speed", stop)
        assert llmcli(*words, str(text)).code == 130
    assert certificate.read_certificate(read_header.read_header(out)) is None
    done = llmcli(*words, str(text))
    assert done.code == 0
    assert "chunks were computed before" in done.err
    assert certificate.read_certificate(read_header.read_header(out)) is not None
    assert "mean KLD" in done.out


def test_verifying_with_the_calibration_text_is_a_warning(
    quantize_and_verify: Callable[..., Any], stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    imatrix_file = tmp_path / "imatrix.gguf"
    writer = gguf.GGUFWriter(imatrix_file, "imatrix")
    writer.add_array("imatrix.datasets", [str(text)])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.linspace(1, 2, 64, dtype=np.float32)[None])
    writer.add_tensor("blk.0.attn_q.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    document, err = quantize_and_verify(
        stories_gguf, "--q4_0", "-o", tmp_path / "small.gguf", "--imatrix", imatrix_file
    )
    assert "some.txt was also used to quantize the file" in err
    written = document["certificate"]
    assert written["answers"]["calibrated"] is True
    (statistics,) = written["steering"]
    assert (statistics["texts"], statistics["tokens"]) == (["some.txt"], 512)
    assert statistics["hashes"] == [written["answers"]["text_sha256"]]
    assert [tensor["name"] for tensor in written["tensors"] if tensor["weighted"]] == [
        "blk.0.attn_q.weight"
    ]
    # An imatrix older than the text: the text may have changed since, so it has no hash.
    os.utime(imatrix_file, (1, 1))
    document, _ = quantize_and_verify(
        stories_gguf, "--q4_0", "-o", tmp_path / "small.gguf", "--imatrix", imatrix_file
    )
    (statistics,) = document["certificate"]["steering"]
    assert (statistics["texts"], statistics["hashes"]) == (["some.txt"], [""])


@pytest.mark.parametrize("share", [0, 0.1, 0.5])
def test_a_part_of_the_evaluation_text_in_the_calibration_text_is_found(
    quantize_and_verify: Callable[..., Any],
    stories_gguf: Path,
    tmp_path: Path,
    text: Path,
    share: float,
) -> None:
    """The file of the calibration text need not exist any more: the statistics have a sample."""
    content = text.read_text(encoding="utf-8")
    windows = sample_windows(["Other words. " * 50 + content[: round(len(content) * share)]])
    collector = ImatrixCollector()
    collector.sums["blk.0.attn_q.weight"] = np.ones((1, 64))
    collector.counts["blk.0.attn_q.weight"] = np.ones(1)
    imatrix_file = tmp_path / "imatrix.gguf"
    record = TextRecord(("gone.txt",), ("prose", "code"), windows)
    imatrix_file.write_bytes(
        b"".join(build_imatrix_file(collector.sums, collector.counts, record, 1, 512))
    )
    document, err = quantize_and_verify(
        stories_gguf, "--q4_0", "-o", tmp_path / "small.gguf", "--imatrix", imatrix_file
    )
    written = document["certificate"]
    (statistics,) = written["steering"]
    assert statistics["overlap"] == pytest.approx(share, abs=0.03)
    assert statistics["kinds"] == ["prose", "code"]
    assert written["answers"]["calibrated"] is bool(share)
    assert bool(re.search(r"\d+% of .*some\.txt was also used to quantize", err)) is bool(share)


def test_the_methods_of_all_tensors_are_counted(
    quantize_and_verify: Callable[..., Any], llmcli: Llmcli, stories_gguf: Path, tmp_path: Path
) -> None:
    rows, out = np.random.default_rng(0).normal(size=(80, 64)), tmp_path / "small.gguf"
    file = moments_writer.write_moments(
        tmp_path / "moments.gguf", [(["blk.0.attn_q.weight"], MomentSums.from_rows(rows))]
    )
    document, _ = quantize_and_verify(
        stories_gguf, "--q4_0", "-o", out, "--method", "gptq", "--moments", file
    )
    methods = document["certificate"]["methods"]
    assert methods == document["methods"]
    assert methods["gptq"] == 1 < methods["search"]
    assert f"method gptq ({methods['search']} tensors by search)" in llmcli("show", str(out)).out


def test_moments_that_chose_folds_are_listed_for_every_method(
    stories_gguf: Path, tmp_path: Path
) -> None:
    source = write.open_gguf(stories_gguf)
    rows = np.random.default_rng(0).normal(size=(80, 64))
    file = moments_writer.write_moments(
        tmp_path / "moments.gguf", [(["blk.0.attn_q.weight"], MomentSums.from_rows(rows))]
    )
    imatrix_file = tmp_path / "imatrix.gguf"
    collector = ImatrixCollector()
    collector.sums["blk.0.attn_q.weight"], collector.counts["blk.0.attn_q.weight"] = (
        np.ones((1, 64)),
        np.ones(1),
    )
    imatrix_file.write_bytes(
        b"".join(build_imatrix_file(collector.sums, collector.counts, TextRecord(("a",)), 1, 512))
    )
    plan = plan_quantization(
        source,
        "Q4_0",
        imatrix=imatrix.load_imatrix(imatrix_file),
        moments=moments.load_moments(file),
    )
    assert [statistics.kind for statistics in verify.used_statistics(plan, ())] == ["imatrix"]
    folded = folded_plan.fold_plan(plan, folds.randomize(source, 0), "a test")
    assert [statistics.kind for statistics in verify.used_statistics(folded, ())] == [
        "imatrix",
        "moments",
    ]


def mixed_plan(stories_gguf: Path) -> Plan:
    """Return a plan with a mix of types, as a target size or a plan file gives one."""
    source = write.open_gguf(stories_gguf)
    present = [(tensor.name, tensor.shape, tensor.type) for tensor in source.weights]
    types = {
        name: "F16" if shape[0] % 32 else "Q8_0" if name.endswith("_q.weight") else "Q4_0"
        for name, shape, _ in tensor_types.quantizable_tensors(present, source.facts)
    }
    return plan_quantization(source, "Q4_0", TypeOverrides(mix=types))


def test_verifying_with_the_text_that_chose_the_types_is_marked(
    stories_gguf: Path, tmp_path: Path, text: Path
) -> None:
    plan = mixed_plan(stories_gguf)
    out = tmp_path / "mixed.gguf"
    report = write.write_model(plan, out, threads=1)
    digest = hashlib.sha256(text.read_text().removesuffix("\n").encode()).hexdigest()[:32]
    allocation = {"text": digest, "chunks": 4, "held_out_chunks": 4, "quick": False}
    document = {"allocation": allocation | {"text_file": str(text)}}
    certified = certify.certify(
        plan, out, report, verify.VerifyRequest(text, 2, 1), document, config.load_config(), UI()
    )
    assert certified is not None
    result = certified.certificate
    (statistics,) = result.steering
    assert (statistics.kind, statistics.hashes, statistics.chunks, result.answers.calibrated) == (
        "mix",
        (digest,),
        8,
        True,
    )
    assert statistics.overlap == 1.0
    kinds = {tensor.name: tensor.type for tensor in result.tensors}
    assert {step.weight.name: step.type for step in plan.steps}.items() <= kinds.items()


def test_a_file_that_a_plan_names_is_not_read(
    stories_gguf: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan file may come from a stranger."""
    plan = mixed_plan(stories_gguf)
    out = tmp_path / "mixed.gguf"
    report = write.write_model(plan, out, threads=1)
    allocation = {"text": "0" * 32, "chunks": 4, "held_out_chunks": 4, "quick": False}
    monkeypatch.setattr(texts, "read_user_texts", lambda paths: pytest.fail(f"read {paths}"))
    certified = certify.certify(
        plan,
        out,
        report,
        verify.VerifyRequest(text, 2, 1),
        {"plan": "their.json", "allocation": allocation | {"text_file": str(text)}},
        config.load_config(),
        UI(),
    )
    assert certified is not None
    (statistics,) = certified.certificate.steering
    assert (statistics.kind, statistics.overlap) == ("mix", None)


def test_invalid_arguments_are_an_error_before_the_file_is_written(
    llmcli: Llmcli, stories_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "small.gguf"
    without_vocabulary = tiny_gguf.llama(tmp_path / "mute.gguf", hidden=64, ff=64, layers=1)
    raw = without_vocabulary.read_bytes().replace(
        b"tokenizer.ggml.tokens", b"tokenizer.ggml.takens"
    )
    without_vocabulary.write_bytes(raw)
    text = tmp_path / "short.txt"
    text.write_text("Once upon a time")
    for words, code, message in (
        ((str(stories_gguf), "--verify-chunks", "3"), 2, "--verify-chunks needs --verify"),
        (
            (str(stories_gguf), "--verify", "--verify-text", str(tmp_path / "none")),
            1,
            "cannot read",
        ),
        ((str(stories_gguf), "--verify", "--verify-text", str(text)), 1, "short.txt has 16 bytes"),
        ((str(without_vocabulary), "--verify"), 1, "has no vocabulary"),
    ):
        done = llmcli("quantize", *words, "--q8_0", "-o", str(out))
        assert (done.code, done.out) == (code, ""), words
        assert message in done.err, words
    assert not out.exists()
    # Long enough in bytes but not in tokens, which is found only after the file is written.
    text.write_text("Once upon a time " * 100)
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
