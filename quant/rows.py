"""The rows of a GGUF vocabulary: ordinary tokens, added ones over them, and filling where a model
has more rows.

It knows texts, scores and types, not the files they are from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quant.errors import Refusal
from quant.sentencepiece import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED

SPACE = "\u2581"
NEVER = -10000.0  # the score of what must not be chosen


@dataclass(frozen=True, slots=True)
class Token:
    """One row of the vocabulary; `type` is a GGUF token type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class Added:
    """A token that stands beside the model's own pieces; the flags say how tokenizers finds it in a
    text.
    """

    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


def table(
    tokens: Mapping[int, Token], added: Mapping[int, Added], size: int, where: str, scored: bool
) -> list[Token]:
    """The whole table of `size` rows: added tokens over ordinary ones, rows without a token filled
    up.
    """
    rows = dict(tokens)
    for index, token in added.items():
        old = rows.get(index)
        if old and old.type in (UNKNOWN, BYTE):
            continue
        control = token.special or looks_special(token.text)
        plain = token.text if control else token.text.replace(SPACE, " ")
        rows[index] = Token(plain, -1000.0 if scored else 0.0, CONTROL if control else USER_DEFINED)
    if rows and (last := max(rows)) >= size:
        raise Refusal(
            f"{where}: token {last} ({rows[last].text[:100]!r}) lies outside of the vocab_size {size} in config.json",
            hint="use the config.json and the tokenizer of the same model",
        )
    return [rows.get(index) or Token(f"[PAD{index}]", NEVER, UNUSED) for index in range(size)]


def looks_special(text: str) -> bool:
    """Whether a token is a control token whatever its file says
    (TextModel.does_token_look_special).
    """
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )
