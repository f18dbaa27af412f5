"""Converts a Unigram tokenizer to the form in which llama.cpp runs it (tokenizer model "t5",
llm_tokenizer_ugm in src/llama-vocab.cpp).

A GGUF file can record a Unigram's scores, types and character rules, whether runs of spaces become
one space, and whether a space is added in front of a text. A tokenizer that needs any other setting
is refused, and the error names the setting.
"""

import base64
import binascii
import itertools
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from quant.errors import UserError
from quant.tokenizer import charsmap
from quant.tokenizer.charsmap import Charsmap
from quant.tokenizer.json_nodes import flatten_sequence, name_step, prepends_space
from quant.tokenizer.sentencepiece_model import NORMAL, UNKNOWN, UNUSED, SentencePieceModel
from quant.tokenizer.token_table import SPACE_MARK, UNUSED_SCORE, VocabularyToken

MAX_PIECE_BYTES = 4096  # limit of the bytes of a Unigram's piece
TOKENIZER_MODEL = "t5"  # the value of tokenizer.ggml.model
Json = Mapping[str, Any]
Entries = list[tuple[str, str, Any]]


@dataclass(frozen=True, slots=True)
class UnigramNormalization:
    """The changes to a text before it is split into pieces, as far as a GGUF file can record them.

    `add_prefix` puts a space in front of the text. `merge_runs` replaces runs of spaces by one
    space and removes spaces at both ends. `charsmap` has compiled character rules, or is empty.
    With `split_words`, the tokenizer splits the text into words first, so that no piece contains an
    inner space.
    """

    add_prefix: bool
    merge_runs: bool
    charsmap: bytes = b""
    split_words: bool = False

    def entries(self) -> Entries:
        """Return the metadata entries as (key below "tokenizer.ggml.", type, value)."""
        keys: Entries = [
            ("add_space_prefix", "bool", self.add_prefix),
            ("remove_extra_whitespaces", "bool", self.merge_runs),
        ]
        return (
            [*keys, ("precompiled_charsmap", "array:uint8", list(self.charsmap))]
            if self.charsmap
            else keys
        )


@dataclass(frozen=True, slots=True)
class UnigramModel:
    """A Unigram model: its pieces by row, the row of the unknown token, and the normalization."""

    tokens: dict[int, VocabularyToken]
    unknown_row: int
    normalization: UnigramNormalization


def read_unigram_json(tokenizer: Json, location: str) -> UnigramModel:
    """Read the content of a tokenizer.json with a Unigram model. Raises UserError, which names
    `location`, if llama.cpp cannot run it.
    """
    model, normalization = tokenizer["model"], _read_normalization(tokenizer, location)
    pieces, unknown = model.get("vocab"), model.get("unk_id")
    if not isinstance(pieces, list) or not all(map(_is_piece, pieces)):
        raise UserError(
            f"{location} has pieces without a text and a score", hint="fetch the file again"
        )
    texts = [text for text, _ in pieces]
    if len(set(texts)) < len(texts):
        duplicate = next(text for text, count in Counter(texts).items() if count > 1)
        hint = "such a tokenizer was trained on texts with its special tokens in them"
        raise UserError(
            f"{location} has the piece {duplicate[:60]!r} twice; a GGUF file needs distinct pieces",
            hint=hint,
        )
    if model.get("byte_fallback"):
        raise _unsupported(location, "spells unknown characters in bytes (byte_fallback)")
    if type(unknown) is not int or not 0 <= unknown < len(pieces):
        raise _unsupported(location, "has no unknown token (unk_id)")
    tokens = {
        index: VocabularyToken(text, float(score), NORMAL)
        for index, (text, score) in enumerate(pieces)
    }
    # llama.cpp does not split a text into words first, so that it must not use pieces with inner
    # spaces.
    if normalization.split_words:
        rows_with_inner_space = [
            index for index, (text, _) in enumerate(pieces) if SPACE_MARK in text[1:]
        ]
        tokens |= {
            index: VocabularyToken(tokens[index].text, UNUSED_SCORE, UNUSED)
            for index in rows_with_inner_space
        }
    tokens[unknown] = VocabularyToken(tokens[unknown].text, tokens[unknown].score, UNKNOWN)
    return UnigramModel(tokens, unknown, normalization)


