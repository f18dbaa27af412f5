"""Verifies a vocabulary: llama.cpp and the model's own tokenizer must give the same ids for the
same strings.

Where llama.cpp is known to compute differently (known_differences.py), the model's tokenizer is
changed to compute in the same way, and must then give exactly llama.cpp's ids. Such differences
become notes for the user. Any other difference is an error that ends the conversion.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError
from quant.gguf.header import MetadataValue
from quant.tokenizer.byte_ranks import BYTE_BY_CHAR
from quant.tokenizer.token_table import SPACE_MARK
from quant.tokenizer.verify import probe_strings, reference_tokenizer
from quant.tokenizer.verify.known_differences import KnownDifferences

MAX_SHOWN_CHARS = 60  # limit of the characters of a string in a message
SAMPLE_WORDS = 3000  # number of the vocabulary's words that are compared, unless all must be
MAX_WORD_CHARS = 1024  # longer words are not compared
# Limits of the strings with accepted differences that a file records.
MAX_RECORDED_TEXTS, MAX_RECORDED_CHARS = 20, 100


class LlamaCppTokenizer(Protocol):
    """The finished vocabulary, run by llama.cpp. A caller provides it, because this package does
    not open models.
    """

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Return the ids of a text.

        With `special`, control tokens are matched in the text; with `add_special`, BOS and EOS are
        added around it.
        """

    def is_control(self, token: int) -> bool:
        """Return whether token `token` is matched in a text only if `special` is set."""


@dataclass(frozen=True, slots=True)
class VocabularyVerification:
    """The result of a successful verification.

    `string_count` is the number of strings that were compared. `notes` describe the known
    differences, for the user. `differing` are the strings with a difference that cannot be
    explained, shortest first and shortened; empty unless the user accepts them.
    """

    string_count: int
    notes: tuple[str, ...]
    differing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodingDifference:
    """A string for which llama.cpp and the model's tokenizer give different ids."""

    text: str
    llama_cpp_ids: list[int]
    reference_ids: list[int]


def verify_vocabulary(
    folder: Path,
    metadata: Mapping[str, MetadataValue],
    llama_cpp: LlamaCppTokenizer,
    pre: str | None = None,
    accept_differences: bool = False,
) -> VocabularyVerification:
    """Compare the tokenizer of a checkpoint folder with the finished vocabulary, run by llama.cpp.
    `metadata` is that of the vocabulary.

    `pre` is the pre-tokenizer that the user named. Raises UserError, which shows an example, if a
    difference cannot be explained. With `accept_differences`, such strings are returned instead.
    """
    return _Comparison(folder, metadata, llama_cpp, pre).run(accept_differences)


