"""The sampler chain inside a grammar.

When only one token is legal, it is taken without a draw. Otherwise all illegal tokens get the logit
-inf before the first step of the chain. For this reason a seed gives the same text whether or not
forced text is inserted directly.

A greedy chain draws first, and the mask is computed only if the grammar refuses the drawn token: if
the likeliest token of all is legal, it is also the likeliest legal one.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.constraint.base import Matcher, TokenBits, UnsatisfiableConstraint, single_token
from llmcli.runtime.requests.request import Request
from llmcli.runtime.sampling.base import Logits
from llmcli.runtime.sampling.chain import ChoosingChain, GreedyChain, RowLogits, SamplerChain

FULL_BYTE = 255  # a byte of a mask with eight legal tokens
MAX_FEW_BYTES = 256  # a mask with more non-zero bytes counts as having many legal tokens
# a mask is nearly full when fewer than 1/4 of its bytes contain an illegal token
NEARLY_FULL_FRACTION = 4


class GuidedChain:
    """A sampler chain that draws only tokens that the grammar allows next."""

    def __init__(
        self,
        chain: SamplerChain,
        matcher: Matcher,
        n_prompt: int,
        tag: str = "",
        piece: Callable[[int], bytes] = lambda token: b"",
    ) -> None:
        """`n_prompt`: how many of the tokens passed to draw() belong to the prompt. `tag`: the text
        after which the grammar starts; until then every token is allowed. An empty tag starts the
        grammar at once. `piece`: returns the bytes of a token, in which the tag is searched.
        """
        self.chain, self.matcher, self.n_prompt, self.tag, self.piece = (
            chain,
            matcher,
            n_prompt,
            tag,
            piece,
        )
        self.choosing_chain = chain if isinstance(chain, ChoosingChain) else None
        # index at which the grammar starts; negative when that token was dropped from the context
        self._start = None if tag else n_prompt
        self._accepted: list[int] = []  # tokens from `_start` on that the matcher has accepted
        # seconds spent in the grammar: all of them, and those inside draw()
        self._total = self._inside = 0.0

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the next token.

        Raises UnsatisfiableConstraint when the grammar allows none.
        """
        begun = time.perf_counter()
        if not self.follow(tokens):
            return self.chain.draw(row, tokens)
        if isinstance(self.chain, GreedyChain):
            chosen = time.perf_counter()
            token = self.chain.draw(row, tokens)
            begun += time.perf_counter() - chosen
            if self.matcher.allows(token):
                self._spend(begun)
                return token
        bits = self.matcher.mask()
        only = single_token(bits)
        if only is not None:
            self._spend(begun)
            return only
        if self.choosing_chain and (few := few_legal_tokens(bits)) is not None:
            self._spend(begun)
            return self.choosing_chain.draw_among(row, few, tokens)
        logits = row.logits
        restore = mask_logits(logits, bits)
        self._spend(begun)
        try:
            token = self.chain.draw(row, tokens)
            # all legal tokens are nearly impossible: take the likeliest of them
            if not bits[token >> 3] >> (token & 7) & 1:
                token = int(logits.argmax())
        finally:
            restore()
        return token

    def follow(self, tokens: list[int]) -> bool:
        """Advance the matcher to the end of `tokens`. Return False while the grammar has not
        started.

        Tokens that were removed or replaced at the end since the last call are rewound first.
        """
        if self._start is None or self._start > len(tokens):
            self._start = self._begin(tokens)
            if self._start is None:
                return False
        start, accepted = self._start, self._accepted
        kept = min(len(accepted), len(tokens) - start)
        while (
            kept and start + kept > self.n_prompt and tokens[start + kept - 1] != accepted[kept - 1]
        ):
            kept -= 1
        if kept < len(accepted):
            self.matcher.rewind(len(accepted) - kept)
            del accepted[kept:]
        for token in tokens[start + kept :]:
            self.matcher.accept(token)
            accepted.append(token)
        return True

    def on_context_shift(self, n_dropped: int, n_prompt: int) -> None:
        """Record that `n_dropped` tokens were dropped from a full context and that `n_prompt` of
        the remaining tokens belong to the prompt.
        """
        self.n_prompt = n_prompt
        if self._start is not None:
            self._start -= n_dropped

    def _begin(self, tokens: list[int]) -> int | None:
        """Return the index at which the grammar starts, which is the end of `tokens` if the tag is
        complete there, otherwise None.
        """
        # This runs for every token, so only the end of the text is searched. A tag has no more
        # tokens than bytes.
        recent = tokens[max(self.n_prompt, len(tokens) - len(self.tag.encode())) :]
        return None if pieces_until_tag(self.tag, map(self.piece, recent)) is None else len(tokens)

    def forced_tokens(self, tokens: list[int], jump: str) -> tuple[list[int], bool]:
        """Return the tokens that must follow `tokens`, and whether the answer must end."""
        begun = time.perf_counter()
        if not self.follow(tokens):
            return [], False
        complete = self.matcher.is_complete
        forced = [] if complete else self.matcher.forced_tokens(jump)
        self._total += time.perf_counter() - begun
        return forced, complete

    def pop_seconds(self) -> tuple[float, float]:
        """Return the seconds spent in the grammar since the last call: all of them, and those
        inside draw().
        """
        spent = self._total, self._inside
        self._total = self._inside = 0.0
        return spent

    def _spend(self, begun: float) -> None:
        seconds = time.perf_counter() - begun
        self._total += seconds
        self._inside += seconds

    def close(self) -> None:
        """Free the chain and the matcher."""
        self.chain.close()
        self.matcher.close()


