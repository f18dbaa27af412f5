"""`llmcli quantize` with a target size, --fit, and plan files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.bench.statistics.paired_test import Comparison
from llmcli.errors import UsageError
from llmcli.workflows.certification import verify
from llmcli.workflows.quantization import largest_fit
from llmcli.workflows.quantization.size_request import parse_size
from quant.certificate import certificate
from quant.model_file import read_header
from quant.quantize import write
from quant.quantize.plan import Plan
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Llmcli = Callable[..., Done]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random model with a context of 64 tokens, which is fast to measure."""
    return tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, ff=96, layers=6, tied=True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a little fish who lived in the sea. " * 120)
    return path


@pytest.fixture
def quantize_json(llmcli: Llmcli, model: Path, tmp_path: Path) -> Llmcli:
    """Return a function that runs `quantize --json` on the model.

    To be fast, it measures one chunk per group of tensors when a size is given.
    """

    def call(*words: str) -> Done:
        out = tmp_path / "o.gguf"
        measures = {"--target-size", "--target-bpw", "--fit"} & {*words} and "--quick" not in words
        probe_flags = ("--probe-chunks", "1", "--probe", "group") if measures else ()
        return llmcli(
            "quantize", str(model), "-o", str(out), "--threads", "1", "--json", *probe_flags, *words
        )

    return call


def parse_json(done: Done) -> dict[str, Any]:
    """Parse stdout as JSON, and fail unless the command succeeded."""
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


def test_statistics_allow_files_that_are_smaller_than_those_of_k_quants(
    llmcli: Llmcli, text: Path, tmp_path: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "wide.gguf", hidden=256, ff=512, layers=4, tied=True)
    imatrix, out, plan = (tmp_path / name for name in ("i.gguf", "o.gguf", "plan.json"))
    words = ("quantize", str(model), "-o", str(out), "--target-bpw", "2.4", "--quick")
    refused = llmcli(*words)
    assert refused.code == 1 and "no mix of these types makes a file of" in refused.err
    assert llmcli("calibrate", str(model), "-f", str(text), "-o", str(imatrix)).code == 0
    done = llmcli(*words, "--imatrix", str(imatrix), "--plan-out", str(plan))
    assert done.code == 0, done.err
    types = {name: row["type"] for name, row in json.loads(plan.read_text())["tensors"].items()}
    assert any(kind.startswith("IQ2") for kind in types.values()), types
    assert not types["token_embd.weight"].startswith("IQ")


