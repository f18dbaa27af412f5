"""`convert --heads`: both forms of a checkpoint give the same file, whose heads compute what torch
computes, and heads of other models are refused.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmcli.runtime import runner
from llmcli.runtime.drafting.draft_files.head_graph import open_heads
from llmcli.runtime.drafting.draft_files.heads_file import HEAD_METHODS, read_heads
from llmcli.workflows.quantization import convert_heads
from quant.model_file.load_checks import HEADS_ARCHITECTURE
from quant.model_file.read_header import read_header
from quant.native import ggml
from tests.quant import tiny_checkpoint, tiny_gguf

HIDDEN, VOCABULARY = 64, 300
Tensors = dict[str, np.ndarray]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_gguf.llama(tmp_path / "m.gguf", hidden=HIDDEN, layers=1, vocab=VOCABULARY)


def medusa_tensors(heads: int = 3, layers: int = 2, outputs: bool = True) -> Tensors:
    """Return random tensors in the form of Medusa's authors."""
    random = np.random.default_rng(0)
    found: Tensors = {}
    for head in range(heads):
        for layer in range(layers):
            name = f"{head}.{layer}.linear"
            found[f"{name}.weight"] = random.normal(0, 0.1, (HIDDEN, HIDDEN)).astype(np.float32)
            found[f"{name}.bias"] = random.normal(0, 0.1, HIDDEN).astype(np.float32)
        if outputs:
            matrix = random.normal(0, 0.1, (VOCABULARY, HIDDEN)).astype(np.float32)
            found[f"{head}.{layers}.weight"] = matrix
    return found