def guide_chain(
    chain: SamplerChain, request: Request, piece: Callable[[int], bytes]
) -> SamplerChain:
    """Return a chain that draws inside the request's grammar, or `chain` itself when the request
    has no grammar. `piece`: returns the bytes of a token.
    """
    grammar = request.grammar
    return (
        GuidedChain(chain, grammar.start(), len(request.tokens), request.grammar_after, piece)
        if grammar
        else chain
    )


def pieces_until_tag(tag: str, pieces: Iterable[bytes]) -> int | None:
    """Return how many of the first pieces are needed to complete `tag`, or None when they do not
    contain it. An empty tag needs 0.
    """
    if not tag:
        return 0
    text, wanted = b"", tag.encode()
    for count, piece in enumerate(pieces, 1):
        text = text[-len(wanted) :] + piece
        if wanted in text:
            return count
    return None


def few_legal_tokens(bits: TokenBits) -> NDArray[np.int64] | None:
    """Return the legal tokens of a mask in ascending order, or None when there are many.

    Shapes: bits `[n_vocab / 8]`, result `[tokens]`. Raises UnsatisfiableConstraint when there are
    none.
    """
    filled = np.flatnonzero(bits)  # indices of bytes
    if len(filled) > MAX_FEW_BYTES:
        return None
    if not len(filled):
        raise dead_end_error()
    inside = np.flatnonzero(np.unpackbits(bits[filled], bitorder="little"))
    tokens: NDArray[np.int64] = filled[inside >> 3] * 8 + (inside & 7)
    return tokens


def dead_end_error() -> UnsatisfiableConstraint:
    """Return the error for a grammar that allows no token."""
    return UnsatisfiableConstraint(
        "no token of the model can follow in this grammar",
        hint="the grammar may need characters that the model's vocabulary does not have",
    )


def mask_logits(logits: Logits, bits: TokenBits) -> Callable[[], None]:
    """Write -inf for the tokens that are not in `bits`. Return a function that restores the
    original logits.

    Where nearly all tokens are legal, as inside a string, only the illegal ones are visited.

    Shapes: logits `[n_vocab]`, bits `[n_vocab / 8]`.
    """
    not_full = np.flatnonzero(bits != FULL_BYTE)  # indices of bytes
    if len(not_full) * NEARLY_FULL_FRACTION < len(bits):
        inside = np.flatnonzero(np.unpackbits(~bits[not_full], bitorder="little"))
        tokens = not_full[inside >> 3] * 8 + (inside & 7)
        tokens = tokens[tokens < len(logits)]
        values = logits[tokens]
        logits[tokens] = -np.inf
        return partial(logits.__setitem__, tokens, values)
    few_legal_tokens(bits)  # raises when there are none
    before = logits.copy()
    allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(np.bool_)
    np.copyto(logits, -np.inf, where=~allowed)
    return partial(np.copyto, logits, before)
