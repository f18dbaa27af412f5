"""`llmcli quantize` by size and by plan file, on the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmcli.bench.statistics.paired_test import Comparison
from llmcli.errors import UsageError
from llmcli.workflows.certification import verify as verifying
from llmcli.workflows.quantization import largest_fit
from llmcli.workflows.quantization.size_request import parse_size
from quant.certificate import certificate
from quant.model_file import read_header
from quant.quantize import write
from quant.quantize.plan import Plan
from tests.fixtures.cli import Done
from tests.quant import tiny_gguf

Call = Callable[..., Done]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Random, with chunks of 64 tokens: little to compute."""
    return tiny_gguf.llama(tmp_path / "m.gguf", hidden=64, ff=96, layers=6, tied=True)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a little fish who lived in the sea. " * 120)
    return path


@pytest.fixture
def sized(llmcli: Call, model: Path, tmp_path: Path) -> Call:
    def call(*words: str) -> Done:
        out = tmp_path / "o.gguf"
        measures = {"--target-size", "--target-bpw", "--fit"} & {*words} and "--quick" not in words
        little = ("--probe-chunks", "1", "--probe", "group") if measures else ()
        return llmcli(
            "quantize", str(model), "-o", str(out), "--threads", "1", "--json", *little, *words
        )

    return call


