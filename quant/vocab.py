"""A checkpoint folder's tokenizer as the entries of a GGUF vocabulary.

SentencePiece (tokenizer.model, or a tokenizer.json made from one) and byte-level BPE (tokenizer.json); added
tokens, special ids, end-of-turn tokens and the chat template. It knows files and entries, no tensors.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant import pretokenizer, sentencepiece, special
from quant import templates as chat
from quant.archs.base import Config
from quant.errors import Refusal
from quant.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quant.tensors import read_json
from quant.writer import entry

SPACE = "\u2581"
MOST = 1 << 22  # rows: sixteen times the largest vocabulary there is; what a file claims is laid out in memory


@dataclass(frozen=True, slots=True)
class Token:
    """One row of the vocabulary; `type` is a GGUF token type."""

    text: str
    score: float
    type: int


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


def load(folder: Path, config: Config, pre: str | None = None, *, spare: bool = False) -> Vocab:
    """Read a folder's tokenizer; its rows are padded to the config's vocab_size.

    `pre` names the pre-tokenizer of byte-level BPE instead of its structure. With `spare`, a config without a
    vocab_size takes the tokenizer's, and added tokens beyond are left out: Gemma 3 has one for images.
    """
    files = Files(
        folder, *(_optional(folder / f"{name}.json") for name in ("tokenizer", "tokenizer_config", "generation_config"))
    )
    model = files.tokenizer.get("model")
    if (folder / "tokenizer.model").is_file():
        kind, tokens, entries = _sentencepiece(files)
    elif isinstance(model, dict) and model.get("type") == "BPE" and isinstance(model.get("vocab"), dict):
        kind, tokens, entries = _pieces(files) if model.get("byte_fallback") else _byte_level(files)
    else:
        raise _unread(folder, model)
    size = config.number("vocab_size", default=max(tokens, default=0) + 1 if spare else None)
    if size > MOST:
        raise Refusal(
            f"{folder}: a vocabulary of {size:,} rows; {MOST:,} are the most that are read",
            hint="fetch config.json and the tokenizer again",
        )
    added = _added(files)
    outside = [text for index, (text, _) in added.items() if index >= size and spare]
    added = {index: token for index, token in added.items() if index < size or not spare}
    rows = _rows(tokens, added, size, folder, scored=kind != "gpt2")
    ids, notes = _special(files, config, rows, pieces=kind != "gpt2")
    templates, more = chat.load(folder, files.settings)
    table = [
        ("model", "string", kind),
        ("pre", "string", _pre(files, kind, pre, bos=any(name == "bos_token_id" for name, *_ in ids))),
        ("tokens", "array:string", [row.text for row in rows]),
        *([("scores", "array:float32", [row.score for row in rows])] if kind != "gpt2" else []),
        ("token_type", "array:int32", [row.type for row in rows]),
        *entries,
        *ids,
    ]
    found = [(f"tokenizer.ggml.{name}", entry(form, value)) for name, form, value in table]
    found += [(f"tokenizer.{name}", entry(form, value)) for name, form, value in chat.entries(templates)]
    left = [f"token {text!r} is left out: the model has no row for it" for text in outside]
    return Vocab(tuple(found), (*left, *notes, *more), len(rows))


def _unread(folder: Path, model: Any) -> Refusal:
    """Why there is no vocabulary: no file, or one of a kind whose text llama.cpp splits otherwise."""
    kind = model.get("type") if isinstance(model, dict) else None
    if kind in ("Unigram", "WordPiece", "WordLevel"):
        return Refusal(
            f"{folder / 'tokenizer.json'} is of type {kind}: llama.cpp would give text other ids than the model knows",
            hint="byte-level BPE and SentencePiece BPE are converted",
        )
    return Refusal(
        f"{folder} has no tokenizer: neither tokenizer.model nor a tokenizer.json of type BPE",
        hint="copy the tokenizer files of the model it was made from into the folder",
    )


def _pre(files: Files, kind: str, pre: str | None, bos: bool) -> str:
    """The pre-tokenizer's name; only byte-level BPE has one. Without a BOS the name is one that has none."""
    if kind == "gpt2":
        name = pretokenizer.find(files.tokenizer, str(files.folder / "tokenizer.json"), pre).name
        return name if bos or pre else pretokenizer.WITHOUT_BOS.get(name, name)
    if pre:
        raise Refusal(f"{files.folder} has no byte-level BPE: it takes no pre-tokenizer", hint="leave --pre out")
    return "default"


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


Extra = list[tuple[str, str, Any]]


def _sentencepiece(files: Files) -> tuple[str, dict[int, Token], Extra]:
    file = files.folder / "tokenizer.model"
    model = sentencepiece.load(file)
    if model.model_type != sentencepiece.BPE:
        raise Refusal(
            f"{file} is not a BPE model: llama.cpp would split text otherwise", hint="use a GGUF of this model"
        )
    tokens = {i: Token(piece.text.decode(), piece.score, piece.type) for i, piece in enumerate(model.pieces)}
    prefix = files.settings.get("add_prefix_space")
    prefix = model.dummy_prefix if prefix is None else bool(prefix)
    return "llama", tokens, [] if prefix else [("add_space_prefix", "bool", False)]


