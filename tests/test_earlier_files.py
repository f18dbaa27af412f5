"""Files that an earlier version of llmcli wrote are read and resumed.

The files in tests/data/earlier were written by the version before the packages were renamed
(scripts/reference/earlier_files.py): a batch, two calibrations and a quantization that were killed,
logs of chats (with branches, with thinking, killed in the middle of an answer), a saved chat with
its KV state, the profile of `bench tune`, the database of `bench history`, manifests of the model
store, the user's catalog with an alias, a plan of tensor types, a certificate, and the logits of a
base model. expected.json has the output of that version. In the files, FOLDER stands for the folder
of the test, and BUILD for the version of llama-cpp-python, which must match to resume a killed run.
"""

import importlib.metadata
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quant.calibration.moments import load_moments

EARLIER = Path(__file__).parent / "data" / "earlier"
TIME_NS = 1_760_000_000_000_000_000
BUILD = importlib.metadata.version("llama-cpp-python")
STEADY = "-fa on -t 1"
CHAT = f"chat tales --no-profile {STEADY} -c 256 -n 20 --temp 0 -s 3 --chat-template template.jinja"
BATCH = f"batch tales --no-profile batch.jsonl -o answers.jsonl -np 1 --temp 0 -c 256 {STEADY}"
CALIBRATE = "calibrate little.gguf --text prose.txt -c 32 --chunks 8 -fa off -t 1"


@dataclass(frozen=True)
class Earlier:
    """A work folder with the earlier files and LLMCLI_HOME. `run`: runs a command line in it and
    returns stdout. `expected`: output of the earlier version by command line.
    """

    folder: Path
    run: Callable[..., str]
    expected: dict[str, Any]

    def json(self, line: str, stdin: str = "") -> Any:
        """Run a command with --json, and return the document that it prints."""
        return json.loads(self.run(f"{line} --json", stdin))

    def last_record(self, name: str = "") -> dict[str, Any]:
        """Return the last record of a session's log. Without a name, use the log that this test has
        written.
        """
        sessions = self.folder / "home/state/sessions"
        path = sessions / f"{name}.jsonl" if name else max(sessions.glob("2*.jsonl"))
        return json.loads(path.read_text().splitlines()[-1])


