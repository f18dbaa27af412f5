"""Converts a checkpoint folder's tokenizer to the metadata entries of a GGUF vocabulary.

Four kinds of tokenizers are read: SentencePiece (tokenizer.model, or a tokenizer.json made from
one), Unigram, WordPiece and byte-level BPE (tokenizer.json, tekken.json or tiktoken.model). Added
tokens, special ids, end-of-turn tokens and the chat template are included.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quant.checkpoint.config import CheckpointConfig
from quant.checkpoint.folder import CheckpointFolder
from quant.errors import UserError
from quant.gguf.layout import encode_entry
from quant.tokenizer import (
    chat_templates,
    pre_tokenizer,
    sentencepiece_model,
    special_tokens,
    token_table,
    tokenizer_files,
    unigram,
    wordpiece,
)
from quant.tokenizer.json_nodes import flatten_sequence, prepends_space
from quant.tokenizer.sentencepiece_model import (
    BYTE,
    MAX_PIECES,
    NORMAL,
    UNKNOWN,
    SentencePieceModel,
)
from quant.tokenizer.token_table import AddedToken, VocabularyToken

MODELS_WITHOUT_SCORES = ("gpt2", wordpiece.TOKENIZER_MODEL)
# llama.cpp's kind of a SentencePiece BPE whose merges are ordered by pairs, as in Gemma 4. With it,
# a BOS is added to every text.
PAIR_BPE_MODEL = "gemma4"
PAIR_BPE_SCORE = -1000.0  # llama.cpp's converter writes it; it is not used
# Special tokens of Gemma 4 that an answer contains, so that a chat parser can read them
# (Gemma4Model.set_vocab of llama.cpp, conversion/gemma.py).
VISIBLE_TOKENS = frozenset(
    {
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    }
)
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A finished vocabulary: its metadata entries (key, stored type number and value), notes for
    the user, and the number of rows.
    """

    entries: tuple[tuple[str, bytes], ...]
    notes: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of the tokenizer's JSON files in a folder: tokenizer.json, tokenizer_config.json
    (`settings`), generation_config.json and added_tokens.json. The content of a missing file is {}.
    """

    folder: Path
    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    generation: dict[str, Any]
    added_tokens: dict[str, Any]


ExtraEntries = list[tuple[str, str, Any]]


@dataclass(frozen=True, slots=True)
class ParsedTokenizer:
    """A parsed tokenizer. `model_name` is llama.cpp's name for the kind of tokenizer ("llama",
    "gpt2", "t5", "bert"). `tokens` are its tokens by row. `entries` are the metadata that only this
    kind has, as (key, type, value). `unknown_row` is the row of the unknown token, None if the kind
    has none.
    """

    model_name: str
    tokens: dict[int, VocabularyToken]
    entries: ExtraEntries
    unknown_row: int | None = None


def load_vocabulary(
    folder: CheckpointFolder,
    config: CheckpointConfig,
    pre: str | None = None,
    *,
    size_from_tokenizer: bool = False,
) -> GgufVocabulary:
    """Read a folder's tokenizer and convert it. The vocabulary is padded to the config's
    vocab_size.

    `pre` overrides the pre-tokenizer of a byte-level BPE. With `size_from_tokenizer`, a config
    without vocab_size takes the tokenizer's size, and added tokens beyond the size are left out
    (Gemma 3 has one for images). Raises UserError for tokenizers that llama.cpp cannot run in the
    same way.
    """
    files = _read_files(folder)
    parsed = _parse(files)
    if parsed.model_name == wordpiece.TOKENIZER_MODEL:
        files = replace(files, settings=wordpiece.complete_settings(files.settings))
    has_scores = parsed.model_name not in MODELS_WITHOUT_SCORES
    size = config.get_int(
        "vocab_size", default=max(parsed.tokens, default=0) + 1 if size_from_tokenizer else None
    )
    if size > MAX_PIECES:
        raise UserError(
            f"{folder.path}: a vocabulary of {size:,} rows; the limit is {MAX_PIECES:,}",
            hint="fetch config.json and the tokenizer again",
        )
    added = _added_tokens(files)
    if parsed.model_name == PAIR_BPE_MODEL:
        added = {
            index: replace(token, special=token.special and token.text not in VISIBLE_TOKENS)
            for index, token in added.items()
        }
    left_out_texts = [
        token.text for index, token in added.items() if index >= size and size_from_tokenizer
    ]
    added = {
        index: token for index, token in added.items() if index < size or not size_from_tokenizer
    }
    token_rows = token_table.build_token_table(
        parsed.tokens, added, size, str(folder.path), has_scores=has_scores
    )
    ids, notes = _special_entries(files, config, token_rows, parsed)
    templates, template_notes = chat_templates.load_templates(folder, files.settings)
    ggml_entries = [
        ("model", "string", parsed.model_name),
        (
            "pre",
            "string",
            _pre_tokenizer_name(
                files, parsed.model_name, pre, bos=any(name == "bos_token_id" for name, *_ in ids)
            ),
        ),
        ("tokens", "array:string", [row.text for row in token_rows]),
        *([("scores", "array:float32", [row.score for row in token_rows])] if has_scores else []),
        ("token_type", "array:int32", [row.type for row in token_rows]),
        *parsed.entries,
        *ids,
        *_separator_entries(files.tokenizer, parsed.model_name),
    ]
    entries = [
        (f"tokenizer.ggml.{name}", encode_entry(form, value)) for name, form, value in ggml_entries
    ]
    entries += [
        (f"tokenizer.{name}", encode_entry(form, value))
        for name, form, value in chat_templates.template_entries(templates)
    ]
    left_out_notes = [
        f"token {text!r} is left out: the model has no row for it" for text in left_out_texts
    ]
    return GgufVocabulary(
        tuple(entries), (*left_out_notes, *notes, *template_notes), len(token_rows)
    )


def load_pieces(folder: CheckpointFolder) -> tuple[SentencePieceModel, dict[int, AddedToken]]:
    """Return a folder's tokenizer.model, with the changes that its settings make, and its added
    tokens by row. The verification uses them.
    """
    files = _read_files(folder)
    return _load_sentencepiece_model(files), _added_tokens(files)


def _read_files(folder: CheckpointFolder) -> TokenizerFiles:
    """Read the tokenizer's JSON files of a folder."""
    return TokenizerFiles(
        folder.path,
        tokenizer=tokenizer_files.read_tokenizer_json(folder),
        settings=tokenizer_files.read_settings(folder),
        generation=folder.read_optional_json("generation_config.json"),
        added_tokens=folder.read_optional_json("added_tokens.json"),
    )


