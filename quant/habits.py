"""Ways in which llama.cpp is known to read a text otherwise than the model's own tokenizer.

A difference is explained where the model's tokenizer, made to take on such habits and no others,
gives llama.cpp's ids to the last. It knows tokenizers and habits, llama.cpp only by what it takes
for special.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from quant import charsmap, pretokenizer, unigram
from quant.header import Array, Value
from quant.own import Own, Reader, custom
from quant.rows import SPACE
from quant.sentencepiece import UNKNOWN
from quant.spelling import Rules, Spaces

EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
Parts = tuple[
    tokenizers.normalizers.Normalizer | None, tokenizers.pre_tokenizers.PreTokenizer | None
]


class Habits:
    """The habits that may matter to one model, and its tokenizer with each of them."""

    def __init__(
        self, own: Own, metadata: Mapping[str, Value], control: Callable[[int], bool]
    ) -> None:
        self.own, self.control = own, control
        kind, merge = (
            metadata.get("tokenizer.ggml.model"),
            metadata.get("tokenizer.ggml.remove_extra_whitespaces"),
        )
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", kind == "llama")
        self.spaces = Spaces(
            prefix is True, merge is True and kind == unigram.KIND, blank=kind == "llama"
        )
        rules = metadata.get("tokenizer.ggml.precompiled_charsmap")
        self.characters = (
            charsmap.parse(rules.raw()) if isinstance(rules, Array) and rules.count else None
        )
        self.names = ["types", "flags"]
        if own.found.dialect:
            self.names.append("dialect")
        elif kind in ("llama", unigram.KIND):
            self.names.append("spaces")
            if any(_type(node) == "Precompiled" for node in own.nodes) and own.rules:
                self.names.append("rules")
        types = metadata.get("tokenizer.ggml.token_type")
        listed = types.values() if isinstance(types, Array) else []
        self.unknown = {row for row, number in enumerate(listed) if number == UNKNOWN}
        added = {token.text for token in own.added.values()}
        odd = [
            word
            for word in own.words
            if word[:2].strip("_" + SPACE)[:1] in ("<", "[") and word not in added
        ]
        self.claimed = [word for word in odd if control(own.reader.rows[word])]
        self.found = [*added, *self.claimed]
        self.alike: dict[tuple[str, ...], Reader] = {}

    def explains(self, text: str, ours: list[int], special: bool) -> str | None:
        """The habit that makes the model's tokenizer give `ours`; "several" if more than one is
        needed.
        """
        several = tuple(name for name in self.names if name != "spaces" or self._spaced(text))
        if not self._gives(several, text, ours, special):
            return None
        return next(
            (name for name in several if self._gives((name,), text, ours, special)), "several"
        )

    def _spaced(self, text: str) -> bool:
        """Whether a text has ends, or places beside added tokens, where llama.cpp puts spaces in
        its own way.
        """
        spelt = self.characters.apply(text) if self.characters else text
        return spelt.strip().strip(SPACE) != spelt or any(token in text for token in self.found)

    def _gives(self, names: tuple[str, ...], text: str, ours: list[int], special: bool) -> bool:
        if names not in self.alike:
            self.alike[names] = self._alike(names)
        found = self.alike[names].ids(text, special=special)
        return found == ours or self.own.tied(found, ours)

    def _alike(self, names: tuple[str, ...]) -> Reader:
        """The model's tokenizer with some habits, upon the same pieces."""
        exact = self.own.reader
        made = tokenizers.Tokenizer(exact.tokenizer.model)
        made.normalizer, made.pre_tokenizer = self._parts(names)
        for _, token in sorted(exact.tokenizer.get_added_tokens_decoder().items()):
            if "flags" in names:
                token = tokenizers.AddedToken(
                    token.content, special=token.special, normalized=False
                )
            if "types" in names:
                row = exact.rows[token.content]
                token.special = self.control(row) or row in self.unknown
            made.add_tokens([token])
        if "types" in names:
            made.add_special_tokens(self.claimed)
        return Reader(exact.where, made, exact.rows)

    def _parts(self, names: tuple[str, ...]) -> Parts:
        exact = self.own.reader.tokenizer
        if "dialect" in names:
            return exact.normalizer, _component(
                "pre_tokenizer", pretokenizer.node(self.own.found.dialect)
            )
        if not {"spaces", "rules"} & set(names):
            return exact.normalizer, exact.pre_tokenizer
        steps = []
        rules = [custom(Rules(self.own.rules))] if self.own.rules else []
        if not self.own.nodes:  # a SentencePiece model's own
            steps += rules
        for node in self.own.nodes:
            if _type(node) == "Precompiled" and "rules" in names:
                steps += rules
            elif not ("spaces" in names and _spaces(node)):
                steps.append(_component("normalizer", node))
        if "spaces" not in names:
            return tokenizers.normalizers.Sequence(steps), exact.pre_tokenizer
        return tokenizers.normalizers.Sequence([*steps, custom(self.spaces)]), None


def _type(node: Any) -> Any:
    return node.get("type") if isinstance(node, dict) else None


def _spaces(node: Any) -> bool:
    """Whether a normalizer is about spaces alone."""
    match node:
        case {"type": "Prepend" | "Strip"}:
            return True
        case {"type": "Replace", "pattern": {"Regex": " {2,}"} | {"String": " "}}:
            return True
    return False


def _component(key: str, node: Any) -> Any:
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(EMPTY | {key: node})), key)
