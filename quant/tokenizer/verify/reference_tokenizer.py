"""The model's own tokenizer, run by the tokenizers library: the reference for llama.cpp.

It is read from tokenizer.json, or built from the pieces of tokenizer.model if there is no
tokenizer.json.
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

from quant.checkpoint.safetensors import read_json
from quant.errors import Refusal
from quant.gguf.header import Array, Value
from quant.tokenizer import charsmap, pre_tokenizer, unigram
from quant.tokenizer import vocabulary as vocab
from quant.tokenizer.charsmap import Charsmap
from quant.tokenizer.sentencepiece_model import BYTE, NORMAL, UNIGRAM, UNKNOWN
from quant.tokenizer.token_table import Added
from quant.tokenizer.tokenizer_json import flat
from quant.tokenizer.unigram import MAX_PIECE
from quant.tokenizer.verify import reference_json
from quant.tokenizer.verify.normalizer import Rules, Spaces

AGAIN = "fetch the file again"
HELLO = "Hello world"
# Part of a text's score that float32 can lose between two splits of the text.
CLOSE = 1e-6
PIECES = pre_tokenizer.Found("default")  # for tokenizers that are not byte-level BPE
T = TypeVar("T")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reader:
    """A tokenizer of the tokenizers library that returns rows of the model's vocabulary.

    `rows` gives the row of each token's text.
    """

    where: Path
    tokenizer: tokenizers.Tokenizer
    rows: Mapping[str, int]

    def ids(self, text: str, *, special: bool, around: bool = False) -> list[int]:
        """Return the rows of a text's tokens, -1 for tokens without a row.

        `special` matches special tokens in the text; `add_special` adds special tokens around it.
        """
        self.tokenizer.encode_special_tokens = not special
        encoding = _call(self.where, lambda: self.tokenizer.encode(text, add_special_tokens=around))
        return [
            self.rows.get(self.tokenizer.id_to_token(index) or "", -1) for index in encoding.ids
        ]


@dataclass(frozen=True, slots=True)
class Own:
    """A model's tokenizer.

    - `words`: the texts of its pieces; `added`: its added tokens by row; `texts`: all tokens' texts
      by row.
    - `sample_ids`: the ids of SAMPLE_TEXT without and with the special tokens around it, if known.
    - `pre_tokenizer`: the pre-tokenizer that llama.cpp uses.
    - `normalizers`: those of tokenizer.json; `normal_form`: the Unicode form that they apply.
    - `charsmap`: SentencePiece's character rules.
    - `scores`: the scores of a Unigram's pieces by row.
    """

    reader: Reader
    words: list[str]
    added: Mapping[int, Added]
    texts: Mapping[int, str]
    around: tuple[list[int], list[int]] | None = None
    found: pre_tokenizer.Found = PIECES
    nodes: tuple[Any, ...] = ()
    form: str | None = None
    rules: Charsmap | None = None
    scores: Mapping[int, float] = field(default_factory=dict)

    def given(self, text: str) -> str:
        """Return the text as llama.cpp must get it: in the model's normal form, which llama.cpp
        never applies.

        A Unigram's vocabulary has rules for single characters, so only text with combining
        characters is changed.
        """
        if not self.form or (self.scores and not any(map(_combines, text))):
            return text
        return unicodedata.normalize(self.form, text)  # type: ignore[arg-type]

    def tied(self, some: list[int], others: list[int]) -> bool:
        """Return whether a Unigram scores two splits of one text equally, within the precision of
        float32.
        """
        if not self.scores or self.spell(some) != self.spell(others):
            return False
        first, second = ([self.scores.get(row, 0.0) for row in rows] for rows in (some, others))
        return abs(math.fsum(first) - math.fsum(second)) <= CLOSE * math.fsum(map(abs, first))

    def spell(self, rows: Iterable[int], joint: str = "") -> str:
        """Return the rows' texts, joined."""
        return joint.join(self.texts.get(row, str(row)) for row in rows)


def _combines(char: str) -> bool:
    """Return whether a character can combine with the one before it: a mark, or a part of a Hangul
    syllable.
    """
    return unicodedata.category(char).startswith("M") or "\u1100" <= char <= "\u11ff"


def load(folder: Path, metadata: Mapping[str, Value], pre: str | None = None) -> Own:
    """Open a folder's tokenizer with the tokenizers library.

    `metadata` is that of the finished vocabulary, `pre` the pre-tokenizer that the user named.
    Raises UserError if the library cannot read the files.
    """
    file = folder / "tokenizer.json"
    return _from_json(file, metadata, pre) if file.is_file() else _from_pieces(folder, metadata)


def _from_json(file: Path, metadata: Mapping[str, Value], pre: str | None) -> Own:
    values, kind, size = read_json(file), metadata.get("tokenizer.ggml.model"), _size(metadata)
    _check_piece_lengths(file, values.get("model"))
    opened = _call(file, lambda: tokenizers.Tokenizer.from_file(str(file)))
    listed = values.get("added_tokens") or []
    if any(item["id"] >= size for item in listed):  # tokens without a row were left out
        listed = [item for item in listed if item["id"] < size]
        values = values | {"added_tokens": listed}
        opened = _open(file, values)
    opened.no_truncation()
    opened.no_padding()
    if isinstance(opened.model, tokenizers.models.BPE):
        opened.model.dropout = None  # a feature for training that skips merges at random
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
        form = "NFC" if pre_tokenizer.normalizes(values) else None
        found = pre_tokenizer.find(values, str(file), pre)
        return Own(reader, words, added, _by_row(rows), around, found, nodes, form)
    if kind != unigram.KIND or model.get("type") != "Unigram" or model.get("unk_id") is None:
        return Own(reader, words, added, _by_row(rows), around, nodes=nodes)
    del opened, reader  # frees one copy of a large vocabulary before the next is built
    tokenizer, added, scores = _unigram_without_specials(values, added)
    reader = Reader(file, _open(file, tokenizer), {**rows, reference_json.HIDDEN: model["unk_id"]})
    compiled = (
        part.get("precompiled_charsmap") for part in nodes if part.get("type") == "Precompiled"
    )
    rules, form = (
        _parse_rules(base64.b64decode(next(compiled, None) or "")),
        unigram.composes(values),
    )
    return Own(reader, words, added, _by_row(rows), around, PIECES, nodes, form, rules, scores)


