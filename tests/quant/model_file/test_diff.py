"""The differences of two GGUF models, compared with numpy and the gguf package."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.model_file import diff, read_header
from quant.quantize import plan
from quant.quantize.write import open_gguf, write_model


@pytest.fixture
def pair(stories_gguf: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The GGUF files of the stories260K model in F32 and in Q8_0."""
    out = tmp_path / "small.gguf"
    write_model(plan.plan_quantization(open_gguf(stories_gguf), "Q8_0"), out, threads=1)
    return stories_gguf, out


def values(path: Path) -> dict[str, np.ndarray]:
    reader = gguf.GGUFReader(path)
    return {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype("f8") for t in reader.tensors
    }


def test_errors_equal_those_of_gguf_and_numpy(pair: tuple[Path, Path]) -> None:
    left, right = pair
    differences = {
        d.name: d
        for d in diff.compare_tensors(read_header.read_header(left), read_header.read_header(right))
    }
    left_values, right_values = values(left), values(right)
    assert differences.keys() == left_values.keys() == right_values.keys()
    for name, difference in differences.items():
        expected = np.sqrt(
            ((left_values[name] - right_values[name]) ** 2).sum() / (left_values[name] ** 2).sum()
        )
        assert difference.error == pytest.approx(expected, rel=1e-5)
        assert difference.same_bytes == (
            difference.left_tensor.type == difference.right_tensor.type
        )
    assert 0 < differences["blk.0.attn_q.weight"].error < 0.01


def test_model_equals_itself(stories_gguf: Path) -> None:
    header = read_header.read_header(stories_gguf)
    assert diff.compare_keys(header, header) == []
    assert all(d.same_bytes and d.error == 0 for d in diff.compare_tensors(header, header))
    assert diff.compare_names(header, header).only_left == ()


def test_missing_and_different_keys_are_listed(pair: tuple[Path, Path]) -> None:
    differences = {d.key: d for d in diff.compare_keys(*map(read_header.read_header, pair))}
    assert (
        differences["general.file_type"].left_value,
        differences["general.file_type"].right_value,
    ) == (
        "0",
        "7",
    )
    assert "tokenizer.ggml.tokens" not in differences
    assert set(differences) <= {
        "general.file_type",
        "llmcli.quantize.source",
        "llmcli.quantize.settings",
        "general.quantization_version",
    }


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_missing_tensors_and_different_shapes_are_reported(tmp_path: Path) -> None:
    ones = np.ones((4, 32), np.float32)
    left = read_header.read_header(
        write(tmp_path / "a.gguf", {"a": ones, "b": ones, "c": ones, "z": ones * 0})
    )
    right = read_header.read_header(
        write(tmp_path / "b.gguf", {"b": ones[:2], "c": ones * 1.5, "d": ones, "z": ones})
    )
    assert diff.compare_names(left, right) == diff.TensorNames(("b", "c", "z"), ("a",), ("d",))
    b, c, z = diff.compare_tensors(left, right)
    assert (b.error, b.same_bytes) == (None, False)
    assert c.error == pytest.approx(0.5)
    assert (z.error, z.same_bytes) == (None, False)  # no relative error: the left tensor is zero


def test_large_tensors_are_compared_in_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "SLAB_VALUES", 64)
    rows = np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32)
    other = rows.copy()
    other[8, 31] += 1
    left, right = write(tmp_path / "a.gguf", {"t": rows}), write(tmp_path / "b.gguf", {"t": other})
    differences = diff.compare_tensors(
        read_header.read_header(left), read_header.read_header(right)
    )
    assert next(differences).error == pytest.approx(
        1 / np.sqrt((rows.astype("f8") ** 2).sum()), rel=1e-5
    )


def test_tensor_with_nan_equals_itself_and_has_no_error_against_others(
    tmp_path: Path,
) -> None:
    rows = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
    broken = {"nan": rows.copy(), "infinite": rows.copy(), "large": rows * np.float32(1e38)}
    broken["nan"][1, 3], broken["infinite"][1, 3] = np.nan, np.inf
    left = read_header.read_header(write(tmp_path / "a.gguf", broken))
    right = read_header.read_header(
        write(tmp_path / "b.gguf", {"nan": rows, "infinite": rows, "large": -broken["large"]})
    )
    assert [(d.error, d.same_bytes) for d in diff.compare_tensors(left, left)] == [(0.0, True)] * 3
    assert [d.error for d in diff.compare_tensors(left, right)] == [None] * 2 + [pytest.approx(2)]
    assert [d.error for d in diff.compare_tensors(right, left)] == [None] * 2 + [pytest.approx(2)]
