"""Unigram tokenizers are converted and verified, or refused by the setting that llama.cpp lacks.

tests/data/unigram has a model trained by SentencePiece, with the token ids of SentencePiece.
"""

import base64
import functools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
import tokenizers

from llmcli.model_loader.verify_tokenizer import verify_tokenizer
from llmcli.runtime.binding.model import open_model
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.convert import checkpoint_source
from quant.errors import UserError
from quant.gguf.layout import encode_entry, lay_out_file
from quant.model_file import load_checks, read_header
from quant.quantize import plan, write
from quant.tokenizer import charsmap, sentencepiece_model, vocabulary
from quant.tokenizer.verify import probe_strings
from tests.quant import vocabularies
from tests.quant.vocabularies import convert_and_verify

DATA = Path(__file__).parents[2] / "data" / "unigram"
PIECES = sentencepiece_model.load_sentencepiece(DATA / "tokenizer.model")
COMPILED = {
    "type": "Precompiled",
    "precompiled_charsmap": base64.b64encode(PIECES.charsmap).decode(),
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
SPLIT_WORDS = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, METASPACE]}
MERGE = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
STRIP = {"type": "Strip", "strip_left": False, "strip_right": True}


def chain(*normalizers: dict[str, Any] | str) -> dict[str, Any]:
    listed = [{"type": item} if isinstance(item, str) else item for item in normalizers]
    return {"type": "Sequence", "normalizers": listed}


def model_folder(target: Path, **settings: bool | bytes) -> Path:
    """Copy the SentencePiece model to `target` with these settings, and return `target`."""
    shutil.copytree(DATA, target)
    if settings:
        pieces = [(piece.text, piece.score, piece.type) for piece in PIECES.pieces]
        fields = {"precompiled_charsmap": PIECES.charsmap} | settings
        (target / "tokenizer.model").write_bytes(
            vocabularies.build_sentencepiece(pieces, 1, **fields)
        )
    return target


def json_folder(target: Path, normalizer: Any, pre_tokenizer: Any, **model: Any) -> Path:
    """Write the pieces of the SentencePiece model as a tokenizer.json, and return the folder.

    `model` replaces values of its "model" object.
    """
    target.mkdir()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {
            "id": row,
            "content": piece.text,
            "special": piece.type != sentencepiece_model.USER_DEFINED,
            **flags,
        }
        for row, piece in enumerate(PIECES.pieces)
        if piece.type != sentencepiece_model.NORMAL
    ]
    pieces = [[piece.text, piece.score] for piece in PIECES.pieces]
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": METASPACE,
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": pieces} | model,
    }
    (target / "tokenizer.json").write_text(json.dumps(values))
    shutil.copy(DATA / "tokenizer_config.json", target)
    return target


def test_sentencepiece_model_gives_all_its_ids(tmp_path: Path) -> None:
    verified = convert_and_verify(DATA, 512, tmp_path / "v.gguf")
    assert verified.notes == ()
    assert verified.string_count > 1000
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        for text, ids in json.loads((DATA / "ids.json").read_text()):
            assert model.tokenize(text, special=False) == ids, text


def test_checkpoint_with_a_unigram_tokenizer_converts_and_runs(
    stories: Path, tmp_path: Path
) -> None:
    folder, out = shutil.copytree(stories, tmp_path / "folder"), tmp_path / "out.gguf"
    (folder / "tokenizer.json").unlink()
    shutil.copytree(DATA, folder, dirs_exist_ok=True)
    source = verify_tokenizer(checkpoint_source.open_checkpoint(folder), folder)
    assert not source.notes
    write.write_model(plan.plan_quantization(source, "F32"), out, threads=1)
    model = llama_cpp.Llama(str(out), n_ctx=64, n_threads=1, verbose=False)
    for text, ids in json.loads((DATA / "ids.json").read_text())[:20]:
        assert model.tokenize(text.encode(), add_bos=False, special=False) == ids
        assert model.tokenizer().decode(ids).strip() == model.detokenize(ids).decode().strip()
    assert model("Hello world", max_tokens=4, temperature=0)["usage"]["completion_tokens"] == 4
    model.close()