def _unigram_without_specials(
    values: Json, added: Mapping[int, Added]
) -> tuple[Json, dict[int, Added], dict[int, float]]:
    """Return a Unigram's tokenizer.json without its unknown and special pieces, its added tokens,
    and its scores by row.

    The library would match those pieces in plain text; SentencePiece and llama.cpp do not.
    """
    unknown = values["model"]["unk_id"]
    pieces = {row: (text, score) for row, (text, score) in enumerate(values["model"]["vocab"])}
    added = {unknown: Added(pieces[unknown][0], special=True)} | dict(added)
    plain = {
        row: piece for row, piece in pieces.items() if row not in added or not added[row].special
    }
    tokenizer = reference_json.tokenizer(reference_json.unigram(plain, unknown), added)
    tokenizer |= {key: values.get(key) for key in ("normalizer", "pre_tokenizer")}
    return tokenizer, added, {row: score for row, (_, score) in plain.items() if row != unknown}


def _check_piece_lengths(file: Path, model: Any) -> None:
    """Refuse pieces so long that the library would crash: it stores a Unigram in a deep tree."""
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, list):
        return
    longest = max((len(text) for item in vocabulary for text in _texts(item)), default=0)
    if longest > MAX_PIECE:
        raise Refusal(
            f"{file} has a piece of {longest:,} characters; the limit is {MAX_PIECE:,}", hint=AGAIN
        )


def _texts(item: Any) -> list[str]:
    return [text for text in item if isinstance(text, str)] if isinstance(item, list) else []


def _from_pieces(folder: Path, metadata: Mapping[str, Value]) -> Own:
    """Return a SentencePiece model as transformers converts it: control and user-defined pieces are
    matched in text as they are.
    """
    file, size = folder / "tokenizer.model", _size(metadata)
    model, more = vocab.pieces(folder)
    fixed = {row for row, piece in enumerate(model.pieces) if piece.type in (UNKNOWN, BYTE)}
    more = {row: token for row, token in more.items() if row < size and row not in fixed}
    pieces = {
        row: piece
        for row, piece in enumerate(model.pieces)
        if row not in more or more[row].text == piece.text
    }
    added = reference_json.named(pieces) | more
    rows = {piece.text: row for row, piece in pieces.items()} | {
        token.text: row for row, token in added.items()
    }
    scores: dict[int, float] = {}
    if model.model_type == UNIGRAM:
        unknown = next(row for row, piece in pieces.items() if piece.type == UNKNOWN)
        scores = {row: piece.score for row, piece in pieces.items() if piece.type == NORMAL}
        tokenizer_model = reference_json.unigram(
            {row: (pieces[row].text, score) for row, score in scores.items()}, unknown
        )
        rows[reference_json.HIDDEN] = unknown
    else:
        tokenizer_model = reference_json.bpe(pieces)
    opened = _open(file, reference_json.tokenizer(tokenizer_model, added))
    rules = _parse_rules(model.charsmap)
    spaces = Spaces(model.add_dummy_prefix, model.remove_extra_whitespaces, blank=True)
    steps: list[Rules | Spaces] = [Rules(rules), spaces] if rules else [spaces]
    opened.normalizer = tokenizers.normalizers.Sequence([custom(step) for step in steps])
    reader = Reader(file, opened, rows)
    words = [piece.text for piece in pieces.values()]
    return Own(reader, words, added, _by_row(rows), rules=rules, scores=scores)


def custom(step: Rules | Spaces) -> tokenizers.normalizers.Normalizer:
    """Return a step of ours as a normalizer of the library."""
    normalizer: tokenizers.normalizers.Normalizer = tokenizers.normalizers.Normalizer.custom(step)
    return normalizer


def _size(metadata: Mapping[str, Value]) -> int:
    words = metadata["tokenizer.ggml.tokens"]
    assert isinstance(words, Array), words
    return words.count


def _parse_rules(data: bytes) -> Charsmap | None:
    """Return compiled character rules, or None if there are none or they are damaged."""
    try:
        return charsmap.parse(data)
    except ValueError:
        return None


def _by_row(rows: Mapping[str, int]) -> dict[int, str]:
    return {row: text for text, row in rows.items()}


def _open(file: Path, values: Json) -> tokenizers.Tokenizer:
    return _call(file, lambda: tokenizers.Tokenizer.from_str(json.dumps(values)))


def _call(file: Path, question: Callable[[], T]) -> T:
    """Return the result of a library call.

    The library fails or panics on faulty files; both become a UserError that names the file.
    """
    try:
        return question()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Refusal(f"the tokenizers library cannot read {file}: {error}", hint=AGAIN) from error
