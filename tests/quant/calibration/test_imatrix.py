"""Importance matrices are read as by llama.cpp, and quantizing with them gives llama.cpp's bytes."""

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
from tests.quant.upstream import Settings, Sums, collected, slim, write_dat, write_gguf

MODELS: dict[str, Callable[[Path], Path]] = {
    "one": lambda path: slim(path, 1),
    "long": lambda path: slim(path, 17, tied=True),
    "experts": lambda path: slim(path, 9, experts=4),
    "odd": lambda path: slim(path, 9, columns=96),
}
BLIND = [name for name, kind in file_types.FILE_TYPES.items() if kind.needs_imatrix]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("imatrix")

    def get(name: str) -> Path:
        file = folder / f"{name}.gguf"
        return file if file.exists() else MODELS[name](file)

    return get


def assert_equal(
    source: Path,
    kind: str,
    folder: Path,
    sums: dict[str, Sums],
    wishes: TypeOverrides = tensor_types.NO_OVERRIDES,
) -> None:
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    importance = {name: found.means for name, found in sums.items()}
    assert upstream.quantize(
        source, theirs, file_types.FILE_TYPES[kind].number, Settings(importance)
    )
    weights = imatrix.load_imatrix(write_gguf(folder / "imatrix.gguf", sums))
    write_model(
        plan_quantization(open_gguf(source), kind, wishes, weights),
        ours,
        threads=2,
    )
    upstream.assert_same(ours, theirs)


@pytest.mark.parametrize(
    "kind", [kind for kind in file_types.FILE_TYPES if kind not in ("F32", "F16", "BF16", "Q8_0")]
)
def test_every_file_type_with_an_imatrix_is_llama_cpps(kind: str, models, tmp_path: Path) -> None:
    assert_equal(models("one"), kind, tmp_path, collected(models("one")))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "IQ4_NL", "IQ3_XXS", "Q4_K_M", "Q2_K_S"])
@pytest.mark.parametrize("model", ["long", "experts", "odd"])
def test_each_expert_has_its_vector_and_an_unseen_one_has_ones(
    kind: str, model: str, models, tmp_path: Path
) -> None:
    assert_equal(models(model), kind, tmp_path, collected(models(model)))


@pytest.mark.parametrize("kind", BLIND)
def test_types_of_few_bits_are_refused_without_an_imatrix_before_anything_is_written(
    kind, models, tmp_path
) -> None:
    source = open_gguf(models("one"))
    with pytest.raises(UserError, match=f"{kind} needs an importance matrix") as caught:
        plan_quantization(source, kind)
    assert "--imatrix" in caught.value.hint
    assert not upstream.quantize(
        models("one"), tmp_path / "x.gguf", file_types.FILE_TYPES[kind].number
    )


