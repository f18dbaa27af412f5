"""Text as SentencePiece and llama.cpp spell it before it is split, for the library's
Normalizer.custom.

The tokenizers library has near relatives of these steps, but applies rules for characters by
grapheme, and a Metaspace puts no space before one that is there. It knows text, and the library
only by the one method it calls.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from quant.charsmap import Charsmap
from quant.rows import SPACE


class Normalized(Protocol):
    """The library's NormalizedString, as far as it is used here."""

    @property
    def normalized(self) -> str: ...
    def replace(self, pattern: str, content: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for characters, the longest first."""

    charsmap: Charsmap

    def normalize(self, text: Normalized) -> None:
        """Called by the library with each stretch of text between added tokens."""
        _put(text, self.charsmap.apply(text.normalized))


@dataclass(frozen=True, slots=True)
class Spaces:
    """Spaces as U+2581: one in front if `prefix`, runs as one and none at the ends if `merge`.

    `blank`: whether text that is nothing but spaces gets one more in front.
    """

    prefix: bool
    merge: bool
    blank: bool

    def normalize(self, text: Normalized) -> None:
        """Called by the library with each stretch of text between added tokens."""
        _put(text, self.spell(text.normalized))

    def spell(self, text: str) -> str:
        """The text with its spaces spelt."""
        made = re.sub(" +", " ", text).strip(" ") if self.merge else text
        if self.prefix and (made if self.blank else made.strip(" ")):
            made = " " + made
        return made.replace(" ", SPACE)


def _put(text: Normalized, made: str) -> None:
    if made != text.normalized:
        text.replace(text.normalized, made)
