"""A converted vocabulary encodes as the model's tokenizer, or the conversion fails and says where."""

import base64
import functools
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmcli.runtime.binding.model import open_model
from quant.errors import UserError
from quant.model_file import read_header
from quant.tokenizer import pre_tokenizer
from quant.tokenizer.verify import probe_strings
from tests.quant import tiny_checkpoint, vocabularies
from tests.quant.vocabularies import prove

ASSETS = Path(__file__).parents[5] / "shared" / "assets"


def tokenizer(name: str) -> Path:
    folder = ASSETS / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip("../shared/assets/tokenizers is not here")
    return folder


def test_the_battery_is_large_and_has_nothing_twice() -> None:
    texts = probe_strings.probe_strings()
    assert len(set(texts)) == len(texts) >= 500
    assert all(
        any(sample in text for text in texts)
        for sample in ("\u200d", "\u0301", "中", "ا", "<|im_end|>", "0x1F")
    )


@pytest.mark.parametrize(
    ("name", "size", "notes"),
    [
        ("smollm2", 49152, []),
        ("qwen3", 151936, ["to NFC;", "treats </s> as special"]),
        ("mistral7b_v1", 32000, []),
    ],
)
def test_real_tokenizers_are_proven(name: str, size: int, notes: list[str], tmp_path: Path) -> None:
    found = prove(tokenizer(name), size, tmp_path / "v.gguf")
    assert found.string_count > 1000
    assert len(found.notes) == len(notes)
    assert all(part in note for part, note in zip(notes, found.notes, strict=True))


def test_both_sources_of_the_stories_are_proven(stories: Path, tmp_path: Path) -> None:
    assert prove(stories, 512, tmp_path / "v.gguf").notes == ()


@pytest.mark.parametrize("prefix", [True, False])
def test_a_file_that_puts_spaces_otherwise_is_caught(
    prefix: bool, stories: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (folder / "tokenizer.model").unlink()
    values = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    steps = [{"type": "Prepend", "prepend": "▁"}, *steps] if prefix else steps
    tiny_checkpoint.edit(
        folder / "tokenizer.json",
        **values | {"normalizer": {"type": "Sequence", "normalizers": steps}},
    )
    prove(folder, 512, tmp_path / "v.gguf")
    with pytest.raises(UserError, match=r"test strings differently .*; the first 10:\n  'a'"):
        prove(folder, 512, tmp_path / "w.gguf", add_space_prefix=("bool", not prefix))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_a_wrong_pre_tokenizer_fails_and_shows_ten(pre: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"would encode \d+ test strings differently .*; the first 10:"
    ) as caught:
        prove(tokenizer("smollm2"), 49152, tmp_path / "v.gguf", pre)
    assert str(caught.value).count("llama.cpp: ") == 10
    assert "--pre" in caught.value.hint


def test_the_right_pre_tokenizer_by_another_name_is_proven(tmp_path: Path) -> None:
    assert prove(tokenizer("smollm2"), 49152, tmp_path / "v.gguf", "starcoder").string_count > 1000


def test_a_finetune_with_one_more_token_is_known_all_the_same(tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer("smollm2"), tmp_path / "folder")
    file = folder / "tokenizer.json"
    file.chmod(0o644)
    values: dict[str, Any] = json.loads(file.read_text())
    new = values["added_tokens"][0] | {"id": 49152, "content": "<|my_turn|>"}
    tiny_checkpoint.edit(file, added_tokens=[*values["added_tokens"], new])
    assert prove(folder, 49153, tmp_path / "v.gguf").notes == ()
    assert (
        prove(folder, None, tmp_path / "less.gguf").notes == ()
    )  # a token without a row is left out


@pytest.mark.parametrize("path", vocabularies.files(), ids=lambda path: path.name)
def test_llama_cpps_own_vocabularies_give_its_expected_ids_and_are_proven(
    path: Path, tmp_path: Path
) -> None:
    name = path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
    if name not in (*vocabularies.STEPS, *vocabularies.PIECES):
        pytest.skip(f"{name} is of a kind that is not converted")
    out, size = tmp_path / "v.gguf", vocabularies.rebuild(path, tmp_path / "folder")
    found = prove(tmp_path / "folder", size, out)
    assert name in vocabularies.PIECES or found.string_count > 1000
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
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=20000, initial_alphabet=alphabet, show_progress=False
    )
    # Without words that llama.cpp takes for special tokens.
    made.train_from_iterator(
        [text for text in probe_strings.probe_strings() if text not in probe_strings.LOOKALIKES]
        * 2,
        trainer,
    )
    return json.loads(made.to_str())["model"]


