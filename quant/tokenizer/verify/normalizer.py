"""SentencePiece's and llama.cpp's normalization of text before it is split, as steps for the
tokenizers library's Normalizer.custom.

The library's own steps differ: it applies character rules by grapheme, and its Metaspace adds no
space in front of an existing one.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from quant.tokenizer.charsmap import Charsmap
from quant.tokenizer.token_table import SPACE_MARK


class NormalizedString(Protocol):
    """The part of the library's NormalizedString that is used here."""

    @property
    def normalized(self) -> str: ...
    def replace(self, pattern: str, content: str) -> None: ...


@dataclass(frozen=True, slots=True)
class CharsmapNormalizer:
    """Replaces characters by rules, the longest first."""

    charsmap: Charsmap

    def normalize(self, text: NormalizedString) -> None:
        """Normalize one stretch of text between added tokens; the library calls this."""
        _replace_text(text, self.charsmap.apply(text.normalized))


@dataclass(frozen=True, slots=True)
class SpaceNormalizer:
    """Writes spaces as U+2581.

    `add_prefix` puts one in front of a text. `merge_runs` makes runs of spaces one, and removes
    them at both ends. With `prefix_blank`, a text of spaces only gets the prefix, too.
    """

    add_prefix: bool
    merge_runs: bool
    prefix_blank: bool

    def normalize(self, text: NormalizedString) -> None:
        """Normalize one stretch of text between added tokens; the library calls this."""
        _replace_text(text, self.normalize_text(text.normalized))

    def normalize_text(self, text: str) -> str:
        """Return the text with its spaces rewritten."""
        spelled = re.sub(" +", " ", text).strip(" ") if self.merge_runs else text
        if self.add_prefix and (spelled if self.prefix_blank else spelled.strip(" ")):
            spelled = " " + spelled
        return spelled.replace(" ", SPACE_MARK)


def _replace_text(text: NormalizedString, new_text: str) -> None:
    if new_text != text.normalized:
        text.replace(text.normalized, new_text)
