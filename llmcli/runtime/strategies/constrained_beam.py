"""A grammar for each of several answers that branch: beam search inside a grammar.

Forbidden tokens get the log-probability -inf. Allowed tokens keep theirs without renormalization,
so the score of an answer is what the model itself gives that text (as in transformers' beam search
with a LogitsProcessor).
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.constraint.base import Matcher
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling.base import Logits
from llmcli.runtime.strategies.constrained_chain import mask_logits


class GrammarBranch:
    """The progress of one answer in a grammar, immutable: a longer answer gets a new object."""

    def __init__(self, matcher: Matcher, tag: bytes = b"", recent_bytes: bytes = b"") -> None:
        """The grammar starts after `tag`, until which everything but an end is allowed; an empty
        tag means that it has started. `recent_bytes`: the latest bytes of the answer, which may
        contain the start of the tag.
        """
        self.matcher, self.tag, self.recent_bytes = matcher, tag, recent_bytes

    def forbid(self, logits: Logits, ends: NDArray[np.int64]) -> None:
        """Write -inf for every token that may not follow.

        Where the answer may end, only the likeliest end token stays; with several the search would
        find the same text again.

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
        """Return the progress after one more token, whose bytes are `piece`."""
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
    """Return the start of the request's grammar, or None without one."""
    return (
        GrammarBranch(request.grammar.start(), request.grammar_after.encode())
        if request.grammar
        else None
    )