def write_folder(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(parents=True)
    tiny_checkpoint.save(folder / "medusa_lm_head.safetensors", tensors, "F16")
    values = {"medusa_num_heads": 3, "medusa_num_layers": 2, **config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def convert(llmcli: Any, model: Path, folder: Path, *words: str) -> Path:
    done = llmcli("convert", str(model), "--heads", str(folder), "--json", *words)
    assert done.code == 0, done.err
    return Path(json.loads(done.out)["path"])


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_pickled_weights_and_safetensors_give_the_same_file(
    llmcli: Any, model: Path, tmp_path: Path, prefix: str
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no pickles")
    tensors = medusa_tensors()
    out = convert(llmcli, model, write_folder(tmp_path / "a", tensors))
    pickled = write_folder(tmp_path / "b", tensors)
    (pickled / "medusa_lm_head.safetensors").unlink()
    torch.save(
        {prefix + name: torch.from_numpy(values).half() for name, values in tensors.items()},
        pickled / "medusa_lm_head.pt",
    )
    done = llmcli("convert", str(model), "--heads", str(pickled))
    assert done.code == 1
    assert "only pickled weights (medusa_lm_head.pt)" in done.err
    assert "--allow-pickle" in done.err
    other = convert(llmcli, model, pickled, "--allow-pickle")
    assert (out.name, other.name) == ("a-heads.gguf", "b-heads.gguf")
    assert out.read_bytes() == other.read_bytes()
    heads = read_heads(read_header(out))
    assert (heads.shapes.n_heads, heads.shapes.n_layers, heads.shapes.has_outputs) == (3, 2, True)
    done = llmcli("convert", str(model), "--heads", str(tmp_path / "a"))
    assert "nothing to do" in done.err
    assert f"llmcli run {model} -md {out}" in done.err


def test_the_model_in_the_same_folder_is_not_read_as_heads(
    llmcli: Any, model: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: no pickles")
    tensors = medusa_tensors()
    folder = write_folder(tmp_path / "a", tensors)
    (folder / "medusa_lm_head.safetensors").unlink()
    tiny_checkpoint.save(folder / "model.safetensors", {"lm_head.weight": np.ones((4, 4))}, "F16")
    torch.save(
        {name: torch.from_numpy(values).half() for name, values in tensors.items()},
        folder / "medusa_lm_head.pt",
    )
    done = llmcli("convert", str(model), "--heads", str(folder))
    assert (done.code, "--allow-pickle" in done.err) == (1, True)
    assert read_heads(read_header(convert(llmcli, model, folder, "--allow-pickle"))).shapes.n_heads


def test_heads_in_a_file_of_a_general_name_are_read(
    llmcli: Any, model: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "a", medusa_tensors())
    (folder / "medusa_lm_head.safetensors").rename(folder / "model.safetensors")
    assert read_heads(read_header(convert(llmcli, model, folder))).shapes.n_heads == 3


def test_a_file_of_the_user_is_refused_before_weights_are_read(
    llmcli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "a", medusa_tensors())
    (tmp_path / "a-heads.gguf").write_bytes(b"notes")
    reads: list[int] = []
    read_row_samples = convert_heads.read_row_samples

    def count(*words: Any) -> Any:
        reads.append(1)
        return read_row_samples(*words)

    monkeypatch.setattr(convert_heads, "read_row_samples", count)
    done = llmcli("convert", str(model), "--heads", str(folder))
    assert (done.code, reads) == (1, [])
    assert "was not made by llmcli" in done.err
    done = llmcli("convert", str(model), "--heads", str(folder), "--dry-run")
    assert (done.code, bool(reads)) == (0, True)
    assert (tmp_path / "a-heads.gguf").read_bytes() == b"notes"


def test_other_weights_of_the_same_shapes_are_converted_again(
    llmcli: Any, model: Path, tmp_path: Path
) -> None:
    tensors = medusa_tensors()
    folder = write_folder(tmp_path / "a", tensors)
    first = convert(llmcli, model, folder).read_bytes()
    tensors["2.1.linear.bias"] = tensors["2.1.linear.bias"] * 2
    tiny_checkpoint.save(folder / "medusa_lm_head.safetensors", tensors, "F16")
    done = llmcli("convert", str(model), "--heads", str(folder))
    assert (done.code, "nothing to do" in done.err) == (0, False)
    assert "convert to a-heads.gguf" in done.err  # the progress
    assert (tmp_path / "a-heads.gguf").read_bytes() != first


@pytest.mark.parametrize(("outtype", "kind"), [("f32", "F32"), ("bf16", "BF16"), ("q8_0", "Q8_0")])
def test_outtype_is_the_type_of_the_matrices(
    llmcli: Any, model: Path, tmp_path: Path, outtype: str, kind: str
) -> None:
    tensors = medusa_tensors()
    folder = write_folder(tmp_path / "a", tensors)
    heads = read_heads(read_header(convert(llmcli, model, folder, "--outtype", outtype)))
    info = heads.tensors["head.1.0.weight"]
    assert (info.type, heads.tensors["head.1.0.bias"].type) == (kind, "F32")
    stored = np.fromfile(info.file, np.uint8, info.nbytes, offset=info.offset)
    found = ggml.decode(stored, kind, HIDDEN, label="w")
    assert np.abs(found - tensors["1.0.linear.weight"]).max() < 0.01


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"0.0.linear.weights": np.ones((HIDDEN, HIDDEN))}, {}, "'0.0.linear.weights'"),
        ({f"{'9' * 5000}.0.linear.bias": np.ones(HIDDEN)}, {}, "which draft heads do not have"),
        ({f"0.{'9' * 5000}.weight": np.ones(HIDDEN)}, {}, "which draft heads do not have"),
        (
            {"00.0.linear.bias": np.ones(HIDDEN)},
            {},
            "has head.0.0.bias twice: as '0.0.linear.bias' and as '00.0.linear.bias'",
        ),
        (
            {"medusa_head.0.0.linear.bias": np.ones(HIDDEN)},
            {},
            "has head.0.0.bias twice: as '0.0.linear.bias' and as 'medusa_head.0.0.linear.bias'",
        ),
        (
            {"0.1.weight": np.ones((VOCABULARY, HIDDEN))},
            {},
            "0.1.weight, which should be 0.2.weight after 2 layers",
        ),
        (
            {"0.0.linear.bias": np.ones(HIDDEN + 1)},
            {},
            "not have all weights of its heads: 0.0.linear.bias is [65], not [64]",
        ),
        ({"7.0.linear.bias": np.ones(HIDDEN)}, {}, "its heads: head.3.0.weight is missing"),
        ({"3.0.linear.bias": np.ones(HIDDEN)}, {}, "head.3.0.weight is missing"),
        ({"3.2.weight": np.ones((VOCABULARY, HIDDEN))}, {}, "head.3.0.weight is missing"),
        (
            {"99.0.linear.bias": np.ones(HIDDEN)},
            {},
            "has 100 heads of 2 layers; llmcli reads at most 15 of 16",
        ),
        (
            {"0.2.weight": np.ones((VOCABULARY + 1, HIDDEN))},
            {},
            "do not fit m.gguf: they guess one of 301 tokens, and the model has 300",
        ),
        ({}, {"medusa_num_heads": 4}, "names 4 heads, but its weights are 3 heads of 2 layers"),
        ({}, {"medusa_num_heads": 4, "medusa_num_layers": None}, "names 4 heads, but"),
        ({}, {"medusa_num_layers": 1}, "names 1 layers, but"),
    ],
)
def test_unfitting_checkpoints_are_refused(
    llmcli: Any,
    model: Path,
    tmp_path: Path,
    tensors: Tensors,
    config: dict[str, int],
    message: str,
) -> None:
    folder = write_folder(tmp_path / "a", medusa_tensors() | tensors, **config)
    done = llmcli("convert", str(model), "--heads", str(folder))
    assert done.code == 1
    assert message in done.err
    assert not (tmp_path / "a-heads.gguf").exists()


def test_heads_of_another_model_and_missing_words_are_refused(
    llmcli: Any, model: Path, stories: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "a", medusa_tensors(), base_model_name_or_path="org/base")
    wide = tiny_gguf.llama(tmp_path / "wide.gguf", hidden=128, layers=1)
    heads = ("--heads", str(folder))
    for words, code, message in (
        ([str(wide)], 1, "they read states of 64 values, and the model's have 128"),
        ([], 1, "a GGUF of org/base"),
        ([str(stories)], 1, "is a checkpoint, and draft heads are converted for a GGUF"),
        ([str(model), "--mmproj"], 2, "--mmproj does not apply to --heads"),
        ([str(model), "--converter", "native"], 2, "--converter native does not apply to --heads"),
        ([str(model), "--converter", "llama.cpp"], 2, "--converter llama.cpp does not apply to"),
        ([str(model), "--lora", str(folder)], 2, "--lora and --heads convert different things"),
    ):
        done = llmcli("convert", *words, *heads)
        assert done.code == code, done.err
        assert message in done.err
    assert f"hint: llmcli convert MODEL --heads {folder}\n" in llmcli("convert", *heads).err
    (tmp_path / "empty").mkdir()
    done = llmcli("convert", str(model), "--heads", str(tmp_path / "empty"))
    assert "has no draft heads" in done.err
    file = folder / "medusa_lm_head.safetensors"
    done = llmcli("convert", str(model), "--heads", str(file))
    assert f"{file} is a file, but --heads takes the folder" in done.err
    assert f"hint: llmcli convert MODEL --heads {folder}\n" in done.err


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"0.0.linear.bias": np.ones(HIDDEN)}, "no matrix of a head is there"),
        ({"hidden.weight": np.ones((8, HIDDEN))}, "no matrix of a head is there"),
        ({"0.0.linear.weight": np.ones((HIDDEN, HIDDEN))}, "head.0.0.bias is missing"),
        (medusa_tensors() | {"0.2.weight": None}, "head.0.output.weight is missing"),
        (medusa_tensors() | {"0.0.linear.weight": None}, "head.0.0.weight is missing"),
    ],
)
def test_incomplete_checkpoints_are_refused(
    llmcli: Any, model: Path, tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    stored = {name: values for name, values in tensors.items() if values is not None}
    done = llmcli("convert", str(model), "--heads", str(write_folder(tmp_path / "a", stored)))
    assert (done.code, f"all weights of its heads: {message}" in done.err) == (1, True), done.err
    assert "hint: fetch the checkpoint again" in done.err


def test_heads_of_integers_are_refused(llmcli: Any, model: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", medusa_tensors())
    file = folder / "medusa_lm_head.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F16"', b'"I16"', 1))
    done = llmcli("convert", str(model), "--heads", str(folder))
    assert (done.code, "0.0.linear.weight in" in done.err) == (1, True)
    assert "is stored as I16, which draft heads cannot be" in done.err


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_trained_heads_compute_what_they_were_trained_to(
    llmcli: Any, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads learn a table of states and tokens, and the converted file guesses what torch does."""
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing is trained")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    from scripts.quality import train_heads

    monkeypatch.setattr(train_heads, "BATCH_STATES", 64)
    model = tiny_gguf.llama(
        tmp_path / "m.gguf", hidden=HIDDEN, layers=1, vocab=VOCABULARY, tied=True
    )
    header = read_header(model)
    args = argparse.Namespace(
        folder=tmp_path / "heads", model=model, method=method, heads=2, layers=1, hidden=0,
        steps=300, seed=0,
    )  # fmt: skip
    random = np.random.default_rng(0)
    states = random.normal(0, 1, (32, HIDDEN)).astype(np.float32)
    labels = random.integers(0, VOCABULARY, (32, 2))
    examples = train_heads.Examples(states, labels)
    output = train_heads.read_output(header)
    torch.manual_seed(0)
    parameters = train_heads.train(examples, examples, output, args)
    torch.manual_seed(0)
    again = train_heads.train(examples, examples, output, args)
    assert all(torch.equal(parameters[name], value) for name, value in again.items())
    assert min(train_heads.acceptance(parameters, examples, output, args)) > 0.5
    stored = {name: value.half().float() for name, value in parameters.items()}
    expected = [
        (values @ torch.from_numpy(output).T).argmax(1).tolist()
        for values in train_heads.head_states(stored, torch.from_numpy(states), args)
    ]
    train_heads.write_heads(parameters, args)
    heads = read_heads(read_header(convert(llmcli, model, tmp_path / "heads")))
    assert (heads.shapes.method, heads.shapes.has_outputs) == (method, False)
    with open_heads(heads, header, 1) as graph:
        guesses = [[best for (best,) in graph.guess(state, 2)] for state in states]
    assert guesses == [list(row) for row in zip(*expected, strict=True)]


def test_a_file_of_heads_is_no_model(llmcli: Any, model: Path, tmp_path: Path) -> None:
    heads = convert(llmcli, model, write_folder(tmp_path / "a", medusa_tensors()))
    for words in (["run", str(heads), "hi"], ["quantize", str(heads), "--q8_0"]):
        done = llmcli(*words)
        assert done.code == 1
        assert "is not a model but draft heads of one" in done.err
        assert f"llmcli run MODEL -md '{heads}'" in done.err
    done = llmcli("show", str(heads), "--json")
    assert done.code == 0, done.err
    assert HEADS_ARCHITECTURE in done.out


def test_heads_are_checked_before_the_model_is_loaded(
    llmcli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = convert(llmcli, model, write_folder(tmp_path / "a", medusa_tensors()))
    other = tiny_gguf.llama(tmp_path / "o.gguf", hidden=HIDDEN, layers=1, vocab=301)
    byte_level = tiny_gguf.llama(tmp_path / "b.gguf", hidden=HIDDEN, layers=1, vocab=-VOCABULARY)
    draft = ["-md", str(heads)]

    def load(path: Path, *_: Any, **__: Any) -> None:
        raise AssertionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "open_model", load)
        for path, words, code, message in (
            (other, draft, 1, "it has 300 tokens, but the model has 301"),
            (byte_level, draft, 1, "its vocabulary is different"),
            (model, [*draft, "--draft", "model"], 1, "has heads for --draft medusa"),
            (model, [*draft, "--draft", "blockwise"], 1, "has heads for --draft medusa"),
            (
                model,
                [*draft, "--ngram-draft", "on", "--draft", "medusa"],
                2,
                "does not use --ngram-draft",
            ),
            (model, [*draft, "--ngram-draft", "on"], 1, "is, does not use --ngram-draft"),
            (model, ["--draft", "medusa"], 2, "--draft medusa needs draft heads"),
            (
                model,
                ["--draft", "medusa", "-md", str(model)],
                1,
                "is a model of architecture llama",
            ),
        ):
            done = llmcli("run", str(path), "hi", "--raw", "-n", "2", *words)
            assert (done.code, message in done.err) == (code, True), done.err
        with pytest.raises(AssertionError, match=r"m\.gguf"):
            llmcli("run", str(model), "hi", "--raw", "-n", "2", *draft)
    done = llmcli("run", str(model), "hi", "--raw", "-n", "2", "-c", "64", "-md", str(heads))
    assert done.code == 0, done.err
    done = llmcli("plan", str(model), "-c", "64", "-md", str(heads))
    assert done.code == 0, done.err
    assert "draft heads take" in done.out
