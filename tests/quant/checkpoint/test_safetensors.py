"""safetensors files are read without torch, and invalid ones are refused with a one-line error."""

import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from quant.checkpoint import safetensors
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError
from tests.quant import tiny_checkpoint


def test_rows_are_read_as_stored(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    tiny_checkpoint.save(tmp_path / "model.safetensors", {"a": values, "b": values[0]})
    loaded = safetensors.load_tensors(CheckpointFolder(tmp_path))
    assert (loaded["a"].shape, loaded["a"].dtype) == ((2, 4, 3), "F32")
    assert np.array_equal(loaded["a"].read(2, 6).view(np.float32), values.reshape(8, 3)[2:6])
    assert np.array_equal(loaded["b"].read(0, 4).view(np.float32), values[0])


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    tiny_checkpoint.save(tmp_path / "model.safetensors", {"a": np.ones((2, 8), np.float32)})
    (tmp_path / "._model.safetensors").write_bytes(b"\x00\x05\x16\x07")
    assert list(safetensors.load_tensors(CheckpointFolder(tmp_path))) == ["a"]


def write(file: Path, header: object, body: bytes = bytes(64)) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]},
            "is truncated: tensor w ends at byte",
        ),
        ({"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 16]}, "has 16 bytes for 8 values"),
        (
            {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
            "stored as F4; supported are F32, F16, BF16",
        ),
        ({"dtype": "F32", "shape": [-2, 4], "data_offsets": [0, 32]}, "no valid shape"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "no valid shape"),
        ({"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}, "has no values"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}, "has -16 bytes"),
        ({"dtype": "F32", "shape": [2**60] * 20_000, "data_offsets": [0, 4]}, "has 20000 axes"),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, "stored as"),
        ("nothing", "is not described"),
    ],
)
def test_impossible_tensor_entry_is_refused(entry: object, message: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"w": entry})
    with pytest.raises(UserError, match=message):
        safetensors.load_tensors(CheckpointFolder(tmp_path))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"123",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_invalid_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="not a valid safetensors file"):
        safetensors.load_tensors(CheckpointFolder(tmp_path))


def test_a_file_damaged_anywhere_in_its_header_is_read_or_refused(
    stories: Path, tmp_path: Path
) -> None:
    data, rng = (stories / "model.safetensors").read_bytes(), random.Random(0)
    end = 8 + int.from_bytes(data[:8], "little")
    refused = 0
    for _ in range(400):
        broken = bytearray(data)
        broken[rng.randrange(end)] = rng.randrange(256)
        (tmp_path / "model.safetensors").write_bytes(broken)
        try:
            for tensor in safetensors.load_tensors(CheckpointFolder(tmp_path)).values():
                tensor.read(0, 1)
        except UserError:
            refused += 1
    assert refused > 50


def test_index_with_missing_or_outside_files_is_refused(stories: Path, tmp_path: Path) -> None:
    for weight_map, message in (
        ({"w": "../x.safetensors"}, "outside it"),
        ({"w": "no.safetensors"}, "has no no.safetensors"),
        ({"w": ".."}, "has no"),
        ({"w": "x" * 5000}, "has no x"),
        ({}, "no weight_map"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
        with pytest.raises(UserError, match=message):
            safetensors.load_tensors(CheckpointFolder(tmp_path))


def test_a_header_length_that_shifts_every_tensor_is_refused(tmp_path: Path) -> None:
    file = tiny_checkpoint.save(tmp_path / "model.safetensors", {"a": np.ones((2, 8), np.float32)})
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padded = data[8 : 8 + length] + b"  "
    file.write_bytes((length + 2).to_bytes(8, "little") + padded + data[8 + length :])
    assert [tensor.name for tensor in safetensors.read_safetensors(file)] == ["a"]
    file.write_bytes((length + 1).to_bytes(8, "little") + padded + data[8 + length :])
    with pytest.raises(UserError, match="end at byte 64 of 65"):
        list(safetensors.read_safetensors(file))


@pytest.mark.parametrize("spans", [[[0, 32], [36, 68]], [[0, 32], [28, 60]]])
def test_tensors_that_overlap_or_leave_gaps_are_refused(
    spans: list[list[int]], tmp_path: Path
) -> None:
    header = {
        str(i): {"dtype": "F32", "shape": [1, 8], "data_offsets": span}
        for i, span in enumerate(spans)
    }
    blob = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(blob).to_bytes(8, "little") + blob + bytes(spans[-1][1]))
    with pytest.raises(UserError, match="do not follow one another"):
        list(safetensors.read_safetensors(file))
