"""A checkpoint folder's tokenizer as the entries of a GGUF vocabulary.

SentencePiece (tokenizer.model, or a tokenizer.json made from one), Unigram and byte-level BPE
(tokenizer.json); added tokens, special ids, end-of-turn tokens and the chat template. It knows
files and entries, no tensors.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quant import pretokenizer, rows, sentencepiece, special, unigram
from quant import templates as chat
from quant.archs.base import Config
from quant.errors import Refusal
from quant.rows import Added, Token
from quant.sentencepiece import BYTE, MOST, NORMAL, UNKNOWN, SentencePiece
from quant.structure import flat, prepends
from quant.tensors import read_json
from quant.writer import entry

LARGEST = 1 << 27  # bytes of a tokenizer's JSON file: four times the largest there is
HEXADECIMAL = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class Vocab:
    """What goes into the file, and what the user should know."""

    entries: tuple[tuple[str, bytes], ...]
    notes: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Files:
    """The tokenizer's JSON files, {} where one is missing."""

    folder: Path
    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    generation: dict[str, Any]


Extra = list[tuple[str, str, Any]]


@dataclass(frozen=True, slots=True)
class Read:
    """A tokenizer's model: its kind to llama.cpp, its tokens by row, keys of its own, the row of
    its unknown token.
    """

    kind: str
    tokens: dict[int, Token]
    entries: Extra
    unknown: int | None = None


def load(folder: Path, config: Config, pre: str | None = None, *, spare: bool = False) -> Vocab:
    """Read a folder's tokenizer; its rows are padded to the config's vocab_size.

    `pre` names the pre-tokenizer of byte-level BPE instead of its structure. With `spare`, a config
    without a vocab_size takes the tokenizer's, and added tokens beyond are left out: Gemma 3 has
    one for images.
    """
    files = _files(folder)
    read = _read(files)
    size = config.number("vocab_size", default=max(read.tokens, default=0) + 1 if spare else None)
    if size > MOST:
        raise Refusal(
            f"{folder}: a vocabulary of {size:,} rows; {MOST:,} are the most that are read",
            hint="fetch config.json and the tokenizer again",
        )
    added = _added(files)
    outside = [token.text for index, token in added.items() if index >= size and spare]
    added = {index: token for index, token in added.items() if index < size or not spare}
    words = rows.table(read.tokens, added, size, str(folder), scored=read.kind != "gpt2")
    ids, notes = _special(files, config, words, read)
    templates, more = chat.load(folder, files.settings)
    table = [
        ("model", "string", read.kind),
        (
            "pre",
            "string",
            _pre(files, read.kind, pre, bos=any(name == "bos_token_id" for name, *_ in ids)),
        ),
        ("tokens", "array:string", [word.text for word in words]),
        *(
            [("scores", "array:float32", [word.score for word in words])]
            if read.kind != "gpt2"
            else []
        ),
        ("token_type", "array:int32", [word.type for word in words]),
        *read.entries,
        *ids,
    ]
    found = [(f"tokenizer.ggml.{name}", entry(form, value)) for name, form, value in table]
    found += [
        (f"tokenizer.{name}", entry(form, value)) for name, form, value in chat.entries(templates)
    ]
    left = [f"token {text!r} is left out: the model has no row for it" for text in outside]
    return Vocab(tuple(found), (*left, *notes, *more), len(words))


def pieces(folder: Path) -> tuple[SentencePiece, dict[int, Added]]:
    """A folder's tokenizer.model with what its settings change, and the tokens they add: for the
    proof.
    """
    files = _files(folder)
    return _model(files), _added(files)


def _files(folder: Path) -> Files:
    return Files(
        folder,
        *(
            _optional(folder / f"{name}.json")
            for name in ("tokenizer", "tokenizer_config", "generation_config")
        ),
    )


def _optional(file: Path) -> dict[str, Any]:
    if file.is_file() and (size := file.stat().st_size) > LARGEST:
        raise Refusal(
            f"{file} has {size:,} bytes; {LARGEST:,} are the most that are read",
            hint="fetch the file again",
        )
    return read_json(file) if file.is_file() else {}


