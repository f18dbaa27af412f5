"""Proves a vocabulary: llama.cpp and the model's own tokenizer must encode the same strings alike.

Where llama.cpp is known to compute otherwise, the model's tokenizer is changed to do the same and
must then agree to the last id: such differences are told, any other fails the conversion. It knows
ids, not weights, and llama.cpp only as an object that is handed in.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quant import battery, own
from quant.errors import Refusal
from quant.habits import Habits
from quant.header import Value
from quant.rows import SPACE

SHOWN = 10
WIDEST = 200  # characters of a string that is shown
SAMPLE = 3000  # of the vocabulary's words, unless every one has to be compared
LONGEST = 1024  # characters of a word that is compared
# How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte
    for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}


class Tokenize(Protocol):
    """The finished vocabulary as llama.cpp runs it."""

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Text to ids; `special` reads control tokens out of the text, `add_special` adds BOS and
        EOS.
        """

    def control(self, token: int) -> bool:
        """Whether a token is read out of the text only where `special` is set."""


@dataclass(frozen=True, slots=True)
class Proof:
    """How many strings were compared, and what the user should know."""

    texts: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """One string that the two encode differently."""

    text: str
    ours: list[int]
    theirs: list[int]


def prove(
    folder: Path, metadata: Mapping[str, Value], ours: Tokenize, pre: str | None = None
) -> Proof:
    """Compare a folder's tokenizer with the finished vocabulary; raises Refusal with the first ten
    differences.
    """
    return _Case(folder, metadata, ours, pre).run()


class _Case:
    """One comparison of the checkpoint's tokenizer with llama.cpp's."""

    def __init__(
        self, folder: Path, metadata: Mapping[str, Value], ours: Tokenize, pre: str | None
    ) -> None:
        self.ours, self.own = ours, own.load(folder, metadata, pre)
        self.bytewise = metadata.get("tokenizer.ggml.model") == "gpt2"
        self.habits = Habits(self.own, metadata, ours.control)
        self.explained: dict[str, list[str]] = {}

    def run(self) -> Proof:
        """Read every string twice: its special tokens as tokens, and as text."""
        sure = self.own.found.sure
        words = list(self._words(SAMPLE if sure else None))
        texts = [
            *battery.texts(),
            *battery.own([token.text for token in self.own.added.values()], words),
        ]
        differences = [*self._compare(texts, special=True), *self._compare(texts, special=False)]
        if not sure:
            differences += self._compare(words, special=True)
        if differences:
            raise self._refusal(differences)
        return Proof(len(texts), tuple(self._notes(len(texts))))

    def _compare(self, texts: list[str], special: bool) -> Iterator[Difference]:
        for text in texts:
            ours = self.ours.tokenize(self.own.given(text), special=special)
            theirs = self.own.reader.ids(text, special=special)
            if ours == theirs:
                continue
            habit = (
                "ties" if self.own.tied(ours, theirs) else self.habits.explains(text, ours, special)
            )
            if habit is None:
                yield Difference(text, ours, theirs)
            elif habit != "types" or special:
                self.explained.setdefault(habit, []).append(text)

    def _notes(self, count: int) -> Iterator[str]:
        if self.own.form:
            yield f"the model's tokenizer composes characters ({self.own.form}), llama.cpp takes them as they come"
        stripped = [token.text for token in self.own.added.values() if token.lstrip or token.rstrip]
        told = {
            "dialect": f"llama.cpp's {self.own.found.name} {self.own.found.habit}",
            "spaces": "llama.cpp puts a space before text that starts with one or follows a special token"
            + ", and leaves none at its end" * self.habits.spaces.merge,
            "rules": "llama.cpp joins characters as SentencePiece does, tokenizers takes each with its marks at once",
            "ties": "llama.cpp splits words otherwise that can be split in two equally good ways",
            "flags": f"llama.cpp takes added tokens as they stand, and strips no space ({_few(stripped)})",
            "types": f"llama.cpp takes {_few(self.habits.claimed)} for special",
            "several": "llama.cpp takes added tokens as they stand, and splits or spaces text in its own way",
        }
        for habit, texts in self.explained.items():
            yield (
                f"{told[habit]}: {len(set(texts))} of {count} test strings get other ids than the model's own "
                f"tokenizer gives, as in every GGUF of this model; the first is {_shown(texts[0])}"
            )
        yield from self._around()

    def _around(self) -> Iterator[str]:
        """What is put around a text: a GGUF can only say BOS and EOS."""
        if not self.own.around:
            return
        body, theirs = self.own.around
        ours = self.ours.tokenize(own.HELLO, special=True, add_special=True)
        if len(theirs) > len(body) and ours != theirs:
            extra = self._pieces([index for index in theirs if index not in body])
            yield f"the model's tokenizer puts {extra} around a text, llama.cpp {self._pieces(ours)!r}"

    def _refusal(self, differences: list[Difference]) -> Refusal:
        shown = "".join(
            f"\n  {_shown(item.text)}"
            f"\n    llama.cpp: {self._pieces(item.ours)}\n    the model: {self._pieces(item.theirs)}"
            for item in differences[:SHOWN]
        )
        first = f"; the first {SHOWN}:" if len(differences) > SHOWN else ":"
        where = self.own.reader.where
        return Refusal(
            f"llama.cpp would encode {len(differences)} test strings otherwise than {where} does{first}{shown}",
            hint="try another --pre, or use a GGUF of this model"
            if self.bytewise
            else "use a GGUF of this model",
        )

    def _pieces(self, ids: list[int]) -> str:
        return self.own.spell(ids[:24], " ")[: 2 * WIDEST] + " …" * (len(ids) > 24)

    def _words(self, count: int | None) -> Iterator[str]:
        """The vocabulary's words as text, or so many of them; pieces that are no whole characters
        are left out.
        """
        special = {token.text for token in self.own.added.values()}
        pieces = [
            piece for piece in self.own.words if piece not in special and len(piece) <= LONGEST
        ]
        if count is not None and len(pieces) > count:
            pieces = random.Random(3).sample(pieces, count)
        for piece in pieces:
            if self.bytewise:
                with contextlib.suppress(KeyError, UnicodeDecodeError):
                    yield bytes(BYTES[char] for char in piece).decode()
            elif not (piece.startswith("<0x") and len(piece) == 6):
                yield piece.replace(SPACE, " ")


def _shown(text: str) -> str:
    return repr(text) if len(text) <= WIDEST else f"{text[:WIDEST]!r}…"


def _few(texts: list[str]) -> str:
    return ", ".join(text[:WIDEST] for text in texts[:5]) + " …" * (len(texts) > 5)
