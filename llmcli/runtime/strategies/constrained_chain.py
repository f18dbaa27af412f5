"""The sampler chain inside a grammar.

A token that is the only legal one is taken without a draw; otherwise all illegal tokens get the
logit -inf before the first step of the chain. So a seed gives the same text whether or not forced
text is inserted directly. A greedy chain draws first, and the mask is computed only if the grammar
refuses its token: the likeliest token is also the likeliest legal one if it is legal.
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
MAX_FEW_BYTES = 256  # non-zero bytes of a mask that has more than a few legal tokens
NEARLY_FULL_FRACTION = 4  # a mask is nearly full when fewer than 1 in 4 bytes is not full


class GuidedChain:
    """Draws only what the grammar allows after the tokens of the answer."""

    def __init__(
        self,
        chain: SamplerChain,
        matcher: Matcher,
        n_prompt: int,
        tag: str = "",
        piece: Callable[[int], bytes] = lambda token: b"",
    ) -> None:
        """`n_prompt`: number of tokens passed to draw() that are not the answer's. The grammar
        starts after `tag`, which is searched in the bytes of the tokens (`piece`); until then every
        token is allowed.
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
        self._accepted: list[int] = []  # tokens from there on that the matcher has accepted
        self._total = self._inside = 0.0  # seconds in the grammar, and those of them inside draw()

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
            if not bits[token >> 3] >> (token & 7) & 1:  # all candidates are as good as impossible
                token = int(logits.argmax())
        finally:
            restore()
        return token

    def follow(self, tokens: list[int]) -> bool:
        """Bring the matcher to the end of `tokens`. Return False while the grammar has not started.

        Tokens at the end that are gone or changed since the last call are rewound.
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
        the remaining ones are not the answer's.
        """
        self.n_prompt = n_prompt
        if self._start is not None:
            self._start -= n_dropped

    def _begin(self, tokens: list[int]) -> int | None:
        """Return the index at which the grammar starts: the end of `tokens`, if the tag is complete
        there.
        """
        # called at every token, so only the end must be searched; the tag has no more tokens than
        # bytes
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
        """Return and reset the seconds in the grammar, and those of them inside draw()."""
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
    """Return `chain` inside the request's grammar, or `chain` itself without one. `piece` returns a
    token's bytes.
    """
    grammar = request.grammar
    return (
        GuidedChain(chain, grammar.start(), len(request.tokens), request.grammar_after, piece)
        if grammar
        else chain
    )


def pieces_until_tag(tag: str, pieces: Iterable[bytes]) -> int | None:
    """Return how many pieces it takes to complete `tag`, or None; 0 for an empty tag."""
    if not tag:
        return 0
    text, wanted = b"", tag.encode()
    for count, piece in enumerate(pieces, 1):
        text = text[-len(wanted) :] + piece
        if wanted in text:
            return count
    return None


def few_legal_tokens(bits: TokenBits) -> NDArray[np.int64] | None:
    """Return the tokens of a mask in ascending order, or None when there are many.

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
    """Write -inf for the tokens that are not in `bits`. Return a function that restores the row for
    other readers.

    Inside a string nearly all tokens are legal, and only the others are touched.

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
