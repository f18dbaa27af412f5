"""Preparing a model by its name: missing files are downloaded and quantized, existing files are
used.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.cli import Done
from tests.fixtures.fake_hub import Hub

Llmcli = Callable[..., Done]
SHORT = ("-n", "6", "-t", "1", "--temp", "0", "--json")


def document(done: Done) -> Any:
    """Return the JSON document of a command that succeeded."""
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_run_downloads_quantizes_and_answers_from_safetensors_on_the_hub(
    llmcli: Llmcli, stories: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    with Hub() as hub:
        hub.add("org/stories", stories)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        first = llmcli("run", "org/stories", "Once upon a time", *SHORT)
        n_requests = len(hub.requests)
        again = llmcli("run", "org/stories", "Once upon a time", *SHORT)
        assert len(hub.requests) == n_requests  # files on this disk need no network
        other = llmcli("run", "org/stories:Q8_0", "Once upon a time", *SHORT)
        assert len(hub.requests) == n_requests
    assert document(first)["model"]["file_type"] == "Q4_K_M"
    assert document(first)["text"] == document(again)["text"] != ""
    assert "bits per weight" in first.err
    assert "bits per weight" not in again.err
    assert document(other)["model"]["file_type"] == "Q8_0"
    assert str(home) in document(first)["model"]["path"]


def test_folder_is_quantized_to_the_requested_type(llmcli: Llmcli, stories: Path) -> None:
    result = document(llmcli("run", f"{stories}/", "Once", "--quant", "q5_k", *SHORT))
    assert result["model"]["file_type"] == "Q5_K_M"


def test_file_is_used_as_it_is_unless_another_type_is_requested(
    llmcli: Llmcli, stories_gguf: Path
) -> None:
    before = stories_gguf.read_bytes()
    unchanged = document(llmcli("run", str(stories_gguf), "Once", *SHORT))
    assert (unchanged["model"]["file_type"], unchanged["model"]["path"]) == (
        "F32",
        str(stories_gguf),
    )
    smaller = document(llmcli("run", str(stories_gguf), "Once", "--quant", "Q8_0", *SHORT))
    assert smaller["model"]["file_type"] == "Q8_0"
    assert stories_gguf.read_bytes() == before


def test_float_file_of_an_alias_is_quantized_to_the_type_in_the_catalog(
    llmcli: Llmcli, stories_gguf: Path, home: Path
) -> None:
    catalog = home / "config" / "models.toml"
    catalog.parent.mkdir()
    catalog.write_text(
        '[models.tales]\nquant = "Q8_0"\nsystem = "Tell tales."\nsettings = { temp = 0.25 }\n'
        f'[[models.tales.sources]]\nkind = "local"\npath = "{stories_gguf}"\n'
    )
    done = llmcli("chat", "tales", "-t", "1", stdin=b"/show\n")
    assert done.code == 0, done.err
    rows = dict(line.split(None, 1) for line in done.out.splitlines() if len(line.split()) > 1)
    assert rows["type"].startswith("Q8_0")
    assert rows["system"].strip() == "Tell tales."
    assert rows["temp"].startswith("0.25")


def test_unknown_type_is_an_error_before_anything_is_downloaded(
    llmcli: Llmcli, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub() as hub:
        hub.add("org/stories", stories)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = llmcli("run", "org/stories", "Once", "--quant", "Q4_KM")
        assert hub.requests == []
    assert done.code == 1
    assert "Q4_K_M" in done.err


@pytest.mark.parametrize("damage", ["cut", "magic", "folder", "architecture"])
def test_file_that_cannot_be_run_is_one_error(
    llmcli: Llmcli, stories: Path, stories_gguf: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "bad.gguf"
    good = stories_gguf.read_bytes()
    if damage == "cut":
        path.write_bytes(good[: len(good) // 2])
    elif damage == "magic":
        path.write_bytes(b"JUNK" + good[4:])
    elif damage == "architecture":
        path.write_bytes(good.replace(b"llama", b"lloma"))
    else:
        path = tmp_path / "checkpoint"
        path.mkdir()
        (path / "config.json").write_bytes((stories / "config.json").read_bytes())
        (path / "model.safetensors").write_bytes((stories / "model.safetensors").read_bytes())
    done = llmcli("run", str(path), "Once", *SHORT)
    lines = done.err.splitlines()
    assert (done.code, done.out) == (1, "")
    assert [line.split(":")[0] for line in lines[-2:]] == ["error", "hint"], done.err
    assert "Traceback" not in done.err
