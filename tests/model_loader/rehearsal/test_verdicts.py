"""Verdicts are found again for the same header, sizes and build, and for nothing else."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from llmcli.config import Config, load_config
from llmcli.errors import UserError
from llmcli.model_loader.rehearsal import verdicts
from llmcli.model_loader.rehearsal.verdicts import (
    CRASH,
    FORMATTING,
    LOADING,
    Fault,
    Verdict,
    VerdictStore,
)
from quant.model_file.read_header import read_header
from tests.quant import tiny_gguf

FAULT = Fault(CRASH, LOADING, "ggml.c:1: GGML_ASSERT(a) failed")


@pytest.fixture
def config(home: Path) -> Config:
    return load_config()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tiny_gguf.llama(tmp_path / "m.gguf", layers=1, hidden=32, ff=32)
    set_age(path, 60)
    return path


def set_age(path: Path, seconds: float) -> None:
    """Give a file a modification time in the past."""
    moment = time.time_ns() - int(seconds * 1e9)
    os.utime(path, ns=(moment, moment))


def open_store(path: Path, config: Config) -> VerdictStore:
    return VerdictStore(read_header(path), config)


def folder_of(config: Config) -> list[Path]:
    return sorted((config.state / "rehearsals").glob("*.json"))


@pytest.mark.parametrize(
    "verdict", [Verdict(True), Verdict(False), Verdict(True, FAULT), Verdict(False, FAULT)]
)
def test_a_saved_verdict_is_found_again(verdict: Verdict, model: Path, config: Config) -> None:
    assert open_store(model, config).load() is None
    open_store(model, config).save(verdict)
    assert open_store(model, config).load() == verdict


def test_a_copy_of_the_file_has_the_same_verdict(
    model: Path, config: Config, tmp_path: Path
) -> None:
    open_store(model, config).save(Verdict(True))
    copy = tmp_path / "another name.gguf"
    copy.write_bytes(model.read_bytes())
    assert open_store(copy, config).load() == Verdict(True)


def test_a_changed_header_or_size_has_no_verdict(model: Path, config: Config) -> None:
    open_store(model, config).save(Verdict(True))
    data = model.read_bytes()
    model.write_bytes(data.replace(b"llama.context_length", b"llama.context_lengtH"))
    assert open_store(model, config).load() is None
    model.write_bytes(data + b"\0")
    assert open_store(model, config).load() is None
    model.write_bytes(data)
    assert open_store(model, config).load() == Verdict(True)


def test_a_change_of_any_shard_changes_the_identity(
    model: Path, config: Config, tmp_path: Path
) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(model.read_bytes())
    header = read_header(model)
    header = replace(header, files=(model, second))
    VerdictStore(header, config).save(Verdict(True))
    second.write_bytes(model.read_bytes() + b"\0")
    assert VerdictStore(header, config).load() is None


def test_another_build_of_llama_cpp_has_no_verdict(
    model: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(model, config).save(Verdict(True))
    monkeypatch.setattr(verdicts, "build_identity", lambda: "another build")
    assert open_store(model, config).load() is None


def test_the_header_is_hashed_only_once(
    model: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "SETTLED_SECONDS", -1e9)  # the file has just been made
    open_store(model, config).save(Verdict(True))
    monkeypatch.setattr(verdicts, "_header_hash", lambda header: pytest.fail("hashed again"))
    assert open_store(model, config).load() == Verdict(True)


def test_a_file_that_has_just_changed_is_found_by_its_header_alone(
    model: Path, config: Config
) -> None:
    open_store(model, config).save(Verdict(True))
    assert len(folder_of(config)) == 1, "its time of change may be that of a later change, too"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "computed": true, "fault": null}',
        b'{"version": 1, "computed": 1, "fault": null}',
        b'{"version": 1, "computed": true, "fault": {"kind": 1, "stage": "", "cause": ""}}',
        b'{"version": 1, "computed": true, "fault": {"more": 1}}',
        b"[" * 9000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_verdict_is_ignored(content: bytes, model: Path, config: Config) -> None:
    open_store(model, config).save(Verdict(True))
    for path in folder_of(config):
        path.write_bytes(content)
    assert open_store(model, config).load() is None


def test_the_number_of_verdicts_is_limited(
    model: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "MAX_VERDICTS", 3)
    for number in range(6):
        monkeypatch.setattr(verdicts, "build_identity", lambda number=number: f"build {number}")
        open_store(model, config).save(Verdict(True))
        for path in folder_of(config):
            set_age(path, 100 - number)
    assert len(folder_of(config)) == 3
    assert open_store(model, config).load() == Verdict(True), "the newest remains"


def test_saving_fails_in_a_folder_that_cannot_be_written(model: Path, config: Config) -> None:
    config.state.parent.mkdir(parents=True, exist_ok=True)
    config.state.write_text("a file in the place of the folder")
    store = open_store(model, config)
    assert store.load() is None
    with pytest.raises(UserError, match="cannot write"):
        store.save(Verdict(True))


def test_a_stored_verdict_is_a_short_json_object(model: Path, config: Config) -> None:
    open_store(model, config).save(Verdict(False, FAULT))
    (path,) = folder_of(config)
    assert json.loads(path.read_bytes()) == {
        "version": 1,
        "computed": False,
        "fault": {"kind": CRASH, "stage": LOADING, "cause": FAULT.cause},
    }


@pytest.mark.parametrize(
    ("verdict", "computes", "expected"),
    [
        (Verdict(True), True, True),
        (Verdict(False), False, True),
        (Verdict(False), True, False),
        (Verdict(False, FAULT), True, True),
        (Verdict(False, replace(FAULT, stage=FORMATTING)), True, False),
    ],
)
def test_a_dry_run_is_no_verdict_on_computing(
    verdict: Verdict, computes: bool, expected: bool
) -> None:
    assert verdict.answers(computes) == expected


def test_the_build_names_the_libraries_and_the_features_of_the_processor() -> None:
    identity = verdicts.build_identity()
    assert "libllama" in identity
    assert "libggml-base" in identity
    assert "CPU" in identity
