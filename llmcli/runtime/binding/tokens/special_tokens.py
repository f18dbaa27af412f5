"""The special tokens of a vocabulary: those that llama.cpp finds in a text by their names."""

from typing import NamedTuple

from llmcli.runtime.binding.contract import CONSTANTS
from llmcli.runtime.binding.library import lib

UNKNOWN_ATTR, CONTROL_ATTR, USER_ATTR, LSTRIP_ATTR, RSTRIP_ATTR = (
    CONSTANTS[f"LLAMA_TOKEN_ATTR_{name}"]
    for name in ("UNKNOWN", "CONTROL", "USER_DEFINED", "LSTRIP", "RSTRIP")
)


class SpecialToken(NamedTuple):
    """A special token.

    - `name`: the text by which it is found.
    - `is_control`: whether it is found only with `special` (control tokens, and the unknown token).
      The others, which the author of the vocabulary has defined, are always found.
    - `strips_left`, `strips_right`: it also consumes white space before or after it.
    """

    name: str
    is_control: bool
    strips_left: bool
    strips_right: bool


def read_special_token(vocab: object, token: int) -> SpecialToken | None:
    """Return the special token with this id, or None if it is an ordinary one."""
    library = lib()
    attributes = library.llama_vocab_get_attr(vocab, token)
    if not attributes & (UNKNOWN_ATTR | CONTROL_ATTR | USER_ATTR):
        return None
    return SpecialToken(
        library.llama_vocab_get_text(vocab, token).decode("utf-8", "surrogateescape"),
        bool(attributes & (UNKNOWN_ATTR | CONTROL_ATTR)),
        bool(attributes & LSTRIP_ATTR),
        bool(attributes & RSTRIP_ATTR),
    )
