"""`llmcli convert` on the command line, and the flags that it shares with quantize."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quant.model_file import load_checks, read_header
from quant.quantize import write
from tests.quant import tiny_checkpoint

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


@pytest.fixture
def folder(stories: Path, tmp_path: Path) -> Path:
    """A copy of the stories checkpoint that a test may change."""
    return shutil.copytree(stories, tmp_path / "stories260K")


def store_as(folder: Path, dtype: str, **changes: np.ndarray) -> None:
    """Store the folder's weights again in this type; `changes` replaces tensors by name."""
    tensors = tiny_checkpoint.read(folder / "model.safetensors")
    tiny_checkpoint.save(folder / "model.safetensors", tensors | changes, dtype)


def matrix_types(path: Path) -> set[str]:
    """Return the types of all tensors of a GGUF file that have two or more dimensions."""
    return {
        tensor.type for tensor in read_header.read_header(path).tensors if len(tensor.shape) > 1
    }


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_automatic_type_is_that_of_the_tensors_not_of_the_config(
    llmcli: Any, folder: Path, tmp_path: Path, dtype: str
) -> None:
    tiny_checkpoint.edit(
        folder / "config.json", torch_dtype="float16" if dtype != "F16" else "bfloat16"
    )
    store_as(folder, dtype)
    done = llmcli("convert", str(folder), "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert (document["file_type"], document["path"]) == (
        dtype,
        str(tmp_path / f"stories260K-{dtype}.gguf"),
    )
    assert matrix_types(Path(document["path"])) == {dtype}
    assert dtype in done.err


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_outtype_is_the_type_of_the_file(
    llmcli: Any, folder: Path, tmp_path: Path, outtype: str
) -> None:
    out = tmp_path / "out.gguf"
    assert llmcli("convert", str(folder), "-o", str(out), "--outtype", outtype).code == 0
    header = read_header.read_header(out)
    load_checks.check_loadable(header)
    assert header.file_type == outtype.upper()
    assert outtype.upper() in matrix_types(out)


def test_convert_and_quantize_write_the_same_file(
    llmcli: Any, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "stories260K-BF16.gguf"
    assert llmcli("quantize", str(folder), "--bf16").code == 0
    before = out.read_bytes()
    done = llmcli("convert", str(folder), "--outtype", "bf16")
    assert done.code == 0
    assert "nothing to do" in done.err
    assert llmcli("convert", str(folder), "--outtype", "bf16", "--force").code == 0
    assert out.read_bytes() == before


def test_a_value_too_large_for_f16_is_named(llmcli: Any, folder: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    large = tiny_checkpoint.read(folder / "model.safetensors")[name].copy()
    large[3, 5] = 70000
    store_as(folder, "BF16", **{name: large})
    out = tmp_path / "out.gguf"
    done = llmcli("convert", str(folder), "-o", str(out), "--outtype", "f16")
    assert (done.code, out.exists()) == (1, False)
    assert "error: tensor blk.1.ffn_up.weight does not fit into F16" in done.err
    assert "hint: " in done.err
    assert llmcli("convert", str(folder), "-o", str(out)).code == 0


def test_a_dry_run_writes_nothing(llmcli: Any, folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = llmcli("convert", str(folder), "--dry-run", "--json")
    assert (done.code, sorted(tmp_path.rglob("*"))) == (0, before)
    predicted_bytes = json.loads(done.out)["bytes"]
    llmcli("convert", str(folder))
    assert (tmp_path / "stories260K-F32.gguf").stat().st_size == predicted_bytes


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_a_missing_tokenizer_is_an_error_that_names_the_base_model(
    llmcli: Any, folder: Path, stories: Path, tmp_path: Path, command: str
) -> None:
    for name in TOKENIZER:
        (folder / name).unlink()
    done = llmcli(command, str(folder))
    assert done.code == 1
    assert "has no tokenizer: neither tokenizer.model nor tokenizer.json" in done.err
    (folder / "README.md").write_text("---\nbase_model: org/Parent-1B\n---\n# A finetune\n")
    assert "org/Parent-1B" in llmcli(command, str(folder)).err
    out = tmp_path / "out.gguf"
    done = llmcli(command, str(folder), "--tokenizer", str(stories), "-o", str(out))
    assert done.code == 0, done.err
    assert (
        read_header.read_header(out).get_int("llama.vocab_size") is not None
        or write.open_gguf(out).weights
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{folder}", "--outtype", "q4_k"], 2, "'q4_k'"),
        (["{file}"], 1, "is a file, but convert needs a checkpoint folder"),
        (["./nothing"], 1, "there is no folder"),
        (["{empty}"], 1, "has no config.json"),
        (["{folder}", "--tokenizer", "{empty}"], 1, "has no tokenizer"),
        (["{folder}", "--tokenizer", "{empty}/no"], 1, "there is no folder"),
    ],
)
def test_invalid_arguments_are_an_error_without_output(
    llmcli: Any, folder: Path, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    paths = {"folder": folder, "file": tmp_path / "x.gguf", "empty": tmp_path / "empty"}
    done = llmcli("convert", *(word.format(**paths) for word in words))
    assert (done.code, done.out) == (code, "")
    assert message in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_flags_of_checkpoint_folders_are_refused_for_a_gguf(
    llmcli: Any, folder: Path, tmp_path: Path
) -> None:
    llmcli("convert", str(folder), "-o", str(tmp_path / "x.gguf"))
    for flag in (["--tokenizer", str(folder)], ["--allow-pickle"]):
        done = llmcli("quantize", str(tmp_path / "x.gguf"), *flag)
        assert done.code == 2
        assert f"{flag[0]} applies to checkpoint folders" in done.err


def test_a_model_given_by_name_is_written_to_the_store(
    llmcli: Any, folder: Path, home: Path
) -> None:
    assert llmcli("alias", "lily", str(folder)).code == 0
    done = llmcli("convert", "lily", "--json")
    assert done.code == 0, done.err
    path = json.loads(done.out)["path"]
    assert Path(path).is_relative_to(home)
    assert path in {entry["path"] for entry in json.loads(llmcli("list", "--json").out)}


def test_pickled_weights_need_allow_pickle(llmcli: Any, folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pickles have no writer")
    weights = {
        name: torch.from_numpy(a.copy())
        for name, a in tiny_checkpoint.read(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    done = llmcli("convert", str(folder))
    assert done.code == 1
    assert f"hint: llmcli convert {folder} --allow-pickle\n" in done.err
    done = llmcli("convert", str(folder), "--allow-pickle", "-o", str(tmp_path / "x.gguf"))
    assert done.code == 0, done.err


def test_an_unknown_value_of_an_option_is_named_with_the_known_ones(llmcli, stories) -> None:
    done = llmcli("convert", str(stories), "--outtype", "f8")
    assert done.code == 2
    assert done.err.startswith(
        "error: invalid value for '--outtype': 'f8' is not one of 'auto', 'f32', 'f16'"
    )
