"""A converted vocabulary encodes as the model's own tokenizer does, or the conversion fails and says where."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmcli.runtime.binding.model import open_model
from quant import battery, container, pretokenizer, proof, vocab
from quant.archs.base import Config
from quant.errors import Refusal
from quant.proof import Proof
from quant.writer import entry, layout
from tests.quant import checkpoint, vocabularies

ASSETS = Path(__file__).parents[3] / "shared" / "assets"


def prove(folder: Path, size: int, out: Path, pre: str | None = None, spare: bool = False) -> Proof:
    """Convert a folder's vocabulary, let llama.cpp load it, compare."""
    found = vocab.load(folder, Config({"vocab_size": size}, "config.json"), pre, spare=spare)
    out.write_bytes(layout([("general.architecture", entry("string", "llama")), *found.entries], [], 32).header)
    header = container.read(out)
    container.check(header)
    with open_model(out, vocab_only=True) as model:
        return proof.prove(folder, header.metadata, model, pre)


def tokenizer(name: str) -> Path:
    folder = ASSETS / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip("../shared/assets/tokenizers is not here")
    return folder


def test_the_battery_is_large_and_has_nothing_twice() -> None:
    texts = battery.texts()
    assert len(set(texts)) == len(texts) >= 500
    assert all(
        any(sample in text for text in texts) for sample in ("\u200d", "\u0301", "中", "ا", "<|im_end|>", "0x1F")
    )


@pytest.mark.parametrize(
    ("name", "size", "notes"),
    [("smollm2", 49152, []), ("qwen3", 151936, ["(NFC)", "takes </s> for special"]), ("mistral7b_v1", 32000, [])],
)
def test_real_tokenizers_are_proven(name: str, size: int, notes: list[str], tmp_path: Path) -> None:
    found = prove(tokenizer(name), size, tmp_path / "v.gguf")
    assert found.texts > 1000
    assert len(found.notes) == len(notes)
    assert all(part in note for part, note in zip(notes, found.notes, strict=True))


def test_both_sources_of_the_stories_are_proven(stories: Path, tmp_path: Path) -> None:
    assert prove(stories, 512, tmp_path / "v.gguf").notes == ()


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_a_wrong_pre_tokenizer_fails_and_shows_ten(pre: str, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"would encode \d+ test strings otherwise .*; the first 10:") as caught:
        prove(tokenizer("smollm2"), 49152, tmp_path / "v.gguf", pre)
    assert str(caught.value).count("llama.cpp: ") == 10
    assert "--pre" in caught.value.hint


def test_the_right_pre_tokenizer_by_another_name_is_proven(tmp_path: Path) -> None:
    assert prove(tokenizer("smollm2"), 49152, tmp_path / "v.gguf", "starcoder").texts > 1000


def test_a_finetune_with_one_more_token_is_known_all_the_same(tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer("smollm2"), tmp_path / "folder")
    file = folder / "tokenizer.json"
    file.chmod(0o644)
    values: dict[str, Any] = json.loads(file.read_text())
    new = values["added_tokens"][0] | {"id": 49152, "content": "<|my_turn|>"}
    checkpoint.edit(file, added_tokens=[*values["added_tokens"], new])
    assert prove(folder, 49153, tmp_path / "v.gguf").notes == ()
    assert prove(folder, 49152, tmp_path / "less.gguf", spare=True).notes == ()  # a token without a row is left out


@pytest.mark.parametrize("path", vocabularies.files(), ids=lambda path: path.name)
def test_llama_cpps_own_vocabularies_give_its_expected_ids_and_are_proven(path: Path, tmp_path: Path) -> None:
    name = path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
    if name not in (*vocabularies.STEPS, *vocabularies.PIECES):
        pytest.skip(f"{name} is of a kind that is not converted")
    out, size = tmp_path / "v.gguf", vocabularies.rebuild(path, tmp_path / "folder")
    found = prove(tmp_path / "folder", size, out)
    assert name in vocabularies.PIECES or found.texts > 1000
    with open_model(out, vocab_only=True) as model:
        for text, ids in vocabularies.expected(path):
            assert model.tokenize(text, special=False) == ids, text


