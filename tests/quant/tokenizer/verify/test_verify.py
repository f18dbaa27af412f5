"""A converted vocabulary gives the ids of the model's tokenizer, or the error lists differences."""

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
from tests.quant.vocabularies import convert_and_verify

ASSETS = Path(__file__).parents[5] / "shared" / "assets"


def released_tokenizer(name: str) -> Path:
    folder = ASSETS / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip("../shared/assets/tokenizers is not here")
    return folder


def test_probe_strings_are_many_and_distinct() -> None:
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
def test_released_tokenizers_are_verified(
    name: str, size: int, notes: list[str], tmp_path: Path
) -> None:
    verified = convert_and_verify(released_tokenizer(name), size, tmp_path / "v.gguf")
    assert verified.string_count > 1000
    assert len(verified.notes) == len(notes)
    assert all(text in note for text, note in zip(notes, verified.notes, strict=True))


def test_stories_tokenizer_is_verified(stories: Path, tmp_path: Path) -> None:
    assert convert_and_verify(stories, 512, tmp_path / "v.gguf").notes == ()


@pytest.mark.parametrize("prefix", [True, False])
def test_file_with_another_space_prefix_fails_verification(
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
    convert_and_verify(folder, 512, tmp_path / "v.gguf")
    with pytest.raises(UserError, match=r"would encode text differently .*, such as '.' as "):
        convert_and_verify(folder, 512, tmp_path / "w.gguf", add_space_prefix=("bool", not prefix))


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_wrong_pre_tokenizer_fails_with_one_short_example(pre: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"differently from .* \(test strings that differ: \d+\), such as "
    ) as caught:
        convert_and_verify(released_tokenizer("smollm2"), 49152, tmp_path / "v.gguf", pre)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert "--pre" in caught.value.hint


def test_equivalent_pre_tokenizer_is_verified(tmp_path: Path) -> None:
    assert (
        convert_and_verify(
            released_tokenizer("smollm2"), 49152, tmp_path / "v.gguf", "starcoder"
        ).string_count
        > 1000
    )


def test_finetune_with_an_added_token_is_verified(tmp_path: Path) -> None:
    folder = shutil.copytree(released_tokenizer("smollm2"), tmp_path / "folder")
    file = folder / "tokenizer.json"
    file.chmod(0o644)
    values: dict[str, Any] = json.loads(file.read_text())
    new = values["added_tokens"][0] | {"id": 49152, "content": "<|my_turn|>"}
    tiny_checkpoint.edit(file, added_tokens=[*values["added_tokens"], new])
    assert convert_and_verify(folder, 49153, tmp_path / "v.gguf").notes == ()
    assert (
        convert_and_verify(folder, None, tmp_path / "less.gguf").notes == ()
    )  # the added token has no row and is left out


@pytest.mark.parametrize("path", vocabularies.vocabulary_files(), ids=lambda path: path.name)
def test_llama_cpp_vocabularies_give_their_expected_ids(path: Path, tmp_path: Path) -> None:
    name = path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
    if name not in (*vocabularies.STEPS, *vocabularies.SENTENCEPIECE_MODELS, "bert-bge"):
        pytest.skip(f"{name} is of a kind that is not converted")
    out, size = tmp_path / "v.gguf", vocabularies.write_tokenizer(path, tmp_path / "folder")
    verified = convert_and_verify(tmp_path / "folder", size, out)
    assert name in vocabularies.SENTENCEPIECE_MODELS or verified.string_count > 1000
    with open_model(out, vocab_only=True) as model:
        for text, ids in vocabularies.expected_ids(path):
            assert model.tokenize(text, special=False) == ids, text


def test_llama_cpp_vocabularies_exist() -> None:
    if not vocabularies.SHARED_VOCABULARIES.is_dir():
        pytest.skip("../shared/assets/vocab is not here")
    assert len(vocabularies.vocabulary_files()) >= 4


@functools.cache
def trained_bpe() -> dict[str, Any]:
    """Return a BPE model trained on the unsplit probe strings.

    Its merges cross all boundaries of pre-tokenizers, so every difference in splitting changes ids.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=20000, initial_alphabet=alphabet, show_progress=False
    )
    # Strings that llama.cpp treats as special tokens are left out.
    bpe.train_from_iterator(
        [text for text in probe_strings.probe_strings() if text not in probe_strings.LOOKALIKES]
        * 2,
        trainer,
    )
    return json.loads(bpe.to_str())["model"]


def write_trained_tokenizer(folder: Path, steps: tuple[str, ...], whole_words_first: bool) -> int:
    """Write a tokenizer.json with the trained BPE model, and return its vocabulary size."""
    model = trained_bpe()
    folder.mkdir()
    values = vocabularies.bpe_tokenizer_json(
        model["vocab"], model["merges"], steps, [], whole_words_first
    )
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
def test_known_pre_tokenizers_split_exactly_as_llama_cpp(steps, pre, tmp_path: Path) -> None:
    size = write_trained_tokenizer(tmp_path / "folder", steps, pre.whole_words_first)
    assert convert_and_verify(tmp_path / "folder", size, tmp_path / "v.gguf").notes == ()


@pytest.mark.parametrize(
    ("steps", "whole_words_first", "message"),
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
            "kimi-k2 ignores case, and treats combining marks and some ideographs differently",
        ),
        (
            (pre_tokenizer.DIGIT_TRIPLES, pre_tokenizer.GPT4O),
            False,
            "tiny_aya ignores case, and treats combining marks differently",
        ),
    ],
    ids=["gpt-4o", "tekken", "kimi-k2", "tiny_aya"],
)
def test_differences_of_rewritten_expressions_are_reported(
    steps, whole_words_first, message, tmp_path
) -> None:
    size = write_trained_tokenizer(tmp_path / "folder", steps, whole_words_first)
    (note,) = convert_and_verify(tmp_path / "folder", size, tmp_path / "v.gguf").notes
    assert re.search(rf"llama.cpp's {message}: \d+ of \d+ test strings", note)


def test_added_tokens_that_strip_spaces_are_reported(tmp_path: Path) -> None:
    token = {
        "id": 0,
        "content": "<|turn|>",
        "single_word": False,
        "lstrip": True,
        "rstrip": True,
        "normalized": True,
        "special": True,
    }
    size = write_trained_tokenizer(tmp_path / "folder", ("gpt2",), False)
    tiny_checkpoint.edit(
        tmp_path / "folder" / "tokenizer.json", added_tokens=[token | {"id": size}]
    )
    (note,) = convert_and_verify(tmp_path / "folder", size + 1, tmp_path / "v.gguf").notes
    assert "strips no spaces around them (<|turn|>)" in note


def test_whole_words_before_merges_are_compared_if_llama_cpp_has_no_such_rule(
    tmp_path: Path,
) -> None:
    size = write_trained_tokenizer(tmp_path / "folder", ("gpt2",), whole_words_first=True)
    values = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    values["model"]["vocab"]["zqzq"] = size
    tiny_checkpoint.edit(tmp_path / "folder" / "tokenizer.json", model=values["model"])
    with pytest.raises(UserError, match="'zqzq'"):
        convert_and_verify(tmp_path / "folder", size + 1, tmp_path / "v.gguf")


@pytest.mark.parametrize(("bos", "name"), [("!", "llama-bpe"), (None, "glm4")])
def test_model_without_a_bos_gets_none(bos: str | None, name: str, tmp_path: Path) -> None:
    size = write_trained_tokenizer(
        tmp_path / "folder", (pre_tokenizer.LLAMA3,), whole_words_first=True
    )
    tiny_checkpoint.edit(tmp_path / "folder" / "tokenizer_config.json", bos_token=bos)
    convert_and_verify(tmp_path / "folder", size, tmp_path / "v.gguf")
    assert read_header.read_header(tmp_path / "v.gguf").metadata["tokenizer.ggml.pre"] == name
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        assert (model.bos is None) == (bos is None)


def write_changed_tokenizer(stories: Path, target: Path, **changes: Any) -> Path:
    """Copy the stories260K folder without tokenizer.model and with a changed tokenizer.json."""
    folder = shutil.copytree(stories, target)
    (folder / "tokenizer.model").unlink()
    values = json.loads((folder / "tokenizer.json").read_text())
    changes = {
        key: values[key] | change if key == "model" else change for key, change in changes.items()
    }
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))
    return folder


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (1, 2, ""),
        (1, None, ""),
        (2, 1, "puts </s> <s> around a text, llama.cpp puts '<s>"),
        (2, None, "puts </s> around"),
    ],
)
def test_surrounding_tokens_that_gguf_cannot_name_are_reported(
    first, last, message: str, stories: Path, tmp_path: Path
) -> None:
    names = {1: "<s>", 2: "</s>"}
    single = [{"SpecialToken": {"id": names[row], "type_id": 0}} for row in (first, last) if row]
    single.insert(1, {"Sequence": {"id": "A", "type_id": 0}})
    special = {name: {"id": name, "ids": [row], "tokens": [name]} for row, name in names.items()}
    post = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}
    notes = convert_and_verify(
        write_changed_tokenizer(stories, tmp_path / "folder", post_processor=post),
        512,
        tmp_path / "v.gguf",
    ).notes
    assert [message in note for note in notes] == [True] * bool(message)


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
def test_training_settings_are_ignored_by_the_verification(
    changes, stories: Path, tmp_path: Path
) -> None:
    assert (
        convert_and_verify(
            write_changed_tokenizer(stories, tmp_path / "folder", **changes),
            512,
            tmp_path / "v.gguf",
        ).notes
        == ()
    )


def test_tokenizer_that_fails_to_encode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    values = vocabularies.bpe_tokenizer_json(
        {"a": 0, "b": 1}, [], ("gpt2",), [], whole_words_first=False
    )
    values["model"]["unk_token"] = "<none>"
    (tmp_path / "folder" / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"the tokenizers library cannot read .*tokenizer.json: .*<none>"
    ):
        convert_and_verify(tmp_path / "folder", 2, tmp_path / "v.gguf")


def test_tokenizer_that_makes_the_library_panic_is_refused(stories: Path, tmp_path: Path) -> None:
    rules = base64.b64encode(struct.pack("<II", 4, 1 << 20) + b"a\0").decode()
    step = {"type": "Precompiled", "precompiled_charsmap": rules}
    with pytest.raises(UserError, match=r"cannot read .*tokenizer.json: index out of bounds"):
        convert_and_verify(
            write_changed_tokenizer(stories, tmp_path / "folder", normalizer=step),
            512,
            tmp_path / "v.gguf",
        )


def test_expression_in_a_sentencepiece_tokenizer_is_refused_by_name(
    stories: Path, tmp_path: Path
) -> None:
    """The expression may take exponential time, so the verification must not run it."""
    step = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    with pytest.raises(UserError, match=r"by the expression '\(a\+\)\+\$'"):
        convert_and_verify(
            write_changed_tokenizer(stories, tmp_path / "folder", pre_tokenizer=step),
            512,
            tmp_path / "v.gguf",
        )


def test_long_strings_are_truncated_in_the_error(tmp_path: Path) -> None:
    folder = shutil.copytree(released_tokenizer("smollm2"), tmp_path / "folder")
    (folder / "tokenizer.json").chmod(0o644)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["added_tokens"][3] |= {
        "content": "<" + "y" * 5000 + ">",
        "lstrip": True,
        "special": False,
    }
    values["model"]["merges"].reverse()
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="would encode text differently") as caught:
        convert_and_verify(folder, 49152, tmp_path / "v.gguf", "gpt-2")
    assert max(map(len, str(caught.value).split("\n"))) < 600
