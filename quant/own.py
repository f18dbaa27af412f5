"""The model's own tokenizer, run by the tokenizers library: what llama.cpp is held against.

From tokenizer.json, or made of the pieces of tokenizer.model where that is all there is. It knows
texts and rows, not llama.cpp.
"""

import base64
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from quant import charsmap, counterpart, pretokenizer, unigram, vocab
from quant.charsmap import Charsmap
from quant.errors import Refusal
from quant.header import Array, Value
from quant.rows import Added
from quant.sentencepiece import BYTE, NORMAL, UNIGRAM, UNKNOWN
from quant.soundness import MAX_PIECE
from quant.spelling import Rules, Spaces
from quant.structure import flat
from quant.tensors import read_json

AGAIN = "fetch the file again"
HELLO = "Hello world"
CLOSE = (
    1e-6  # of a text's score: what float32 leaves of the difference between two ways to split it
)
PIECES = pretokenizer.Found("default")  # there is nothing to find where no byte-level BPE is
T = TypeVar("T")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """A tokenizer of the library that answers in rows of the model; `rows` has them by the token's
    text.
    """

    where: Path
    tokenizer: tokenizers.Tokenizer
    rows: Mapping[str, int]

    def ids(self, text: str, *, special: bool, around: bool = False) -> list[int]:
        """Text to rows; `special` reads special tokens out of it, `around` puts them around it."""
        self.tokenizer.encode_special_tokens = not special
        found = _asked(self.where, lambda: self.tokenizer.encode(text, add_special_tokens=around))
        return [self.rows.get(self.tokenizer.id_to_token(index) or "", -1) for index in found.ids]


@dataclass(frozen=True, slots=True)
class Own:
    """A model's tokenizer.

    `words` are its pieces, `added` its added tokens and `texts` all tokens by row. `around` is a
    text bare and with what is put around it, where that is known. `nodes` are the normalizers of
    its tokenizer.json, `form` the normal form that they bring text to, `rules` SentencePiece's for
    characters; `scores` are those of a Unigram's pieces by row.
    """

    reader: Reader
    words: list[str]
    added: Mapping[int, Added]
    texts: Mapping[int, str]
    around: tuple[list[int], list[int]] | None = None
    found: pretokenizer.Found = PIECES
    nodes: tuple[Any, ...] = ()
    form: str | None = None
    rules: Charsmap | None = None
    scores: Mapping[int, float] = field(default_factory=dict)

    def given(self, text: str) -> str:
        """The text as llama.cpp gets to read it, which joins no characters: the model's form comes
        from outside.

        A Unigram's vocabulary has rules for single characters, so that only text with parts to join
        is changed.
        """
        if not self.form or (self.scores and not any(map(_joins, text))):
            return text
        return unicodedata.normalize(self.form, text)  # type: ignore[arg-type]

    def tied(self, some: list[int], others: list[int]) -> bool:
        """Whether two ways to split a text are as good to a Unigram as float32 can tell."""
        if not self.scores or self.spell(some) != self.spell(others):
            return False
        first, second = ([self.scores.get(row, 0.0) for row in rows] for rows in (some, others))
        return abs(math.fsum(first) - math.fsum(second)) <= CLOSE * math.fsum(map(abs, first))

    def spell(self, rows: Iterable[int], joint: str = "") -> str:
        """The rows' texts."""
        return joint.join(self.texts.get(row, str(row)) for row in rows)


def _joins(char: str) -> bool:
    """Whether a character may join the one before it: marks, and parts of a Hangul syllable."""
    return unicodedata.category(char).startswith("M") or "\u1100" <= char <= "\u11ff"


def load(folder: Path, metadata: Mapping[str, Value], pre: str | None = None) -> Own:
    """Open a folder's tokenizer, whose vocabulary is `metadata`'s; `pre` is the pre-tokenizer that
    was asked for.
    """
    file = folder / "tokenizer.json"
    return _from_json(file, metadata, pre) if file.is_file() else _from_pieces(folder, metadata)


def _from_json(file: Path, metadata: Mapping[str, Value], pre: str | None) -> Own:
    values, kind, size = read_json(file), metadata.get("tokenizer.ggml.model"), _size(metadata)
    _shallow(file, values.get("model"))
    opened = _asked(file, lambda: tokenizers.Tokenizer.from_file(str(file)))
    listed = values.get("added_tokens") or []
    if any(item["id"] >= size for item in listed):  # left out: they have no row
        listed = [item for item in listed if item["id"] < size]
        values = values | {"added_tokens": listed}
        opened = _opened(file, values)
    opened.no_truncation()
    opened.no_padding()
    if isinstance(opened.model, tokenizers.models.BPE):
        opened.model.dropout = None  # for training: some merges are left out, by chance
    rows, words = (
        opened.get_vocab(with_added_tokens=True),
        list(opened.get_vocab(with_added_tokens=False)),
    )
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    added = {
        item["id"]: Added(item["content"], **{flag: bool(item.get(flag)) for flag in flags})
        for item in listed
    }
    nodes = tuple(
        part for part in flat(values.get("normalizer"), "normalizers") if part is not None
    )
    reader, model = Reader(file, opened, rows), values["model"]
    around = reader.ids(HELLO, special=True), reader.ids(HELLO, special=True, around=True)
    if kind == "gpt2":
        form = "NFC" if pretokenizer.normalizes(values) else None
        found = pretokenizer.find(values, str(file), pre)
        return Own(reader, words, added, _by_row(rows), around, found, nodes, form)
    if kind != unigram.KIND or model.get("type") != "Unigram" or model.get("unk_id") is None:
        return Own(reader, words, added, _by_row(rows), around, nodes=nodes)
    del opened, reader  # two trees of a large vocabulary need not be held at once
    made, added, scores = _unigram(values, added)
    reader = Reader(file, _opened(file, made), {**rows, counterpart.HIDDEN: model["unk_id"]})
    compiled = (
        part.get("precompiled_charsmap") for part in nodes if part.get("type") == "Precompiled"
    )
    rules, form = _rules(base64.b64decode(next(compiled, None) or "")), unigram.composes(values)
    return Own(reader, words, added, _by_row(rows), around, PIECES, nodes, form, rules, scores)


