"""WordPiece vocabularies: the ids of the tokenizers library, pairs of texts, and refusals."""

import functools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmcli.runtime.binding.model import open_model
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError
from quant.model_file import read_header
from quant.tokenizer import vocabulary, wordpiece
from quant.tokenizer.sentencepiece_model import CONTROL, NORMAL
from quant.tokenizer.verify import known_differences, probe_strings, reference_tokenizer
from tests.quant import vocabularies

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SETTINGS = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
NORMALIZERS: list[dict[str, Any]] = [
    {},
    {"lowercase": False},
    {"strip_accents": False},
    {"lowercase": False, "strip_accents": True},
]
normalizers = pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)


@functools.cache
def trained_pieces() -> list[str]:
    """Return the pieces of a WordPiece model that is trained on the probe strings, with cases and
    accents. Characters that llama.cpp leaves of others are pieces, too.
    """
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=4000, special_tokens=list(SPECIALS), show_progress=False
    )
    model = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    texts = [text for text in probe_strings.probe_strings() if "[" not in text]
    forms = [unicodedata.normalize("NFD", text) for text in texts]
    model.train_from_iterator([*texts, *forms, *map(str.lower, texts + forms)], trainer)
    ids = model.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def write_tokenizer(folder: Path, settings: dict[str, Any], **changes: Any) -> int:
    """Write BERT's tokenizer files with the trained pieces, and return the vocabulary size.
    `settings` are of the normalizer; `changes` replace parts of tokenizer.json.
    """
    folder.mkdir()
    pieces = trained_pieces()
    added = [
        {
            "id": row,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for row, text in enumerate(SPECIALS)
    ]
    values = vocabularies.wordpiece_tokenizer_json(pieces, added, **settings)
    (folder / "tokenizer.json").write_text(json.dumps(values | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return len(pieces)


@normalizers
def test_ids_equal_those_of_the_library_or_are_explained(
    normalizer: dict[str, Any], tmp_path: Path
) -> None:
    size = write_tokenizer(tmp_path / "model", normalizer)
    verified = vocabularies.convert_and_verify(tmp_path / "model", size, tmp_path / "v.gguf")
    assert verified.string_count > 1000
    (note,) = verified.notes
    assert note.startswith("llama.cpp cleans text differently")


@normalizers
def test_llama_cpp_gives_the_ids_of_the_described_differences(
    normalizer: dict[str, Any], tmp_path: Path
) -> None:
    """Every probe string, also those that both tokenizers encode in the same way."""
    folder, out = tmp_path / "model", tmp_path / "v.gguf"
    size = write_tokenizer(folder, normalizer)
    vocabularies.convert_and_verify(folder, size, out)
    metadata = read_header.read_header(out).metadata
    reference = reference_tokenizer.load_reference(CheckpointFolder(folder), metadata)
    with open_model(out, vocab_only=True) as model:
        differences = known_differences.KnownDifferences(reference, metadata, model.is_control)
        word_piece = differences.word_piece
        assert word_piece
        for text in [*probe_strings.probe_strings(), "a[SEP]b [MASK] [UNK]"]:
            for special in (False, True):
                ids = model.tokenize(text, special=special)
                assert ids == word_piece.encode(text, special=special), text


def test_special_tokens_surround_texts_and_pairs(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "v.gguf"
    size = write_tokenizer(folder, {})
    vocabularies.convert_and_verify(folder, size, out)
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open_model(out, vocab_only=True) as model:
        ids = model.tokenize("Hello world", special=True, add_special=True)
        assert ids == oracle.encode("Hello world").ids
        pair = ("The quick brown fox.", "Hello, world!")
        assert model.tokenize_pair(*pair) == oracle.encode(*pair).ids


def test_second_separator_of_roberta_is_recorded(tmp_path: Path) -> None:
    """RoBERTa's tokenizers have two separators between texts."""
    post_processor = {
        "type": "RobertaProcessing",
        "sep": ["[SEP]", 3],
        "cls": ["[CLS]", 2],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    folder, out = tmp_path / "model", tmp_path / "v.gguf"
    size = write_tokenizer(folder, {}, post_processor=post_processor)
    vocabularies.convert_and_verify(folder, size, out)
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open_model(out, vocab_only=True) as model:
        pair = ("The quick brown fox.", "Hello, world!")
        assert model.tokenize_pair(*pair) == oracle.encode(*pair).ids


def test_pieces_are_marked_as_llama_cpp_marks_them() -> None:
    words = {"[UNK]": 0, "un": 1, "##aff": 2, "##": 3, "#": 4, "##\u2581un": 5}
    pieces, unknown = wordpiece.convert_pieces(words, {}, "tokenizer.json")
    assert unknown == 0
    assert [(pieces[row].text, pieces[row].type) for row in range(6)] == [
        ("[UNK]", CONTROL),
        ("\u2581un", NORMAL),
        ("aff", NORMAL),
        ("##", NORMAL),
        ("\u2581#", NORMAL),
        ("##\u2581un", NORMAL),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": []}}, "ids that are not valid"),
        ({"model": {"type": "WordPiece", "vocab": {"[UNK]": -1}}}, "ids that are not valid"),
        ({"model": {"type": "WordPiece", "vocab": {"[UNK]": True}}}, "ids that are not valid"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "no unknown token"),
        (
            {
                "model": {
                    "type": "WordPiece",
                    "vocab": {"[UNK]": 0},
                    "continuing_subword_prefix": "@",
                }
            },
            "by '@'",
        ),
        ({"normalizer": None}, "no BertNormalizer"),
        ({"normalizer": {"type": "BertNormalizer", "clean_text": False}}, "control characters"),
        (
            {"normalizer": {"type": "BertNormalizer", "handle_chinese_chars": False}},
            "Chinese characters",
        ),
        ({"normalizer": {"type": "Precompiled"}}, "changes text by Precompiled"),
        ({"normalizer": ["x"]}, "changes text by"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "splits text by Whitespace"),
        ({"pre_tokenizer": None}, "splits text by None"),
    ],
)
def test_tokenizer_that_llama_cpp_cannot_run_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    size = write_tokenizer(tmp_path / "model", {}, **changes)
    with pytest.raises(UserError, match=message):
        vocabulary.load_vocabulary(
            CheckpointFolder(tmp_path / "model"),
            CheckpointConfig({"vocab_size": size}, "config.json"),
        )