def convert_unigram(model: SentencePieceModel, location: str) -> UnigramModel:
    """Convert a SentencePiece Unigram model. Raises UserError, which names `location`, if llama.cpp
    cannot run it.
    """
    unknown = next(
        (index for index, piece in enumerate(model.pieces) if piece.type == UNKNOWN), None
    )
    for is_used, reason in (
        (model.byte_fallback, "spells unknown characters in bytes (byte_fallback)"),
        (model.treat_whitespace_as_suffix, "puts spaces after words (treat_whitespace_as_suffix)"),
        (not model.escape_whitespaces, "leaves spaces as they are (escape_whitespaces)"),
        (unknown is None, "has no unknown token"),
        *_space_problem(model.add_dummy_prefix, model.remove_extra_whitespaces),
    ):
        if is_used:
            raise _unsupported(location, reason)
    assert unknown is not None
    # llama.cpp also matches unused pieces, so they get a score that is too low to be chosen.
    tokens = {
        index: VocabularyToken(
            piece.text, UNUSED_SCORE if piece.type == UNUSED else piece.score, piece.type
        )
        for index, piece in enumerate(model.pieces)
    }
    if model.charsmap:
        _parse_charsmap(model.charsmap, location)
    return UnigramModel(
        tokens,
        unknown,
        UnigramNormalization(
            model.add_dummy_prefix, model.remove_extra_whitespaces, model.charsmap
        ),
    )


def _space_problem(prefix: bool, merge: bool) -> tuple[tuple[bool, str], ...]:
    """Return (whether it occurs, text) for a combination of space settings that llama.cpp does not
    support.
    """
    reason = (
        "merges runs of spaces (remove_extra_whitespaces) and adds none in front of a text "
        "(add_dummy_prefix)"
    )
    return ((merge and not prefix, reason),)


def _unsupported(location: str, reason: str) -> UserError:
    """Return the error for a setting that llama.cpp does not support."""
    hint = "run this model with the library it was made for"
    return UserError(f"{location} {reason}: llama.cpp's Unigram tokenizer does not", hint=hint)


def _is_piece(piece: Any) -> bool:
    """Return whether a JSON value is a piece: a list of a text and a finite score."""
    match piece:
        case [str(), int(score) | float(score)]:
            return not isinstance(score, bool) and abs(score) < 3e38 and math.isfinite(score)
    return False


# Normalizers that work character by character are converted to one rule for each character.
NMT_REMOVED = frozenset(map(chr, (*range(1, 9), 0xB, *range(0xE, 0x20), 0x7F, 0x8F, 0x9F)))
NMT_SPACES = frozenset("\t\n\f\r\u1680\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd")
WHITESPACE = "\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
WHITESPACE_TO_SPACE = str.maketrans(dict.fromkeys(WHITESPACE, " "))
NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]
NORMAL_FORMS: tuple[NormalForm, ...] = get_args(NormalForm)
# All characters that a normal form or a change of case may affect; surrogates, private characters
# and empty planes are left out.
CHANGEABLE_RANGES = (range(1, 0xD800), range(0xF900, 0x30000), range(0xE0000, 0xE1000))
Step = Callable[[str], str]


def _nmt(text: str) -> str:
    """Do what the Nmt normalizer does: remove control characters, and replace special spaces by
    spaces.
    """
    return "".join(" " if char in NMT_SPACES else char for char in text if char not in NMT_REMOVED)


def _lower(text: str) -> str:
    # One character at a time: in a whole text, lower() writes Greek's final sigma differently.
    """Return the text in lower case."""
    return "".join(map(str.lower, text))


def _unaccented(text: str) -> str:
    """Return the text without combining marks."""
    return "".join(char for char in text if not unicodedata.category(char).startswith("M"))


def _form(name: Any) -> Step:
    """Return the step that converts text to a Unicode normal form."""
    return lambda text: unicodedata.normalize(name, text)


STEPS_BY_NAME: dict[str, Step] = {"Nmt": _nmt, "StripAccents": _unaccented, "Lowercase": _lower}
STEPS_BY_NAME |= {name: _form(name) for name in NORMAL_FORMS}


def find_normal_form(tokenizer: Json) -> NormalForm | None:
    """Return the Unicode normal form that the normalizers of a tokenizer.json apply last, or None
    if they apply none.

    A normal form composes several characters to one, which character rules cannot always express.
    """
    names = [
        step.get("type")
        for step in flatten_sequence(tokenizer.get("normalizer"), "normalizers")
        if isinstance(step, dict)
    ]
    return next((form for name in reversed(names) for form in NORMAL_FORMS if form == name), None)


