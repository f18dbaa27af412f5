"""The rows of a GGUF vocabulary: ordinary tokens, added tokens that replace some of them, and
padding if the model has more rows than tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quant.errors import UserError
from quant.tokenizer.sentencepiece_model import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED

SPACE_MARK = "\u2581"
UNUSED_SCORE = -10000.0  # the score of a token that must never be chosen


@dataclass(frozen=True, slots=True)
class VocabularyToken:
    """One row of the vocabulary; `type` is a GGUF token type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is added to the pieces of the tokenizer's model.

    The flags are those of the tokenizers library, and say how the token is matched in a text.
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
    """Return the table of `size` rows: added tokens replace ordinary ones, and rows without a token
    get padding.

    Unknown and byte tokens are never replaced. Raises UserError for a token in a row beyond `size`.
    """
    rows = dict(tokens)
    for index, token in added.items():
        old = rows.get(index)
        if old and old.type in (UNKNOWN, BYTE):
            continue
        control = token.special or looks_special(token.text)
        plain = token.text if control else token.text.replace(SPACE_MARK, " ")
        rows[index] = VocabularyToken(
            plain, -1000.0 if has_scores else 0.0, CONTROL if control else USER_DEFINED
        )
    if rows and (last := max(rows)) >= size:
        raise UserError(
            f"{location}: token {last} ({rows[last].text[:100]!r}) is outside of the vocab_size "
            f"{size} in config.json",
            hint="use the config.json and the tokenizer of the same model",
        )
    return [
        rows.get(index) or VocabularyToken(f"[PAD{index}]", UNUSED_SCORE, UNUSED)
        for index in range(size)
    ]


def looks_special(text: str) -> bool:
    """Return whether llama.cpp's converter makes a token a control token because of its text
    (TextModel.does_token_look_special).
    """
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )
