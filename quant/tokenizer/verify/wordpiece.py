"""WordPiece as llama.cpp runs it (llm_tokenizer_wpm_session in src/llama-vocab.cpp), for comparison
with the model's own tokenizer.

llama.cpp cleans text in a slightly different way than BertNormalizer: with accents, it removes all
marks and all but the first letter of a composed character, for example of a Korean syllable; it
splits at more control characters; it lowers each character to one character; and it looks up words
of any length.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping

from quant.tokenizer.token_table import SPACE_MARK
from quant.tokenizer.unigram import WHITESPACE

SPACES = frozenset(WHITESPACE + " ")
# is_chinese_char of llama.cpp. It has 0x2B920 instead of 0x2B820, as the tokenizers library does.
CHINESE_RANGES = (
    range(0x4E00, 0xA000),
    range(0x3400, 0x4DC0),
    range(0x20000, 0x2A6E0),
    range(0x2A700, 0x2B740),
    range(0x2B740, 0x2B820),
    range(0x2B920, 0x2CEB0),
    range(0xF900, 0xFB00),
    range(0x2F800, 0x2FA20),
)


def split_words(text: str, lowercase: bool, strips_accents: bool) -> list[str]:
    """Return the words of a text after llama.cpp's changes to it."""
    words = [""]
    for char in text:
        base = unicodedata.normalize("NFD", char)[0] if strips_accents else char
        category = unicodedata.category(base)
        if base in SPACES:
            words.append("")
            continue
        if base in "\0\ufffd" or category in ("Cc", "Cf", "Co", "Cs"):
            continue
        if strips_accents and category[0] == "M":
            continue
        written = base.lower()[0] if lowercase else base
        is_mark = category[0] == "P" or (category[0] == "S" and base < "\x7f")
        if is_mark or any(ord(base) in chinese for chinese in CHINESE_RANGES):
            words += [written, ""]
        else:
            words[-1] += written
    return [word for word in words if word]


class LlamaCppWordPiece:
    """llama.cpp's WordPiece. `pieces` are the rows of the vocabulary's pieces, by text as llama.cpp
    stores it. `unknown` is the row of the unknown token.

    `matched` are the rows of tokens that are matched before a text is split into words, by text.
    `is_control(row)` returns whether such a token is matched only if `special` is set.
    """

    def __init__(
        self,
        pieces: Mapping[str, int],
        matched: Mapping[str, int],
        is_control: Callable[[int], bool],
        unknown: int,
        *,
        lowercase: bool,
        strips_accents: bool,
    ) -> None:
        self.pieces, self.unknown = pieces, unknown
        self.lowercase, self.strips_accents = lowercase, strips_accents
        self.longest = max(map(len, pieces), default=0)
        self.matched = matched
        plain = [text for text, row in matched.items() if not is_control(row)]
        self.expressions = {True: _alternatives(matched), False: _alternatives(plain)}

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the rows of a text's tokens. `special` matches special tokens in the text."""
        rows: list[int] = []
        expression = self.expressions[special]
        for part in expression.split(text) if expression else [text]:
            if expression and expression.fullmatch(part):
                rows.append(self.matched[part])
                continue
            for word in split_words(part, self.lowercase, self.strips_accents):
                rows += self._look_up(SPACE_MARK + word)
        return rows

    def _look_up(self, word: str) -> list[int]:
        """Return the rows of a word's pieces: the longest piece at its start, then the longest at
        each following position. Return the row of the unknown token if no piece fits.
        """
        rows, start = [], 0
        while start < len(word):
            ends = range(min(len(word), start + self.longest), start, -1)
            end = next((end for end in ends if word[start:end] in self.pieces), None)
            if end is None:
                return [self.unknown]
            rows.append(self.pieces[word[start:end]])
            start = end
        return rows


def _alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return an expression that matches any of these texts, longest first, as one group."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})") if ordered else None
