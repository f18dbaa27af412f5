"""Known ways in which llama.cpp tokenizes differently from the model's own tokenizer.

A difference in the ids of a text is explained if the model's tokenizer, after it is changed to do
some of these things as llama.cpp does, gives exactly llama.cpp's ids.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from quant.gguf.header import GgufArray, MetadataValue
from quant.tokenizer import charsmap, pre_tokenizer, unigram
from quant.tokenizer.sentencepiece_model import UNKNOWN
from quant.tokenizer.token_table import SPACE_MARK
from quant.tokenizer.verify.normalizer import CharsmapNormalizer, SpaceNormalizer
from quant.tokenizer.verify.reference_tokenizer import (
    ReferenceTokenizer,
    RowTokenizer,
    make_normalizer,
)

EMPTY_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
TextSteps = tuple[
    tokenizers.normalizers.Normalizer | None, tokenizers.pre_tokenizers.PreTokenizer | None
]


class KnownDifferences:
    """The known differences that may affect one model, and variants of the model's tokenizer that
    have them.
    """

    def __init__(
        self,
        reference: ReferenceTokenizer,
        metadata: Mapping[str, MetadataValue],
        control: Callable[[int], bool],
    ) -> None:
        self.reference, self.is_control = reference, control
        kind, merge = (
            metadata.get("tokenizer.ggml.model"),
            metadata.get("tokenizer.ggml.remove_extra_whitespaces"),
        )
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", kind == "llama")
        self.spaces = SpaceNormalizer(
            prefix is True,
            merge is True and kind == unigram.TOKENIZER_MODEL,
            prefix_blank=kind == "llama",
        )
        rules = metadata.get("tokenizer.ggml.precompiled_charsmap")
        self.characters = (
            charsmap.parse_charsmap(rules.read_bytes())
            if isinstance(rules, GgufArray) and rules.count
            else None
        )
        self.names = ["types", "flags"]
        if reference.pre_tokenizer.dialect:
            self.names.append("dialect")
        elif kind in ("llama", unigram.TOKENIZER_MODEL):
            self.names.append("spaces")
            if (
                any(_type(node) == "Precompiled" for node in reference.normalizers)
                and reference.charsmap
            ):
                self.names.append("rules")
        types = metadata.get("tokenizer.ggml.token_type")
        type_numbers = types.read_values() if isinstance(types, GgufArray) else []
        self.unknown = {row for row, number in enumerate(type_numbers) if number == UNKNOWN}
        added = {token.text for token in reference.added.values()}
        token_like = [
            word
            for word in reference.words
            if word[:2].strip("_" + SPACE_MARK)[:1] in ("<", "[") and word not in added
        ]
        self.implicit_specials = [
            word for word in token_like if control(reference.row_tokenizer.rows[word])
        ]
        self.matched = [*added, *self.implicit_specials]
        self.readers: dict[tuple[str, ...], RowTokenizer] = {}

    def explain(self, text: str, llama_cpp_ids: list[int], special: bool) -> str | None:
        """Return the name of the known difference that makes the model's tokenizer give llama.cpp's
        ids.

        Returns "several" if more than one difference is needed, and None if no combination gives
        the same ids.
        """
        several = tuple(
            name for name in self.names if name != "spaces" or self._has_special_spaces(text)
        )
        if not self._gives(several, text, llama_cpp_ids, special):
            return None
        return next(
            (name for name in several if self._gives((name,), text, llama_cpp_ids, special)),
            "several",
        )

    def _has_special_spaces(self, text: str) -> bool:
        """Return whether a text has spaces at its ends or contains added tokens, because llama.cpp
        treats spaces differently there.
        """
        mapped = self.characters.apply(text) if self.characters else text
        return mapped.strip().strip(SPACE_MARK) != mapped or any(
            token in text for token in self.matched
        )

    def _gives(self, names: tuple[str, ...], text: str, ours: list[int], special: bool) -> bool:
        if names not in self.readers:
            self.readers[names] = self._changed_reader(names)
        ids = self.readers[names].encode(text, special=special)
        return ids == ours or self.reference.is_tied(ids, ours)

    def _changed_reader(self, names: tuple[str, ...]) -> RowTokenizer:
        """Return the model's tokenizer with the differences `names`, on the same pieces."""
        exact = self.reference.row_tokenizer
        changed = tokenizers.Tokenizer(exact.tokenizer.model)
        changed.normalizer, changed.pre_tokenizer = self._parts(names)
        for _, token in sorted(exact.tokenizer.get_added_tokens_decoder().items()):
            if "flags" in names:
                token = tokenizers.AddedToken(
                    token.content, special=token.special, normalized=False
                )
            if "types" in names:
                row = exact.rows[token.content]
                token.special = self.is_control(row) or row in self.unknown
            changed.add_tokens([token])
        if "types" in names:
            changed.add_special_tokens(self.implicit_specials)
        return RowTokenizer(exact.file, changed, exact.rows)

    def _parts(self, names: tuple[str, ...]) -> TextSteps:
        exact = self.reference.row_tokenizer.tokenizer
        if "dialect" in names:
            return exact.normalizer, _component(
                "pre_tokenizer", pre_tokenizer.build_node(self.reference.pre_tokenizer.dialect)
            )
        if not {"spaces", "rules"} & set(names):
            return exact.normalizer, exact.pre_tokenizer
        steps = []
        rules = (
            [make_normalizer(CharsmapNormalizer(self.reference.charsmap))]
            if self.reference.charsmap
            else []
        )
        if (
            not self.reference.normalizers
        ):  # a SentencePiece model has no normalizers from a tokenizer.json
            steps += rules
        for node in self.reference.normalizers:
            if _type(node) == "Precompiled" and "rules" in names:
                steps += rules
            elif not ("spaces" in names and _only_spaces(node)):
                steps.append(_component("normalizer", node))
        if "spaces" not in names:
            return tokenizers.normalizers.Sequence(steps), exact.pre_tokenizer
        return tokenizers.normalizers.Sequence([*steps, make_normalizer(self.spaces)]), None


def _type(node: Any) -> Any:
    return node.get("type") if isinstance(node, dict) else None


def _only_spaces(node: Any) -> bool:
    """Return whether a normalizer only changes spaces."""
    match node:
        case {"type": "Prepend" | "Strip"}:
            return True
        case {"type": "Replace", "pattern": {"Regex": " {2,}"} | {"String": " "}}:
            return True
    return False


def _component(key: str, node: Any) -> Any:
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(EMPTY_TOKENIZER | {key: node})), key)
