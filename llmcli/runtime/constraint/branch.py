"""A grammar beside each of several answers that part on their way.

What it forbids is as unlikely as can be, and what it allows keeps the log-probability that it has in the whole
vocabulary: nothing is divided up anew, so that an answer's score is what the model itself gives that text. (As
transformers' beam search has it, where a LogitsProcessor changes log-probabilities.)
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.constraint.base import Matcher
from llmcli.runtime.constraint.chain import forbid
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.base import Logits


class Branch:
    """One answer's place in a grammar, which stays: a longer answer has a place of its own."""

    def __init__(self, matcher: Matcher, tag: bytes = b"", said: bytes = b"") -> None:
        """The grammar begins where `tag` has been said, of which `said` may be the beginning; until then all is
        allowed but an end. An empty tag: it has begun."""
        self.matcher, self.tag, self.said = matcher, tag, said

    def forbid(self, logits: Logits, ends: NDArray[np.int64]) -> None:
        """Write -inf where nothing may follow. Of the tokens that end an answer (`ends`) the likeliest is left alone,
        where one may come: with the others the same text would be found again."""
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
