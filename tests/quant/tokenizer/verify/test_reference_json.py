"""A folder with only a tokenizer.model is verified with that model's pieces."""

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
from tests.quant.vocabularies import prove

MISTRAL = (
    Path(__file__).parents[5]
    / "shared"
    / "assets"
    / "tokenizers"
    / "mistral7b_v1"
    / "tokenizer.json"
)


def pieces_of_mistral() -> list[tuple[str, float, int]]:
    """The pieces of Mistral 7B's tokenizer.model; their scores are the order in which its
    tokenizer.json makes them.
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
    """A folder with a tokenizer.model and nothing else."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(vocabularies.sentencepiece(pieces, **settings))
    return folder


def test_a_tokenizer_model_alone_is_proven(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "folder", pieces_of_mistral())
    found = prove(folder, 32000, tmp_path / "v.gguf")
    assert found.string_count > 1000
    assert found.notes == ()
    oracle = tokenizers.Tokenizer.from_file(str(MISTRAL))
    with open_model(tmp_path / "v.gguf", vocab_only=True) as model:
        for text in probe_strings.probe_strings():
            assert (
                model.tokenize(text, special=True)
                == oracle.encode(text, add_special_tokens=False).ids
            ), text


def test_the_stories_model_alone_is_proven(stories: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "folder")
    (folder / "tokenizer.json").unlink()
    found = prove(folder, 512, tmp_path / "v.gguf")
    assert (found.string_count > 900, found.notes) == (True, ())


def test_a_file_of_another_tokenizer_model_is_caught(tmp_path: Path) -> None:
    pieces, out = pieces_of_mistral(), tmp_path / "v.gguf"
    right = model_folder(tmp_path / "right", pieces)
    wrong = [
        (text, -1e5 - score if -1e5 < score < 0 else score, kind) for text, score, kind in pieces
    ]
    prove(model_folder(tmp_path / "wrong", wrong), 32000, out)
    with open_model(out, vocab_only=True) as model:
        with pytest.raises(
            UserError, match=r"differently from .*right/tokenizer.model; the first 10:"
        ):
            verify.verify_vocabulary(right, read_header.read_header(out).metadata, model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": charsmap.build_charsmap({"ﬁ": "fi"})}, "precompiled_charsmap"),
        ({"treat_whitespace_as_suffix": True}, "treat_whitespace_as_suffix"),
        ({"escape_whitespaces": False}, "escape_whitespaces"),
        ({"kind": 3}, "splits text into words or characters"),
    ],
)
def test_what_a_tokenizer_model_asks_for_and_llama_cpp_cannot_do_is_refused_by_name(
    settings, said, tmp_path
) -> None:
    pieces = [
        ("<unk>", 0.0, 2),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        ("▁a", -1.0, 1),
    ]
    with pytest.raises(UserError, match=said):
        prove(model_folder(tmp_path / "folder", pieces, **settings), 258, tmp_path / "v.gguf")


def test_tokens_that_are_added_to_a_tokenizer_model_are_proven_with_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "folder", pieces_of_mistral())
    (folder / "added_tokens.json").write_text(json.dumps({"<turn>": 32000}))
    token = {"content": "<|pad|>", "lstrip": True, "rstrip": True, "special": True}
    tiny_checkpoint.edit(folder / "tokenizer_config.json", added_tokens_decoder={"32001": token})
    notes = prove(folder, 32002, tmp_path / "v.gguf").notes
    assert any("strips no spaces around them (<|pad|>)" in note for note in notes), notes
