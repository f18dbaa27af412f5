"""Importance matrices are read as in llama.cpp, and quantizing with them gives its bytes."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from quant.calibration import imatrix
from quant.errors import UserError
from quant.model_file import read_header
from quant.quantize import pipeline
from quant.quantize.plan import plan_quantization
from quant.quantize.write import open_gguf, write_model
from quant.recipes import file_types, tensor_types
from quant.recipes.tensor_types import TypeOverrides
from tests.quant import upstream
from tests.quant.upstream import Settings, Sums, random_sums, thin_model, write_dat, write_gguf

MODELS: dict[str, Callable[[Path], Path]] = {
    "one": lambda path: thin_model(path, 1),
    "long": lambda path: thin_model(path, 17, tied=True),
    "experts": lambda path: thin_model(path, 9, experts=4),
    "odd": lambda path: thin_model(path, 9, columns=96),
}
IMATRIX_FILE_TYPES = [name for name, kind in file_types.FILE_TYPES.items() if kind.needs_imatrix]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("imatrix")

    def get(name: str) -> Path:
        file = folder / f"{name}.gguf"
        return file if file.exists() else MODELS[name](file)

    return get


def assert_same_as_llama_cpp(
    source: Path,
    kind: str,
    folder: Path,
    sums: dict[str, Sums],
    overrides: TypeOverrides = tensor_types.NO_OVERRIDES,
) -> None:
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    importance = {name: entry.means for name, entry in sums.items()}
    assert upstream.quantize(
        source, theirs, file_types.FILE_TYPES[kind].number, Settings(importance)
    )
    weights = imatrix.load_imatrix(write_gguf(folder / "imatrix.gguf", sums))
    write_model(
        plan_quantization(open_gguf(source), kind, overrides, weights),
        ours,
        threads=2,
    )
    upstream.assert_same(ours, theirs)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in file_types.FILE_TYPES
        if kind not in ("F32", "F16", "BF16", "Q8_0", *file_types.OWN_FILE_TYPES)
    ],
)
def test_every_file_type_with_an_imatrix_equals_llama_cpp(
    kind: str, models, tmp_path: Path
) -> None:
    assert_same_as_llama_cpp(models("one"), kind, tmp_path, random_sums(models("one")))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "IQ4_NL", "IQ3_XXS", "Q4_K_M", "Q2_K_S"])
@pytest.mark.parametrize("model", ["long", "experts", "odd"])
def test_each_expert_uses_its_own_vector_and_an_unseen_expert_ones(
    kind: str, model: str, models, tmp_path: Path
) -> None:
    assert_same_as_llama_cpp(models(model), kind, tmp_path, random_sums(models(model)))


@pytest.mark.parametrize("kind", IMATRIX_FILE_TYPES)
def test_types_of_few_bits_are_refused_without_an_imatrix(kind, models, tmp_path) -> None:
    source = open_gguf(models("one"))
    with pytest.raises(UserError, match=f"{kind} needs an importance matrix") as caught:
        plan_quantization(source, kind)
    assert "--imatrix" in caught.value.hint
    assert not upstream.quantize(
        models("one"), tmp_path / "x.gguf", file_types.FILE_TYPES[kind].number
    )


def test_file_types_that_need_an_imatrix() -> None:
    assert set(IMATRIX_FILE_TYPES) == {
        "Q2_K_S",
        "IQ3_XXS",
        "IQ2_M",
        "IQ2_S",
        "IQ2_XS",
        "IQ2_XXS",
        "IQ1_M",
        "IQ1_S",
    }


def test_slabs_and_threads_do_not_change_the_bytes(models, tmp_path: Path, monkeypatch) -> None:
    source, sums = models("experts"), random_sums(models("experts"))
    weights = imatrix.load_imatrix(write_gguf(tmp_path / "imatrix.gguf", sums))
    for name, slab, threads in (("a", 1 << 24, 1), ("b", 700, 3)):
        monkeypatch.setattr(pipeline, "SLAB_VALUES", slab)
        plan = plan_quantization(open_gguf(source), "Q4_K_M", imatrix=weights)
        write_model(plan, tmp_path / name, threads=threads)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_gguf_and_dat_files_hold_the_same_means(models, tmp_path: Path) -> None:
    sums = random_sums(models("experts"))
    new = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", sums))
    old = imatrix.load_imatrix(write_dat(tmp_path / "a.dat", sums))
    assert new.entries.keys() == old.entries.keys() == sums.keys()
    for name, entry in sums.items():
        matrices, columns = entry.sums.shape
        assert np.array_equal(new.entries[name].mean_squares(0, matrices, columns), entry.means)
        assert np.allclose(
            old.entries[name].mean_squares(0, matrices, columns), entry.means, rtol=1e-6
        )
        assert np.array_equal(
            new.entries[name].mean_squares(matrices - 1, matrices, columns), entry.means[-1:]
        )


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_output_names_its_imatrix_in_the_metadata_of_llama_quantize(
    form: str, models, tmp_path: Path
) -> None:
    write = {"gguf": write_gguf, "dat": write_dat}[form]
    sums = random_sums(models("one"))
    weights = imatrix.load_imatrix(write(tmp_path / f"imatrix.{form}", sums))
    out = tmp_path / "out.gguf"
    write_model(
        plan_quantization(open_gguf(models("one")), "Q4_0", imatrix=weights),
        out,
        threads=1,
    )
    fields = gguf.GGUFReader(out).fields
    written = {key: fields[key].contents() for key in fields if key.startswith("quantize.imatrix.")}
    assert written == {
        "quantize.imatrix.file": str(tmp_path / f"imatrix.{form}")[:127],
        "quantize.imatrix.dataset": "wiki.txt",
        "quantize.imatrix.entries_count": len(sums),
        "quantize.imatrix.chunks_count": 7,
    }
    assert {fields[f"quantize.imatrix.{key}_count"].types[0] for key in ("entries", "chunks")} == {
        gguf.GGUFValueType.UINT32
    }


def test_dat_file_without_dataset_and_chunks_is_read(models, tmp_path: Path) -> None:
    sums, path = random_sums(models("one")), tmp_path / "a.dat"
    data = write_dat(path, sums).read_bytes()
    path.write_bytes(data[: -8 - len(b"wiki.txt")])
    weights = imatrix.load_imatrix(path)
    assert (weights.dataset, weights.chunks, len(weights.entries)) == ("", 0, len(sums))
    assert weights.metadata.keys() == {"quantize.imatrix.file", "quantize.imatrix.entries_count"}


def test_output_is_rewritten_only_for_another_imatrix(models, tmp_path: Path) -> None:
    source, out = open_gguf(models("one")), tmp_path / "out.gguf"
    first = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", random_sums(models("one"))))
    second = imatrix.load_imatrix(
        write_gguf(tmp_path / "b.gguf", random_sums(models("one"), seed=4))
    )
    assert not write_model(plan_quantization(source, "Q4_0", imatrix=first), out).already_finished
    assert write_model(plan_quantization(source, "Q4_0", imatrix=first), out).already_finished
    assert not write_model(plan_quantization(source, "Q4_0", imatrix=second), out).already_finished
    assert not write_model(plan_quantization(source, "Q4_0"), out).already_finished


def test_vector_of_wrong_length_is_refused_except_for_the_embedding(models, tmp_path) -> None:
    source, sums = open_gguf(models("one")), random_sums(models("one"))
    sums["token_embd.weight"] = Sums(np.ones((1, 5), np.float32), np.ones(1))
    plan = plan_quantization(
        source, "Q4_0", imatrix=imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", sums))
    )
    assert plan.tensors_without_importance == ("token_embd.weight",)
    for name in ("blk.0.ffn_up.weight", "output.weight"):
        sums[name] = Sums(np.ones((1, 77), np.float32), np.ones(1))
    weights = imatrix.load_imatrix(write_gguf(tmp_path / "b.gguf", sums))
    with pytest.raises(
        UserError,
        match=r"blk\.0\.ffn_up\.weight has 77 values, the tensor needs 256; .*output\.weight",
    ):
        plan_quantization(source, "Q4_0", imatrix=weights)


def test_tensor_without_an_entry_is_reported_or_refused_for_types_of_few_bits(
    models, tmp_path: Path
) -> None:
    source, sums = open_gguf(models("one")), random_sums(models("one"))
    del sums["blk.0.ffn_gate.weight"]
    weights = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", sums))
    plan = plan_quantization(source, "Q4_K_M", imatrix=weights)
    assert set(plan.tensors_without_importance) == {"token_embd.weight", "blk.0.ffn_gate.weight"}
    with pytest.raises(
        UserError, match=r"without data in the imatrix, .*blk\.0\.ffn_gate\.weight \(IQ2_XXS\)"
    ):
        plan_quantization(source, "IQ2_XXS", imatrix=weights)


def damaged_files(folder: Path, sums: dict[str, Sums]) -> dict[str, bytes]:
    """Return invalid imatrix files made from `sums`: the content by a name of the damage."""
    new = write_gguf(folder / "new", sums).read_bytes()
    old = write_dat(folder / "old", sums).read_bytes()
    name = next(iter(sums))
    size_offset = 4 + 4 + len(name) + 4
    three_counts = dict(sums)
    three_counts[name] = Sums(sums[name].sums, np.ones(3))
    nan = {name: Sums(np.full((1, 4), np.nan, np.float32), np.ones(1))}
    negative = {name: Sums(np.full((1, 4), -1, np.float32), np.ones(1))}
    return {
        "empty": b"",
        "text": b"this is no importance matrix at all",
        "cut": new[: len(new) // 2],
        "cut old": old[: len(old) // 2],
        "no keys": new.replace(b"imatrix.chunk_size", b"imatrix.chunk_sizf"),
        "no counts": new.replace(b".counts", b".countz"),
        "counts of another size": write_gguf(folder / "c", three_counts).read_bytes(),
        "nan": write_gguf(folder / "d", nan).read_bytes(),
        "negative": write_dat(folder / "e", negative).read_bytes(),
        "huge": old[:size_offset] + struct.pack("<i", 2**31 - 1) + old[size_offset + 4 :],
        "less than nothing": old[:size_offset] + struct.pack("<i", -5) + old[size_offset + 4 :],
        "many": struct.pack("<i", 2**31 - 1) + old[4:],
        "long name": old[:4] + struct.pack("<i", 2**30) + old[8:],
        "twice": struct.pack("<i", 2)
        + 2 * old[4 : 4 + 4 + len(name) + 8 + 4 * sums[name].sums.size],
    }


def test_damaged_file_is_refused_with_a_hint(models, tmp_path: Path) -> None:
    for damage, data in damaged_files(tmp_path, random_sums(models("one"))).items():
        path = tmp_path / "damaged"
        path.write_bytes(data)
        with pytest.raises(UserError, match="damaged") as caught:
            imatrix.load_imatrix(path)
        assert caught.value.hint, damage
    with pytest.raises(UserError, match="there is no file"):
        imatrix.load_imatrix(tmp_path / "none.gguf")
    with pytest.raises(UserError, match="cannot read"):
        imatrix.load_imatrix(tmp_path)


def test_truncated_path_in_the_metadata_is_valid_utf8(models, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"odd \xff name")
    folder.mkdir()
    for name in (
        "\u00fc" * 99,
        "x" + "\u00fc" * 99,
    ):  # ü has two bytes in UTF-8: the cut at 127 bytes splits a character in one of the names
        path = write_gguf(folder / "a.gguf", random_sums(models("one"))).rename(
            folder / f"{name}.gguf"
        )
        out = tmp_path / "out.gguf"
        plan = plan_quantization(
            open_gguf(models("one")), "Q4_0", imatrix=imatrix.load_imatrix(path)
        )
        write_model(plan, out, force=True)
        written_path = gguf.GGUFReader(out).fields["quantize.imatrix.file"].contents()
        assert str(path).encode("utf-8", "ignore").startswith(written_path.encode())
        assert 120 < len(written_path.encode()) <= 127


@pytest.mark.parametrize("value", ["tensor", "matrices", "chunks"])
def test_impossible_numbers_are_refused(value: str, tmp_path: Path, models) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("imatrix.datasets", ["a"])
    (writer.add_uint64 if value == "chunks" else writer.add_uint32)("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    matrices = 1 << 17 if value == "matrices" else 1
    writer.add_tensor("a.in_sum2", np.ones((matrices, 4), np.float32))
    writer.add_tensor("a.counts", np.ones((matrices, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if value == "tensor":
        with pytest.raises(
            UserError, match="imatrix of another model: a has 4 values, the tensor needs 8"
        ):
            imatrix.load_imatrix(path).match_tensors([("a", (4, 9, 1, 2))])
    else:
        with pytest.raises(UserError, match=r"a\.gguf: .*(counts|chunk_count)"):
            imatrix.load_imatrix(path)


@pytest.mark.parametrize(
    "kind", [kind for kind in file_types.TENSOR_TYPES if kind not in ("F32", "F16", "BF16")]
)
def test_vector_of_zeros_is_quantized(kind: str, models, tmp_path: Path) -> None:
    sums = {
        name: Sums(np.zeros_like(entry.sums), entry.counts)
        for name, entry in random_sums(models("one")).items()
    }
    weights = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", sums))
    plan = plan_quantization(
        open_gguf(models("one")), "Q4_K_M", TypeOverrides((f"ffn_up={kind}",)), weights
    )
    assert write_model(plan, tmp_path / "out.gguf", threads=1).type_summaries
    assert read_header.read_header(tmp_path / "out.gguf").tensors
