"""The model's own tokenizer, run by the tokenizers library. It is the reference with which
llama.cpp is compared.

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

from quant.checkpoint.folder import REFETCH_HINT, CheckpointFolder
from quant.errors import UserError
from quant.gguf.header import GgufArray, MetadataValue
from quant.tokenizer import charsmap, tokenizer_files, unigram
from quant.tokenizer.charsmap import Charsmap
from quant.tokenizer.json_nodes import flatten_sequence
from quant.tokenizer.pre_tokenizer import PreTokenizerMatch, find_pre_tokenizer, uses_nfc
from quant.tokenizer.sentencepiece_model import BYTE, NORMAL, UNIGRAM, UNKNOWN
from quant.tokenizer.token_table import AddedToken
from quant.tokenizer.unigram import MAX_PIECE_BYTES, NormalForm
from quant.tokenizer.verify import reference_json
from quant.tokenizer.verify.normalizer import CharsmapNormalizer, SpaceNormalizer
from quant.tokenizer.vocabulary import load_pieces

SAMPLE_TEXT = "Hello world"
# Two scores of a text count as equal if they differ by less than this fraction, which float32 can
# lose.
SCORE_TOLERANCE = 1e-6
DEFAULT_PRE_TOKENIZER = PreTokenizerMatch("default")  # for tokenizers that are not byte-level BPE
T = TypeVar("T")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowTokenizer:
    """A tokenizer of the tokenizers library that returns rows of the model's vocabulary instead of
    the library's ids.

    `rows` gives the row of each token by its text. `file` is named in errors.
    """

    file: Path
    tokenizer: tokenizers.Tokenizer
    rows: Mapping[str, int]

    def encode(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Return the rows of a text's tokens, -1 for a token without a row.

        `special` matches special tokens in the text; `add_special` adds special tokens around it.
        """
        self.tokenizer.encode_special_tokens = not special
        encoding = _call(
            self.file, lambda: self.tokenizer.encode(text, add_special_tokens=add_special)
        )
        return [
            self.rows.get(self.tokenizer.id_to_token(index) or "", -1) for index in encoding.ids
        ]


@dataclass(frozen=True, slots=True)
class ReferenceTokenizer:
    """A model's own tokenizer, with the facts that the verification needs.

    - `words`: the texts of its pieces.
    - `added`: its added tokens by row.
    - `texts`: the texts of all tokens by row.
    - `sample_ids`: the rows of SAMPLE_TEXT without and with the special tokens around it, or None
      if they are unknown.
    - `pre_tokenizer`: the pre-tokenizer that llama.cpp uses for the model.
    - `normalizers`: the normalizer nodes of tokenizer.json.
    - `normal_form`: the Unicode normal form that the normalizers apply.
    - `charsmap`: SentencePiece's character rules.
    - `scores`: the scores of a Unigram's pieces by row.
    """

    row_tokenizer: RowTokenizer
    words: list[str]
    added: Mapping[int, AddedToken]
    texts: Mapping[int, str]
    sample_ids: tuple[list[int], list[int]] | None = None
    pre_tokenizer: PreTokenizerMatch = DEFAULT_PRE_TOKENIZER
    normalizers: tuple[Any, ...] = ()
    normal_form: NormalForm | None = None
    charsmap: Charsmap | None = None
    scores: Mapping[int, float] = field(default_factory=dict)

    def text_for_llama_cpp(self, text: str) -> str:
        """Return the text in the model's normal form. llama.cpp never normalizes, so that it must
        get the text in this form.

        A Unigram's vocabulary has rules for single characters, so that for a Unigram only a text
        with combining characters is changed.
        """
        if not self.normal_form or (self.scores and not any(map(_combines, text))):
            return text
        return unicodedata.normalize(self.normal_form, text)

    def is_tied(self, ids: list[int], other_ids: list[int]) -> bool:
        """Return whether two splits of one text into a Unigram's pieces have the same score, within
        the precision of float32. Then both are correct.
        """
        if not self.scores or self.join_texts(ids) != self.join_texts(other_ids):
            return False
        scores, other_scores = (
            [self.scores.get(row, 0.0) for row in rows] for rows in (ids, other_ids)
        )
        return abs(math.fsum(scores) - math.fsum(other_scores)) <= SCORE_TOLERANCE * math.fsum(
            map(abs, scores)
        )

    def join_texts(self, rows: Iterable[int], separator: str = "") -> str:
        """Return the texts of the rows' tokens, joined by `separator`."""
        return separator.join(self.texts.get(row, str(row)) for row in rows)


def _combines(char: str) -> bool:
    """Return whether a character can combine with the character before it: a mark, or a part of a
    Hangul syllable.
    """
    return unicodedata.category(char).startswith("M") or "\u1100" <= char <= "\u11ff"


