"""The file of second moments: a round trip, inputs shared by weights, and refused damage."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.calibration import imatrix, moments, moments_writer
from quant.calibration.moments import MomentsOrigin
from quant.calibration.moments_writer import MomentsInput, MomentSums, MomentsWriter
from quant.calibration.text_record import TextRecord
from quant.errors import UserError

ORIGIN = MomentsOrigin(
    "0123", 64, 3, ("ab", "cd"), TextRecord(("some.txt", "more.txt"), ("code",), (3, 5))
)


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 1, shape)


def write_file(folder: Path) -> Path:
    experts = MomentSums.from_rows(rows(3, 50, 8, seed=1))
    experts.second[1] = experts.first[1] = experts.counts[1] = 0  # no token went to this expert
    qkv = (
        ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"],
        MomentSums.from_rows(rows(70, 40)),
    )
    return moments_writer.write_moments(
        folder / "m.gguf", [qkv, (["blk.0.ffn_up_exps.weight"], experts)], ORIGIN
    )


def test_written_moments_are_read_back(tmp_path: Path) -> None:
    loaded = moments.load_moments(write_file(tmp_path))
    assert loaded.origin == ORIGIN
    assert loaded.names == {
        f"blk.0.{role}.weight" for role in ("attn_q", "attn_k", "attn_v", "ffn_up_exps")
    }
    assert loaded.input_of("blk.0.attn_q.weight") is loaded.input_of("blk.0.attn_v.weight")
    assert loaded.input_of("output.weight") is None
    second, x = loaded.input_of("blk.0.attn_k.weight"), rows(70, 40)
    assert second is not None
    assert (second.columns, second.matrices, second.counts, second.thin_matrices) == (
        40,
        1,
        (70.0,),
        0,
    )
    mean, first = second.mean(), second.first_mean()
    assert mean.dtype == np.float32
    assert np.array_equal(mean, mean.T)
    np.testing.assert_allclose(mean, x.T @ x / 70, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second.squares(), np.square(x).mean(0), rtol=1e-6)
    np.testing.assert_allclose(first, x.mean(0), rtol=1e-5, atol=1e-6)


def test_each_expert_has_its_own_moments_and_an_unseen_expert_the_identity(tmp_path: Path) -> None:
    second = moments.load_moments(write_file(tmp_path)).input_of("blk.0.ffn_up_exps.weight")
    x = rows(3, 50, 8, seed=1)
    assert second is not None
    assert (second.counts, second.unseen_matrices) == ((50.0, 0.0, 50.0), 1)
    np.testing.assert_allclose(second.mean(2), x[2].T @ x[2] / 50, rtol=1e-5, atol=1e-6)
    assert np.array_equal(second.mean(1), np.eye(8))
    assert np.array_equal(second.squares(1), np.ones(8))
    assert not second.first_mean(1).any()


def test_diagonal_of_the_moments_is_an_imatrix(tmp_path: Path) -> None:
    loaded = moments.load_moments(write_file(tmp_path))
    entries = loaded.imatrix.match_tensors(
        [("blk.0.attn_q.weight", (40, 4)), ("blk.0.ffn_up_exps.weight", (8, 4, 3))]
    )
    assert np.array_equal(
        entries["blk.0.attn_q.weight"].mean_squares(0, 1, 40)[0], loaded.inputs[0].squares()
    )
    experts = entries["blk.0.ffn_up_exps.weight"].mean_squares(0, 3, 8)
    assert np.array_equal(experts, [loaded.inputs[1].squares(matrix) for matrix in range(3)])
    assert (loaded.imatrix.dataset, loaded.imatrix.chunks) == ("some.txt", 3)


def test_file_is_read_by_the_gguf_package(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(write_file(tmp_path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    x = rows(70, 40)
    np.testing.assert_allclose(
        tensors["0.second"].data.reshape(40, 40), x.T @ x, rtol=1e-5, atol=1e-5
    )
    assert reader.fields["general.type"].contents() == "llmcli.moments"


def test_whole_matrices_of_earlier_versions_are_read(tmp_path: Path) -> None:
    x = rows(700, 600)
    file = moments_writer.write_moments(
        tmp_path / "new", [(["a"], MomentSums.from_rows(np.stack([x, 2 * x])))], ORIGIN
    )
    ours = moments.load_moments(file).inputs[0]
    writer = gguf.GGUFWriter(tmp_path / "old", "none")
    writer.add_type("llmcli.moments")
    for key, text in (("digest", "ab" * 32), ("model", "0123"), ("transform", "none")):
        writer.add_string(f"llmcli.moments.{key}", text)
    for key in ("chunk_size", "chunks"):
        writer.add_uint32(f"llmcli.moments.{key}", 1)
    for key in ("texts", "datasets", "weights"):
        writer.add_array(f"llmcli.moments.{key}", ["a"])
    writer.add_key_value(
        "llmcli.moments.inputs", [0], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
    )
    sums = np.stack([ours.sums(matrix) for matrix in range(2)])
    writer.add_tensor("0.second", sums)
    writer.add_tensor("0.squares", sums.diagonal(axis1=1, axis2=2).copy())
    writer.add_tensor("0.first", np.zeros((2, 600), np.float32))
    writer.add_tensor("0.counts", np.full(2, 700.0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = moments.load_moments(tmp_path / "old").inputs[0]
    for matrix in range(2):
        assert np.array_equal(theirs.mean(matrix), ours.mean(matrix))


def test_moments_of_another_model_or_other_folds_are_refused(tmp_path: Path) -> None:
    loaded = moments.load_moments(write_file(tmp_path))
    assert set(
        loaded.match_tensors([("blk.0.attn_q.weight", (40, 4)), ("output.weight", (40, 9))])
    ) == {"blk.0.attn_q.weight"}
    with pytest.raises(
        UserError,
        match=r"another model: blk\.0\.attn_q\.weight has 1 x 40 columns, the tensor 1 x 41",
    ):
        loaded.match_tensors([("blk.0.attn_q.weight", (41, 4))])
    with pytest.raises(UserError, match=r"another model: .*ffn_up_exps"):
        loaded.match_tensors([("blk.0.ffn_up_exps.weight", (8, 4, 4))])
    with pytest.raises(UserError, match="a model with no folds, this model has folds abc"):
        loaded.match_tensors([("blk.0.attn_q.weight", (40, 4))], transform="abc")


def test_digest_depends_on_moments_and_tensor_names(tmp_path: Path) -> None:
    digest = moments.load_moments(
        moments_writer.write_moments(
            tmp_path / "a", [(["a"], MomentSums.from_rows(rows(9, 4)))], ORIGIN
        )
    ).digest
    assert (
        digest
        == moments.load_moments(
            moments_writer.write_moments(
                tmp_path / "b", [(["a"], MomentSums.from_rows(rows(9, 4)))], ORIGIN
            )
        ).digest
    )
    other_digest = moments.load_moments(
        moments_writer.write_moments(
            tmp_path / "c", [(["a"], MomentSums.from_rows(rows(9, 4, seed=1)))], ORIGIN
        )
    ).digest
    assert digest != other_digest
    assert (
        digest
        != moments.load_moments(
            moments_writer.write_moments(
                tmp_path / "d", [(["b"], MomentSums.from_rows(rows(9, 4)))], ORIGIN
            )
        ).digest
    )


def test_unfinished_file_is_continued(tmp_path: Path) -> None:
    inputs = [MomentsInput((f"w{number}",), 6) for number in range(3)]
    sums = [MomentSums.from_rows(rows(9, 6, seed=number)) for number in range(3)]
    expected = moments_writer.write_moments(
        tmp_path / "whole", [((f"w{n}",), entry) for n, entry in enumerate(sums)], ORIGIN
    )
    with MomentsWriter(tmp_path / "m", ORIGIN, inputs) as file:
        file.write_input(2, sums[2])
    assert not (tmp_path / "m").exists()
    with MomentsWriter(tmp_path / "m", ORIGIN, inputs) as file:
        assert file.finished_inputs == {2}
        file.write_input(0, sums[0])
        file.write_input(1, sums[1])
        file.finish()
    assert (tmp_path / "m").read_bytes() == expected.read_bytes()
    assert list(tmp_path.glob(".*")) == []
    with MomentsWriter(tmp_path / "m", ORIGIN, inputs) as file:
        file.write_input(1, sums[1])
    with MomentsWriter(
        tmp_path / "m", MomentsOrigin("other"), inputs
    ) as file:  # the unfinished file is of another model: the writer starts again
        assert file.finished_inputs == frozenset()


@pytest.mark.parametrize("changed", ["second", "squares", "first", "counts", "mark"])
def test_an_input_whose_bytes_are_not_those_of_its_mark_is_written_again(
    tmp_path: Path, changed: str
) -> None:
    """As after a power cut, when a file system may keep a later write and lose an earlier one."""
    inputs = [MomentsInput((f"w{number}",), 6) for number in range(2)]
    sums = [MomentSums.from_rows(rows(9, 6, seed=number)) for number in range(2)]
    with MomentsWriter(tmp_path / "m", ORIGIN, inputs) as file:
        for number in range(2):
            file.write_input(number, sums[number])
        offset = file._slots[f"1.{changed}"].offset
    part = tmp_path / ".m.part"
    raw = bytearray(part.read_bytes())
    raw[offset] ^= 1
    part.write_bytes(raw)
    with MomentsWriter(tmp_path / "m", ORIGIN, inputs) as file:
        assert file.finished_inputs == {0}
        file.write_input(1, sums[1])
        file.finish()
    whole = moments_writer.write_moments(
        tmp_path / "whole", [((f"w{n}",), entry) for n, entry in enumerate(sums)], ORIGIN
    )
    assert (tmp_path / "m").read_bytes() == whole.read_bytes()


def test_moments_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    broken = rows(9, 6)
    broken[3, 2] = np.nan
    with pytest.raises(UserError, match="the input of w is not finite"):
        moments_writer.write_moments(tmp_path / "m", [(["w"], MomentSums.from_rows(broken))])


def damaged_files(path: Path) -> dict[str, bytes]:
    raw = path.read_bytes()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def overwrite(offset: int, value: bytes) -> bytes:
        return raw[:offset] + value + raw[offset + len(value) :]

    second, squares, counts = (
        tensors[f"0.{end}"].data_offset for end in ("second", "squares", "counts")
    )
    return {
        "no valid moments file.*not finished": raw.replace(
            gguf.GGUFReader(path).fields["llmcli.moments.digest"].contents().encode(), b"0" * 64
        ),
        "without moments": raw.replace(b"llmcli.moments\x15", b"llmcli.momentz\x15", 1),
        "is missing": raw.replace(b"moments.transform", b"moments.transforn"),
        "some of the moments": raw.replace(b"0.squares", b"0.squarez"),
        "is truncated": raw[:-600],
        "counts of .* are invalid": overwrite(counts, struct.pack("<d", -1)),
        "no sums of squares": overwrite(squares, struct.pack("<f", -1)),
        "not finite": overwrite(second + 4, struct.pack("<f", float("inf"))),
        "not symmetric": overwrite(second + 4, struct.pack("<f", 77)),
        "diagonal": overwrite(squares, struct.pack("<f", 77)),
    }


def test_damaged_file_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    for why, raw in damaged_files(write_file(tmp_path)).items():
        path.write_bytes(raw)
        with pytest.raises(UserError, match=why) as caught:  # noqa: PT012 (either may find it)
            second = moments.load_moments(path).input_of("blk.0.attn_q.weight")
            assert second is not None
            second.mean()
        assert caught.value.hint, why
    with pytest.raises(UserError, match="there is no file"):
        moments.load_moments(tmp_path / "none")
    assert not moments.is_moments_file(tmp_path / "none")
    path.write_bytes(b"GGUF nothing")
    assert not moments.is_moments_file(path)
    with pytest.raises(UserError):
        imatrix.load_imatrix(path)