def _parse(files: TokenizerFiles) -> ParsedTokenizer:
    """Parse the tokenizer's model. Raises UserError if there is none or if llama.cpp does not
    support it.
    """
    model = files.tokenizer.get("model")
    if (files.folder / "tokenizer.model").is_file():
        return _parse_sentencepiece(files)
    match model:
        case {"type": "BPE", "vocab": {}, **rest}:
            return (
                _parse_sentencepiece_json(files)
                if rest.get("byte_fallback")
                else _parse_byte_level(files)
            )
        case {"type": "Unigram"}:
            return _parsed_unigram(
                unigram.read_unigram_json(files.tokenizer, str(files.folder / "tokenizer.json"))
            )
        case {"type": "WordPiece"}:
            location = str(files.folder / "tokenizer.json")
            pieces, unknown = wordpiece.convert_pieces(
                _piece_ids(files), files.tokenizer["model"], location
            )
            entries = wordpiece.normalization_entries(files.tokenizer, location)
            return ParsedTokenizer(wordpiece.TOKENIZER_MODEL, pieces, entries, unknown)
    raise _unsupported_model_error(files.folder, model)


def _unsupported_model_error(folder: Path, model: Any) -> UserError:
    """Return the error for a tokenizer that is missing, or of a kind that llama.cpp does not
    support. `model` is the "model" of tokenizer.json.
    """
    kind = model.get("type") if isinstance(model, dict) else None
    if kind == "WordLevel":
        return UserError(
            f"{folder / 'tokenizer.json'} is of type {kind}: llama.cpp would give text other ids "
            "than the model was trained with",
            hint="byte-level BPE, SentencePiece BPE, Unigram and WordPiece are supported",
        )
    return UserError(
        f"{folder} has no tokenizer: neither tokenizer.model nor a tokenizer.json of type BPE, "
        "Unigram or WordPiece",
        hint="copy the tokenizer files of the model it was made from into the folder",
    )


def _pre_tokenizer_name(files: TokenizerFiles, kind: str, pre: str | None, bos: bool) -> str:
    """Return the value of tokenizer.ggml.pre. Only byte-level BPE has a choice of pre-tokenizers;
    all other kinds get "default".

    `pre` is the user's choice. If `bos` is false, the model has no BOS, and a name is chosen with
    which llama.cpp adds no BOS by default.
    """
    if kind == "gpt2":
        name = pre_tokenizer.find_pre_tokenizer(
            files.tokenizer, str(files.folder / "tokenizer.json"), pre
        ).name
        return name if bos or pre else pre_tokenizer.NAMES_WITHOUT_BOS.get(name, name)
    if pre:
        raise UserError(
            f"{files.folder} is not byte-level BPE, so it has no pre-tokenizer to choose",
            hint="leave --pre out",
        )
    return kind if kind == PAIR_BPE_MODEL else "default"


def _load_sentencepiece_model(files: TokenizerFiles) -> SentencePieceModel:
    """Read tokenizer.model, and change its add_dummy_prefix if tokenizer_config.json says so."""
    model = sentencepiece_model.load_sentencepiece(files.folder / "tokenizer.model")
    prefix = files.settings.get("add_prefix_space")
    return model if prefix is None else replace(model, add_dummy_prefix=bool(prefix))


def _parse_sentencepiece(files: TokenizerFiles) -> ParsedTokenizer:
    """Parse tokenizer.model. Raises UserError for settings that llama.cpp does not support."""
    file, model = files.folder / "tokenizer.model", _load_sentencepiece_model(files)
    if model.model_type == sentencepiece_model.UNIGRAM:
        return _parsed_unigram(unigram.convert_unigram(model, str(file)))
    if model.model_type != sentencepiece_model.BPE:
        raise UserError(
            f"{file} splits text into words or characters, as llama.cpp does not",
            hint="SentencePiece models of type BPE and Unigram are supported",
        )
    # if there is a tokenizer.json, the verification shows whether this matters
    for is_used, reason in (
        (model.charsmap, "has rules for characters (precompiled_charsmap)"),
        (model.remove_extra_whitespaces, "merges runs of spaces (remove_extra_whitespaces)"),
        (model.treat_whitespace_as_suffix, "puts spaces after words (treat_whitespace_as_suffix)"),
        (not model.escape_whitespaces, "leaves spaces as they are (escape_whitespaces)"),
    ):
        if is_used and not files.tokenizer:
            raise UserError(
                f"{file} {reason}: llama.cpp's SentencePiece tokenizer does not",
                hint="add a tokenizer.json",
            )
    tokens = {
        i: VocabularyToken(piece.text, piece.score, piece.type)
        for i, piece in enumerate(model.pieces)
    }
    return ParsedTokenizer("llama", tokens, _prefix_entries(model.add_dummy_prefix))


def _parsed_unigram(model: unigram.UnigramModel) -> ParsedTokenizer:
    """Return a Unigram model as a ParsedTokenizer."""
    return ParsedTokenizer(
        unigram.TOKENIZER_MODEL, model.tokens, model.normalization.entries(), model.unknown_row
    )