class _Comparison:
    """The comparison of a checkpoint's tokenizer (the reference) with llama.cpp's. `explained` has
    the strings with a known difference, by the name of the difference.
    """

    def __init__(
        self,
        folder: Path,
        metadata: Mapping[str, MetadataValue],
        llama_cpp: LlamaCppTokenizer,
        pre: str | None,
    ) -> None:
        self.llama_cpp = llama_cpp
        self.reference = reference_tokenizer.load_reference(CheckpointFolder(folder), metadata, pre)
        self.is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
        self.known_differences = KnownDifferences(self.reference, metadata, llama_cpp.is_control)
        self.explained: dict[str, list[str]] = {}

    def run(self, accept_differences: bool) -> VocabularyVerification:
        """Compare every string twice: once with special tokens matched in it, and once as plain
        text. Raises UserError for differences that cannot be explained, unless they are accepted.
        """
        is_certain = self.reference.pre_tokenizer.is_certain
        words = list(self._words(SAMPLE_WORDS if is_certain else None))
        texts = [
            *probe_strings.probe_strings(),
            *probe_strings.model_strings(
                [token.text for token in self.reference.added.values()], words
            ),
        ]
        differences = [*self._compare(texts, special=True), *self._compare(texts, special=False)]
        if not is_certain:
            differences += self._compare(words, special=True)
        if differences and not accept_differences:
            raise self._difference_error(differences)
        differing = sorted({difference.text for difference in differences}, key=len)
        compared = len({*texts, *([] if is_certain else words)})
        return VocabularyVerification(
            compared,
            tuple(self._notes(compared)),
            tuple(text[:MAX_RECORDED_CHARS] for text in differing[:MAX_RECORDED_TEXTS]),
        )

    def _compare(self, texts: list[str], special: bool) -> Iterator[EncodingDifference]:
        """Yield the differences that cannot be explained. Add all other strings with different ids
        to `explained`.
        """
        for text in texts:
            llama_cpp_ids = self.llama_cpp.tokenize(
                self.reference.text_for_llama_cpp(text), special=special
            )
            reference_ids = self.reference.row_tokenizer.encode(text, special=special)
            if llama_cpp_ids == reference_ids:
                continue
            difference = (
                "ties"
                if self.reference.is_tied(llama_cpp_ids, reference_ids)
                else self.known_differences.explain(text, llama_cpp_ids, special)
            )
            if difference is None:
                yield EncodingDifference(text, llama_cpp_ids, reference_ids)
            elif difference != "types" or special:
                self.explained.setdefault(difference, []).append(text)

    def _notes(self, count: int) -> Iterator[str]:
        """Yield notes for the user about known differences. `count` is the number of test
        strings.
        """
        if self.reference.normal_form:
            form = self.reference.normal_form
            yield f"the model's tokenizer normalizes text to {form}; llama.cpp does not"
        stripped = [
            token.text for token in self.reference.added.values() if token.lstrip or token.rstrip
        ]
        pre_tokenizer = self.reference.pre_tokenizer
        implicit_specials = _first_five(self.known_differences.implicit_specials)
        explanations = {
            "dialect": f"llama.cpp's {pre_tokenizer.name} {pre_tokenizer.difference}",
            "spaces": (
                "llama.cpp puts a space before text that starts with one or follows a special "
                "token"
                + ", and removes spaces at its end"
                * self.known_differences.spaces.merge_runs
            ),
            "rules": (
                "llama.cpp applies character rules as SentencePiece does, the tokenizers library "
                "to each character with its marks"
            ),
            "words": (
                "llama.cpp cleans text differently before it looks up words: it removes marks of "
                "all kinds, keeps only the first letter of a Korean syllable if accents are "
                "removed, and looks up words of any length"
            ),
            "ties": "llama.cpp chooses differently between two equally good splits of a word",
            "flags": (
                "llama.cpp matches added tokens exactly, and strips no spaces around them "
                f"({_first_five(stripped)})"
            ),
            "types": f"llama.cpp treats {implicit_specials} as special tokens",
            "several": (
                "llama.cpp matches added tokens exactly, and splits or spaces text differently"
            ),
        }
        for difference, texts in self.explained.items():
            yield (
                f"{explanations[difference]}: {len(set(texts))} of {count} test strings get "
                "different ids than from the model's own tokenizer, as in every GGUF of this "
                f"model; the first is {_shorten(texts[0])}"
            )
        yield from self._surrounding_note()

    def _surrounding_note(self) -> Iterator[str]:
        """Yield a note if the model's tokenizer puts other special tokens around a text than
        llama.cpp does. This happens because a GGUF can only name BOS and EOS.
        """
        if not self.reference.sample_ids:
            return
        plain_ids, reference_ids = self.reference.sample_ids
        llama_cpp_ids = self.llama_cpp.tokenize(
            reference_tokenizer.SAMPLE_TEXT, special=True, add_special=True
        )
        if len(reference_ids) > len(plain_ids) and llama_cpp_ids != reference_ids:
            extra_texts = self._join_pieces(
                [index for index in reference_ids if index not in plain_ids]
            )
            yield (
                f"the model's tokenizer puts {extra_texts} around a text, llama.cpp puts "
                f"{self._join_pieces(llama_cpp_ids)!r}"
            )

    def _difference_error(self, differences: list[EncodingDifference]) -> UserError:
        """Return the error for differences that cannot be explained, with the shortest one as an
        example.
        """
        example = min(differences, key=lambda difference: len(difference.text))
        file = self.reference.row_tokenizer.file
        return UserError(
            f"llama.cpp would encode text differently from {file} (test strings that differ: "
            f"{len(differences)}), such as {_shorten(example.text)} as "
            f"{self._join_pieces(example.llama_cpp_ids)!r} instead of "
            f"{self._join_pieces(example.reference_ids)!r}",
            hint=("try another --pre, or use" if self.is_byte_level else "use")
            + " a GGUF of this model; --accept-tokenizer-differences goes on",
        )

    def _join_pieces(self, ids: list[int]) -> str:
        """Return the texts of the first ids for a message."""
        return self.reference.join_texts(ids[:24], " ")[: 2 * MAX_SHOWN_CHARS] + " …" * (
            len(ids) > 24
        )

    def _words(self, count: int | None) -> Iterator[str]:
        """Yield the vocabulary's words as text: all of them, or a random sample of `count` words.

        Pieces that do not consist of complete characters are left out.
        """
        special = {token.text for token in self.reference.added.values()}
        pieces = [
            piece
            for piece in self.reference.words
            if piece not in special and len(piece) <= MAX_WORD_CHARS
        ]
        if count is not None and len(pieces) > count:
            pieces = random.Random(3).sample(pieces, count)
        for piece in pieces:
            if self.is_byte_level:
                with contextlib.suppress(KeyError, UnicodeDecodeError):
                    yield bytes(BYTE_BY_CHAR[char] for char in piece).decode()
            elif not (piece.startswith("<0x") and len(piece) == 6):
                yield piece.replace(SPACE_MARK, " ")


def _shorten(text: str) -> str:
    """Return a string for a message, in quotes and cut to MAX_SHOWN_CHARS characters."""
    return repr(text) if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]!r}…"


def _first_five(texts: list[str]) -> str:
    """Return the first five texts for a message."""
    return ", ".join(text[:MAX_SHOWN_CHARS] for text in texts[:5]) + " …" * (len(texts) > 5)