RULES = "applies character rules as SentencePiece does"
SPACES = "puts a space before text that starts with one"


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "notes"),
    [
        pytest.param(COMPILED, SPLIT_WORDS, [RULES], id="T5, XLM-R"),
        pytest.param(chain(COMPILED, STRIP, MERGE), METASPACE, [RULES], id="from transformers"),
        pytest.param(chain(COMPILED, MERGE), METASPACE, [SPACES, RULES], id="mT5"),
        pytest.param(chain(COMPILED, "Lowercase"), SPLIT_WORDS, [RULES], id="lower case"),
        pytest.param(
            chain("Nmt", "NFKC", MERGE),
            METASPACE,
            ["to NFKC;", SPACES],
            id="SentencePieceUnigramTokenizer",
        ),
        pytest.param(
            chain("NFKD", "StripAccents", "Lowercase"),
            SPLIT_WORDS,
            ["to NFKD;", SPACES],
            id="accents stripped",
        ),
        pytest.param(None, METASPACE, [SPACES], id="no rules"),
        pytest.param(None, METASPACE | {"prepend_scheme": "never"}, [], id="no prefix"),
    ],
)
def test_supported_normalizers_are_verified(
    normalizer, pre_tokenizer, notes, tmp_path: Path
) -> None:
    folder = json_folder(tmp_path / "folder", normalizer, pre_tokenizer)
    all_notes = convert_and_verify(folder, 512, tmp_path / "v.gguf").notes
    relevant = [note for note in all_notes if "two equally good splits" not in note]
    assert len(relevant) == len(notes), relevant
    assert all(text in note for text, note in zip(notes, relevant, strict=True)), relevant


@functools.cache
def trained_tokenizer() -> str:
    """Return the JSON of a Unigram tokenizer trained by the tokenizers library."""
    tokenizer = tokenizers.SentencePieceUnigramTokenizer()
    texts = [text for text in probe_strings.probe_strings() if text not in probe_strings.LOOKALIKES]
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        texts, vocab_size=1500, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    return tokenizer.to_str()