def told(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_a_size_is_kept_to_and_a_second_one_costs_no_measurement(
    sized: Call, text: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    words = ("--target-size", "180K", "--text", str(text), "--swaps", "1", "--plan-out", str(plan))
    first = sized(*words, "--threads", "0")  # as where nothing is said of them
    document = told(first)
    size = (tmp_path / "o.gguf").stat().st_size
    assert 180_000 * 0.997 <= size <= 180_000
    assert (document["bytes"], document["target_bytes"]) == (size, 180_000)
    assert document["allocation"]["expected_kld"] > 0
    assert (
        "to measure: 43 x" in first.err and "12 of 43 also need the method's own codes" in first.err
    )
    tensors = json.loads(plan.read_text())["tensors"]
    assert all(row["measured_kld"] > 0 for row in tensors.values() if "measured_kld" in row)
    made = {
        tensor.name: tensor.type for tensor in read_header.read_header(tmp_path / "o.gguf").tensors
    }
    assert {name: row["type"] for name, row in tensors.items()} == {
        name: made[name] for name in tensors
    }

    weights = read_header.read_header(tmp_path / "o.gguf").parameters
    second = sized("--target-bpw", "7", "--text", str(text), "--swaps", "1")
    assert 0.997 * 7 <= 8 * told(second)["bytes"] / weights <= 7
    assert "43 of 43 measurements were made before" in second.err
    assert "to measure:" not in second.err


def test_a_file_with_an_edit_that_the_samples_miss_is_measured_anew(
    llmcli: Call, text: Path, tmp_path: Path
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
    edited = next(
        one for one in read_header.read_header(model).tensors if one.name == "blk.0.attn_q.weight"
    )
    with model.open("r+b") as file:
        file.seek(edited.offset + 20 * 64 * 4)
        file.write(bytes(4 * 64))
    assert write.open_gguf(model).fingerprint == before
    assert "to measure:" in llmcli(*words, "--force").err


def test_a_certificate_is_part_of_the_size(
    sized: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = Comparison(1.0, 0.9, 1.1, 0.95, (9.0, 10.0, 11.0), (9.0, 10.0, 11.0))
    monkeypatch.setattr(
        verifying.interleaved, "compare_tests", lambda pairs, design, ui: [alike for _ in pairs]
    )
    verify = ("--verify", "--verify-text", str(text), "--verify-chunks", "2")
    document = told(sized("--target-size", "210K", "--text", str(text), "--swaps", "0", *verify))
    header = read_header.read_header(tmp_path / "o.gguf")
    found = certificate.read_certificate(header)
    assert found is not None
    room = certificate.max_json_bytes([tensor.name for tensor in header.tensors], [""])
    assert len(found.to_json().encode()) + 100 < room
    assert [(one.kind, one.chunks, one.tokens) for one in found.steering] == [("mix", 1, 64)]
    assert 210_000 - room <= document["bytes"] == header.path.stat().st_size <= 210_000


def test_a_text_that_is_too_short_is_told_before_the_model_is_copied(
    sized: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("quant.quantize.write.write_model")
    text = tmp_path / "short.txt"
    text.write_text("Once upon a time there was a little fish who lived in the sea. " * 6)
    done = sized("--target-size", "180K", "--text", str(text), "--probe-chunks", "100")
    assert done.code == 1
    assert "100 are measured and 100 more held out" in done.err
    assert "use a longer --text, or fewer --probe-chunks" in done.err


def test_a_plan_makes_the_same_bytes_again_and_is_recognised(sized: Call, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "o.gguf"
    told(sized("--target-size", "170K", "--quick", "--plan-out", str(plan)))
    made = out.read_bytes()
    out.unlink()
    again = told(sized("--plan", str(plan)))
    assert out.read_bytes() == made
    assert (again["present"], told(sized("--plan", str(plan)))["present"]) == (False, True)


def test_a_plan_tells_the_text_that_its_types_were_chosen_by(
    sized: Call, text: Path, tmp_path: Path
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
    made = told(sized(*words))["allocation"]
    again = told(sized("--plan", str(plan), "--dry-run"))["allocation"]
    assert again == {key: made[key] for key in ("text", "chunks", "held_out_chunks", "quick")}
    plan.write_text(plan.read_text().replace('"chunks": 1', '"chunks": "one"'))
    assert "allocation" not in told(sized("--plan", str(plan), "--dry-run"))


def test_a_recipe_can_be_written_down_as_a_plan(sized: Call, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    stock = told(sized("-t", "q5_0", "--plan-out", str(plan), "--dry-run"))
    again = told(sized("--plan", str(plan), "--dry-run"))
    assert again["types"] == stock["types"]
    assert "allocation" not in again  # no text chose them


def test_a_plan_of_another_source_is_refused(sized: Call, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    told(sized("-t", "q8_0", "--plan-out", str(plan), "--dry-run"))
    plan.write_text(plan.read_text().replace('"source": "', '"source": "0'))
    done = sized("--plan", str(plan))
    assert done.code == 1
    assert "the plan is for another source" in done.err


@pytest.mark.parametrize("size", ["10K", "5M"])
def test_a_size_out_of_reach_is_refused_with_those_in_reach(sized: Call, size: str) -> None:
    done = sized("--target-size", size, "--quick")
    assert done.code == 1
    assert "the smallest has" in done.err
    assert "the largest" in done.err


def test_the_largest_file_that_fits(
    sized: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everything = told(sized("--fit", "--quick", "--dry-run"))
    monkeypatch.setattr(largest_fit, "fits", lambda plan, path: plan.nbytes <= 200_000)
    document = told(sized("--fit", "--quick"))
    assert 0.995 * 200_000 <= (tmp_path / "o.gguf").stat().st_size == document["bytes"] <= 200_000
    assert everything["bytes"] > 220_000
    monkeypatch.setattr(largest_fit, "fits", lambda plan, path: False)
    assert "does not fit into the free memory" in sized("--fit", "--quick", "--force").err


def test_what_fits_is_looked_for_beside_the_copy_that_is_measured_with(
    sized: Call, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, looked = largest_fit.fits, 0

    def alone(plan: Plan, path: Path) -> bool:
        nonlocal looked
        looked += 1
        assert not path.exists(), "llama.cpp has it mapped"
        return fits(plan, path) and plan.nbytes <= 200_000

    monkeypatch.setattr(largest_fit, "fits", alone)
    document = told(sized("--fit", "--text", str(text), "--swaps", "1", "--dry-run"))
    assert looked > 2
    assert 0.99 * 200_000 <= document["bytes"] <= 200_000
    assert [trial["kld"] > 0 for trial in document["allocation"]["trials"]] == [True, True]


@pytest.mark.parametrize(
    ("words", "told"),
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
def test_wishes_that_make_no_sense_are_told(sized: Call, words: tuple[str, ...], told: str) -> None:
    done = sized(*words)
    assert done.code in (1, 2)
    assert told in done.err


def test_sizes_are_read_as_people_write_them() -> None:
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