def trained(folder: Path, steps: tuple[str, ...], whole: bool) -> int:
    """Write a tokenizer.json with that model; returns the size of its vocabulary."""
    model = learnt()
    folder.mkdir()
    values = vocabularies.bytewise(model["vocab"], model["merges"], steps, [], whole)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return len(model["vocab"])


EXACT = {
    "gpt-2",
    "smollm",
    "llama-bpe",
    "smaug-bpe",
    "qwen2",
    "qwen35",
    "bailingmoe",
    "deepseek-v3",
    "spark2_5",
    "bloom",
    "viking",
    "minicpm5",
    "seed-coder",
    "exaone-moe",
    "jais-2",
}
CHAINS = [
    (steps, item)
    for steps, items in pre_tokenizer.PRE_TOKENIZERS.items()
    for item in items
    if item.name in EXACT
]


@pytest.mark.parametrize(("steps", "pre"), CHAINS, ids=lambda item: getattr(item, "name", ""))
def test_known_structures_split_as_llama_cpp_does_to_the_last_character(
    steps, pre, tmp_path: Path
) -> None:
    size = trained(tmp_path / "folder", steps, pre.whole_words_first)
    assert prove(tmp_path / "folder", size, tmp_path / "v.gguf").notes == ()


@pytest.mark.parametrize(
    ("steps", "whole", "said"),
    [
        (
            (pre_tokenizer.GPT4O,),
            False,
            "gpt-4o recognizes case by ASCII letters only, and no combining marks",
        ),
        (
            (pre_tokenizer.TEKKEN,),
            True,
            "tekken recognizes case by ASCII letters only, and no combining marks",
        ),
        (
            (pre_tokenizer.KIMI,),
            False,
            "kimi-k2 ignores case, and treats combining marks differently",
        ),
        (
            (pre_tokenizer.DIGIT_TRIPLES, pre_tokenizer.GPT4O),
            False,
            "tiny_aya ignores case, and treats combining marks differently",
        ),
    ],
    ids=["gpt-4o", "tekken", "kimi-k2", "tiny_aya"],
)
def test_an_expression_that_llama_cpp_rewrote_is_told_with_how_much_it_changes(
    steps, whole, said, tmp_path
) -> None:
    size = trained(tmp_path / "folder", steps, whole)
    (note,) = prove(tmp_path / "folder", size, tmp_path / "v.gguf").notes
    assert re.search(rf"llama.cpp's {said}: \d+ of \d+ test strings", note)


def test_added_tokens_that_take_the_space_around_them_are_told(tmp_path: Path) -> None:
    token = {
        "id": 0,
        "content": "<|turn|>",
        "single_word": False,
        "lstrip": True,
        "rstrip": True,
        "normalized": True,
        "special": True,
    }
    size = trained(tmp_path / "folder", ("gpt2",), False)
    tiny_checkpoint.edit(
        tmp_path / "folder" / "tokenizer.json", added_tokens=[token | {"id": size}]
    )
    (note,) = prove(tmp_path / "folder", size + 1, tmp_path / "v.gguf").notes
    assert "strips no spaces around them (<|turn|>)" in note


def test_whole_words_before_merges_are_compared_one_by_one_where_llama_cpp_has_no_such_rule(
    tmp_path: Path,
) -> None:
    size = trained(tmp_path / "folder", ("gpt2",), whole=True)
    values = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    values["model"]["vocab"]["zqzq"] = size
    tiny_checkpoint.edit(tmp_path / "folder" / "tokenizer.json", model=values["model"])
    with pytest.raises(UserError, match="'zqzq'"):
        prove(tmp_path / "folder", size + 1, tmp_path / "v.gguf")