def test_which_types_need_one() -> None:
    assert set(BLIND) == {
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
    source, sums = models("experts"), collected(models("experts"))
    weights = imatrix.load_imatrix(write_gguf(tmp_path / "imatrix.gguf", sums))
    for name, slab, threads in (("a", 1 << 24, 1), ("b", 700, 3)):
        monkeypatch.setattr(pipeline, "SLAB_VALUES", slab)
        plan = plan_quantization(open_gguf(source), "Q4_K_M", imatrix=weights)
        write_model(plan, tmp_path / name, threads=threads)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_both_forms_say_the_same(models, tmp_path: Path) -> None:
    sums = collected(models("experts"))
    new = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", sums))
    old = imatrix.load_imatrix(write_dat(tmp_path / "a.dat", sums))
    assert new.entries.keys() == old.entries.keys() == sums.keys()
    for name, found in sums.items():
        matrices, columns = found.sums.shape
        assert np.array_equal(new.entries[name].mean_squares(0, matrices, columns), found.means)
        assert np.allclose(
            old.entries[name].mean_squares(0, matrices, columns), found.means, rtol=1e-6
        )
        assert np.array_equal(
            new.entries[name].mean_squares(matrices - 1, matrices, columns), found.means[-1:]
        )


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_the_new_file_says_what_steered_it_as_llama_quantize_does(
    form: str, models, tmp_path: Path
) -> None:
    write = {"gguf": write_gguf, "dat": write_dat}[form]
    sums = collected(models("one"))
    weights = imatrix.load_imatrix(write(tmp_path / f"imatrix.{form}", sums))
    out = tmp_path / "out.gguf"
    write_model(
        plan_quantization(open_gguf(models("one")), "Q4_0", imatrix=weights),
        out,
        threads=1,
    )
    fields = gguf.GGUFReader(out).fields
    found = {key: fields[key].contents() for key in fields if key.startswith("quantize.imatrix.")}
    assert found == {
        "quantize.imatrix.file": str(tmp_path / f"imatrix.{form}")[:127],
        "quantize.imatrix.dataset": "wiki.txt",
        "quantize.imatrix.entries_count": len(sums),
        "quantize.imatrix.chunks_count": 7,
    }
    assert {fields[f"quantize.imatrix.{key}_count"].types[0] for key in ("entries", "chunks")} == {
        gguf.GGUFValueType.UINT32
    }


def test_the_oldest_files_end_behind_the_last_entry(models, tmp_path: Path) -> None:
    sums, path = collected(models("one")), tmp_path / "a.dat"
    whole = write_dat(path, sums).read_bytes()
    path.write_bytes(whole[: -8 - len(b"wiki.txt")])
    weights = imatrix.load_imatrix(path)
    assert (weights.dataset, weights.chunks, len(weights.entries)) == ("", 0, len(sums))
    assert weights.metadata.keys() == {"quantize.imatrix.file", "quantize.imatrix.entries_count"}


def test_another_imatrix_makes_the_file_anew_and_the_same_does_not(models, tmp_path: Path) -> None:
    source, out = open_gguf(models("one")), tmp_path / "out.gguf"
    first = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", collected(models("one"))))
    second = imatrix.load_imatrix(write_gguf(tmp_path / "b.gguf", collected(models("one"), seed=4)))
    assert not write_model(plan_quantization(source, "Q4_0", imatrix=first), out).already_finished
    assert write_model(plan_quantization(source, "Q4_0", imatrix=first), out).already_finished
    assert not write_model(plan_quantization(source, "Q4_0", imatrix=second), out).already_finished
    assert not write_model(plan_quantization(source, "Q4_0"), out).already_finished


def test_a_vector_of_another_length_is_refused_by_name_but_the_embeddings_is_passed_over(
    models, tmp_path
) -> None:
    source, sums = open_gguf(models("one")), collected(models("one"))
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


def test_a_tensor_it_does_not_speak_of_is_told_or_where_it_would_be_noise_refused(
    models, tmp_path: Path
) -> None:
    source, sums = open_gguf(models("one")), collected(models("one"))
    del sums["blk.0.ffn_gate.weight"]
    weights = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", sums))
    plan = plan_quantization(source, "Q4_K_M", imatrix=weights)
    assert set(plan.tensors_without_importance) == {"token_embd.weight", "blk.0.ffn_gate.weight"}
    with pytest.raises(
        UserError, match=r"has no data for 1 tensors .*blk\.0\.ffn_gate\.weight \(IQ2_XXS\)"
    ):
        plan_quantization(source, "IQ2_XXS", imatrix=weights)


def damaged(folder: Path, sums: dict[str, Sums]) -> dict[str, bytes]:
    """Files that lie, by what is wrong with them."""
    new = write_gguf(folder / "new", sums).read_bytes()
    old = write_dat(folder / "old", sums).read_bytes()
    name = next(iter(sums))
    at = 4 + 4 + len(name) + 4
    lonely = dict(sums)
    lonely[name] = Sums(sums[name].sums, np.ones(3))
    nan = {name: Sums(np.full((1, 4), np.nan, np.float32), np.ones(1))}
    negative = {name: Sums(np.full((1, 4), -1, np.float32), np.ones(1))}
    return {
        "empty": b"",
        "text": b"this is no importance matrix at all",
        "cut": new[: len(new) // 2],
        "cut old": old[: len(old) // 2],
        "no keys": new.replace(b"imatrix.chunk_size", b"imatrix.chunk_sizf"),
        "no counts": new.replace(b".counts", b".countz"),
        "counts of another size": write_gguf(folder / "c", lonely).read_bytes(),
        "nan": write_gguf(folder / "d", nan).read_bytes(),
        "negative": write_dat(folder / "e", negative).read_bytes(),
        "huge": old[:at] + struct.pack("<i", 2**31 - 1) + old[at + 4 :],
        "less than nothing": old[:at] + struct.pack("<i", -5) + old[at + 4 :],
        "many": struct.pack("<i", 2**31 - 1) + old[4:],
        "long name": old[:4] + struct.pack("<i", 2**30) + old[8:],
        "twice": struct.pack("<i", 2)
        + 2 * old[4 : 4 + 4 + len(name) + 8 + 4 * sums[name].sums.size],
    }


def test_a_damaged_file_is_one_clear_refusal(models, tmp_path: Path) -> None:
    for what, data in damaged(tmp_path, collected(models("one"))).items():
        path = tmp_path / "damaged"
        path.write_bytes(data)
        with pytest.raises(UserError, match="damaged") as caught:
            imatrix.load_imatrix(path)
        assert caught.value.hint, what
    with pytest.raises(UserError, match="there is no file"):
        imatrix.load_imatrix(tmp_path / "none.gguf")
    with pytest.raises(UserError, match="cannot read"):
        imatrix.load_imatrix(tmp_path)


def test_texts_in_the_new_file_are_whole_characters_whatever_the_names(
    models, tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"odd \xff name")
    folder.mkdir()
    for name in (
        "\u00fc" * 99,
        "x" + "\u00fc" * 99,
    ):  # of two bytes each: one of both is cut in the middle of one
        path = write_gguf(folder / "a.gguf", collected(models("one"))).rename(
            folder / f"{name}.gguf"
        )
        out = tmp_path / "out.gguf"
        plan = plan_quantization(
            open_gguf(models("one")), "Q4_0", imatrix=imatrix.load_imatrix(path)
        )
        write_model(plan, out, force=True)
        told = gguf.GGUFReader(out).fields["quantize.imatrix.file"].contents()
        assert str(path).encode("utf-8", "ignore").startswith(told.encode())
        assert 120 < len(told.encode()) <= 127


@pytest.mark.parametrize("value", ["tensor", "matrices", "chunks"])
def test_numbers_that_no_imatrix_has_are_refused(value: str, tmp_path: Path, models) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("imatrix.datasets", ["a"])
    (writer.add_uint64 if value == "chunks" else writer.add_uint32)("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    many = 1 << 17 if value == "matrices" else 1
    writer.add_tensor("a.in_sum2", np.ones((many, 4), np.float32))
    writer.add_tensor("a.counts", np.ones((many, 1), np.float32))
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
def test_a_vector_of_zeros_is_no_crash(kind: str, models, tmp_path: Path) -> None:
    sums = {
        name: Sums(np.zeros_like(found.sums), found.counts)
        for name, found in collected(models("one")).items()
    }
    weights = imatrix.load_imatrix(write_gguf(tmp_path / "a.gguf", sums))
    plan = plan_quantization(
        open_gguf(models("one")), "Q4_K_M", TypeOverrides((f"ffn_up={kind}",)), weights
    )
    assert write_model(plan, tmp_path / "out.gguf", threads=1).type_summaries
    assert read_header.read_header(tmp_path / "out.gguf").tensors
