"""Checkpoints pickled by torch.save: read like safetensors, and code in them is never run."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.checkpoint import pickles, safetensors, tensor_views
from quant.checkpoint.folder import CheckpointFolder
from quant.convert import checkpoint_source
from quant.errors import PickleNotAllowedError, UserError
from quant.quantize import plan, write
from tests.quant import tiny_checkpoint

torch = pytest.importorskip("torch", reason="torch is not installed: pickles have no writer")


@pytest.fixture
def weights(stories: Path) -> dict[str, Any]:
    return {
        name: torch.from_numpy(a.copy())
        for name, a in tiny_checkpoint.read(stories / "model.safetensors").items()
    }


@pytest.fixture
def folder(stories: Path, tmp_path: Path) -> Path:
    """A copy of the stories260K checkpoint without its weights file."""
    copied = shutil.copytree(stories, tmp_path / "stories260K")
    (copied / "model.safetensors").unlink()
    return copied


def test_pickle_gives_the_file_of_safetensors_except_for_the_source_fingerprint(
    folder: Path, weights: dict[str, Any], stories: Path, tmp_path: Path
) -> None:
    torch.save(weights, folder / "pytorch_model.bin")
    ours, theirs = tmp_path / "a.gguf", tmp_path / "b.gguf"
    sources = (
        checkpoint_source.open_checkpoint(folder, allow_pickle=True),
        checkpoint_source.open_checkpoint(stories),
    )
    for source, out in zip(sources, (ours, theirs), strict=True):
        write.write_model(plan.plan_quantization(source, "Q8_0"), out, threads=1)
    our_fingerprint, their_fingerprint = (source.fingerprint.encode() for source in sources)
    assert ours.read_bytes().replace(our_fingerprint, their_fingerprint) == theirs.read_bytes()


def test_shards_and_every_dtype_are_read(tmp_path: Path) -> None:
    random = torch.randn(3, 4, 6)
    tensors = {
        "a": random,
        "b": random[0].bfloat16(),
        "c": random[1].half(),
        "d": (random[0] * 9).to(torch.int32),
        "e": random[1].to(torch.float8_e4m3fn),
        "f": torch.tensor(2.5),
        "g": random[2, 1:3],
    }
    weight_map = {}
    for i, (name, value) in enumerate(tensors.items()):
        file = f"pytorch_model-{i % 2 + 1:05}-of-00002.bin"
        weight_map[name] = file
        shard = torch.load(tmp_path / file, weights_only=True) if (tmp_path / file).exists() else {}
        torch.save(shard | {name: value}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = pickles.load_pickles(CheckpointFolder(tmp_path))
    assert {name: t.dtype for name, t in sorted(loaded.items())} == dict(
        zip("abcdefg", ["F32", "BF16", "F16", "I32", "F8_E4M3", "F32", "F32"], strict=True)
    )
    assert {name: t.shape for name, t in loaded.items() if name in "afg"} == {
        "a": (3, 4, 6),
        "f": (1,),
        "g": (2, 6),
    }
    assert np.array_equal(
        tensor_views.read_floats(loaded["a"], 5, 9), random.reshape(12, 6)[5:9].numpy()
    )
    assert np.array_equal(tensor_views.read_floats(loaded["b"]), tensors["b"].float().numpy())
    assert np.array_equal(tensor_views.read_floats(loaded["g"]), tensors["g"].numpy())


def test_a_column_of_any_stride_is_read(tmp_path: Path) -> None:
    """torch treats a transposed row as contiguous, for any stride of its single column."""
    row = torch.arange(1.0, 5.0).reshape(1, 4)
    torch.save({"a": row.T, "b": row[:, :1], "c": torch.zeros(3, 4, 1, 1).as_strided((3, 4, 1, 1), (4, 1, 7, 9))},
               tmp_path / "pytorch_model.bin")  # fmt: skip
    loaded = pickles.load_pickles(CheckpointFolder(tmp_path))
    assert tensor_views.read_floats(loaded["a"]).tolist() == [[1], [2], [3], [4]]
    assert tensor_views.read_floats(loaded["a"], 1, 3).tolist() == [[2], [3]]
    assert tensor_views.read_floats(loaded["b"]).tolist() == [[1]]
    assert tensor_views.read_floats(loaded["c"]).shape == (12, 1)


def test_pickles_are_refused_unless_they_are_allowed(folder: Path, weights: dict[str, Any]) -> None:
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(
        PickleNotAllowedError, match=r"has only pickled weights \(pytorch_model\.bin\)"
    ) as caught:
        checkpoint_source.open_checkpoint(folder)
    assert "--allow-pickle" in caught.value.hint


class TouchWhenUnpickled:
    """Creates the file `target` if it is unpickled without restrictions."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("wrapped", [True, False])