def _read(files: Files) -> Read:
    model = files.tokenizer.get("model")
    if (files.folder / "tokenizer.model").is_file():
        return _sentencepiece(files)
    match model:
        case {"type": "BPE", "vocab": {}, **rest}:
            return _pieces(files) if rest.get("byte_fallback") else _byte_level(files)
        case {"type": "Unigram"}:
            return _unigram(
                unigram.from_json(files.tokenizer, str(files.folder / "tokenizer.json"))
            )
    raise _unread(files.folder, model)


def _unread(folder: Path, model: Any) -> Refusal:
    """Why there is no vocabulary: no file, or one of a kind whose text llama.cpp splits otherwise."""
    kind = model.get("type") if isinstance(model, dict) else None
    if kind in ("WordPiece", "WordLevel"):
        return Refusal(
            f"{folder / 'tokenizer.json'} is of type {kind}: llama.cpp would give text other ids than the model knows",
            hint="byte-level BPE, SentencePiece BPE and Unigram are converted",
        )
    return Refusal(
        f"{folder} has no tokenizer: neither tokenizer.model nor a tokenizer.json of type BPE or Unigram",
        hint="copy the tokenizer files of the model it was made from into the folder",
    )


def _pre(files: Files, kind: str, pre: str | None, bos: bool) -> str:
    """The pre-tokenizer's name; only byte-level BPE has one. Without a BOS the name is one that has
    none.
    """
    if kind == "gpt2":
        name = pretokenizer.find(files.tokenizer, str(files.folder / "tokenizer.json"), pre).name
        return name if bos or pre else pretokenizer.WITHOUT_BOS.get(name, name)
    if pre:
        raise Refusal(
            f"{files.folder} has no byte-level BPE: it takes no pre-tokenizer",
            hint="leave --pre out",
        )
    return "default"


def _model(files: Files) -> SentencePiece:
    model = sentencepiece.load(files.folder / "tokenizer.model")
    prefix = files.settings.get("add_prefix_space")
    return model if prefix is None else replace(model, add_dummy_prefix=bool(prefix))


def _sentencepiece(files: Files) -> Read:
    file, model = files.folder / "tokenizer.model", _model(files)
    if model.model_type == sentencepiece.UNIGRAM:
        return _unigram(unigram.from_model(model, str(file)))
    if model.model_type != sentencepiece.BPE:
        raise Refusal(
            f"{file} is a model of words or of characters: llama.cpp would split text otherwise",
            hint="SentencePiece models of type BPE and Unigram are converted",
        )
    for asked, what in (  # with a tokenizer.json the proof tells whether it matters
        (model.charsmap, "has rules for characters (precompiled_charsmap)"),
        (model.remove_extra_whitespaces, "merges runs of spaces (remove_extra_whitespaces)"),
        (model.treat_whitespace_as_suffix, "puts spaces behind words (treat_whitespace_as_suffix)"),
        (not model.escape_whitespaces, "leaves spaces as they are (escape_whitespaces)"),
    ):
        if asked and not files.tokenizer:
            raise Refusal(
                f"{file} {what}: llama.cpp's SentencePiece tokenizer does not",
                hint="add a tokenizer.json",
            )
    tokens = {i: Token(piece.text, piece.score, piece.type) for i, piece in enumerate(model.pieces)}
    return Read("llama", tokens, _prefix(model.add_dummy_prefix))


def _unigram(found: unigram.Unigram) -> Read:
    return Read(unigram.KIND, found.tokens, found.spelling.entries(), found.unknown)


def _prefix(prefix: bool) -> Extra:
    return [] if prefix else [("add_space_prefix", "bool", False)]


def _pieces(files: Files) -> Read:
    """SentencePiece from tokenizer.json: a piece's score is the rank of the merges that make it.

    llama.cpp merges by the score of the result, tokenizers by the rank of the pair: the same where
    the merges of each result stand together, as in every tokenizer.json made from a
    tokenizer.model.
    """
    words, last = _words(files), ""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(files)):
        made = left + right
        if made != last and made in ranks:
            raise Refusal(
                f"{files.folder / 'tokenizer.json'} orders its merges by pairs, which llama.cpp cannot follow",
                hint="add the model's tokenizer.model to the folder",
            )
        ranks.setdefault(made, rank)
        last = made
    unknown = files.tokenizer["model"].get("unk_token")
    tokens = {}
    for text, index in words.items():
        kind = UNKNOWN if text == unknown else BYTE if HEXADECIMAL.fullmatch(text) else NORMAL
        tokens[index] = Token(text, -float(ranks.get(text, len(ranks))), kind)
    return Read("llama", tokens, _prefix(_prefixed(files)))


