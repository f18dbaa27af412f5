"""Cuts a long text into parts whose token ids, joined, equal those of the whole text. The cuts are
after control tokens.

llama.cpp searches a text for each control token of the vocabulary in turn, and each search walks
the list of all fragments found so far (llama-vocab.cpp, tokenizer_st_partition). Its time grows
with the square of the number of control tokens in the text. Short parts avoid this.
"""

import re
from collections.abc import Iterator

from llmcli.runtime.binding.contract import CONSTANTS
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.tokens.special_tokens import (
    CONTROL_ATTR,
    LSTRIP_ATTR,
    RSTRIP_ATTR,
    UNKNOWN_ATTR,
    USER_ATTR,
)

SLICE_BYTES = 1 << 13  # approximate bytes of a part
# types of vocabularies whose tokens do not depend on text before a control token
SENTENCEPIECE, BPE = CONSTANTS["LLAMA_VOCAB_TYPE_SPM"], CONSTANTS["LLAMA_VOCAB_TYPE_BPE"]
STRIP_ATTRS = LSTRIP_ATTR | RSTRIP_ATTR


class TokenizeSplits:
    """The control tokens of a vocabulary after which a text may be cut. `strips_spaces`: whether
    the vocabulary has tokens that consume adjacent white space.
    """

    def __init__(self, vocab: object, n_vocab: int) -> None:
        library = lib()
        # llama.cpp finds control tokens in a text only with `special`, user-defined tokens always
        by_attribute = {CONTROL_ATTR: set[bytes](), USER_ATTR: set[bytes]()}
        names, self.strips_spaces = set[bytes](), False
        for token in range(n_vocab):
            attributes = library.llama_vocab_get_attr(vocab, token)
            if not attributes & (UNKNOWN_ATTR | CONTROL_ATTR | USER_ATTR):
                continue
            text = library.llama_vocab_get_text(vocab, token)
            names.add(text)
            if attributes & STRIP_ATTRS:
                self.strips_spaces = True
            elif not attributes & UNKNOWN_ATTR:
                by_attribute[USER_ATTR if attributes & USER_ATTR else CONTROL_ATTR].add(text)
        names.discard(b"")
        self._firsts = {text[:1] for text in names}
        joined = b"\0".join(names)
        self._user_tokens = {
            text for text in by_attribute[USER_ATTR] if self._is_unambiguous(text, joined)
        }
        self._special_tokens = self._user_tokens | {
            text for text in by_attribute[CONTROL_ATTR] if self._is_unambiguous(text, joined)
        }

    def _is_unambiguous(self, text: bytes, joined: bytes) -> bool:
        """Return whether a control token cannot overlap another one: no control token starts inside
        it or contains it. `joined`: the names of all control tokens, separated by zero bytes.
        """
        inside = {text[at : at + 1] for at in range(1, len(text))}
        return bool(text) and not inside & self._firsts and joined.count(text) == 1

    def split_text(self, raw: bytes, special: bool) -> Iterator[bytes]:
        """Yield consecutive parts of a text, of about SLICE_BYTES each. A part is larger where no
        control token follows after which the text may be cut.

        `special`: whether the text will be tokenized with its control tokens. Otherwise only
        user-defined tokens are recognized, so the cuts are after these.
        """
        names = self._special_tokens if special else self._user_tokens
        lengths = sorted({len(name) for name in names}, reverse=True)
        firsts = b"".join(re.escape(first) for first in {name[:1] for name in names})
        first_byte = re.compile(b"[%b]" % firsts if names else b"$.")
        start = 0
        while len(raw) - start > SLICE_BYTES:
            cuts = (
                at + length
                for at in (match.start() for match in first_byte.finditer(raw, start + SLICE_BYTES))
                for length in lengths
                if raw[at : at + length] in names
            )
            end = next(cuts, len(raw))
            yield raw[start:end]
            start = end
        if start < len(raw):
            yield raw[start:]