@pytest.fixture
def earlier(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Earlier:
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    assert home == tmp_path / "home"
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if b"FOLDER" in data or b'"BUILD"' in data:
            if data.startswith(b"SQLite"):
                continue
            path.write_bytes(
                data.replace(b"FOLDER", str(tmp_path).encode()).replace(
                    b'"BUILD"', f'"{BUILD}"'.encode()
                )
            )
    for name in ("little.gguf", "tales.gguf"):
        os.utime(tmp_path / name, ns=(TIME_NS, TIME_NS))
    for manifest in home.rglob("manifest.json"):
        for file in json.loads(manifest.read_text())["files"]:
            os.utime(file["path"], ns=(file["mtime_ns"], file["mtime_ns"]))
    monkeypatch.chdir(tmp_path)

    def run(line: str, stdin: str = "", code: int = 0) -> str:
        from llmcli.app import main

        monkeypatch.setattr(sys, "argv", ["llmcli", *line.split()])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        assert (exit_info.value.code or 0) == code, err
        return out

    return Earlier(tmp_path, run, json.loads((tmp_path / "expected.json").read_text()))


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Return every tensor of a GGUF file as an array."""
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_a_killed_batch_is_resumed(earlier: Earlier) -> None:
    journal = earlier.folder / ".answers.jsonl.journal"
    finished = [int(line.split(b" ")[1]) for line in lines(journal)[1:]]
    assert len(finished) >= 8
    document = earlier.json(BATCH)
    assert (document["lines"], document["failed"]) == (30, 0)
    assert document["resumed_lines"] == len(finished)
    answers, whole = (
        lines(earlier.folder / "answers.jsonl"),
        lines(earlier.folder / "whole-answers.jsonl"),
    )
    assert [answers[index] for index in finished] == [whole[index] for index in finished]
    assert [json.loads(line)["custom_id"] for line in answers] == [f"line-{n}" for n in range(30)]
    assert all(json.loads(line)["response"]["body"]["choices"][0]["text"] for line in answers)
    assert not journal.exists()


def test_a_killed_calibration_is_resumed(earlier: Earlier) -> None:
    document = earlier.json(f"{CALIBRATE} -o killed-imatrix.gguf")
    assert (document["chunks"], document["resumed_chunks"]) == (8, 5)
    resumed, whole = (
        tensors(earlier.folder / name) for name in ("killed-imatrix.gguf", "imatrix.gguf")
    )
    assert resumed.keys() == whole.keys()
    for name, values in whole.items():
        assert np.allclose(resumed[name], values, rtol=1e-3), name
    assert not list(earlier.folder.glob(".killed-imatrix*"))


def test_a_killed_calibration_with_moments_is_resumed(earlier: Earlier) -> None:
    document = earlier.json(f"{CALIBRATE} -o killed-both.gguf --moments killed-moments.gguf")
    assert (document["chunks"], document["resumed_chunks"]) == (8, 12)
    for killed, name in (
        ("killed-both.gguf", "imatrix.gguf"),
        ("killed-moments.gguf", "moments.gguf"),
    ):
        resumed, whole = tensors(earlier.folder / killed), tensors(earlier.folder / name)
        assert resumed.keys() == whole.keys()
        for tensor in (tensor for tensor in whole if not tensor.endswith(".mark")):
            assert np.allclose(resumed[tensor], whole[tensor], rtol=1e-3, atol=1e-3), tensor
    assert not list(earlier.folder.glob(".killed-both*"))
    assert not list(earlier.folder.glob(".killed-moments*"))


def test_importance_matrices_are_merged(earlier: Earlier) -> None:
    earlier.run("calibrate --merge imatrix.gguf imatrix.gguf -o twice.gguf")
    once, twice = tensors(earlier.folder / "imatrix.gguf"), tensors(earlier.folder / "twice.gguf")
    assert once.keys() == twice.keys()
    for tensor, values in once.items():
        assert np.allclose(twice[tensor], 2 * values, rtol=1e-6), tensor


def test_second_moments_are_merged(earlier: Earlier) -> None:
    earlier.run("calibrate --merge moments.gguf moments.gguf -o twice.gguf")
    once, twice = (load_moments(earlier.folder / name) for name in ("moments.gguf", "twice.gguf"))
    assert once.names == twice.names
    for first, second in zip(once.inputs, twice.inputs, strict=True):
        for matrix in range(first.matrices):
            assert np.allclose(second.sums(matrix), 2 * first.sums(matrix), rtol=1e-6)
            assert np.allclose(second.first_sums(matrix), 2 * first.first_sums(matrix), rtol=1e-6)


@pytest.mark.parametrize("method", ["search --imatrix imatrix.gguf", "gptq --moments moments.gguf"])
def test_calibration_files_are_used_by_quantize(method: str, earlier: Earlier) -> None:
    quantize = "quantize little.gguf --type Q4_0 --threads 1"
    document = earlier.json(f"{quantize} --method {method} -o calibrated.gguf")
    assert document["without_importance"] == 0
    assert document["methods"][method.split()[0]] > 0
    plain = earlier.json(f"{quantize} -o plain.gguf")
    assert document["sha256"] != plain["sha256"]


def test_a_killed_quantization_is_resumed(earlier: Earlier) -> None:
    reached = json.loads(lines(earlier.folder / ".killed.gguf.journal")[-1])["bytes"]
    quantize = "quantize little.gguf --type Q8_0 --threads 1"
    document = earlier.json(f"{quantize} -o killed.gguf")
    assert document["resumed_bytes"] == reached > 0
    earlier.run(f"{quantize} -o whole.gguf")
    assert (earlier.folder / "killed.gguf").read_bytes() == (
        earlier.folder / "whole.gguf"
    ).read_bytes()
    assert not list(earlier.folder.glob(".killed.gguf*"))


def test_a_plan_gives_every_tensor_its_type(earlier: Earlier) -> None:
    earlier.run("quantize little.gguf --plan plan.json -o mix.gguf --threads 1")
    assert (
        earlier.json("show mix.gguf --tensors")
        == earlier.expected["show mix.gguf --tensors --json"]
    )


def test_a_certificate_is_checked_against_its_file(earlier: Earlier) -> None:
    document = earlier.json("show verified.gguf --check")
    written = document["certificate"]
    # what is newer than the file
    assert written.pop("differing_strings") == []
    assert written.pop("frozen_settings") is None
    assert written["answers"].pop("kinds") == []
    for statistics in written["steering"]:
        assert (statistics.pop("kinds"), statistics.pop("overlap")) == ([], None)
    assert document == earlier.expected["show verified.gguf --check --json"]
    certificate = json.loads((earlier.folder / "verified.certificate.json").read_text())
    assert {key: written[key] for key in certificate} == certificate
    assert written["belongs"]
    file = earlier.folder / "verified.gguf"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    earlier.run("show verified.gguf --check", code=1)


@pytest.mark.parametrize(
    "name", ["19990101T000000-1", "19990102T000000-2", "19990104T000000-4", "kept"]
)
def test_chats_are_shown(name: str, earlier: Earlier) -> None:
    expected = earlier.expected[f"sessions show {name} --json"]
    document = earlier.json(f"sessions show {name}")
    varying = {"time": "", "bytes": 0}
    assert document | varying == expected | varying


def test_chats_are_listed(earlier: Earlier) -> None:
    chats = {
        row["name"]: (row["kind"], row["model"], row["turns"]) for row in earlier.json("sessions")
    }
    assert chats == {
        "19990101T000000-1": ("sitting", "tales", 6), "19990102T000000-2": ("sitting", "tales", 1),
        "19990103T000000-3": ("sitting", "tales", 1), "19990104T000000-4": ("sitting", "tales", 1),
        "kept": ("saved", "tales", 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["19990101T000000-1", "19990102T000000-2", "19990104T000000-4"])
def test_a_chat_is_resumed_at_its_last_turn(name: str, earlier: Earlier) -> None:
    expected = earlier.expected[f"sessions show {name} --json"]
    earlier.run(f"{CHAT} --resume {name}", "And then?\n")
    document = earlier.json(f"sessions show {name}")
    *turns, added = document["turns"]
    assert turns == expected["turns"]
    assert (added["question"], added["parent"]) == ("And then?", expected["at"])
    assert added["answer"]
    record = earlier.last_record(name)
    assert (record["prompt"], record["system"]) == ("And then?", expected["system"])


def test_the_last_question_of_a_killed_chat_is_asked_again(earlier: Earlier) -> None:
    earlier.run(f"{CHAT} --resume 19990104T000000-4", "/regen\n")
    record = earlier.last_record("19990104T000000-4")
    assert (record["prompt"], record["turn"]) == ("What came then?", 2)


def test_thinking_and_the_grammar_of_a_chat_are_resumed(earlier: Earlier) -> None:
    before = earlier.last_record("19990102T000000-2")
    earlier.run(f"{CHAT} --resume 19990102T000000-2", "And then?\n/export json all.json\n")
    messages = json.loads((earlier.folder / "all.json").read_text())["messages"]
    assert messages[1]["content"] == before["text"]
    after = earlier.last_record("19990102T000000-2")
    assert (after["prompt"], after["constraint"]["kind"]) == ("And then?", "gbnf")
    for record in (before, after):
        assert record["thinking"].startswith("<think>")
        assert record["text"].removeprefix(record["thinking"]).strip() == record["content"].strip()


@pytest.mark.skipif(BUILD != "0.3.36", reason="llama.cpp reads the KV state of its own build alone")
def test_a_saved_chat_is_resumed_with_its_kv_state(earlier: Earlier) -> None:
    earlier.run(f"{CHAT} --resume kept", "And then?\n")
    record = earlier.last_record()
    assert record["timing"]["cached_tokens"] == 42


def test_a_saved_chat_is_resumed(earlier: Earlier) -> None:
    earlier.run(f"{CHAT} --resume kept", "And then?\n/save kept\n")
    first, second = earlier.json("sessions show kept")["turns"]
    assert [first] == earlier.expected["sessions show kept --json"]["turns"]
    assert (second["question"], second["parent"]) == ("And then?", 1)


def test_a_tuned_profile_is_listed_and_forgotten(earlier: Earlier) -> None:
    (expected,), (profile,) = (
        earlier.expected["bench tune --show --json"],
        earlier.json("bench tune --show"),
    )
    assert profile | {"here": True} == expected
    forgotten = earlier.json("bench tune --forget tales")["forgotten"]
    assert len(forgotten) == 1
    assert earlier.json("bench tune --show") == []


def test_a_tuned_profile_is_used_where_it_was_measured(earlier: Earlier) -> None:
    (profile,) = earlier.json("bench tune --show")
    earlier.run("chat tales -c 256 -n 4 --chat-template template.jinja", "Who was there?\n")
    used_profile = earlier.last_record().get("profile")
    assert bool(used_profile) == profile["here"]
    assert not used_profile or used_profile.startswith(profile["flags"])


def test_the_history_of_bench_is_read_and_compared(earlier: Earlier) -> None:
    rows = earlier.json("bench history")
    expected = json.loads(
        json.dumps(earlier.expected["bench history --json"]).replace(str(earlier.folder), "FOLDER")
    )
    assert rows == expected
    assert [row["test"] for row in rows] == ["pp16", "tg8", "pp32", "tg8", "pp16", "tg8"]
    document = earlier.json("bench compare 1 5 --anyway")
    expected = earlier.expected["bench compare 1 5 --json"]
    without_verdict = {"verdict": ""}
    assert [test | without_verdict for test in document["tests"]] == [
        test | without_verdict for test in expected["tests"]
    ]


def test_manifests_and_the_catalog_name_the_models(earlier: Earlier) -> None:
    for line in ("list", "show little", "show poet"):
        assert earlier.json(line) == earlier.expected[f"{line} --json"], line


def test_a_quantized_model_of_the_store_is_reused(earlier: Earlier) -> None:
    manifest = earlier.folder / "home/data/models/little/Q8_0/manifest.json"
    before = manifest.read_bytes()
    document = earlier.json("pull little --quant Q8_0 --offline")
    assert document["sha256"] == json.loads(before)["files"][0]["sha256"]
    assert manifest.read_bytes() == before


def test_an_alias_has_its_system_text_and_settings(earlier: Earlier) -> None:
    earlier.run(
        f"chat poet {STEADY} -c 256 -n 4 --chat-template template.jinja", "Who was there?\n"
    )
    record = earlier.last_record()
    assert (record["system"], record["model"]["name"]) == ("Rhyme.", "tales")
    assert (record["settings"]["temp"], record["settings"]["top_k"]) == (0.25, 7)


def test_stored_base_logits_are_used_by_eval(earlier: Earlier) -> None:
    document = earlier.json(f"eval tales --base-logits base.logits {STEADY}")
    expected = earlier.expected[f"eval tales --base-logits base.logits {STEADY} --json"]
    for name in ("chunks", "positions", "n_ctx", "text_tokens"):
        assert document[name] == expected[name], name
    for name in ("perplexity", "base_perplexity"):
        assert document[name]["value"] == pytest.approx(expected[name]["value"], rel=1e-3)
    assert document["kl_divergence"]["value"] < 1e-4
    assert document["same_top"]["value"] > 0.95
