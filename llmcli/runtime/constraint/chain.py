"""The sampler chain inside a grammar.

The rule: a token that is the only legal one is taken without a draw; otherwise all illegal tokens
get the logit -inf before the first step of the chain. So a seed gives the same text whether forced
text is jumped over or not. A greedy chain draws first, and the mask is made only if the grammar
refuses its token: the likeliest token of all, if it is legal, is the likeliest legal one.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.constraint.base import Bits, Matcher, Unfollowable, single
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.base import Logits
from llmcli.runtime.sampling.chain import Chain, Choosing, Greedy, Row

FULL = 255  # a byte of a mask with eight legal tokens
MANY = 256  # filled bytes of a mask with more than a few legal tokens
FEW = 4  # a mask is nearly full where fewer than one byte in so many is not


class GuidedChain:
    """Draws only what the grammar allows after the answer's tokens, which it reads off those that
    draw() gets.
    """

    def __init__(
        self,
        chain: Chain,
        matcher: Matcher,
        prompt: int,
        tag: str = "",
        piece: Callable[[int], bytes] = lambda token: b"",
    ) -> None:
        """`prompt`: how many of the tokens that draw() gets are not the answer's. The grammar
        begins behind `tag`, which is looked for in the tokens' bytes (`piece`); until then every
        token is allowed.
        """
        self.chain, self.matcher, self.prompt, self.tag, self.piece = (
            chain,
            matcher,
            prompt,
            tag,
            piece,
        )
        self.choosing = chain if isinstance(chain, Choosing) else None
        self._start = (
            None if tag else prompt
        )  # where the grammar begins; below 0 where that has left the tokens
        self._told: list[int] = []  # tokens from there on that the matcher knows
        self._total = self._inside = 0.0  # seconds in the grammar, and those of them in draw()

    def draw(self, row: Row, tokens: list[int]) -> int:
        """The next token. Raises Unfollowable where the grammar leaves none."""
        begun = time.perf_counter()
        if not self.follow(tokens):
            return self.chain.draw(row, tokens)
        if isinstance(self.chain, Greedy):
            chosen = time.perf_counter()
            token = self.chain.draw(row, tokens)
            begun += time.perf_counter() - chosen
            if self.matcher.allows(token):
                self._spend(begun)
                return token
        bits = self.matcher.mask()
        only = single(bits)
        if only is not None:
            self._spend(begun)
            return only
        if self.choosing and (few := legal(bits)) is not None:
            self._spend(begun)
            return self.choosing.draw_among(row, few, tokens)
        logits = row.logits
        put_right = forbid(logits, bits)
        self._spend(begun)
        try:
            token = self.chain.draw(row, tokens)
            if (
                not bits[token >> 3] >> (token & 7) & 1
            ):  # of candidates that are all as good as impossible
                token = int(logits.argmax())
        finally:
            put_right()
        return token

    def follow(self, tokens: list[int]) -> bool:
        """Bring the matcher to the end of `tokens`; False while the grammar has not begun.

        Tokens at the end that have gone since the last call, or have changed, are taken back.
        """
        if self._start is None or self._start > len(tokens):
            self._start = self._begin(tokens)
            if self._start is None:
                return False
        start, told = self._start, self._told
        kept = min(len(told), len(tokens) - start)
        while kept and start + kept > self.prompt and tokens[start + kept - 1] != told[kept - 1]:
            kept -= 1
        if kept < len(told):
            self.matcher.rewind(len(told) - kept)
            del told[kept:]
        for token in tokens[start + kept :]:
            self.matcher.accept(token)
            told.append(token)
        return True

    def shortened(self, gone: int, prompt: int) -> None:
        """`gone` tokens have left a full context; `prompt` of those that stay are not the answer's."""
        self.prompt = prompt
        if self._start is not None:
            self._start -= gone

    def _begin(self, tokens: list[int]) -> int | None:
        """Where in `tokens` the grammar begins: at their end, if the tag has just been said."""
        # Asked at every token: a tag that ends with the last one has no more tokens than bytes.
        recent = tokens[max(self.prompt, len(tokens) - len(self.tag.encode())) :]
        return None if after(self.tag, map(self.piece, recent)) is None else len(tokens)

    def ahead(self, tokens: list[int], jump: str) -> tuple[list[int], bool]:
        """What must come after `tokens`, and whether that is the end."""
        begun = time.perf_counter()
        if not self.follow(tokens):
            return [], False
        complete = self.matcher.complete
        forced = [] if complete else self.matcher.forced(jump)
        self._total += time.perf_counter() - begun
        return forced, complete

    def spent(self) -> tuple[float, float]:
        """Seconds in the grammar since last asked, and those of them that were part of a draw."""
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


def guided(chain: Chain, request: Request, piece: Callable[[int], bytes]) -> Chain:
    """`chain` inside the request's grammar, where it has one; `piece` are a token's bytes."""
    grammar = request.grammar
    return (
        GuidedChain(chain, grammar.start(), len(request.tokens), request.after, piece)
        if grammar
        else chain
    )


def after(tag: str, pieces: Iterable[bytes]) -> int | None:
    """How many pieces it takes until `tag` has been said; None where it has not. No tag is said at
    once.
    """
    if not tag:
        return 0
    text, wanted = b"", tag.encode()
    for count, piece in enumerate(pieces, 1):
        text = text[-len(wanted) :] + piece
        if wanted in text:
            return count
    return None


def legal(bits: Bits) -> NDArray[np.int64] | None:
    """The tokens of a mask, the lowest first; None where they are many. Raises Unfollowable where
    there are none.
    """
    filled = np.flatnonzero(bits)  # bytes
    if len(filled) > MANY:
        return None
    if not len(filled):
        raise nowhere()
    inside = np.flatnonzero(np.unpackbits(bits[filled], bitorder="little"))
    tokens: NDArray[np.int64] = filled[inside >> 3] * 8 + (inside & 7)
    return tokens


def nowhere() -> Unfollowable:
    """What is told where a grammar leaves no token."""
    return Unfollowable(
        "no token of the model goes on in this grammar",
        hint="it may ask for characters that the model's vocabulary does not have",
    )


def forbid(logits: Logits, bits: Bits) -> Callable[[], None]:
    """Write -inf for the tokens that `bits` lacks. Returns what restores the row, for others may
    read it, too.

    Within a string nearly all tokens are legal, and only the others are touched (400 illegal ones
    of 49,152: 20 µs instead of 60; some hundred with cold caches).
    """
    holes = np.flatnonzero(bits != FULL)  # bytes
    if len(holes) * FEW < len(bits):
        inside = np.flatnonzero(np.unpackbits(~bits[holes], bitorder="little"))
        tokens = holes[inside >> 3] * 8 + (inside & 7)
        tokens = tokens[tokens < len(logits)]
        values = logits[tokens]
        logits[tokens] = -np.inf
        return partial(logits.__setitem__, tokens, values)
    legal(bits)  # raises where there are none
    before = logits.copy()
    allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(np.bool_)
    np.copyto(logits, -np.inf, where=~allowed)
    return partial(np.copyto, logits, before)