def _pieces(files: Files) -> tuple[str, dict[int, Token], Extra]:
    """SentencePiece from tokenizer.json: a piece's score is the rank of the merges that make it.

    llama.cpp merges by the score of the result, tokenizers by the rank of the pair: the same where the merges
    of each result stand together, as in every tokenizer.json made from a tokenizer.model.
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
        hexadecimal = len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        kind = UNKNOWN if text == unknown else BYTE if hexadecimal else NORMAL
        tokens[index] = Token(text, -float(ranks.get(text, len(ranks))), kind)
    prefix = SPACE in str(files.tokenizer.get("normalizer")) and "'Prepend'" in str(files.tokenizer.get("normalizer"))
    metaspace = files.tokenizer.get("pre_tokenizer")
    metaspace = metaspace if isinstance(metaspace, dict) else {}
    prefix = prefix or metaspace.get("prepend_scheme") in ("first", "always") or bool(metaspace.get("add_prefix_space"))
    return "llama", tokens, [] if prefix else [("add_space_prefix", "bool", False)]


def _byte_level(files: Files) -> tuple[str, dict[int, Token], Extra]:
    tokens = {index: Token(text, 0.0, NORMAL) for text, index in _words(files).items()}
    merges = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in _merges(files)]
    return "gpt2", tokens, [("merges", "array:string", merges)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(files: Files) -> dict[str, int]:
    words = files.tokenizer["model"]["vocab"]
    if not all(type(index) is int and index >= 0 for index in words.values()):
        raise Refusal(f"{files.folder / 'tokenizer.json'} has ids that are not numbers", hint="fetch the file again")
    return words  # type: ignore[no-any-return]


def _merges(files: Files) -> list[tuple[str, str]]:
    """Merges in either spelling: "a b", or a pair."""
    pairs = []
    for merge in _list(files.tokenizer["model"].get("merges")):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise Refusal(
                f"{files.folder / 'tokenizer.json'} has a merge that is no pair: {merge!r}", hint="fetch the file again"
            )
        pairs.append((parts[0], parts[1]))
    return pairs


def _added(files: Files) -> dict[int, tuple[str, bool]]:
    """Added tokens: id -> (text, special), from every place they may stand in."""
    found: dict[int, tuple[str, bool]] = {}
    legacy = _optional(files.folder / "added_tokens.json")
    found |= {index: (text, False) for text, index in legacy.items() if isinstance(index, int)}
    decoder = files.settings.get("added_tokens_decoder")
    listed = [*decoder.items()] if isinstance(decoder, dict) else []
    listed += [(item.get("id"), item) for item in _list(files.tokenizer.get("added_tokens")) if isinstance(item, dict)]
    for index, item in listed:
        if isinstance(item, dict) and isinstance(item.get("content"), str) and str(index).isdecimal():
            found[int(index)] = (item["content"], bool(item.get("special")))
    return found


def _rows(
    tokens: dict[int, Token], added: dict[int, tuple[str, bool]], size: int, folder: Path, scored: bool
) -> list[Token]:
    """The whole table: added tokens over ordinary ones, rows without a token filled up."""
    for index, (text, flag) in added.items():
        old = tokens.get(index)
        if old and old.type in (UNKNOWN, BYTE):
            continue
        control = flag or looks_special(text)
        plain = text if control else text.replace(SPACE, " ")
        tokens[index] = Token(plain, -1000.0 if scored else 0.0, CONTROL if control else USER_DEFINED)
    if tokens and (last := max(tokens)) >= size:
        raise Refusal(
            f"{folder}: token {last} ({tokens[last].text!r}) lies outside of the vocab_size {size} in config.json",
            hint="use the config.json and the tokenizer of the same model",
        )
    return [tokens.get(index) or Token(f"[PAD{index}]", -10000.0, UNUSED) for index in range(size)]


def looks_special(text: str) -> bool:
    """Whether a token is a control token whatever its file says (TextModel.does_token_look_special)."""
    return (
        text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
        or (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
    )


def _special(files: Files, config: Config, rows: list[Token], pieces: bool) -> tuple[Extra, list[str]]:
    """The special tokens' ids, and what llama.cpp puts around a text; a token that is not there is not put."""
    texts = [row.text for row in rows]
    ids = special.ids(texts, files.settings, files.generation, config.values, str(files.folder))
    first, last, notes = special.around(files.tokenizer, files.settings, pieces)
    found: Extra = [(f"{name}_token_id", "uint32", index) for name, index in ids.items()]
    found += [("add_bos_token", "bool", first and "bos" in ids), ("add_eos_token", "bool", last and "eos" in ids)]
    if "eos" not in ids:
        notes.append("no token ends an answer in this model: generation stops at its length only")
    return found, notes