def test_a_target_size_is_met_and_a_second_one_reuses_the_measurements(
    quantize_json: Llmcli, text: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    words = ("--target-size", "180K", "--text", str(text), "--swaps", "1", "--plan-out", str(plan))
    first = quantize_json(*words, "--threads", "0")  # 0 is the default
    document = parse_json(first)
    size = (tmp_path / "o.gguf").stat().st_size
    assert 180_000 * 0.997 <= size <= 180_000
    assert (document["bytes"], document["target_bytes"]) == (size, 180_000)
    assert document["allocation"]["expected_kld"] > 0
    assert (
        "to measure: 43 x" in first.err and "12 of 43 also need the method's own codes" in first.err
    )
    tensors = json.loads(plan.read_text())["tensors"]
    assert all(row["measured_kld"] > 0 for row in tensors.values() if "measured_kld" in row)
    types = {
        tensor.name: tensor.type for tensor in read_header.read_header(tmp_path / "o.gguf").tensors
    }
    assert {name: row["type"] for name, row in tensors.items()} == {
        name: types[name] for name in tensors
    }

    weights = read_header.read_header(tmp_path / "o.gguf").parameters
    second = quantize_json("--target-bpw", "7", "--text", str(text), "--swaps", "1")
    assert 0.997 * 7 <= 8 * parse_json(second)["bytes"] / weights <= 7
    assert "43 of 43 measurements were made before" in second.err
    assert "to measure:" not in second.err


def test_a_change_that_the_fingerprint_misses_is_measured_again(
    llmcli: Llmcli, text: Path, tmp_path: Path
) -> None:
    model = tiny_gguf.llama(tmp_path / "one.gguf", hidden=64, ff=96, layers=1, tied=True)
    words = (
        "quantize",
        str(model),
        "-o",
        str(tmp_path / "o.gguf"),
        "--threads",
        "1",
        "--probe-chunks",
        "1",
    )
    words = (*words, "--target-bpw", "7", "--text", str(text), "--swaps", "0")
    before = write.open_gguf(model).fingerprint
    assert "to measure:" in llmcli(*words).err
    assert "to measure:" not in llmcli(*words, "--force").err
    tensor = next(
        tensor
        for tensor in read_header.read_header(model).tensors
        if tensor.name == "blk.0.attn_q.weight"
    )
    with model.open("r+b") as file:
        file.seek(tensor.offset + 20 * 64 * 4)
        file.write(bytes(4 * 64))
    assert write.open_gguf(model).fingerprint == before
    assert "to measure:" in llmcli(*words, "--force").err


def test_the_certificate_counts_towards_the_target_size(
    quantize_json: Llmcli, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(1.0, 0.9, 1.1, 0.95, (9.0, 10.0, 11.0), (9.0, 10.0, 11.0))
    monkeypatch.setattr(
        verify.interleaved, "compare_tests", lambda pairs, design, ui: [comparison for _ in pairs]
    )
    verify_flags = ("--verify", "--verify-text", str(text), "--verify-chunks", "2")
    document = parse_json(
        quantize_json("--target-size", "210K", "--text", str(text), "--swaps", "0", *verify_flags)
    )
    header = read_header.read_header(tmp_path / "o.gguf")
    embedded = certificate.read_certificate(header)
    assert embedded is not None
    reserved = certificate.max_json_bytes([tensor.name for tensor in header.tensors], [""])
    assert len(embedded.to_json().encode()) + 100 < reserved
    assert [
        (statistics.kind, statistics.chunks, statistics.tokens) for statistics in embedded.steering
    ] == [("mix", 1, 64)]
    assert 210_000 - reserved <= document["bytes"] == header.path.stat().st_size <= 210_000


def test_a_text_that_is_too_short_is_an_error_before_the_model_is_copied(
    quantize_json: Llmcli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("quant.quantize.write.write_model")
    text = tmp_path / "short.txt"
    text.write_text("Once upon a time there was a little fish who lived in the sea. " * 6)
    done = quantize_json("--target-size", "180K", "--text", str(text), "--probe-chunks", "100")
    assert done.code == 1
    assert "100 are measured and 100 more held out" in done.err
    assert "use a longer --text, or fewer --probe-chunks" in done.err


def test_a_plan_file_gives_the_same_bytes_and_a_finished_file_is_left(
    quantize_json: Llmcli, tmp_path: Path
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "o.gguf"
    parse_json(quantize_json("--target-size", "170K", "--quick", "--plan-out", str(plan)))
    first_bytes = out.read_bytes()
    out.unlink()
    document = parse_json(quantize_json("--plan", str(plan)))
    assert out.read_bytes() == first_bytes
    assert (document["present"], parse_json(quantize_json("--plan", str(plan)))["present"]) == (
        False,
        True,
    )


def test_a_plan_file_names_the_text_that_chose_its_types(
    quantize_json: Llmcli, text: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    words = (
        "--target-size",
        "180K",
        "--text",
        str(text),
        "--swaps",
        "0",
        "--plan-out",
        str(plan),
        "--dry-run",
    )
    allocation = parse_json(quantize_json(*words))["allocation"]
    from_plan = parse_json(quantize_json("--plan", str(plan), "--dry-run"))["allocation"]
    assert from_plan == {
        key: allocation[key] for key in ("text", "chunks", "held_out_chunks", "quick")
    }
    plan.write_text(plan.read_text().replace('"chunks": 1', '"chunks": "one"'))
    assert "allocation" not in parse_json(quantize_json("--plan", str(plan), "--dry-run"))


def test_a_file_type_can_be_saved_as_a_plan(quantize_json: Llmcli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    from_type = parse_json(quantize_json("-t", "q5_0", "--plan-out", str(plan), "--dry-run"))
    from_plan = parse_json(quantize_json("--plan", str(plan), "--dry-run"))
    assert from_plan["types"] == from_type["types"]
    assert "allocation" not in from_plan  # no text chose the types


def test_a_plan_of_another_source_is_refused(quantize_json: Llmcli, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    parse_json(quantize_json("-t", "q8_0", "--plan-out", str(plan), "--dry-run"))
    plan.write_text(plan.read_text().replace('"source": "', '"source": "0'))
    done = quantize_json("--plan", str(plan))
    assert done.code == 1
    assert "the plan is for another source" in done.err


@pytest.mark.parametrize("size", ["10K", "5M"])
def test_an_unreachable_size_is_an_error_with_the_reachable_range(
    quantize_json: Llmcli, size: str
) -> None:
    done = quantize_json("--target-size", size, "--quick")
    assert done.code == 1
    assert "the smallest has" in done.err
    assert "the largest" in done.err


def test_fit_makes_the_largest_file_that_fits(
    quantize_json: Llmcli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unlimited = parse_json(quantize_json("--fit", "--quick", "--dry-run"))
    monkeypatch.setattr(largest_fit, "fits", lambda plan, path: plan.nbytes <= 200_000)
    document = parse_json(quantize_json("--fit", "--quick"))
    assert 0.995 * 200_000 <= (tmp_path / "o.gguf").stat().st_size == document["bytes"] <= 200_000
    assert unlimited["bytes"] > 220_000
    monkeypatch.setattr(largest_fit, "fits", lambda plan, path: False)
    assert "does not fit into the free memory" in quantize_json("--fit", "--quick", "--force").err


def test_the_header_for_the_fit_check_is_not_written_over_the_scratch_model(
    quantize_json: Llmcli, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, calls = largest_fit.fits, 0

    def fits_200k(plan: Plan, path: Path) -> bool:
        nonlocal calls
        calls += 1
        assert not path.exists(), "llama.cpp maps the scratch model"
        return fits(plan, path) and plan.nbytes <= 200_000

    monkeypatch.setattr(largest_fit, "fits", fits_200k)
    document = parse_json(quantize_json("--fit", "--text", str(text), "--swaps", "1", "--dry-run"))
    assert calls > 2
    assert 0.99 * 200_000 <= document["bytes"] <= 200_000
    assert [trial["kld"] > 0 for trial in document["allocation"]["trials"]] == [True, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target-size", "1M", "--fit"), "--target-size and --fit cannot be combined"),
        (("--target-bpw", "5", "-t", "q4_0"), "leave out the file type"),
        (("--plan", "p.json", "--pure"), "--plan decides every tensor's type"),
        (
            ("--target-size", "1M", "--token-embedding-type", "q8_0"),
            "leave out --tensor-type and similar options",
        ),
        (("--quick",), "--quick needs a target size"),
        (("--probe-chunks", "4"), "--probe-chunks needs a target size"),
        (("--swaps", "0"), "--swaps needs a target size"),
        (("--probe", "tensor", "--plan", "p.json"), "--probe needs a target size"),
        (("--target-size", "1M", "--quick", "--swaps", "2"), "--quick measures nothing"),
        (("--target-size", ""), "'' is not a size"),
        (("--target-bpw", "0"), "--target-bpw is 0"),
        (("--target-size", "90 potatoes"), "is not a size"),
        (("--target-size", "1M", "--split-max-size", "1M"), "--target-size makes a single file"),
        (("--target-size", "1M", "--types", "q4_7"), "no tensor type 'q4_7'"),
    ],
)
def test_invalid_flags_are_an_error(
    quantize_json: Llmcli, words: tuple[str, ...], message: str
) -> None:
    done = quantize_json(*words)
    assert done.code in (1, 2)
    assert message in done.err


def test_sizes_have_units_of_1000() -> None:
    assert [parse_size(word) for word in ("90M", "0.5G", "123", "1.5kb", "90m")] == [
        90 * 10**6,
        5 * 10**8,
        123,
        1500,
        90 * 10**6,
    ]
    for word in ("", "M", "1..5M", "-1M", "1e3", "٣M", "1,5G"):
        with pytest.raises(UsageError):
            parse_size(word)
