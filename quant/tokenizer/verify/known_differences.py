"""Known ways in which llama.cpp tokenizes differently from the model's own tokenizer.

A text with different ids is explained by known differences if a variant of the model's tokenizer,
changed to do these things as llama.cpp does, gives exactly llama.cpp's ids. The known differences
have names:

- types: which tokens are matched only as special tokens
- flags: spaces around added tokens are not stripped
- dialect: llama.cpp's own expression splits text differently
- spaces: where a space is added or removed
- rules: character rules are applied to bytes, not to graphemes
- words: WordPiece's text is cleaned and split into words differently
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

from quant.gguf.header import GgufArray, MetadataValue
from quant.tokenizer import charsmap, pre_tokenizer, unigram, wordpiece
from quant.tokenizer.sentencepiece_model import UNKNOWN
from quant.tokenizer.token_table import SPACE_MARK
from quant.tokenizer.verify.normalizer import CharsmapNormalizer, SpaceNormalizer
from quant.tokenizer.verify.reference_tokenizer import (
    ReferenceTokenizer,
    RowTokenizer,
    make_normalizer,
)
from quant.tokenizer.verify.wordpiece import LlamaCppWordPiece

EMPTY_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}
TextSteps = tuple[
    tokenizers.normalizers.Normalizer | None, tokenizers.pre_tokenizers.PreTokenizer | None
]


class KnownDifferences:
    """The known differences that may affect one model (`names`), and variants of the model's
    tokenizer that have them (`variants`).

    `implicit_specials` are ordinary tokens that llama.cpp treats as special tokens because of their
    text.
    """

    def __init__(
        self,
        reference: ReferenceTokenizer,
        metadata: Mapping[str, MetadataValue],
        is_control: Callable[[int], bool],
    ) -> None:
        self.reference, self.is_control = reference, is_control
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
        self.word_piece: LlamaCppWordPiece | None = None
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
            word for word in token_like if is_control(reference.row_tokenizer.rows[word])
        ]
        self.matched_tokens = [*added, *self.implicit_specials]
        self.variants: dict[tuple[str, ...], RowTokenizer | LlamaCppWordPiece] = {}
        if kind == wordpiece.TOKENIZER_MODEL:
            self.names.append("words")
            self.word_piece = self._make_word_piece(metadata)

    def explain(self, text: str, llama_cpp_ids: list[int], special: bool) -> str | None:
        """Return the name of the known difference that makes the model's tokenizer give llama.cpp's
        ids for a text.

        Return "several" if more than one difference is needed, and None if no combination gives the
        same ids.
        """
        several = tuple(
            name for name in self.names if name != "spaces" or self._has_special_spaces(text)
        )
        if not self._variant_gives(several, text, llama_cpp_ids, special):
            return None
        return next(
            (
                name
                for name in several
                if self._variant_gives((name,), text, llama_cpp_ids, special)
            ),
            "several",
        )

    def _has_special_spaces(self, text: str) -> bool:
        """Return whether a text has spaces at its ends or contains added tokens. llama.cpp treats
        spaces differently there.
        """
        normalized = self.characters.apply(text) if self.characters else text
        return normalized.strip().strip(SPACE_MARK) != normalized or any(
            token in text for token in self.matched_tokens
        )

    def _variant_gives(
        self, names: tuple[str, ...], text: str, llama_cpp_ids: list[int], special: bool
    ) -> bool:
        """Return whether the variant with the differences `names` gives llama.cpp's ids."""
        if names not in self.variants:
            self.variants[names] = self._make_variant(names)
        ids = self.variants[names].encode(text, special=special)
        return ids == llama_cpp_ids or self.reference.is_tied(ids, llama_cpp_ids)

    def _make_word_piece(self, metadata: Mapping[str, MetadataValue]) -> LlamaCppWordPiece:
        """Return llama.cpp's WordPiece with the vocabulary of the file."""
        texts = metadata["tokenizer.ggml.tokens"]
        assert isinstance(texts, GgufArray), texts
        pieces = {str(text): row for row, text in enumerate(texts.read_values())}
        matched = {
            text: self.reference.row_tokenizer.rows[text]
            for text in self.matched_tokens
            if text in self.reference.row_tokenizer.rows
        }
        unknown = metadata.get("tokenizer.ggml.unknown_token_id")
        lowercase = metadata.get(f"tokenizer.ggml.{wordpiece.LOWERCASE_KEY}", True)
        accents = metadata.get(f"tokenizer.ggml.{wordpiece.STRIP_ACCENTS_KEY}", lowercase)
        return LlamaCppWordPiece(
            pieces,
            matched,
            self.is_control,
            unknown if isinstance(unknown, int) else -1,
            lowercase=lowercase is True,
            strips_accents=accents is True,
        )

    def _make_variant(self, names: tuple[str, ...]) -> RowTokenizer | LlamaCppWordPiece:
        """Return a copy of the model's tokenizer, with the same pieces, that has the known
        differences `names`.
        """
        if "words" in names and self.word_piece:
            return self.word_piece
        original = self.reference.row_tokenizer
        variant = tokenizers.Tokenizer(original.tokenizer.model)
        variant.normalizer, variant.pre_tokenizer = self._text_steps(names)
        for _, token in sorted(original.tokenizer.get_added_tokens_decoder().items()):
            if "flags" in names:
                token = tokenizers.AddedToken(
                    token.content, special=token.special, normalized=False
                )
            if "types" in names:
                row = original.rows[token.content]
                token.special = self.is_control(row) or row in self.unknown
            variant.add_tokens([token])
        if "types" in names:
            variant.add_special_tokens(self.implicit_specials)
        return RowTokenizer(original.file, variant, original.rows)

    def _text_steps(self, names: tuple[str, ...]) -> TextSteps:
        """Return the normalizer and the pre-tokenizer of the variant with the differences
        `names`.
        """
        original = self.reference.row_tokenizer.tokenizer
        if "dialect" in names:
            return original.normalizer, _component(
                "pre_tokenizer", pre_tokenizer.build_node(self.reference.pre_tokenizer.dialect)
            )
        if not {"spaces", "rules"} & set(names):
            return original.normalizer, original.pre_tokenizer
        steps = []
        rules = (
            [make_normalizer(CharsmapNormalizer(self.reference.charsmap))]
            if self.reference.charsmap
            else []
        )
        # a SentencePiece model has no normalizers from a tokenizer.json
        if not self.reference.normalizers:
            steps += rules
        for node in self.reference.normalizers:
            if _type(node) == "Precompiled" and "rules" in names:
                steps += rules
            elif not ("spaces" in names and _only_spaces(node)):
                steps.append(_component("normalizer", node))
        if "spaces" not in names:
            return tokenizers.normalizers.Sequence(steps), original.pre_tokenizer
        return tokenizers.normalizers.Sequence([*steps, make_normalizer(self.spaces)]), None


def _type(node: Any) -> Any:
    """Return the type of a node of tokenizer.json, or None if it is no object."""
    return node.get("type") if isinstance(node, dict) else None


def _only_spaces(node: Any) -> bool:
    """Return whether a normalizer node only changes spaces."""
    match node:
        case {"type": "Prepend" | "Strip"}:
            return True
        case {"type": "Replace", "pattern": {"Regex": " {2,}"} | {"String": " "}}:
            return True
    return False


def _component(key: str, node: Any) -> Any:
    """Return a node of tokenizer.json as an object of the tokenizers library. `key` is "normalizer"
    or "pre_tokenizer".
    """
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(EMPTY_TOKENIZER | {key: node})), key)