def test_llama_cpps_own_vocabularies_are_here() -> None:
    if not vocabularies.HERE.is_dir():
        pytest.skip("../shared/assets/vocab is not here")
    assert len(vocabularies.files()) >= 4


@functools.cache
def learnt() -> dict[str, Any]:
    """A model whose merges cross every boundary, learnt from the battery: any other split shows."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=20000, initial_alphabet=alphabet, show_progress=False)
    # Without words that llama.cpp takes for special tokens.
    made.train_from_iterator([text for text in battery.texts() if text not in battery.LOOKALIKES] * 2, trainer)
    return json.loads(made.to_str())["model"]


def trained(folder: Path, steps: tuple[str, ...], whole: bool) -> int:
    """Write a tokenizer.json with that model; returns the size of its vocabulary."""
    model = learnt()
    folder.mkdir()
    values = vocabularies.bytewise(model["vocab"], model["merges"], steps, [], whole)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return len(model["vocab"])


EXACT = {"gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "qwen35", "bailingmoe", "deepseek-v3", "spark2_5",
         "bloom", "viking", "minicpm5", "seed-coder", "exaone-moe", "jais-2"}  # fmt: skip
CHAINS = [(steps, item) for steps, items in pretokenizer.KNOWN.items() for item in items if item.name in EXACT]


@pytest.mark.parametrize(("steps", "pre"), CHAINS, ids=lambda item: getattr(item, "name", ""))
def test_known_structures_split_as_llama_cpp_does_to_the_last_character(steps, pre, tmp_path: Path) -> None:
    size = trained(tmp_path / "folder", steps, pre.whole)
    assert prove(tmp_path / "folder", size, tmp_path / "v.gguf").notes == ()


@pytest.mark.parametrize(("steps", "whole"), [((pretokenizer.GPT4O,), False), ((pretokenizer.TEKKEN,), True)])
def test_an_expression_that_llama_cpp_rewrote_is_told_with_how_much_it_changes(steps, whole, tmp_path: Path) -> None:
    size = trained(tmp_path / "folder", steps, whole)
    (note,) = prove(tmp_path / "folder", size, tmp_path / "v.gguf").notes
    assert re.search(r"case and combining marks by ASCII letters alone: \d+ of \d+ test strings", note)


def test_added_tokens_that_take_the_space_around_them_are_told(tmp_path: Path) -> None:
    token = {"id": 0, "content": "<|turn|>", "single_word": False, "lstrip": True, "rstrip": True, "normalized": True,
             "special": True}  # fmt: skip
    size = trained(tmp_path / "folder", ("gpt2",), False)
    checkpoint.edit(tmp_path / "folder" / "tokenizer.json", added_tokens=[token | {"id": size}])
    (note,) = prove(tmp_path / "folder", size + 1, tmp_path / "v.gguf").notes
    assert "strips no space (<|turn|>)" in note


def test_whole_words_before_merges_are_compared_one_by_one_where_llama_cpp_has_no_such_rule(tmp_path: Path) -> None:
    size = trained(tmp_path / "folder", ("gpt2",), whole=True)
    values = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    values["model"]["vocab"]["zqzq"] = size
    checkpoint.edit(tmp_path / "folder" / "tokenizer.json", model=values["model"])
    with pytest.raises(Refusal, match="'zqzq'"):
        prove(tmp_path / "folder", size + 1, tmp_path / "v.gguf")


@pytest.mark.parametrize(("bos", "name"), [("!", "llama-bpe"), (None, "glm4")])
def test_a_model_without_a_bos_gets_none(bos: str | None, name: str, tmp_path: Path) -> None:
    size = trained(tmp_path / "folder", (pretokenizer.LLAMA3,), whole=True)
    checkpoint.edit(tmp_path / "folder" / "tokenizer_config.json", bos_token=bos)
    prove(tmp_path / "folder", size, tmp_path / "v.gguf")
    assert container.read(tmp_path / "v.gguf").metadata["tokenizer.ggml.pre"] == name
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        assert (model.bos is None) == (bos is None)
