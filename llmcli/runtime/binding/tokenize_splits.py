"""Finds where a long text can be cut so that its parts give the same tokens as the whole text:
after control tokens.

llama.cpp extracts the control tokens of a text one kind after another, and for each kind it walks
the list of all fragments (llama-vocab.cpp, tokenizer_st_partition). So the time grows with the
square of the number of control tokens in the text. Cut into parts, texts with many control tokens
are tokenized fast, with the same ids.
"""

import re
from collections.abc import Iterator

from llmcli.runtime.binding.library import lib

SLICE_BYTES = 1 << 13  # approximate bytes of a part
# enum llama_vocab_type: types whose tokens do not depend on text before a control token
SENTENCEPIECE, BPE = 1, 2
UNKNOWN_ATTR, CONTROL_ATTR, USER_ATTR = 1, 1 << 3, 1 << 4  # enum llama_token_attr
STRIP_ATTRS = 1 << 7 | 1 << 8  # attributes of tokens that also consume adjacent white space


class TokenizeSplits:
    """The control tokens of a vocabulary after which a text may be cut. `strips_spaces`: whether
    the vocabulary has tokens that consume adjacent white space.
    """

    def __init__(self, vocab: object, n_vocab: int) -> None:
        library = lib()
        # control tokens are found in a text only with `special`, user-defined tokens always
        read = {CONTROL_ATTR: set[bytes](), USER_ATTR: set[bytes]()}
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
                read[USER_ATTR if attributes & USER_ATTR else CONTROL_ATTR].add(text)
        names.discard(b"")
        self._firsts = {text[:1] for text in names}
        joined = b"\0".join(names)
        self._always = {text for text in read[USER_ATTR] if self._sharp(text, joined)}
        self._special = self._always | {
            text for text in read[CONTROL_ATTR] if self._sharp(text, joined)
        }

    def _sharp(self, text: bytes, joined: bytes) -> bool:
        """Return whether no other control token can start inside this one or contain it."""
        inside = {text[at : at + 1] for at in range(1, len(text))}
        return bool(text) and not inside & self._firsts and joined.count(text) == 1

    def split_text(self, raw: bytes, special: bool) -> Iterator[bytes]:
        """Yield the text in parts of about SLICE_BYTES. A part is larger where the text cannot be
        cut.
        """
        ends = self._special if special else self._always
        lengths = sorted({len(text) for text in ends}, reverse=True)
        firsts = b"".join(re.escape(first) for first in {text[:1] for text in ends})
        begins = re.compile(b"[%b]" % firsts if ends else b"$.")
        start = 0
        while len(raw) - start > SLICE_BYTES:
            cuts = (
                at + length
                for at in (match.start() for match in begins.finditer(raw, start + SLICE_BYTES))
                for length in lengths
                if raw[at : at + length] in ends
            )
            end = next(cuts, len(raw))
            yield raw[start:end]
            start = end
        if start < len(raw):
            yield raw[start:]