def _prefix_entries(prefix: bool) -> ExtraEntries:
    """Return the metadata entry that says that no space is added in front of a text. llama.cpp adds
    one by default.
    """
    return [] if prefix else [("add_space_prefix", "bool", False)]


def _parse_sentencepiece_json(files: TokenizerFiles) -> ParsedTokenizer:
    """Parse a SentencePiece BPE model in tokenizer.json. A piece's score is the negative rank of
    the first merge that makes it.

    llama.cpp merges in the order of the scores of the resulting pieces, but the tokenizers library
    in the order of the ranks of the pairs. Both orders agree if all merges that make a piece are
    neighbors in the list, as in every tokenizer.json made from a tokenizer.model. Otherwise the
    merges themselves are written. Raises UserError if the tokenizer adds a space then, too.
    """
    prefix, merges = _adds_prefix(files), _merges(files)
    ranks = _piece_ranks(merges)
    if ranks is None and prefix:
        raise UserError(
            f"{files.folder / 'tokenizer.json'} orders its merges by pairs and adds a space in "
            "front of a text, which llama.cpp cannot follow",
            hint="add the model's tokenizer.model to the folder",
        )
    # llama.cpp's converter writes the unknown token of such a BPE as a control token
    unknown = files.tokenizer["model"].get("unk_token") if ranks is not None else None
    tokens = {}
    for text, index in _piece_ids(files).items():
        kind = UNKNOWN if text == unknown else BYTE if BYTE_PIECE.fullmatch(text) else NORMAL
        score = PAIR_BPE_SCORE if ranks is None else -float(ranks.get(text, len(ranks)))
        tokens[index] = VocabularyToken(text, score, kind)
    if ranks is not None:
        return ParsedTokenizer("llama", tokens, _prefix_entries(prefix))
    pairs = [f"{left} {right}" for left, right in merges]
    entries = [("merges", "array:string", pairs), *_prefix_entries(prefix)]
    return ParsedTokenizer(PAIR_BPE_MODEL, tokens, entries)


def _piece_ranks(merges: list[tuple[str, str]]) -> dict[str, int] | None:
    """Return the rank of each merged piece, or None if the merges of a piece are not neighbors in
    the list.
    """
    ranks: dict[str, int] = {}
    previous = ""
    for rank, (left, right) in enumerate(merges):
        merged = left + right
        if merged != previous and merged in ranks:
            return None
        ranks.setdefault(merged, rank)
        previous = merged
    return ranks


def _adds_prefix(files: TokenizerFiles) -> bool:
    """Return whether a tokenizer.json adds a space in front of a text.

    Raises UserError for steps with a regular expression, which llama.cpp's SentencePiece tokenizer
    does not support.
    """
    prefix = False
    steps = flatten_sequence(files.tokenizer.get("normalizer"), "normalizers")
    for step in (*steps, *flatten_sequence(files.tokenizer.get("pre_tokenizer"), "pretokenizers")):
        match step:
            case {"pattern": {"Regex": regex}}:
                raise UserError(
                    f"{files.folder / 'tokenizer.json'} splits or changes text by the expression "
                    f"{str(regex)[:60]!r}: llama.cpp's SentencePiece tokenizer does not",
                    hint="use a GGUF of this model",
                )
            case {"type": "Prepend", "prepend": "\u2581"}:
                prefix = True
            case {"type": "Metaspace"}:
                prefix = prefix or prepends_space(step)
    return prefix


def _parse_byte_level(files: TokenizerFiles) -> ParsedTokenizer:
    """Parse a byte-level BPE model in tokenizer.json."""
    tokens = {
        index: VocabularyToken(text, 0.0, NORMAL) for text, index in _piece_ids(files).items()
    }
    merges = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in _merges(files)]
    return ParsedTokenizer("gpt2", tokens, [("merges", "array:string", merges)])


def _as_list(value: Any) -> list[Any]:
    """Return a JSON value if it is a list, else []."""
    return value if isinstance(value, list) else []


