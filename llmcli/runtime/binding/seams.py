"""Where a long text can be cut so that its tokens are those of its parts: behind control tokens.

llama.cpp takes the control tokens out of a text one after another and walks the list of all that it
has found for each (llama-vocab.cpp, tokenizer_st_partition), so that the time grows with the square
of their number. 2026-11-22: 100,000 of them, 1.2 MB, took 41.6 s, and a server's other prompts
waited; in parts 0.26 s, with the same ids.
"""

import re
from collections.abc import Iterator

from llmcli.runtime.binding.library import lib

SLICE = 1 << 13  # bytes, about; the 700 shortest control tokens in so many take 0.3 ms
SENTENCEPIECE, BPE = (
    1,
    2,
)  # enum llama_vocab_type: those whose tokens depend on nothing before a control token
UNKNOWN, CONTROL, USER = 1, 1 << 3, 1 << 4  # enum llama_token_attr
STRIPS = 1 << 7 | 1 << 8  # they take the white space beside them along


class Seams:
    """The control tokens of one vocabulary behind which a text may be cut; `strips`: some take
    white space along.
    """

    def __init__(self, vocab: object, n_vocab: int) -> None:
        library = lib()
        read = {CONTROL: set[bytes](), USER: set[bytes]()}  # where control tokens are read; always
        every, self.strips = set[bytes](), False
        for token in range(n_vocab):
            about = library.llama_vocab_get_attr(vocab, token)
            if not about & (UNKNOWN | CONTROL | USER):
                continue
            text = library.llama_vocab_get_text(vocab, token)
            every.add(text)
            if about & STRIPS:
                self.strips = True
            elif not about & UNKNOWN:
                read[USER if about & USER else CONTROL].add(text)
        every.discard(b"")
        self._firsts = {text[:1] for text in every}
        joined = b"\0".join(every)
        self._always = {text for text in read[USER] if self._sharp(text, joined)}
        self._special = self._always | {text for text in read[CONTROL] if self._sharp(text, joined)}

    def _sharp(self, text: bytes, joined: bytes) -> bool:
        """Whether no other one can begin within it, or hold it."""
        inside = {text[at : at + 1] for at in range(1, len(text))}
        return bool(text) and not inside & self._firsts and joined.count(text) == 1

    def parts(self, raw: bytes, special: bool) -> Iterator[bytes]:
        """The text in parts of about a SLICE, or larger where there is nothing to cut at."""
        ends = self._special if special else self._always
        lengths = sorted({len(text) for text in ends}, reverse=True)
        firsts = b"".join(re.escape(first) for first in {text[:1] for text in ends})
        begins = re.compile(b"[%b]" % firsts if ends else b"$.")
        start = 0
        while len(raw) - start > SLICE:
            found = (
                at + length
                for at in (match.start() for match in begins.finditer(raw, start + SLICE))
                for length in lengths
                if raw[at : at + length] in ends
            )
            end = next(found, len(raw))
            yield raw[start:end]
            start = end
        if start < len(raw):
            yield raw[start:]