def test_code_in_a_pickle_is_not_run(wrapped: bool, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    torch.save(
        {"w": torch.ones(2, 2), "x": TouchWhenUnpickled(target)}
        if wrapped
        else TouchWhenUnpickled(target),
        tmp_path / "pytorch_model.bin",
    )
    with pytest.raises(UserError, match=r"cannot be read: Weights only load failed"):
        pickles.load_pickles(CheckpointFolder(tmp_path))
    assert not target.exists()
    torch.load(
        tmp_path / "pytorch_model.bin", weights_only=False
    )  # shows that unrestricted unpickling would run the code
    assert target.exists()


def save_old_format(file: Path, values: Any) -> None:
    torch.save(values, file, _use_new_zipfile_serialization=False)


def save_compressed(file: Path, values: Any) -> None:
    torch.save(values, file.with_suffix(".tmp"))
    with (
        zipfile.ZipFile(file.with_suffix(".tmp")) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))


def negative_view() -> Any:
    """Return a tensor with torch's negation bit: its values are the negated stored values."""
    value = torch.ones(2, 2)
    torch._C._set_tensor_metadata(value, {"neg": True})
    return value


def save_plain_pickle(file: Path, values: Any) -> None:
    file.write_bytes(pickle.dumps(values))


@pytest.mark.parametrize(
    ("save", "values", "message"),
    [
        (save_old_format, {"w": torch.ones(2, 2)}, "torch's format from before 2020"),
        (save_plain_pickle, {"w": [1, 2]}, "torch's format from before 2020"),
        (save_compressed, {"w": torch.ones(2, 2)}, "is compressed"),
        (lambda file, values: torch.save(values, file), {}, "does not hold a table of tensors"),
        (
            lambda file, values: torch.save(values, file),
            [torch.ones(2, 2)],
            "does not hold a table of tensors",
        ),
        (
            lambda file, values: torch.save(values, file),
            {"w": torch.ones(2, 2), "epoch": 3},
            "more than tensors",
        ),
        (
            lambda file, values: torch.save(values, file),
            {"w": torch.ones(4, 2).T},
            "in memory order: 'w'",
        ),
        (
            lambda file, values: torch.save(values, file),
            {"w": torch.ones(2, 2).to_sparse()},
            "in memory order: 'w'",
        ),
        (
            lambda file, values: torch.save(values, file),
            {"w": negative_view()},
            "in memory order: 'w'",
        ),
        (
            lambda file, values: torch.save(values, file),
            {"w": torch.ones(2, 2, dtype=torch.complex64)},
            "order: 'w'",
        ),
        (
            lambda file, values: torch.save(values, file),
            {3: torch.ones(2, 2)},
            "in memory order: 3",
        ),
    ],
)
def test_pickle_without_a_table_of_plain_tensors_is_refused(
    save: Any, values: Any, message: str, tmp_path: Path
) -> None:
    save(tmp_path / "pytorch_model.bin", values)
    with pytest.raises(UserError) as caught:
        pickles.load_pickles(CheckpointFolder(tmp_path))
    assert message in str(caught.value)


def test_a_damaged_pickle_is_read_or_refused(weights: dict[str, Any], tmp_path: Path) -> None:
    good, file = tmp_path / "good.bin", tmp_path / "model" / "pytorch_model.bin"
    file.parent.mkdir()
    torch.save({name: weights[name] for name in list(weights)[:3]}, good)
    data, random = good.read_bytes(), np.random.default_rng(0)
    with zipfile.ZipFile(good) as archive:
        head = next(m for m in archive.infolist() if m.filename.endswith("data.pkl"))
    positions = [
        *random.integers(head.header_offset, head.header_offset + head.file_size, 150),
        *random.integers(len(data) - 900, len(data), 100),
    ]
    refused = 0
    for position in positions:
        broken = bytearray(data)
        broken[position] = random.integers(256)
        file.write_bytes(broken)
        try:
            for tensor in pickles.load_pickles(CheckpointFolder(file.parent)).values():
                tensor.read(0, 1)
        except UserError:
            refused += 1
    assert refused > 50


def test_training_files_are_ignored(weights: dict[str, Any], tmp_path: Path) -> None:
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "rng_state_0.pth",
        "._model.pt",
        "model.pt",
    ):
        torch.save({"w": torch.ones(2, 2)}, tmp_path / name)
    assert [file.name for file in pickles.find_pickles(tmp_path)] == ["model.pt"]
    assert list(pickles.load_pickles(CheckpointFolder(tmp_path))) == ["w"]
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "other.pth")
    with pytest.raises(
        UserError, match=r"has 2 pickled files and no pytorch_model\.bin: model\.pt, other\.pth"
    ):
        pickles.load_pickles(CheckpointFolder(tmp_path))


def test_safetensors_are_preferred_to_pickles(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "both")
    (folder / "pytorch_model.bin").write_bytes(b"nonsense")
    assert checkpoint_source.open_checkpoint(folder, allow_pickle=True).weights
    assert safetensors.load_tensors(CheckpointFolder(folder))
