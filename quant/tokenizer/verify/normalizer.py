"""Normalizers that change text before it is split as SentencePiece and llama.cpp do, for
Normalizer.custom of the tokenizers library.

The library's own normalizers are different: they apply character rules to graphemes, and Metaspace
adds no space in front of an existing one.
"""

import re
from dataclasses import dataclass
from typing import Protocol

from quant.tokenizer.charsmap import Charsmap
from quant.tokenizer.token_table import SPACE_MARK


class NormalizedString(Protocol):
    """The methods of the library's NormalizedString that these normalizers use."""

    @property
    def normalized(self) -> str: ...
    def replace(self, pattern: str, content: str) -> None: ...


@dataclass(frozen=True, slots=True)
class CharsmapNormalizer:
    """Applies compiled character rules: at each position the longest prefix that has a rule is
    replaced.
    """

    charsmap: Charsmap

    def normalize(self, text: NormalizedString) -> None:
        """Normalize the text between two added tokens in place. The library calls this method."""
        _replace_text(text, self.charsmap.apply(text.normalized))


@dataclass(frozen=True, slots=True)
class SpaceNormalizer:
    """Replaces spaces by U+2581, after it adds and removes spaces.

    `add_prefix` puts a space in front of a text. `merge_runs` replaces runs of spaces by one space
    and removes spaces at both ends. With `prefix_blank`, a text that consists only of spaces gets
    the prefix, too.
    """

    add_prefix: bool
    merge_runs: bool
    prefix_blank: bool

    def normalize(self, text: NormalizedString) -> None:
        """Normalize the text between two added tokens in place. The library calls this method."""
        _replace_text(text, self.normalize_text(text.normalized))

    def normalize_text(self, text: str) -> str:
        """Return the text with spaces added, removed and replaced."""
        spaced = re.sub(" +", " ", text).strip(" ") if self.merge_runs else text
        if self.add_prefix and (spaced if self.prefix_blank else spaced.strip(" ")):
            spaced = " " + spaced
        return spaced.replace(" ", SPACE_MARK)


def _replace_text(text: NormalizedString, new_text: str) -> None:
    """Replace the content of a NormalizedString."""
    if new_text != text.normalized:
        text.replace(text.normalized, new_text)
