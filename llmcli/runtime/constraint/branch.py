"""A grammar for each of several answers that branch: beam search inside a grammar.

Forbidden tokens get the log-probability -inf. Allowed ones keep the one that they have in the whole
vocabulary: nothing is normalised again, so an answer's score is what the model itself gives that
text (as in transformers' beam search with a LogitsProcessor).
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.constraint.base import Matcher
from llmcli.runtime.constraint.chain import forbid
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.base import Logits


class Branch:
    """One answer's place in a grammar. It never changes: a longer answer gets a place of its own."""

    def __init__(self, matcher: Matcher, tag: bytes = b"", said: bytes = b"") -> None:
        """The grammar begins behind `tag`; until that was said everything but an end is allowed. An
        empty tag: it has begun. `said`: the answer's latest bytes, which may be the tag's
        beginning.
        """
        self.matcher, self.tag, self.said = matcher, tag, said

    def forbid(self, logits: Logits, ends: NDArray[np.int64]) -> None:
        """Write -inf for every token that may not follow. Where the answer may end, only the
        likeliest of the tokens that end it (`ends`) stays: with the others the search would find
        the same text again.
        """
        end = ends[logits[ends].argmax()]
        before, legal = logits[end], self.accepting
        if not self.tag:
            bits = self.matcher.mask()
            if bits.any():
                forbid(logits, bits)
            else:
                logits[:] = -np.inf
        logits[ends] = -np.inf
        if legal:
            logits[end] = before

    def child(self, token: int, piece: bytes) -> "Branch":
        """The place behind one more token, whose bytes are `piece`."""
        matcher = self.matcher.copy()
        if not self.tag:
            matcher.accept(token)
            return Branch(matcher)
        said = self.said[-len(self.tag) :] + piece
        return Branch(matcher) if self.tag in said else Branch(matcher, self.tag, said)

    @property
    def accepting(self) -> bool:
        """Whether the answer may end here."""
        return not self.tag and self.matcher.accepting

    def close(self) -> None:
        """Free the matcher."""
        self.matcher.close()


def begin(request: Request) -> Branch | None:
    """The beginning of the request's grammar; None where it has none."""
    return Branch(request.grammar.start(), request.after.encode()) if request.grammar else None
