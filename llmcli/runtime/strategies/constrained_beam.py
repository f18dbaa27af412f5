"""Beam search inside a grammar: a grammar state for each beam, which masks the beam's next token.

Forbidden tokens get the log-probability -inf. The log-probabilities of the allowed tokens are not
renormalized. So an answer has the same score as the same text in a search without a grammar, as in
transformers' beam search with a LogitsProcessor.
"""

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.constraint.base import Matcher
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling.base import Logits
from llmcli.runtime.strategies.constrained_chain import mask_logits


class GrammarBranch:
    """The grammar state after one beam's text. The object is immutable: `child` makes a new object
    for the text with one more token, because several beams may continue the same text.
    """

    def __init__(self, matcher: Matcher, tag: bytes = b"", recent_bytes: bytes = b"") -> None:
        """`matcher`: the state in the grammar. `tag`: a text in the answer after which the grammar
        starts, such as `</think>`; until then every token except an end token is allowed. An empty
        `tag` means that the grammar has started. `recent_bytes`: the last bytes of the answer so
        far, which may contain the first bytes of the tag.
        """
        self.matcher, self.tag, self.recent_bytes = matcher, tag, recent_bytes

    def forbid(self, logits: Logits, ends: NDArray[np.int32]) -> None:
        """Write -inf into `logits` for every token that the grammar forbids next.

        Where the answer may end, only the likeliest end token stays allowed, because every end
        token gives an answer of the same text.

        Shapes: logits `[n_vocab]`, ends `[end tokens]` (token ids).
        """
        end = ends[logits[ends].argmax()]
        end_logit, may_end = logits[end], self.is_accepting
        if not self.tag:
            bits = self.matcher.mask()
            if bits.any():
                mask_logits(logits, bits)
            else:
                logits[:] = -np.inf
        logits[ends] = -np.inf
        if may_end:
            logits[end] = end_logit

    def child(self, token: int, piece: bytes) -> "GrammarBranch":
        """Return the grammar state of the text extended by `token`, whose bytes are `piece`."""
        matcher = self.matcher.copy()
        if not self.tag:
            matcher.accept(token)
            return GrammarBranch(matcher)
        recent = self.recent_bytes[-len(self.tag) :] + piece
        return (
            GrammarBranch(matcher)
            if self.tag in recent
            else GrammarBranch(matcher, self.tag, recent)
        )

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        return not self.tag and self.matcher.is_accepting

    def close(self) -> None:
        """Free the matcher."""
        self.matcher.close()


def start_branch(request: Request) -> GrammarBranch | None:
    """Return the grammar state before the first token of an answer, or None without a grammar."""
    return (
        GrammarBranch(request.grammar.start(is_rigid=True), request.grammar_after.encode())
        if request.grammar
        else None
    )
