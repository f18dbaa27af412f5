"""Verifies a vocabulary: llama.cpp and the model's own tokenizer must give the same ids for the
same strings.

Where llama.cpp is known to compute differently, the model's tokenizer is changed to work the same
way and must then give exactly the same ids. Such differences become notes; any other difference
fails the conversion.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quant.errors import Refusal
from quant.gguf.header import Value
from quant.tokenizer.token_table import SPACE
from quant.tokenizer.verify import probe_strings, reference_tokenizer
from quant.tokenizer.verify.known_differences import Habits

SHOWN = 10  # differences in a message
WIDEST = 200  # characters of a string in a message
SAMPLE = 3000  # words of the vocabulary that are compared, unless all must be
LONGEST = 1024  # characters of a word that is compared
# The characters that byte-level vocabularies use for bytes: printable ones stand for themselves,
# the others start at U+0100.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + index): byte
    for index, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}


class Tokenize(Protocol):
    """The finished vocabulary, run by llama.cpp."""

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Return the ids of a text.

        `special` matches control tokens in the text; `add_special` adds BOS and EOS.
        """

    def control(self, token: int) -> bool:
        """Return whether a token is matched in text only if `special` is set."""


@dataclass(frozen=True, slots=True)
class Proof:
    """The number of strings that were compared, and notes for the user."""

    texts: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One string that llama.cpp and the model's tokenizer encode differently."""

    text: str
    ours: list[int]
    theirs: list[int]


def prove(
    folder: Path, metadata: Mapping[str, Value], ours: Tokenize, pre: str | None = None
) -> Proof:
    """Compare a folder's tokenizer with the finished vocabulary, run by llama.cpp.

    `pre` is the pre-tokenizer that the user named. Raises UserError with the first differences.
    """
    return _Comparison(folder, metadata, ours, pre).run()


class _Comparison:
    """One comparison of a checkpoint's tokenizer with llama.cpp's."""

    def __init__(
        self, folder: Path, metadata: Mapping[str, Value], ours: Tokenize, pre: str | None
    ) -> None:
        self.ours, self.reference = ours, reference_tokenizer.load(folder, metadata, pre)
        self.bytewise = metadata.get("tokenizer.ggml.model") == "gpt2"
        self.habits = Habits(self.reference, metadata, ours.control)
        self.explained: dict[str, list[str]] = {}

    def run(self) -> Proof:
        """Compare every string twice: with its special tokens matched, and as plain text."""
        is_certain = self.reference.found.sure
        words = list(self._words(SAMPLE if is_certain else None))
        texts = [
            *probe_strings.texts(),
            *probe_strings.own([token.text for token in self.reference.added.values()], words),
        ]
        differences = [*self._compare(texts, special=True), *self._compare(texts, special=False)]
        if not is_certain:
            differences += self._compare(words, special=True)
        if differences:
            raise self._refusal(differences)
        return Proof(len(texts), tuple(self._notes(len(texts))))

    def _compare(self, texts: list[str], special: bool) -> Iterator[Difference]:
        for text in texts:
            ours = self.ours.tokenize(self.reference.given(text), special=special)
            theirs = self.reference.reader.ids(text, special=special)
            if ours == theirs:
                continue
            habit = (
                "ties"
                if self.reference.tied(ours, theirs)
                else self.habits.explains(text, ours, special)
            )
            if habit is None:
                yield Difference(text, ours, theirs)
            elif habit != "types" or special:
                self.explained.setdefault(habit, []).append(text)

    def _notes(self, count: int) -> Iterator[str]:
        if self.reference.form:
            form = self.reference.form
            yield f"the model's tokenizer normalizes text to {form}; llama.cpp does not"
        stripped = [
            token.text for token in self.reference.added.values() if token.lstrip or token.rstrip
        ]
        explanations = {
            "dialect": f"llama.cpp's {self.reference.found.name} {self.reference.found.habit}",
            "spaces": (
                "llama.cpp puts a space before text that starts with one or follows a special "
                "token" + ", and removes spaces at its end" * self.habits.spaces.merge
            ),
            "rules": (
                "llama.cpp applies character rules as SentencePiece does, the tokenizers library "
                "to each character with its marks"
            ),
            "ties": "llama.cpp chooses differently between two equally good splits of a word",
            "flags": (
                "llama.cpp matches added tokens exactly, and strips no spaces around them "
                f"({_first_five(stripped)})"
            ),
            "types": f"llama.cpp treats {_first_five(self.habits.claimed)} as special tokens",
            "several": (
                "llama.cpp matches added tokens exactly, and splits or spaces text differently"
            ),
        }
        for habit, texts in self.explained.items():
            yield (
                f"{explanations[habit]}: {len(set(texts))} of {count} test strings get different "
                "ids than from the model's own tokenizer, as in every GGUF of this model; the "
                f"first is {_shorten(texts[0])}"
            )
        yield from self._surrounding_note()

    def _surrounding_note(self) -> Iterator[str]:
        """Yield a note if other special tokens are put around a text: a GGUF can only name BOS and
        EOS.
        """
        if not self.reference.around:
            return
        body, theirs = self.reference.around
        ours = self.ours.tokenize(reference_tokenizer.HELLO, special=True, add_special=True)
        if len(theirs) > len(body) and ours != theirs:
            extra = self._pieces([index for index in theirs if index not in body])
            yield (
                f"the model's tokenizer puts {extra} around a text, llama.cpp puts "
                f"{self._pieces(ours)!r}"
            )

    def _refusal(self, differences: list[Difference]) -> Refusal:
        shown = "".join(
            f"\n  {_shorten(item.text)}"
            f"\n    llama.cpp: {self._pieces(item.ours)}"
            f"\n    the model: {self._pieces(item.theirs)}"
            for item in differences[:SHOWN]
        )
        first = f"; the first {SHOWN}:" if len(differences) > SHOWN else ":"
        where = self.reference.reader.where
        return Refusal(
            f"llama.cpp would encode {len(differences)} test strings differently from "
            f"{where}{first}{shown}",
            hint="try another --pre, or use a GGUF of this model"
            if self.bytewise
            else "use a GGUF of this model",
        )

    def _pieces(self, ids: list[int]) -> str:
        return self.reference.spell(ids[:24], " ")[: 2 * WIDEST] + " …" * (len(ids) > 24)

    def _words(self, count: int | None) -> Iterator[str]:
        """Yield the vocabulary's words as text, or a random sample of `count` of them.

        Pieces that are not whole characters are left out.
        """
        special = {token.text for token in self.reference.added.values()}
        pieces = [
            piece
            for piece in self.reference.words
            if piece not in special and len(piece) <= LONGEST
        ]
        if count is not None and len(pieces) > count:
            pieces = random.Random(3).sample(pieces, count)
        for piece in pieces:
            if self.bytewise:
                with contextlib.suppress(KeyError, UnicodeDecodeError):
                    yield bytes(BYTES[char] for char in piece).decode()
            elif not (piece.startswith("<0x") and len(piece) == 6):
                yield piece.replace(SPACE, " ")


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= WIDEST else f"{text[:WIDEST]!r}…"


def _first_five(texts: list[str]) -> str:
    return ", ".join(text[:WIDEST] for text in texts[:5]) + " …" * (len(texts) > 5)
