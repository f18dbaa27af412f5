"""Converts a WordPiece tokenizer, as BERT has it, to the form in which llama.cpp runs it (tokenizer
model "bert", llm_tokenizer_wpm in src/llama-vocab.cpp).

llama.cpp marks the first piece of a word by U+2581 instead of all others by "##". It splits text
into words as BertNormalizer and BertPreTokenizer do. A file can record whether text becomes lower
case and whether accents are removed. Follows BertModel.set_vocab of llama.cpp (conversion/bert.py).
"""

from collections.abc import Mapping
from typing import Any

from quant.errors import UserError
from quant.tokenizer.json_nodes import flatten_sequence, name_step
from quant.tokenizer.sentencepiece_model import CONTROL, NORMAL
from quant.tokenizer.token_table import SPACE_MARK, VocabularyToken

TOKENIZER_MODEL = "bert"  # the value of tokenizer.ggml.model
CONTINUATION_MARK = "##"
LOWERCASE_KEY, STRIP_ACCENTS_KEY = "normalizer.lowercase", "normalizer.strip_accents"
Json = Mapping[str, Any]
Entries = list[tuple[str, str, Any]]


def convert_pieces(
    ids: Mapping[str, int], model: Json, location: str
) -> tuple[dict[int, VocabularyToken], int]:
    """Return the pieces of a WordPiece tokenizer by row as llama.cpp stores them, and the row of
    the unknown token. `ids` are the rows of the pieces by text, and `model` is the "model" of
    tokenizer.json. Raises UserError, which names `location`, if llama.cpp cannot run it.
    """
    unknown = model.get("unk_token", "[UNK]")
    mark = model.get("continuing_subword_prefix", CONTINUATION_MARK)
    if mark != CONTINUATION_MARK:
        raise _unsupported(location, f"marks the inner pieces of a word by {mark!r}")
    if not isinstance(unknown, str) or unknown not in ids:
        raise _unsupported(location, "has no unknown token")
    pieces = {
        index: VocabularyToken(convert_piece(text), 0.0, NORMAL) for text, index in ids.items()
    }
    row = ids[unknown]
    pieces[row] = VocabularyToken(unknown, 0.0, CONTROL)
    return pieces, row


def convert_piece(text: str) -> str:
    """Return a piece of a WordPiece vocabulary as llama.cpp stores it. An inner piece that is empty
    or begins with U+2581 keeps its mark, and is never matched: it would equal another piece.
    """
    if not text.startswith(CONTINUATION_MARK):
        return SPACE_MARK + text
    inner = text.removeprefix(CONTINUATION_MARK)
    return text if inner[:1] in ("", SPACE_MARK) else inner


def normalization_entries(tokenizer: Json, location: str) -> Entries:
    """Return the metadata entries of the changes to a text before it is split into words. Raises
    UserError, which names `location`, if llama.cpp cannot do the same.
    """
    lowercase = strips_accents = False
    cleans = False
    for step in flatten_sequence(tokenizer.get("normalizer"), "normalizers"):
        match step:
            case {"type": "BertNormalizer", **settings}:
                lowercase = settings.get("lowercase") is not False
                accents = settings.get("strip_accents")
                strips_accents = lowercase if accents is None else accents is True
                cleans = True
                for name, action in (
                    ("clean_text", "keeps control characters"),
                    ("handle_chinese_chars", "does not split Chinese characters"),
                ):
                    if settings.get(name) is False:
                        raise _unsupported(location, action)
            case {"type": "Lowercase"}:
                lowercase = True
            case {"type": "StripAccents"}:
                strips_accents = True
            case {"type": "NFD" | "NFKD"} | None:
                pass
            case _:
                raise _unsupported(location, f"changes text by {name_step(step)}")
    if not cleans:
        raise _unsupported(location, "leaves text as it is (no BertNormalizer)")
    for step in flatten_sequence(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if not isinstance(step, dict) or step.get("type") != "BertPreTokenizer":
            raise _unsupported(location, f"splits text by {name_step(step)}")
    return [(LOWERCASE_KEY, "bool", lowercase), (STRIP_ACCENTS_KEY, "bool", strips_accents)]


def complete_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer_config.json with [CLS] as BOS and [SEP] as EOS, unless it
    names them. llama.cpp puts these tokens around a text.
    """
    names = {"bos_token": "cls_token", "eos_token": "sep_token"}
    return settings | {
        name: settings.get(source)
        for name, source in names.items()
        if settings.get(name) is None and settings.get(source) is not None
    }


def _unsupported(location: str, reason: str) -> UserError:
    """Return the error for a setting that llama.cpp does not support."""
    hint = "run this model with the library it was made for"
    return UserError(f"{location} {reason}: llama.cpp's WordPiece tokenizer does not", hint=hint)