def load_reference(
    folder: CheckpointFolder, metadata: Mapping[str, MetadataValue], pre: str | None = None
) -> ReferenceTokenizer:
    """Open the tokenizer of a checkpoint folder with the tokenizers library.

    `metadata` is that of the finished GGUF vocabulary; `pre` is the pre-tokenizer that the user
    named. Raises UserError if the library cannot read the files.
    """
    name = tokenizer_files.find_byte_rank_file(folder)
    if name or folder.has_file("tokenizer.json"):
        return _from_json(folder, name or "tokenizer.json", metadata, pre)
    return _from_pieces(folder, metadata)


def _from_json(
    folder: CheckpointFolder, name: str, metadata: Mapping[str, MetadataValue], pre: str | None
) -> ReferenceTokenizer:
    """Open a tokenizer.json, or another file `name` in its form."""
    file, values = folder.path / name, tokenizer_files.read_tokenizer_json(folder)
    kind, size = metadata.get("tokenizer.ggml.model"), _size(metadata)
    _check_piece_lengths(file, values.get("model"))
    tokenizer = (
        _call(file, lambda: tokenizers.Tokenizer.from_file(str(file)))
        if name == "tokenizer.json"
        else _open(file, values)
    )
    added_nodes = values.get("added_tokens") or []
    # tokens without a row were left out of the vocabulary
    if any(node["id"] >= size for node in added_nodes):
        added_nodes = [node for node in added_nodes if node["id"] < size]
        values = values | {"added_tokens": added_nodes}
        tokenizer = _open(file, values)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None  # a training feature that skips merges at random
    rows, words = (
        tokenizer.get_vocab(with_added_tokens=True),
        list(tokenizer.get_vocab(with_added_tokens=False)),
    )
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    added = {
        node["id"]: AddedToken(node["content"], **{flag: bool(node.get(flag)) for flag in flags})
        for node in added_nodes
    }
    nodes = tuple(
        node
        for node in flatten_sequence(values.get("normalizer"), "normalizers")
        if node is not None
    )
    row_tokenizer, model = RowTokenizer(file, tokenizer, rows), values["model"]
    sample_ids = (
        row_tokenizer.encode(SAMPLE_TEXT, special=True),
        row_tokenizer.encode(SAMPLE_TEXT, special=True, add_special=True),
    )
    if kind == "gpt2":
        normal_form: NormalForm | None = "NFC" if uses_nfc(values) else None
        pre_tokenizer = find_pre_tokenizer(values, str(file), pre)
        return ReferenceTokenizer(
            row_tokenizer,
            words,
            added,
            _by_row(rows),
            sample_ids,
            pre_tokenizer,
            nodes,
            normal_form,
        )
    if (
        kind != unigram.TOKENIZER_MODEL
        or model.get("type") != "Unigram"
        or model.get("unk_id") is None
    ):
        return ReferenceTokenizer(
            row_tokenizer, words, added, _by_row(rows), sample_ids, normalizers=nodes
        )
    # Frees a copy of the vocabulary, which may be large, before another copy is made.
    del tokenizer, row_tokenizer
    plain_tokenizer, added, scores = _unigram_without_specials(values, added)
    row_tokenizer = RowTokenizer(
        file, _open(file, plain_tokenizer), {**rows, reference_json.HIDDEN_UNKNOWN: model["unk_id"]}
    )
    compiled = (
        node.get("precompiled_charsmap") for node in nodes if node.get("type") == "Precompiled"
    )
    rules, normal_form = (
        _parse_rules(base64.b64decode(next(compiled, None) or "")),
        unigram.find_normal_form(values),
    )
    return ReferenceTokenizer(
        row_tokenizer,
        words,
        added,
        _by_row(rows),
        sample_ids,
        DEFAULT_PRE_TOKENIZER,
        nodes,
        normal_form,
        rules,
        scores,
    )


def _unigram_without_specials(
    values: Json, added: Mapping[int, AddedToken]
) -> tuple[Json, dict[int, AddedToken], dict[int, float]]:
    """Return three things: a Unigram's tokenizer.json without its unknown and special pieces, its
    added tokens by row, and its scores by row.

    The library would match these pieces in plain text; SentencePiece and llama.cpp do not. `values`
    is the content of the model's tokenizer.json.
    """
    unknown = values["model"]["unk_id"]
    pieces = {row: (text, score) for row, (text, score) in enumerate(values["model"]["vocab"])}
    added = {unknown: AddedToken(pieces[unknown][0], special=True)} | dict(added)
    plain = {
        row: piece for row, piece in pieces.items() if row not in added or not added[row].special
    }
    tokenizer = reference_json.build_tokenizer_json(
        reference_json.build_unigram(plain, unknown), added
    )
    tokenizer |= {key: values.get(key) for key in ("normalizer", "pre_tokenizer")}
    return tokenizer, added, {row: score for row, (_, score) in plain.items() if row != unknown}