def _prefixed(files: Files) -> bool:
    """Whether a tokenizer.json puts a space in front of a text; refuses expressions, which are not
    llama.cpp's way.
    """
    prefix = False
    steps = flat(files.tokenizer.get("normalizer"), "normalizers")
    for step in (*steps, *flat(files.tokenizer.get("pre_tokenizer"), "pretokenizers")):
        match step:
            case {"pattern": {"Regex": regex}}:
                raise Refusal(
                    f"{files.folder / 'tokenizer.json'} splits or changes text by the expression {str(regex)[:60]!r}: "
                    "llama.cpp's SentencePiece tokenizer does not",
                    hint="use a GGUF of this model",
                )
            case {"type": "Prepend", "prepend": "\u2581"}:
                prefix = True
            case {"type": "Metaspace"}:
                prefix = prefix or prepends(step)
    return prefix


def _byte_level(files: Files) -> Read:
    tokens = {index: Token(text, 0.0, NORMAL) for text, index in _words(files).items()}
    merges = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in _merges(files)]
    return Read("gpt2", tokens, [("merges", "array:string", merges)])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(files: Files) -> dict[str, int]:
    words = files.tokenizer["model"]["vocab"]
    if not all(type(index) is int and index >= 0 for index in words.values()):
        raise Refusal(
            f"{files.folder / 'tokenizer.json'} has ids that are not numbers",
            hint="fetch the file again",
        )
    return words  # type: ignore[no-any-return]


def _merges(files: Files) -> list[tuple[str, str]]:
    """Merges in either spelling: "a b", or a pair."""
    pairs = []
    for merge in _list(files.tokenizer["model"].get("merges")):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(part, str) for part in parts)
        ):
            raise Refusal(
                f"{files.folder / 'tokenizer.json'} has a merge that is no pair: {str(merge)[:60]!r}",
                hint="fetch the file again",
            )
        pairs.append((parts[0], parts[1]))
    return pairs


def _added(files: Files) -> dict[int, Added]:
    """Added tokens by row, from every place they may stand in."""
    listed: list[tuple[Any, Any]] = [
        (index, {"content": text})
        for text, index in _optional(files.folder / "added_tokens.json").items()
    ]
    decoder = files.settings.get("added_tokens_decoder")
    listed += decoder.items() if isinstance(decoder, dict) else ()
    listed += [
        (item.get("id"), item)
        for item in _list(files.tokenizer.get("added_tokens"))
        if isinstance(item, dict)
    ]
    found: dict[int, Added] = {}
    for index, item in listed:
        number = str(index) if type(index) in (int, str) else ""
        text = item.get("content") if isinstance(item, dict) else None
        if number.isascii() and number.isdecimal() and len(number) < 10 and isinstance(text, str):
            found[int(number)] = Added(text, **{name: item.get(name) is True for name in FLAGS})
    return found


FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def _special(
    files: Files, config: Config, words: list[Token], read: Read
) -> tuple[Extra, list[str]]:
    """The special tokens' ids, and what llama.cpp puts around a text; a token that is not there is
    not put.
    """
    texts = [word.text for word in words]
    ids = special.ids(texts, files.settings, files.generation, config.values, str(files.folder))
    if read.unknown is not None:
        ids["unknown"] = read.unknown
    first, last, notes = special.around(files.tokenizer, files.settings, read.kind != "gpt2")
    found: Extra = [(f"{name}_token_id", "uint32", index) for name, index in ids.items()]
    found += [
        ("add_bos_token", "bool", first and "bos" in ids),
        ("add_eos_token", "bool", last and "eos" in ids),
    ]
    if "eos" not in ids:
        notes.append("no token ends an answer in this model: generation stops at its length only")
    return found, notes