def _unigram(
    values: Json, added: Mapping[int, Added]
) -> tuple[Json, dict[int, Added], dict[int, float]]:
    """A Unigram whose unknown and special tokens are not found in text that is to be read as text;
    its scores by row.

    The library takes them for pieces like all others; SentencePiece and llama.cpp do not.
    """
    unknown = values["model"]["unk_id"]
    pieces = {row: (text, score) for row, (text, score) in enumerate(values["model"]["vocab"])}
    added = {unknown: Added(pieces[unknown][0], special=True)} | dict(added)
    plain = {
        row: piece for row, piece in pieces.items() if row not in added or not added[row].special
    }
    made = counterpart.tokenizer(counterpart.unigram(plain, unknown), added)
    made |= {key: values.get(key) for key in ("normalizer", "pre_tokenizer")}
    return made, added, {row: score for row, (_, score) in plain.items() if row != unknown}


def _shallow(file: Path, model: Any) -> None:
    """Refuse pieces so long that the library, which keeps a Unigram's in a tree, would end in
    taking it down.
    """
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, list):
        return
    longest = max((len(text) for item in vocabulary for text in _texts(item)), default=0)
    if longest > MAX_PIECE:
        raise Refusal(
            f"{file} has a piece of {longest:,} characters, {MAX_PIECE:,} are the most", hint=AGAIN
        )


def _texts(item: Any) -> list[str]:
    return [text for text in item if isinstance(text, str)] if isinstance(item, list) else []


def _from_pieces(folder: Path, metadata: Mapping[str, Value]) -> Own:
    """A SentencePiece model as transformers converts it: control and user-defined pieces are found
    as they stand.
    """
    file, size = folder / "tokenizer.model", _size(metadata)
    model, more = vocab.pieces(folder)
    kept = {row for row, piece in enumerate(model.pieces) if piece.type in (UNKNOWN, BYTE)}
    more = {row: token for row, token in more.items() if row < size and row not in kept}
    pieces = {
        row: piece
        for row, piece in enumerate(model.pieces)
        if row not in more or more[row].text == piece.text
    }
    added = counterpart.named(pieces) | more
    rows = {piece.text: row for row, piece in pieces.items()} | {
        token.text: row for row, token in added.items()
    }
    scores: dict[int, float] = {}
    if model.model_type == UNIGRAM:
        unknown = next(row for row, piece in pieces.items() if piece.type == UNKNOWN)
        scores = {row: piece.score for row, piece in pieces.items() if piece.type == NORMAL}
        made = counterpart.unigram(
            {row: (pieces[row].text, score) for row, score in scores.items()}, unknown
        )
        rows[counterpart.HIDDEN] = unknown
    else:
        made = counterpart.bpe(pieces)
    opened = _opened(file, counterpart.tokenizer(made, added))
    rules = _rules(model.charsmap)
    spaces = Spaces(model.add_dummy_prefix, model.remove_extra_whitespaces, blank=True)
    steps: list[Rules | Spaces] = [Rules(rules), spaces] if rules else [spaces]
    opened.normalizer = tokenizers.normalizers.Sequence([custom(step) for step in steps])
    reader = Reader(file, opened, rows)
    words = [piece.text for piece in pieces.values()]
    return Own(reader, words, added, _by_row(rows), rules=rules, scores=scores)


def custom(step: Rules | Spaces) -> tokenizers.normalizers.Normalizer:
    """A step of ours among the library's normalizers."""
    made: tokenizers.normalizers.Normalizer = tokenizers.normalizers.Normalizer.custom(step)
    return made


def _size(metadata: Mapping[str, Value]) -> int:
    words = metadata["tokenizer.ggml.tokens"]
    assert isinstance(words, Array), words
    return words.count


def _rules(data: bytes) -> Charsmap | None:
    """Compiled rules; None where there are none, or where they lead nowhere and differ from any
    that were converted.
    """
    try:
        return charsmap.parse(data)
    except ValueError:
        return None


def _by_row(rows: Mapping[str, int]) -> dict[int, str]:
    return {row: text for text, row in rows.items()}


def _opened(file: Path, values: Json) -> tokenizers.Tokenizer:
    return _asked(file, lambda: tokenizers.Tokenizer.from_str(json.dumps(values)))


def _asked(file: Path, question: Callable[[], T]) -> T:
    """The library's answer; where it fails or panics over a file, the file is at fault."""
    try:
        return question()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Refusal(f"{file} is not understood by tokenizers: {error}", hint=AGAIN) from error