def _check_piece_lengths(file: Path, model: Any) -> None:
    """Raise UserError for very long pieces. The library would crash on them, because it stores a
    Unigram in a tree as deep as its longest piece.
    """
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, list):
        return
    longest = max((len(text) for item in vocabulary for text in _texts(item)), default=0)
    if longest > MAX_PIECE_BYTES:
        raise UserError(
            f"{file} has a piece of {longest:,} characters; the limit is {MAX_PIECE_BYTES:,}",
            hint=REFETCH_HINT,
        )


def _texts(item: Any) -> list[str]:
    """Return the texts in a JSON list."""
    return [text for text in item if isinstance(text, str)] if isinstance(item, list) else []


def _from_pieces(
    folder: CheckpointFolder, metadata: Mapping[str, MetadataValue]
) -> ReferenceTokenizer:
    """Open a tokenizer.model as transformers converts it: control and user-defined pieces are
    matched in a text before it is split.
    """
    file, size = folder.path / "tokenizer.model", _size(metadata)
    model, added_tokens = load_pieces(folder)
    fixed_rows = {row for row, piece in enumerate(model.pieces) if piece.type in (UNKNOWN, BYTE)}
    added_tokens = {
        row: token for row, token in added_tokens.items() if row < size and row not in fixed_rows
    }
    pieces = {
        row: piece
        for row, piece in enumerate(model.pieces)
        if row not in added_tokens or added_tokens[row].text == piece.text
    }
    added = reference_json.added_from_pieces(pieces) | added_tokens
    rows = {piece.text: row for row, piece in pieces.items()} | {
        token.text: row for row, token in added.items()
    }
    scores: dict[int, float] = {}
    if model.model_type == UNIGRAM:
        unknown = next(row for row, piece in pieces.items() if piece.type == UNKNOWN)
        scores = {row: piece.score for row, piece in pieces.items() if piece.type == NORMAL}
        tokenizer_model = reference_json.build_unigram(
            {row: (pieces[row].text, score) for row, score in scores.items()}, unknown
        )
        rows[reference_json.HIDDEN_UNKNOWN] = unknown
    else:
        tokenizer_model = reference_json.build_bpe(pieces)
    tokenizer = _open(file, reference_json.build_tokenizer_json(tokenizer_model, added))
    rules = _parse_rules(model.charsmap)
    spaces = SpaceNormalizer(
        model.add_dummy_prefix, model.remove_extra_whitespaces, prefix_blank=True
    )
    steps: list[CharsmapNormalizer | SpaceNormalizer] = (
        [CharsmapNormalizer(rules), spaces] if rules else [spaces]
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [make_normalizer(step) for step in steps]
    )
    row_tokenizer = RowTokenizer(file, tokenizer, rows)
    words = [piece.text for piece in pieces.values()]
    return ReferenceTokenizer(
        row_tokenizer, words, added, _by_row(rows), charsmap=rules, scores=scores
    )


def make_normalizer(
    step: CharsmapNormalizer | SpaceNormalizer,
) -> tokenizers.normalizers.Normalizer:
    """Return a normalizer of normalizer.py as a normalizer of the library."""
    normalizer: tokenizers.normalizers.Normalizer = tokenizers.normalizers.Normalizer.custom(step)
    return normalizer


def _size(metadata: Mapping[str, MetadataValue]) -> int:
    """Return the number of rows of the vocabulary in the GGUF, padding tokens included."""
    words = metadata["tokenizer.ggml.tokens"]
    assert isinstance(words, GgufArray), words
    return words.count


def _parse_rules(data: bytes) -> Charsmap | None:
    """Return compiled character rules, or None if there are none or if they are damaged."""
    try:
        return charsmap.parse_charsmap(data)
    except ValueError:
        return None


def _by_row(rows: Mapping[str, int]) -> dict[int, str]:
    """Return the texts by row, given the rows by text."""
    return {row: text for text, row in rows.items()}


def _open(file: Path, values: Json) -> tokenizers.Tokenizer:
    """Open the content of a tokenizer.json. `file` is named in errors."""
    return _call(file, lambda: tokenizers.Tokenizer.from_str(json.dumps(values)))


def _call(file: Path, function: Callable[[], T]) -> T:
    """Return the result of `function`, which calls the tokenizers library.

    The library raises errors or panics on faulty files. Both become a UserError that names the
    file.
    """
    try:
        return function()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizers library cannot read {file}: {error}", hint=REFETCH_HINT
        ) from error
