"""Builds the rows of a GGUF vocabulary: ordinary tokens, added tokens that replace some of them,
and padding if the model has more rows than tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quant.errors import UserError
from quant.tokenizer.sentencepiece_model import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED

SPACE_MARK = "\u2581"  # stands for a space in the pieces of SentencePiece and Unigram
UNUSED_SCORE = -10000.0  # the score of a token that must never be chosen


@dataclass(frozen=True, slots=True)
class VocabularyToken:
    """One row of the vocabulary. `type` is a GGUF token type (sentencepiece_model.NORMAL, ...)."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is added to the pieces of the tokenizer's model.

    The flags are those of the tokenizers library. They say how the token is matched in a text.
    """

    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


def build_token_table(
    tokens: Mapping[int, VocabularyToken],
    added: Mapping[int, AddedToken],
    size: int,
    location: str,
    has_scores: bool,
) -> list[VocabularyToken]:
    """Return the `size` rows of the vocabulary: `added` tokens replace ordinary ones, and rows
    without a token get padding. `tokens` and `added` are by row.

    Unknown and byte tokens are never replaced. Raises UserError for a token in a row beyond `size`;
    the message begins with `location`.
    """
    rows = dict(tokens)
    for index, token in added.items():
        replaced = rows.get(index)
        if replaced and replaced.type in (UNKNOWN, BYTE):
            continue
        is_control = token.special or looks_special(token.text)
        text = token.text if is_control else token.text.replace(SPACE_MARK, " ")
        rows[index] = VocabularyToken(
            text, -1000.0 if has_scores else 0.0, CONTROL if is_control else USER_DEFINED
        )
    if rows and (last_row := max(rows)) >= size:
        raise UserError(
            f"{location}: token {last_row} ({rows[last_row].text[:100]!r}) is outside of the "
            f"vocab_size {size} in config.json",
            hint=f"if the token was added later, resize_token_embeddings({last_row + 1}) of "
            "transformers makes a row for it; else use the tokenizer of the same model",
        )
    return [
        rows.get(index) or VocabularyToken(f"[PAD{index}]", UNUSED_SCORE, UNUSED)
        for index in range(size)
    ]


def looks_special(text: str) -> bool:
    """Return whether llama.cpp's converter makes an added token a control token because of its text
    (TextModel.does_token_look_special).
    """
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )
