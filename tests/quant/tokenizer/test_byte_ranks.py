"""Vocabularies of byte pieces by rank (tekken.json, tiktoken.model): the ids of a BPE that the
tokenizers library trained, of tiktoken's own procedure, and refusals of damaged files.
"""

import base64
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers

from llmcli.runtime.binding.model import open_model
from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError
from quant.model_file import read_header
from quant.tokenizer import byte_ranks, tekken, tiktoken, vocabulary
from quant.tokenizer.byte_ranks import BYTE_BY_CHAR, CHAR_BY_BYTE
from quant.tokenizer.pre_tokenizer import KIMI, TEKKEN, build_node
from quant.tokenizer.verify import probe_strings, reference_tokenizer
from tests.quant import vocabularies

SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
TEXTS = [text for text in probe_strings.probe_strings() if "<" not in text and "[" not in text]
KIMI_SETTINGS = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
}


@functools.cache
def trained(pattern: str) -> tokenizers.Tokenizer:
    """Return a BPE that the library trained on the probe strings, split by `pattern`."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    empty = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    node = json.dumps(empty | {"pre_tokenizer": build_node((pattern,))})
    bpe.pre_tokenizer = tokenizers.Tokenizer.from_str(node).pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=3000,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS * 3, trainer)
    return bpe


def trained_pieces(pattern: str) -> list[bytes]:
    """Return the pieces of the trained BPE as bytes, by rank."""
    ids = trained(pattern).get_vocab()
    return [bytes(BYTE_BY_CHAR[char] for char in text) for text in sorted(ids, key=ids.__getitem__)]


def tekken_json(pieces: list[bytes], **changes: Any) -> dict[str, Any]:
    """Return the content of a tekken.json with more pieces than are used."""
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate([*pieces, b"unused piece"])
    ]
    values = {
        "config": {
            "pattern": TEKKEN,
            "num_vocab_tokens": len(listed),
            "default_vocab_size": len(pieces) + 10,
            "default_num_special_tokens": 10,
            "version": "v7",
        },
        "vocab": listed,
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(SPECIALS)
        ],
    }
    return values | changes


def write_tiktoken(folder: Path, pieces: list[bytes], **changes: Any) -> None:
    """Write a tiktoken.model and the settings of Kimi's tokenizer."""
    folder.mkdir()
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("".join(lines))
    texts = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "[PAD]", "[UNK]"]
    added = {str(len(pieces) + i): {"content": text} for i, text in enumerate(texts)}
    settings = KIMI_SETTINGS | {"added_tokens_decoder": added} | changes
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def assert_trained_ids(folder: Path, out: Path, pattern: str, first_row: int) -> None:
    """Assert that the reference for llama.cpp gives the ids of the trained BPE."""
    reference = reference_tokenizer.load_reference(
        CheckpointFolder(folder), read_header.read_header(out).metadata
    )
    for text in TEXTS:
        expected = [first_row + index for index in trained(pattern).encode(text).ids]
        assert reference.row_tokenizer.encode(text, special=False) == expected, text


def test_tekken_gives_the_ids_of_the_trained_bpe(tmp_path: Path) -> None:
    folder, out, pieces = tmp_path / "model", tmp_path / "v.gguf", trained_pieces(TEKKEN)
    folder.mkdir()
    (folder / "tekken.json").write_text(json.dumps(tekken_json(pieces)))
    verified = vocabularies.convert_and_verify(folder, len(pieces) + 10, out)
    assert verified.string_count > 1000
    assert_trained_ids(folder, out, TEKKEN, 10)
    with open_model(out, vocab_only=True) as model:
        assert (model.bos, model.eos) == (1, 2)
        ids = model.tokenize("[INST]a[/INST]", special=True, add_special=True)
        assert (ids[0], ids[1], ids[-1]) == (1, 3, 4)


def test_tiktoken_gives_the_ids_of_the_trained_bpe(tmp_path: Path) -> None:
    folder, out, pieces = tmp_path / "model", tmp_path / "v.gguf", trained_pieces(KIMI)
    write_tiktoken(folder, pieces)
    size = len(pieces) + 16
    verified = vocabularies.convert_and_verify(folder, size, out)
    assert verified.string_count > 1000
    assert_trained_ids(folder, out, KIMI, 0)
    with open_model(out, vocab_only=True) as model:
        assert (model.bos, model.eos) == (len(pieces), len(pieces) + 1)
        assert model.tokenize("<|im_end|>", special=True) == [len(pieces) + 2]


def test_repetition_mark_between_ideographs_is_explained(tmp_path: Path) -> None:
    """llama.cpp splits before U+3005, which is a Han character for the library."""
    folder, pieces = tmp_path / "model", [bytes([byte]) for byte in range(256)]
    for text in ("\u4eba", "\u3005", "\u4eba\u3005"):
        data = text.encode()
        pieces += [piece for cut in (2, 3, 4, 5, 6) if (piece := data[:cut]) not in pieces]
    write_tiktoken(folder, list(dict.fromkeys(pieces)))
    verified = vocabularies.convert_and_verify(folder, len(pieces) + 16, tmp_path / "v.gguf")
    assert "some ideographs" in verified.notes[0]


