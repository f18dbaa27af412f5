"""JSON files of a checkpoint folder: read once, limited in size, and refused by name if damaged."""

import json
from pathlib import Path

import pytest

from quant.checkpoint import folder
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError


def test_a_file_is_read_once(tmp_path: Path) -> None:
    file, checkpoint = tmp_path / "config.json", CheckpointFolder(tmp_path)
    file.write_text(json.dumps({"hidden_size": 8}))
    first = checkpoint.read_json("config.json")
    file.unlink()
    assert checkpoint.read_json("config.json") is first == {"hidden_size": 8}


def test_missing_optional_file_is_an_empty_object(tmp_path: Path) -> None:
    checkpoint = CheckpointFolder(tmp_path)
    assert not checkpoint.has_file("generation_config.json")
    assert checkpoint.read_optional_json("generation_config.json") == {}
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read as JSON"):
        checkpoint.read_json("generation_config.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "cannot be read as JSON"),
        (b"[1]", "does not hold a JSON object"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"a": "\\ud800"}', "cannot be read as JSON"),
        (b'{"a": "' + b"x" * 100 + b'"}', "has 109 bytes; the limit is 99"),
    ],
)
def test_a_damaged_or_large_file_is_refused_by_name(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "limit" in message:
        monkeypatch.setattr(folder, "MAX_JSON_BYTES", 99)
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(UserError, match=rf"config\.json {message}"):
        CheckpointFolder(tmp_path).read_json("config.json")