def test_tokenizer_of_the_library_trainer_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(trained_tokenizer())
    verified = convert_and_verify(folder, None, tmp_path / "v.gguf")
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        for text in (*probe_strings.PROSE, *probe_strings.SCRIPTS[:20], *probe_strings.EMOJI):
            if (
                text == text.strip()
            ):  # splits with equal scores differ in order: "!!" and "!", or "!" and "!!"
                theirs = oracle.encode(text, add_special_tokens=False).ids
                assert sorted(model.tokenize(text, special=False)) == sorted(theirs), text
    assert verified.string_count > 1000


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "model", "message"),
    [
        (COMPILED, SPLIT_WORDS, {"byte_fallback": True}, r"in bytes \(byte_fallback\)"),
        (COMPILED, SPLIT_WORDS, {"unk_id": None}, r"no unknown token \(unk_id\)"),
        (COMPILED, SPLIT_WORDS, {"unk_id": 512}, r"no unknown token \(unk_id\)"),
        (COMPILED, SPLIT_WORDS, {"vocab": [["a", -1.0], ["a", -2.0]]}, "has the piece 'a' twice"),
        (COMPILED, SPLIT_WORDS, {"vocab": [["a", "b"]]}, "pieces without a text and a score"),
        (
            COMPILED,
            SPLIT_WORDS,
            {"vocab": [["a", float("nan")]]},
            "pieces without a text and a score",
        ),
        (COMPILED, SPLIT_WORDS, {"vocab": {"a": 1}}, "pieces without a text and a score"),
        (COMPILED, None, {}, "it has no Metaspace"),
        (chain(COMPILED, STRIP), METASPACE, {}, r"ends of a text \(Strip\)"),
        (
            chain(COMPILED, MERGE),
            METASPACE | {"prepend_scheme": "never"},
            {},
            "remove_extra_whitespaces",
        ),
        (
            chain({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}),
            METASPACE,
            {},
            "text by Replace .*a+",
        ),
        ({"type": "BertNormalizer"}, METASPACE, {}, "changes text by BertNormalizer"),
        (7, METASPACE, {}, "changes text by 7"),
        (None, {"type": "Digits", "individual_digits": True}, {}, "splits text by Digits"),
        (None, METASPACE | {"replacement": "_"}, {}, "splits text by Metaspace"),
        (
            COMPILED | {"precompiled_charsmap": "####"},
            METASPACE,
            {},
            "precompiled_charsmap is damaged",
        ),
        (
            COMPILED | {"precompiled_charsmap": "AAAA"},
            METASPACE,
            {},
            "precompiled_charsmap is damaged",
        ),
    ],
)
def test_unsupported_tokenizer_json_is_refused_by_setting(
    normalizer, pre_tokenizer, model, message, tmp_path: Path
) -> None:
    folder = json_folder(tmp_path / "folder", normalizer, pre_tokenizer, **model)
    with pytest.raises(UserError, match=message):
        convert_and_verify(folder, 512, tmp_path / "v.gguf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"byte_fallback": True}, "byte_fallback"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"escape_whitespaces": False}, "escape_whitespaces"),
        ({"add_dummy_prefix": False}, "add_dummy_prefix"),
        ({"precompiled_charsmap": b"\0" * 9}, "precompiled_charsmap is damaged"),
    ],
)
def test_unsupported_sentencepiece_settings_are_refused_by_name(
    settings, message, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        convert_and_verify(model_folder(tmp_path / "folder", **settings), 512, tmp_path / "v.gguf")


@pytest.mark.parametrize(
    "settings", [{"remove_extra_whitespaces": False}, {"precompiled_charsmap": b""}]
)
def test_supported_sentencepiece_settings_are_verified(settings, tmp_path: Path) -> None:
    assert (
        len(
            convert_and_verify(
                model_folder(tmp_path / "folder", **settings), 512, tmp_path / "v.gguf"
            ).notes
        )
        <= 2
    )


SCORES = [piece.score for piece in PIECES.pieces]


@pytest.mark.parametrize(
    "changes",
    [
        {"add_space_prefix": ("bool", False), "remove_extra_whitespaces": ("bool", False)},
        {"remove_extra_whitespaces": ("bool", False)},
        {"precompiled_charsmap": ("array:uint8", list(charsmap.build_charsmap({"a": "b"})))},
        {"scores": ("array:float32", [*SCORES[:5], *SCORES[:4:-1]])},
        {"unknown_token_id": ("uint32", 7)},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("source", ["tokenizer.model", "tokenizer.json"])
def test_file_with_other_entries_fails_verification(source, changes, tmp_path: Path) -> None:
    is_model = source == "tokenizer.model"
    folder = (
        model_folder(tmp_path / "folder")
        if is_model
        else json_folder(tmp_path / "folder", COMPILED, SPLIT_WORDS)
    )
    with pytest.raises(UserError, match=rf"would encode text differently from .*{source} "):
        convert_and_verify(folder, 512, tmp_path / "v.gguf", **changes)


@pytest.mark.parametrize(
    ("normalizer", "model", "message"),
    [
        (COMPILED, {"unk_id": None}, "tokenizers library cannot read"),
        (
            COMPILED | {"precompiled_charsmap": "BAAAAGFiY2QAAA=="},
            {},
            "tokenizer.json: index out of",
        ),
        (
            COMPILED,
            {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
            "would encode text differently",
        ),
    ],
    ids=["no unknown", "damaged rules", "another kind"],
)
def test_invalid_tokenizer_json_is_refused_despite_a_valid_model(
    normalizer, model, message, tmp_path: Path
) -> None:
    folder = json_folder(tmp_path / "folder", normalizer, SPLIT_WORDS, **model)
    shutil.copy(DATA / "tokenizer.model", folder)
    with pytest.raises(UserError, match=message):
        convert_and_verify(folder, 512, tmp_path / "v.gguf")


def test_added_tokens_decoder_may_rename_pieces(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "folder")
    added_tokens = {
        "0": {"content": "<what>"},
        "600": {"content": "<beyond>"},
        "7": {"content": "<seven>", "special": True},
    }
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "added_tokens_decoder": added_tokens
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"token 600 \('<beyond>'\) is outside"):
        convert_and_verify(folder, 512, tmp_path / "v.gguf")
    assert convert_and_verify(folder, None, tmp_path / "v.gguf").notes == ()
    assert (
        "<seven>"
        in read_header.read_header(tmp_path / "v.gguf")
        .metadata["tokenizer.ggml.tokens"]
        .read_values()
    )


def test_pieces_with_a_space_are_not_used_if_words_are_split(tmp_path: Path) -> None:
    pieces = [[piece.text, piece.score] for piece in PIECES.pieces[:-1]] + [["▁a▁b", -0.5]]
    folder = json_folder(tmp_path / "folder", COMPILED, SPLIT_WORDS, vocab=pieces)
    convert_and_verify(folder, 512, tmp_path / "v.gguf")
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        assert 511 not in model.tokenize("a b", special=False)


def damaged_charsmaps() -> Iterator[bytes]:
    """Yield the character rules of the model with random bytes changed."""
    rng = random.Random(0)
    for _ in range(60):
        broken = bytearray(PIECES.charsmap)
        for _ in range(rng.choice((1, 1, 8))):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        yield bytes(broken)


def test_damaged_rules_that_pass_the_checks_do_not_crash_llama_cpp(tmp_path: Path) -> None:
    refused = 0
    for number, rules in enumerate(damaged_charsmaps()):
        file = tmp_path / f"{number}.gguf"
        loaded = vocabulary.load_vocabulary(
            CheckpointFolder(DATA), CheckpointConfig({"vocab_size": 512}, "config.json")
        )
        entries = dict(loaded.entries) | {
            "tokenizer.ggml.precompiled_charsmap": encode_entry("array:uint8", list(rules))
        }
        entries["general.architecture"] = encode_entry("string", "llama")
        file.write_bytes(lay_out_file(list(entries.items()), [], 32).header)
        try:
            load_checks.check_loadable(read_header.read_header(file))
        except UserError:
            refused += 1
        else:
            with open_model(file, vocab_only=True) as model:
                for text in (
                    *probe_strings.SCRIPTS,
                    *probe_strings.MARKS,
                    *probe_strings.INVISIBLE,
                ):
                    model.tokenize(text, special=False)
    assert 10 < refused < 60


def test_huge_piece_is_refused(tmp_path: Path) -> None:
    """llama.cpp walks its tree of pieces recursively, as deep as the longest piece."""
    tokens = [*(piece.text for piece in PIECES.pieces[:-1]), "a" * 100_000]
    with pytest.raises(
        UserError, match=r"would crash llama.cpp: its vocabulary has a piece of 100000 bytes"
    ):
        convert_and_verify(DATA, 512, tmp_path / "v.gguf", tokens=("array:string", tokens))


def test_huge_piece_in_tokenizer_json_is_refused_despite_a_valid_model(
    stories: Path, tmp_path: Path
) -> None:
    """The tokenizers library frees its tree of pieces recursively, as deep as the longest piece."""
    folder = json_folder(
        tmp_path / "folder", None, METASPACE, vocab=[["<unk>", 0.0], ["a" * 1_000_000, -1.0]]
    )
    shutil.copy(stories / "tokenizer.model", folder)
    with pytest.raises(UserError, match=r"tokenizer.json has a piece of 1,000,000 characters"):
        convert_and_verify(folder, 512, tmp_path / "v.gguf")
