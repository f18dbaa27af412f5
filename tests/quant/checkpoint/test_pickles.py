"""Pickled checkpoints of torch.save: the same tensors as in safetensors, and no code is run."""

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
    """The stories' folder without weights."""
    made = shutil.copytree(stories, tmp_path / "stories260K")
    (made / "model.safetensors").unlink()
    return made


def test_a_pickle_gives_the_same_file_as_safetensors_but_for_the_name_of_its_source(
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
    mine, other = (source.fingerprint.encode() for source in sources)
    assert ours.read_bytes().replace(mine, other) == theirs.read_bytes()


def test_shards_and_every_dtype_are_read(tmp_path: Path) -> None:
    random = torch.randn(3, 4, 6)
    kept = {
        "a": random,
        "b": random[0].bfloat16(),
        "c": random[1].half(),
        "d": (random[0] * 9).to(torch.int32),
        "e": random[1].to(torch.float8_e4m3fn),
        "f": torch.tensor(2.5),
        "g": random[2, 1:3],
    }
    places = {}
    for i, (name, value) in enumerate(kept.items()):
        file = f"pytorch_model-{i % 2 + 1:05}-of-00002.bin"
        places[name] = file
        old = torch.load(tmp_path / file, weights_only=True) if (tmp_path / file).exists() else {}
        torch.save(old | {name: value}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    found = pickles.load_pickles(CheckpointFolder(tmp_path))
    assert {name: t.dtype for name, t in sorted(found.items())} == dict(
        zip("abcdefg", ["F32", "BF16", "F16", "I32", "F8_E4M3", "F32", "F32"], strict=True)
    )
    assert {name: t.shape for name, t in found.items() if name in "afg"} == {
        "a": (3, 4, 6),
        "f": (1,),
        "g": (2, 6),
    }
    assert np.array_equal(
        tensor_views.read_floats(found["a"], 5, 9), random.reshape(12, 6)[5:9].numpy()
    )
    assert np.array_equal(tensor_views.read_floats(found["b"]), kept["b"].float().numpy())
    assert np.array_equal(tensor_views.read_floats(found["g"]), kept["g"].numpy())


def test_a_column_of_any_stride_is_read(tmp_path: Path) -> None:
    """A transposed row is contiguous to torch whatever the stride of its one column."""
    row = torch.arange(1.0, 5.0).reshape(1, 4)
    torch.save({"a": row.T, "b": row[:, :1], "c": torch.zeros(3, 4, 1, 1).as_strided((3, 4, 1, 1), (4, 1, 7, 9))},
               tmp_path / "pytorch_model.bin")  # fmt: skip
    found = pickles.load_pickles(CheckpointFolder(tmp_path))
    assert tensor_views.read_floats(found["a"]).tolist() == [[1], [2], [3], [4]]
    assert tensor_views.read_floats(found["a"], 1, 3).tolist() == [[2], [3]]
    assert tensor_views.read_floats(found["b"]).tolist() == [[1]]
    assert tensor_views.read_floats(found["c"]).shape == (12, 1)


def test_pickles_are_refused_unless_they_are_allowed(folder: Path, weights: dict[str, Any]) -> None:
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(
        PickleNotAllowedError, match=r"has only pickled weights \(pytorch_model\.bin\)"
    ) as caught:
        checkpoint_source.open_checkpoint(folder)
    assert "--allow-pickle" in caught.value.hint


class Bomb:
    """What unpickling would run."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("wrapped", [True, False])
def test_code_in_a_pickle_is_not_run(wrapped: bool, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    torch.save(
        {"w": torch.ones(2, 2), "x": Bomb(target)} if wrapped else Bomb(target),
        tmp_path / "pytorch_model.bin",
    )
    with pytest.raises(UserError, match=r"cannot be read: Weights only load failed"):
        pickles.load_pickles(CheckpointFolder(tmp_path))
    assert not target.exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)  # the bomb is a real one
    assert target.exists()


def old_format(file: Path, values: Any) -> None:
    torch.save(values, file, _use_new_zipfile_serialization=False)


def compressed(file: Path, values: Any) -> None:
    torch.save(values, file.with_suffix(".tmp"))
    with (
        zipfile.ZipFile(file.with_suffix(".tmp")) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))


def negated() -> Any:
    """A tensor whose stored values have the other sign: a bit of it says so."""
    value = torch.ones(2, 2)
    torch._C._set_tensor_metadata(value, {"neg": True})
    return value


def bare(file: Path, values: Any) -> None:
    file.write_bytes(pickle.dumps(values))


@pytest.mark.parametrize(
    ("save", "values", "said"),
    [
        (old_format, {"w": torch.ones(2, 2)}, "torch's format from before 2020"),
        (bare, {"w": [1, 2]}, "torch's format from before 2020"),
        (compressed, {"w": torch.ones(2, 2)}, "is compressed"),
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
        (lambda file, values: torch.save(values, file), {"w": negated()}, "in memory order: 'w'"),
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
def test_what_is_no_table_of_tensors_is_refused(
    save: Any, values: Any, said: str, tmp_path: Path
) -> None:
    save(tmp_path / "pytorch_model.bin", values)
    with pytest.raises(UserError) as caught:
        pickles.load_pickles(CheckpointFolder(tmp_path))
    assert said in str(caught.value)


def test_a_damaged_pickle_is_read_or_refused(weights: dict[str, Any], tmp_path: Path) -> None:
    good, file = tmp_path / "good.bin", tmp_path / "model" / "pytorch_model.bin"
    file.parent.mkdir()
    torch.save({name: weights[name] for name in list(weights)[:3]}, good)
    data, random = good.read_bytes(), np.random.default_rng(0)
    with zipfile.ZipFile(good) as archive:
        head = next(m for m in archive.infolist() if m.filename.endswith("data.pkl"))
    spots = [
        *random.integers(head.header_offset, head.header_offset + head.file_size, 150),
        *random.integers(len(data) - 900, len(data), 100),
    ]
    refused = 0
    for spot in spots:
        broken = bytearray(data)
        broken[spot] = random.integers(256)
        file.write_bytes(broken)
        try:
            for tensor in pickles.load_pickles(CheckpointFolder(file.parent)).values():
                tensor.read(0, 1)
        except UserError:
            refused += 1
    assert refused > 50


def test_a_trainers_own_files_do_not_count(weights: dict[str, Any], tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "model.pt"):
        torch.save({"w": torch.ones(2, 2)}, tmp_path / name)
    assert [file.name for file in pickles.find_pickles(tmp_path)] == ["model.pt"]
    assert list(pickles.load_pickles(CheckpointFolder(tmp_path))) == ["w"]
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "other.pth")
    with pytest.raises(
        UserError, match=r"has 2 pickled files and no pytorch_model\.bin: model\.pt, other\.pth"
    ):
        pickles.load_pickles(CheckpointFolder(tmp_path))


def test_safetensors_go_before_pickles(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "both")
    (folder / "pytorch_model.bin").write_bytes(b"nonsense")
    assert checkpoint_source.open_checkpoint(folder, allow_pickle=True).weights
    assert safetensors.load_tensors(CheckpointFolder(folder))
