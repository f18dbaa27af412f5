"""Proves a vocabulary: llama.cpp and the tokenizers library must encode the same strings alike.

Where llama.cpp is known to compute otherwise, the checkpoint's tokenizer is changed to do the same and must then
agree to the last id: such differences are told, any other fails the conversion. It knows ids, not weights, and
llama.cpp only as an object that is handed in.
"""

import contextlib
import json
import random
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from quant import battery, pretokenizer
from quant.errors import Refusal
from quant.header import Array, Value
from quant.tensors import read_json

SHOWN = 10
SAMPLE = 3000  # of the vocabulary's words, unless every one has to be compared
SPACE = "\u2581"
HELLO = "Hello world"
# How byte-level vocabularies spell bytes: printable ones as themselves, the others from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}


class Tokenize(Protocol):
    """The finished vocabulary as llama.cpp runs it."""

    def tokenize(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Text to ids; `special` reads control tokens out of the text, `add_special` adds BOS and EOS."""

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


def prove(folder: Path, metadata: Mapping[str, Value], ours: Tokenize, pre: str | None = None) -> Proof:
    """Compare a folder's tokenizer.json with the finished vocabulary; raises Refusal with the first ten differences."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return Proof(0, (f"{folder} has no tokenizer.json: the tokenizer was not compared with the model's own",))
    return _Case(file, read_json(file), metadata, ours, pre).run()


class _Case:
    """One comparison of the checkpoint's tokenizer with llama.cpp's."""

    def __init__(
        self, file: Path, values: dict[str, Any], metadata: Mapping[str, Value], ours: Tokenize, pre: str | None
    ) -> None:
        self.file, self.values, self.metadata, self.ours = file, values, metadata, ours
        self.kind = metadata.get("tokenizer.ggml.model")
        bytewise = self.kind == "gpt2"
        self.found = pretokenizer.find(values, str(file), pre) if bytewise else pretokenizer.Found("default")
        self.composes = bytewise and pretokenizer.normalizes(values)
        self.exact = _open(file)
        words = metadata.get("tokenizer.ggml.tokens")
        if isinstance(words, Array) and any(item["id"] >= words.count for item in _added(values)):
            self.values = _within(values, words.count)
            self.exact = tokenizers.Tokenizer.from_str(json.dumps(self.values))
        self.steps = _steps(self.found, self.kind, metadata.get("tokenizer.ggml.add_space_prefix"))
        self.alike: dict[tuple[str, ...], tokenizers.Tokenizer] = {}
        self.explained: dict[str, list[str]] = {}

    def run(self) -> Proof:
        """Read every string twice: its special tokens as tokens, and as text."""
        words = list(_words(self.values, self.kind, SAMPLE if self.found.sure else None))
        texts = [*battery.texts(), *battery.own([item["content"] for item in _added(self.values)], words)]
        differences = [*self._compare(texts, special=True), *self._compare(texts, special=False)]
        if not self.found.sure:
            differences += self._compare(words, special=True)
        if differences:
            raise self._refusal(differences)
        return Proof(len(texts), tuple(self._notes(len(texts))))

    def _compare(self, texts: list[str], special: bool) -> Iterator[Difference]:
        self.exact.encode_special_tokens = not special
        for text in texts:
            given = unicodedata.normalize("NFC", text) if self.composes else text
            ours = self.ours.tokenize(given, special=special)
            theirs = self.exact.encode(text, add_special_tokens=False).ids
            if ours != theirs:
                habit = self._habit(given, ours, special)
                if habit and (habit != "types" or special):
                    self.explained.setdefault(habit, []).append(text)
                elif not habit:
                    yield Difference(text, ours, theirs)

    def _habit(self, text: str, ours: list[int], special: bool) -> str | None:
        """The habit of llama.cpp that explains a difference exactly; "several" if more than one is needed."""
        several = ("types", "flags", *self.steps)
        for names in (several, *((name,) for name in several)):
            if names not in self.alike:
                self.alike[names] = self._alike(names)
            alike = self.alike[names]
            alike.encode_special_tokens = not special
            pieces = alike.encode(text, add_special_tokens=False).tokens
            same = [self.exact.token_to_id(piece) for piece in pieces] == ours
            if len(names) == 1 and same:
                return names[0]
            if names == several and not same:
                return None
        return "several"

    def _alike(self, names: tuple[str, ...]) -> tokenizers.Tokenizer:
        """The checkpoint's tokenizer with some habits of llama.cpp, upon the same model."""
        alike = tokenizers.Tokenizer(self.exact.model)
        alike.normalizer, alike.pre_tokenizer = self.exact.normalizer, self.exact.pre_tokenizer
        for name in self.steps.keys() & set(names):
            alike.normalizer, alike.pre_tokenizer = self.steps[name]
        for index, token in sorted(self.exact.get_added_tokens_decoder().items()):
            if "flags" in names:
                token = tokenizers.AddedToken(token.content, special=token.special, normalized=False)
            if "types" in names:
                token.special = self.ours.control(index)
            alike.add_tokens([token])
        if "types" in names:
            alike.add_special_tokens(self.claimed)
        return alike

    @cached_property
    def claimed(self) -> list[str]:
        """Ordinary words that llama.cpp takes for special tokens, by their text."""
        added = self.exact.get_added_tokens_decoder()
        odd = (word for word in _vocabulary(self.values) if word[:2].strip("_" + SPACE)[:1] in ("<", "["))
        found = ((word, self.exact.token_to_id(word)) for word in odd)
        return [w for w, index in found if index is not None and index not in added and self.ours.control(index)]

    def _notes(self, count: int) -> Iterator[str]:
        if self.composes:
            yield "the model's tokenizer composes characters (NFC), llama.cpp takes them as they come"
        stripped = [item["content"] for item in _added(self.values) if item.get("lstrip") or item.get("rstrip")]
        told = {
            "dialect": f"llama.cpp's {self.found.name} tells case and combining marks by ASCII letters alone",
            "spaces": "llama.cpp puts a space before text that starts with one or follows a special token",
            "flags": f"llama.cpp takes added tokens as they stand, and strips no space ({', '.join(stripped[:5])})",
            "types": f"llama.cpp takes {', '.join(self.claimed)} for special",
            "several": "llama.cpp takes added tokens as they stand, and splits or spaces text in its own way",
        }
        for habit, texts in self.explained.items():
            if habit in told:
                yield (
                    f"{told[habit]}: {len(set(texts))} of {count} test strings get other ids than the model's own "
                    f"tokenizer gives, as in every GGUF of this model; the first is {texts[0]!r}"
                )
        yield from self._around()

    def _around(self) -> Iterator[str]:
        """What is put around a text: a GGUF can only say BOS and EOS."""
        self.exact.encode_special_tokens = False
        ours = self.ours.tokenize(HELLO, special=True, add_special=True)
        body = self.exact.encode(HELLO, add_special_tokens=False).ids
        theirs = self.exact.encode(HELLO).ids
        if len(theirs) > len(body) + 2 or (len(theirs) > len(body) and ours != theirs and theirs[-len(body) :] == body):
            extra = self._pieces([index for index in theirs if index not in body])
            yield f"the model's tokenizer puts {extra} around a text, llama.cpp {self._pieces(ours)!r}"

    def _refusal(self, differences: list[Difference]) -> Refusal:
        shown = "".join(
            f"\n  {item.text!r}\n    llama.cpp: {self._pieces(item.ours)}\n    the model: {self._pieces(item.theirs)}"
            for item in differences[:SHOWN]
        )
        first = f"; the first {SHOWN}:" if len(differences) > SHOWN else ":"
        return Refusal(
            f"llama.cpp would encode {len(differences)} test strings otherwise than {self.file} does{first}{shown}",
            hint="try another --pre, or use a GGUF of this model"
            if self.kind == "gpt2"
            else "use a GGUF of this model",
        )

    def _pieces(self, ids: list[int]) -> str:
        pieces = [self.exact.id_to_token(index) or str(index) for index in ids]
        return " ".join(pieces[:24]) + " …" * (len(pieces) > 24)


Steps = tuple[tokenizers.normalizers.Normalizer | None, tokenizers.pre_tokenizers.PreTokenizer | None]


def _steps(found: pretokenizer.Found, kind: Value | None, prefix: Value | None) -> dict[str, Steps]:
    """The expressions (dialect) or the spaces of SentencePiece as llama.cpp does them."""
    nodes: dict[str, Any] = {"normalizer": None, "pre_tokenizer": None}
    if found.dialect:
        name, nodes["pre_tokenizer"] = "dialect", pretokenizer.node(found.dialect)
    elif kind == "llama":
        parts: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
        if prefix is not False:
            parts.insert(0, {"type": "Prepend", "prepend": SPACE})
        name, nodes["normalizer"] = "spaces", {"type": "Sequence", "normalizers": parts}
    else:
        return {}
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    made = tokenizers.Tokenizer.from_str(json.dumps(empty | nodes))
    return {name: (made.normalizer, made.pre_tokenizer)}


def _open(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise Refusal(f"{file} is not understood by tokenizers: {error}", hint="fetch the file again") from error


def _added(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json that the library has accepted."""
    return values.get("added_tokens") or []


def _within(values: dict[str, Any], size: int) -> dict[str, Any]:
    """The tokenizer without added tokens that were left out because the model has no row for them."""
    return values | {"added_tokens": [item for item in _added(values) if item["id"] < size]}


def _vocabulary(values: dict[str, Any]) -> list[str]:
    """The pieces of a tokenizer.json that the library has accepted."""
    vocabulary = values["model"].get("vocab")
    return list(vocabulary) if isinstance(vocabulary, dict) else [item[0] for item in vocabulary or []]


def _words(values: dict[str, Any], kind: Value | None, count: int | None) -> Iterator[str]:
    """The vocabulary's words as text, or so many of them; pieces that are no whole characters are left out."""
    special = {item["content"] for item in _added(values)}
    pieces = [piece for piece in _vocabulary(values) if piece not in special]
    if count is not None and len(pieces) > count:
        pieces = random.Random(3).sample(pieces, count)
    for piece in pieces:
        if kind == "gpt2":
            with contextlib.suppress(KeyError, UnicodeDecodeError):
                yield bytes(BYTES[char] for char in piece).decode()
        elif not (piece.startswith("<0x") and len(piece) == 6):
            yield piece.replace(SPACE, " ")