def _read_normalization(tokenizer: Json, location: str) -> UnigramNormalization:
    """Read the normalizers and pre-tokenizers of a tokenizer.json. Raises UserError if llama.cpp
    cannot do the same.
    """
    rules = _Rules(location)
    add_prefix = merge_runs = strips_ends = escapes_spaces = split_words = False
    for step in flatten_sequence(tokenizer.get("normalizer"), "normalizers"):
        match step:
            case None:
                pass
            case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": (" " | "\u2581")}:
                merge_runs = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                escapes_spaces = True
            case {"type": "Prepend", "prepend": "\u2581"}:
                add_prefix = True
            case {"type": "Strip"}:
                strips_ends = True
            case _:
                rules.add(step)
    for step in flatten_sequence(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match step:
            case None:
                pass
            case {"type": "WhitespaceSplit"}:
                merge_runs = split_words = True
                rules.add_whitespace_step()
            case {"type": "Metaspace", "replacement": "\u2581"}:
                escapes_spaces = True
                add_prefix = add_prefix or prepends_space(step)
                split_words = split_words or step.get("split") is not False
            case _:
                raise _unsupported(location, f"splits text by {name_step(step)}")
    for is_used, reason in (
        (not escapes_spaces, "leaves spaces as they are (it has no Metaspace)"),
        (strips_ends and not merge_runs, "removes spaces at the ends of a text (Strip)"),
        *_space_problem(add_prefix, merge_runs),
    ):
        if is_used:
            raise _unsupported(location, reason)
    return UnigramNormalization(add_prefix, merge_runs, rules.compile(), split_words)


class _Rules:
    """Converts a chain of normalizers to character rules that have the same effect on every
    character, and on the sequences that the normalizers name.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self.steps: list[Step] = []
        self.sequences: list[str] = []
        self.compiled = b""

    def add(self, node: Any) -> None:
        """Add a normalizer node of tokenizer.json to the chain. Raises UserError if it cannot be
        converted.
        """
        match node:
            case {"type": "Precompiled", "precompiled_charsmap": (None | "")}:
                pass
            case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
                try:
                    data = base64.b64decode(text, validate=True)
                except (binascii.Error, ValueError):
                    data = b""
                self.steps.append(_parse_charsmap(data, self.location).apply)
                if len(self.steps) == 1:
                    self.compiled = data
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                old and "\0" not in new
            ):
                self.sequences.append(old)
                self.steps.append(lambda text: text.replace(old, new))
            case {"type": str(name)} if name in STEPS_BY_NAME:
                self.steps.append(STEPS_BY_NAME[name])
            case _:
                raise _unsupported(self.location, f"changes text by {name_step(node)}")

    def add_whitespace_step(self) -> None:
        """Add a step that replaces every whitespace character by a space, for tokenizers that split
        a text at all whitespace.
        """
        if any(self._apply(char).strip(" ") for char in WHITESPACE):
            self.steps.append(lambda text: text.translate(WHITESPACE_TO_SPACE))

    def _apply(self, text: str) -> str:
        """Return a text after all steps of the chain."""
        for step in self.steps:
            text = step(text)
        return text

    def compile(self) -> bytes:
        """Return compiled rules that apply all steps to every character.

        Sequences that the steps name get rules, too. If the first step is a compiled charsmap, its
        rules are extended instead of computed again.
        """
        chars = [*self.sequences, *map(chr, itertools.chain(*CHANGEABLE_RANGES))]
        if not self.compiled:
            results = {text: self._apply(text) for text in chars if "\0" not in text}
            return charsmap.build_charsmap(
                {text: result for text, result in results.items() if result != text}
            )
        later_rules = _Rules(self.location)
        later_rules.steps = self.steps[1:]
        return (
            charsmap.append_step(self.compiled, later_rules._apply, chars)
            if later_rules.steps
            else self.compiled
        )


def _parse_charsmap(data: bytes, location: str) -> Charsmap:
    """Parse compiled character rules. Raises UserError if they are damaged."""
    try:
        rules = charsmap.parse_charsmap(data)
    except ValueError as error:
        raise UserError(
            f"{location}: its precompiled_charsmap is damaged: {error}", hint="fetch the file again"
        ) from None
    return rules