def encode_word(ranks: dict[bytes, int], word: bytes) -> list[int]:
    """Return the ranks of a word's pieces by tiktoken's procedure, written out."""
    if word in ranks:
        return [ranks[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        joined = [ranks.get(a + b) for a, b in itertools.pairwise(parts)]
        best = min((rank for rank in joined if rank is not None), default=None)
        if best is None:
            return [ranks[part] for part in parts]
        index = joined.index(best)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


def test_merges_do_what_tiktoken_does() -> None:
    """Also for random pieces, which no training made."""
    import random

    rng = random.Random(7)
    pieces = [bytes([byte]) for byte in range(256)]
    while len(pieces) < 600:
        piece = rng.choice(pieces[96:]) + rng.choice(pieces[96:])
        if len(piece) <= 6 and piece not in pieces:
            pieces.append(piece)
    values = byte_ranks.build_tokenizer_json(pieces, 0, {}, r"\S+|\s+")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(values))
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    for _ in range(300):
        data = b"".join(rng.choices(pieces[97:123] + pieces[256:], k=rng.randrange(1, 12)))
        text = data.decode("latin-1").encode().decode()
        words = regex.findall(r"\S+|\s+", text)
        expected = [rank for word in words for rank in encode_word(ranks, word.encode())]
        assert tokenizer.encode(text).ids == expected, text


def test_a_byte_has_the_character_of_gpt2() -> None:
    """The tests above write bytes by the same table as the code."""
    oracle = pytest.importorskip(
        "transformers.convert_slow_tokenizer", reason="transformers is not installed: no oracle"
    )
    assert oracle.bytes_to_unicode() == CHAR_BY_BYTE


def test_old_tekken_files_have_their_special_tokens() -> None:
    pieces = [bytes([byte]) for byte in range(256)]
    values = tekken_json(pieces)
    del values["special_tokens"]
    values["config"] |= {"default_num_special_tokens": 1000, "default_vocab_size": 1256}
    result = tekken.read_tekken(values, "tekken.json")
    texts = {item["id"]: item["content"] for item in result["added_tokens"]}
    assert (texts[1], texts[11], texts[999]) == ("<s>", "<pad>", "<SPECIAL_999>")
    assert result["model"]["vocab"]["A"] == 1000 + ord("A")


BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, "no valid default_vocab_size"),
        ({"config": {"default_vocab_size": True}}, "no valid default_vocab_size"),
        (
            {"config": {"default_vocab_size": 10, "default_num_special_tokens": 10}},
            "no pattern, or no rows",
        ),
        ({"vocab": []}, "fewer than 256 pieces"),
        ({"vocab": [7] * 256}, "no valid piece of rank 0"),
        ({"vocab": [{"rank": 0, "token_bytes": "*"}] * 256}, "no valid piece of rank 0"),
        ({"vocab": [{"rank": 0, "token_bytes": "QQ=="}] * 256}, "no valid piece of rank 1"),
        (
            {"vocab": [{"rank": rank, "token_bytes": "QQ=="} for rank in range(256)]},
            "same piece twice",
        ),
        (
            {"vocab": [{"rank": rank, "token_bytes": ""} for rank in range(256)]},
            "empty or longer",
        ),
        ({"special_tokens": {}}, "special token without"),
        ({"special_tokens": [{"rank": 10, "token_str": "x"}]}, "special token without"),
        ({"special_tokens": [{"rank": i, "token_str": "x"} for i in range(2)]}, "token twice"),
    ],
)
def test_damaged_tekken_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tekken.read_tekken(tekken_json(BYTES, **changes), "tekken.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not have a piece for every byte"),
        ("QQ==\n", "no piece and rank in line 1"),
        ("QQ== 0\nQg== 0\n", "no piece and rank in line 2"),
        ("*** 0\n", "no piece and rank in line 1"),
        ("QQ== 99999999999999999999\n", "no piece and rank in line 1"),
        ("QQ== -1\n", "every rank once"),
        ("QQ== 5\n", "every rank once"),
        ("QQ== 0\nQQ== 1\n", "same piece twice"),
    ],
)
def test_damaged_tiktoken_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tiktoken.model"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        tiktoken.read_tiktoken(file, KIMI_SETTINGS)


@pytest.mark.parametrize("kind", ["OtherTokenizer", None, {"a": 1}])
def test_unknown_tiktoken_class_is_refused(kind: Any, tmp_path: Path) -> None:
    write_tiktoken(tmp_path / "model", BYTES, tokenizer_class=kind)
    with pytest.raises(UserError, match=f"class {kind} is unknown"):
        vocabulary.load_vocabulary(
            CheckpointFolder(tmp_path / "model"), CheckpointConfig({"vocab_size": 300}, "c")
        )
