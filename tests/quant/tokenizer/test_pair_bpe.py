"""A SentencePiece BPE whose merges are ordered by pairs, as in Gemma 4."""

import json
from pathlib import Path
from typing import Any

import pytest

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError
from quant.gguf.layout import encode_entry
from quant.tokenizer.vocabulary import load_vocabulary

PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", "<|channel>", "a", "b", "c", "ab", "bc", "abc"]
# "abc" is made by the first merge and by the last one, with another merge between them
MERGES = [["ab", "c"], ["a", "b"], ["b", "c"], ["a", "bc"]]
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}


def write_tokenizer(folder: Path, normalizer: dict[str, Any]) -> CheckpointFolder:
    """Write a tokenizer.json with these pieces and merges, and return its folder."""
    model = {
        "type": "BPE",
        "byte_fallback": True,
        "unk_token": "<unk>",
        "vocab": {text: index for index, text in enumerate(PIECES)},
        "merges": MERGES,
    }
    added = [
        {"id": index, "content": text, "special": True} for index, text in enumerate(PIECES[:5])
    ]
    (folder / "tokenizer.json").write_text(
        json.dumps({"normalizer": normalizer, "added_tokens": added, "model": model})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"})
    )
    return CheckpointFolder(folder)


CONFIG = CheckpointConfig({"vocab_size": len(PIECES), "eos_token_id": 1}, "config.json")


def test_merges_that_are_no_neighbors_are_written_as_they_are(tmp_path: Path) -> None:
    entries = dict(load_vocabulary(write_tokenizer(tmp_path, SPACE), CONFIG).entries)
    expected: list[tuple[str, str, Any]] = [
        ("model", "string", "gemma4"),
        ("pre", "string", "gemma4"),
        ("merges", "array:string", ["ab c", "a b", "b c", "a bc"]),
        # a token that a chat parser must see is not a control token
        ("token_type", "array:int32", [3, 3, 3, 3, 4, 1, 1, 1, 1, 1, 1]),
        ("add_bos_token", "bool", True),
        ("add_space_prefix", "bool", False),
    ]
    for name, kind, value in expected:
        assert entries[f"tokenizer.ggml.{name}"] == encode_entry(kind, value), name


def test_space_before_a_text_is_refused(tmp_path: Path) -> None:
    normalizer = {"type": "Sequence", "normalizers": [PREPEND, SPACE]}
    with pytest.raises(UserError, match="orders its merges by pairs"):
        load_vocabulary(write_tokenizer(tmp_path, normalizer), CONFIG)
