"""A folder with only a tokenizer.model is verified with a tokenizer.json built from its pieces."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from llmcli.runtime.binding.model import open_model
from quant.errors import UserError
from quant.model_file import read_header
from quant.tokenizer import charsmap, sentencepiece_model
from quant.tokenizer.verify import probe_strings, verify
from tests.quant import tiny_checkpoint, vocabularies
from tests.quant.vocabularies import convert_and_verify

MISTRAL = (
    Path(__file__).parents[5]
    / "shared"
    / "assets"
    / "tokenizers"
    / "mistral7b_v1"
    / "tokenizer.json"
)


def mistral_pieces() -> list[tuple[str, float, int]]:
    """Return the pieces of Mistral 7B's tokenizer.model as (text, score, type).

    The scores follow the order of the merges in its tokenizer.json.
    """
    if not MISTRAL.is_file():
        pytest.skip("../shared/assets/tokenizers is not here")
    model = json.loads(MISTRAL.read_text())["model"]
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    kinds = {
        "<unk>": sentencepiece_model.UNKNOWN,
        "<s>": sentencepiece_model.CONTROL,
        "</s>": sentencepiece_model.CONTROL,
    }
    kinds |= {f"<0x{byte:02X}>": sentencepiece_model.BYTE for byte in range(256)}
    words = sorted(model["vocab"], key=model["vocab"].get)
    return [
        (text, -float(ranks.get(text, 1e9)), kinds.get(text, sentencepiece_model.NORMAL))
        for text in words
    ]


def model_folder(
    folder: Path, pieces: list[tuple[str, float, int]], **settings: bool | bytes
) -> Path:
    """Write a folder with only a tokenizer.model of these pieces, and return it."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(vocabularies.build_sentencepiece(pieces, **settings))
    return folder


def test_tokenizer_model_alone_is_verified(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "folder", mistral_pieces())
    verified = convert_and_verify(folder, 32000, tmp_path / "v.gguf")
    assert verified.string_count > 1000
    assert verified.notes == ()
    oracle = tokenizers.Tokenizer.from_file(str(MISTRAL))
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        for text in probe_strings.probe_strings():
            assert (
                model.tokenize(text, special=True)
                == oracle.encode(text, add_special_tokens=False).ids
            ), text


def test_stories_tokenizer_model_alone_is_verified(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (folder / "tokenizer.json").unlink()
    verified = convert_and_verify(folder, 512, tmp_path / "v.gguf")
    assert (verified.string_count > 900, verified.notes) == (True, ())


def test_file_of_another_tokenizer_model_fails_verification(tmp_path: Path) -> None:
    pieces, out = mistral_pieces(), tmp_path / "v.gguf"
    right = model_folder(tmp_path / "right", pieces)
    wrong = [
        (text, -1e5 - score if -1e5 < score < 0 else score, kind) for text, score, kind in pieces
    ]
    convert_and_verify(model_folder(tmp_path / "wrong", wrong), 32000, out)
    with open_model(out, vocab_only=True) as model:
        with pytest.raises(
            UserError,
            match=r"differently from .*right/tokenizer.model \(test strings that differ: \d+\)",
        ):
            verify.verify_vocabulary(right, read_header.read_header(out).metadata, model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": charsmap.build_charsmap({"ﬁ": "fi"})}, "precompiled_charsmap"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"escape_whitespaces": False}, "escape_whitespaces"),
        ({"kind": 3}, "splits text into words or characters"),
    ],
)
def test_unsupported_tokenizer_model_settings_are_refused_by_name(
    settings, message, tmp_path
) -> None:
    pieces = [
        ("<unk>", 0.0, 2),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        ("▁a", -1.0, 1),
    ]
    with pytest.raises(UserError, match=message):
        convert_and_verify(
            model_folder(tmp_path / "folder", pieces, **settings), 258, tmp_path / "v.gguf"
        )


def test_tokens_added_to_a_tokenizer_model_are_verified(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "folder", mistral_pieces())
    (folder / "added_tokens.json").write_text(json.dumps({"<turn>": 32000}))
    token = {"content": "<|pad|>", "lstrip": True, "rstrip": True, "special": True}
    tiny_checkpoint.edit(folder / "tokenizer_config.json", added_tokens_decoder={"32001": token})
    notes = convert_and_verify(folder, 32002, tmp_path / "v.gguf").notes
    assert any("strips no spaces around them (<|pad|>)" in note for note in notes), notes