@pytest.mark.parametrize(("bos", "name"), [("!", "llama-bpe"), (None, "glm4")])
def test_a_model_without_a_bos_gets_none(bos: str | None, name: str, tmp_path: Path) -> None:
    size = trained(tmp_path / "folder", (pre_tokenizer.LLAMA3,), whole=True)
    tiny_checkpoint.edit(tmp_path / "folder" / "tokenizer_config.json", bos_token=bos)
    prove(tmp_path / "folder", size, tmp_path / "v.gguf")
    assert read_header.read_header(tmp_path / "v.gguf").metadata["tokenizer.ggml.pre"] == name
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        assert (model.bos is None) == (bos is None)


def changed(stories: Path, target: Path, **changes: Any) -> Path:
    """The stories' tokenizer.json with other values, and no tokenizer.model."""
    folder = shutil.copytree(stories, target)
    (folder / "tokenizer.model").unlink()
    values = json.loads((folder / "tokenizer.json").read_text())
    changes = {
        key: values[key] | change if key == "model" else change for key, change in changes.items()
    }
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))
    return folder


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        (1, 2, ""),
        (1, None, ""),
        (2, 1, "puts </s> <s> around a text, llama.cpp puts '<s>"),
        (2, None, "puts </s> around"),
    ],
)
def test_what_a_file_cannot_put_around_a_text_is_told(
    first, last, told: str, stories: Path, tmp_path: Path
) -> None:
    names = {1: "<s>", 2: "</s>"}
    put = [{"SpecialToken": {"id": names[row], "type_id": 0}} for row in (first, last) if row]
    put.insert(1, {"Sequence": {"id": "A", "type_id": 0}})
    special = {name: {"id": name, "ids": [row], "tokens": [name]} for row, name in names.items()}
    post = {"type": "TemplateProcessing", "single": put, "pair": [], "special_tokens": special}
    notes = prove(
        changed(stories, tmp_path / "folder", post_processor=post), 512, tmp_path / "v.gguf"
    ).notes
    assert [told in note for note in notes] == [True] * bool(told)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "truncation": {
                "direction": "Right",
                "max_length": 4,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        },
        {
            "padding": {
                "strategy": {"Fixed": 64},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<unk>",
            }
        },
        {"model": {"dropout": 0.5}},
    ],
    ids=["truncation", "padding", "dropout"],
)
def test_what_a_tokenizer_was_trained_with_does_not_disturb_the_proof(
    changes, stories: Path, tmp_path: Path
) -> None:
    assert (
        prove(changed(stories, tmp_path / "folder", **changes), 512, tmp_path / "v.gguf").notes
        == ()
    )


def test_a_tokenizer_that_fails_over_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    values = vocabularies.bytewise({"a": 0, "b": 1}, [], ("gpt2",), [], whole=False)
    values["model"]["unk_token"] = "<none>"
    (tmp_path / "folder" / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"the tokenizers library cannot read .*tokenizer.json: .*<none>"
    ):
        prove(tmp_path / "folder", 2, tmp_path / "v.gguf")


def test_a_tokenizer_that_makes_the_library_panic_is_refused(stories: Path, tmp_path: Path) -> None:
    rules = base64.b64encode(struct.pack("<II", 4, 1 << 20) + b"a\0").decode()
    step = {"type": "Precompiled", "precompiled_charsmap": rules}
    with pytest.raises(UserError, match=r"cannot read .*tokenizer.json: index out of bounds"):
        prove(changed(stories, tmp_path / "folder", normalizer=step), 512, tmp_path / "v.gguf")


def test_an_expression_in_a_tokenizer_of_pieces_is_refused_by_name(
    stories: Path, tmp_path: Path
) -> None:
    """Not run: it may take for ever, and llama.cpp would not do it."""
    step = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    with pytest.raises(UserError, match=r"by the expression '\(a\+\)\+\$'"):
        prove(changed(stories, tmp_path / "folder", pre_tokenizer=step), 512, tmp_path / "v.gguf")


def test_long_strings_are_shown_cut(tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer("smollm2"), tmp_path / "folder")
    (folder / "tokenizer.json").chmod(0o644)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["added_tokens"][3] |= {
        "content": "<" + "y" * 5000 + ">",
        "lstrip": True,
        "special": False,
    }
    values["model"]["merges"].reverse()
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="test strings differently") as caught:
        prove(folder, 49152, tmp_path / "v.gguf", "gpt-2")
    assert max(map(len, str(caught.value).split("\n"))) < 600
