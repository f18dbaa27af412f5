"""Beam search inside a grammar: the progress of each beam in the grammar, and the mask for its next
token.

Forbidden tokens get the log-probability -inf. The log-probabilities of allowed tokens are not
renormalized, so the score of an answer is the score that the model gives to the same text without a
grammar (as in transformers' beam search with a LogitsProcessor).
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.constraint.base import Matcher
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling.base import Logits
from llmcli.runtime.strategies.constrained_chain import mask_logits


class GrammarBranch:
    """The progress of one answer in a grammar. It is immutable; each longer answer gets a new
    object.
    """

    def __init__(self, matcher: Matcher, tag: bytes = b"", recent_bytes: bytes = b"") -> None:
        """`matcher`: the progress in the grammar. `tag`: a text in the answer after which the
        grammar starts, such as the end of thinking; until then every token except an end token is
        allowed. An empty `tag` means that the grammar has started. `recent_bytes`: the end of the
        answer so far, in which the first part of the tag may already be present.
        """
        self.matcher, self.tag, self.recent_bytes = matcher, tag, recent_bytes

    def forbid(self, logits: Logits, ends: NDArray[np.int64]) -> None:
        """Write -inf for every token that must not come next.

        Where the answer may end, only the likeliest end token stays allowed, because each further
        end token would give the same text again.

        Shapes: logits `[n_vocab]`, ends `[end tokens]` (ids).
        """
        end = ends[logits[ends].argmax()]
        before, legal = logits[end], self.is_accepting
        if not self.tag:
            bits = self.matcher.mask()
            if bits.any():
                mask_logits(logits, bits)
            else:
                logits[:] = -np.inf
        logits[ends] = -np.inf
        if legal:
            logits[end] = before

    def child(self, token: int, piece: bytes) -> "GrammarBranch":
        """Return the progress after the answer is extended by `token`, whose bytes are `piece`."""
        matcher = self.matcher.copy()
        if not self.tag:
            matcher.accept(token)
            return GrammarBranch(matcher)
        said = self.recent_bytes[-len(self.tag) :] + piece
        return (
            GrammarBranch(matcher) if self.tag in said else GrammarBranch(matcher, self.tag, said)
        )

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        return not self.tag and self.matcher.is_accepting

    def close(self) -> None:
        """Free the matcher."""
        self.matcher.close()


def start_branch(request: Request) -> GrammarBranch | None:
    """Return the progress at the start of an answer, or None when the request has no grammar."""
    return (
        GrammarBranch(request.grammar.start(), request.grammar_after.encode())
        if request.grammar
        else None
    )