def _piece_ids(files: TokenizerFiles) -> dict[str, int]:
    """Return the ids of the model's pieces by text. Raises UserError if an id is not a valid
    number.
    """
    words: dict[str, int] = files.tokenizer["model"].get("vocab")
    if not isinstance(words, dict) or not all(
        type(index) is int and index >= 0 for index in words.values()
    ):
        raise UserError(
            f"{files.folder / 'tokenizer.json'} has ids that are not valid numbers",
            hint="fetch the file again",
        )
    return words


def _merges(files: TokenizerFiles) -> list[tuple[str, str]]:
    """Return the merges as pairs. tokenizer.json has them as pairs or as texts "a b"."""
    pairs = []
    for merge in _as_list(files.tokenizer["model"].get("merges")):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(part, str) for part in parts)
        ):
            raise UserError(
                f"{files.folder / 'tokenizer.json'} has a merge that is not a pair: "
                f"{str(merge)[:60]!r}",
                hint="fetch the file again",
            )
        pairs.append((parts[0], parts[1]))
    return pairs


def _added_tokens(files: TokenizerFiles) -> dict[int, AddedToken]:
    """Return the added tokens by row, collected from all files that may list them."""
    listed: list[tuple[Any, Any]] = [
        (index, {"content": text}) for text, index in files.added_tokens.items()
    ]
    decoder = files.settings.get("added_tokens_decoder")
    listed += decoder.items() if isinstance(decoder, dict) else ()
    listed += [
        (item.get("id"), item)
        for item in _as_list(files.tokenizer.get("added_tokens"))
        if isinstance(item, dict)
    ]
    added: dict[int, AddedToken] = {}
    for index, item in listed:
        number = str(index) if type(index) in (int, str) else ""
        text = item.get("content") if isinstance(item, dict) else None
        if number.isascii() and number.isdecimal() and len(number) < 10 and isinstance(text, str):
            added[int(number)] = AddedToken(
                text, **{name: item.get(name) is True for name in TOKEN_FLAGS}
            )
    return added


def _separator_entries(tokenizer: dict[str, Any], kind: str) -> ExtraEntries:
    """Return the metadata entry that says whether a pair of texts has a second separator between
    them, as RoBERTa's tokenizers add it. llama.cpp adds one by default for WordPiece only.
    """
    has_second = special_tokens.count_separators(tokenizer) > 1
    if not has_second and kind != wordpiece.TOKENIZER_MODEL:
        return []
    return [("add_sep_token", "bool", has_second)]


TOKEN_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def _special_entries(
    files: TokenizerFiles,
    config: CheckpointConfig,
    tokens: list[VocabularyToken],
    parsed: ParsedTokenizer,
) -> tuple[ExtraEntries, list[str]]:
    """Return the metadata entries for special tokens and for the tokens that llama.cpp adds around
    a text, and notes for the user.

    `tokens` are the vocabulary's rows. A BOS or EOS that the model does not have is not added to
    texts.
    """
    texts = [token.text for token in tokens]
    ids, end_notes = special_tokens.find_special_ids(
        texts, files.settings, files.generation, config.values
    )
    if parsed.unknown_row is not None:
        ids["unknown"] = parsed.unknown_row
    always_adds_bos = parsed.model_name == PAIR_BPE_MODEL
    adds_bos, adds_eos, notes = special_tokens.find_surrounding_tokens(
        files.tokenizer, files.settings, parsed.model_name != "gpt2"
    )
    keys: ExtraEntries = [(f"{name}_token_id", "uint32", index) for name, index in ids.items()]
    keys += [
        ("add_bos_token", "bool", (adds_bos or always_adds_bos) and "bos" in ids),
        ("add_eos_token", "bool", adds_eos and "eos" in ids),
    ]
    if "eos" not in ids:
        notes.append("no token ends an answer in this model: generation stops only at its limit")
    return keys, [*end_notes, *notes]
