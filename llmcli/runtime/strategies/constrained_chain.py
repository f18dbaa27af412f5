"""Sampling inside a grammar: a sampler chain that draws only tokens that the grammar allows next.

When the grammar allows a single token, that token is returned without a draw. So the random numbers
of a seed, and with them the text, do not depend on whether forced text is inserted directly
(guided.py). Otherwise all forbidden tokens get the logit -inf before the first step of the chain.

A greedy chain draws first, and the mask is computed only if the grammar forbids the drawn token: if
the likeliest token of all is allowed, it is also the likeliest allowed token.
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

FULL_BYTE = 255  # a mask byte whose eight tokens are all allowed
MAX_FEW_BYTES = 256  # a mask with more non-zero bytes counts as allowing many tokens
# a mask is nearly full when fewer than 1/4 of its bytes contain a forbidden token
NEARLY_FULL_FRACTION = 4


class GuidedChain:
    """A sampler chain that draws only tokens that the grammar allows next. The grammar may start
    later than the answer, after a tag such as `</think>`.
    """

    def __init__(
        self,
        chain: SamplerChain,
        matcher: Matcher,
        n_prompt: int,
        tag: str = "",
        piece: Callable[[int], bytes] = lambda token: b"",
    ) -> None:
        """`chain`: draws the tokens. `matcher`: the state in the grammar. `n_prompt`: how many of
        the tokens passed to draw() belong to the prompt. `tag`: the text in the answer after which
        the grammar starts; until then every token is allowed. With an empty tag the grammar starts
        at once. `piece`: returns the bytes of a token, in which the tag is searched.
        """
        self.chain, self.matcher, self.n_prompt, self.tag, self.piece = (
            chain,
            matcher,
            n_prompt,
            tag,
            piece,
        )
        self.choosing_chain = chain if isinstance(chain, ChoosingChain) else None
        # Index of the first token inside the grammar; None before the grammar starts, and negative
        # when that token was dropped from the context.
        self._start = None if tag else n_prompt
        self._accepted: list[int] = []  # tokens from `_start` on that the matcher has accepted
        # seconds spent in the grammar since pop_seconds(): in total, and inside draw()
        self._seconds = self._draw_seconds = 0.0

    def draw(self, row: RowLogits, tokens: list[int]) -> int:
        """Return the token that follows `tokens`. The logits of `row` are the same after the call.

        Raises UnsatisfiableConstraint when the grammar allows no token.
        """
        start_time = time.perf_counter()
        if not self.follow(tokens):
            return self.chain.draw(row, tokens)
        if isinstance(self.chain, GreedyChain):
            draw_time = time.perf_counter()
            token = self.chain.draw(row, tokens)
            start_time += time.perf_counter() - draw_time  # the draw is not the grammar's time
            if self.matcher.allows(token):
                self._record_seconds(start_time)
                return token
        bits = self.matcher.mask()
        single = single_token(bits)
        if single is not None:
            self._record_seconds(start_time)
            return single
        if self.choosing_chain and (few_tokens := few_legal_tokens(bits)) is not None:
            self._record_seconds(start_time)
            return self.choosing_chain.draw_among(row, few_tokens, tokens)
        logits = row.logits
        restore = mask_logits(logits, bits)
        self._record_seconds(start_time)
        try:
            token = self.chain.draw(row, tokens)
            # If all legal tokens have a probability near 0, the chain may draw a forbidden one.
            # Then take the likeliest legal token.
            if not bits[token >> 3] >> (token & 7) & 1:
                token = int(logits.argmax())
        finally:
            restore()
        return token

    def follow(self, tokens: list[int]) -> bool:
        """Advance the matcher to the end of `tokens`, the prompt and the answer so far. Return
        False while the grammar has not started.

        If the last tokens were removed or replaced since the last call, as after a wrong guess, the
        matcher is first rewound to the last token that is still the same.
        """
        if self._start is None or self._start > len(tokens):
            self._start = self._find_start(tokens)
            if self._start is None:
                return False
        start, accepted = self._start, self._accepted
        n_same = min(len(accepted), len(tokens) - start)
        while (
            n_same
            and start + n_same > self.n_prompt
            and tokens[start + n_same - 1] != accepted[n_same - 1]
        ):
            n_same -= 1
        if n_same < len(accepted):
            self.matcher.rewind(len(accepted) - n_same)
            del accepted[n_same:]
        for token in tokens[start + n_same :]:
            self.matcher.accept(token)
            accepted.append(token)
        return True

    def on_context_shift(self, n_dropped: int, n_prompt: int) -> None:
        """Adjust the positions in the text: `n_dropped` tokens were dropped from a full context,
        and the first `n_prompt` of the remaining tokens belong to the prompt.
        """
        self.n_prompt = n_prompt
        if self._start is not None:
            self._start -= n_dropped

    def _find_start(self, tokens: list[int]) -> int | None:
        """Return the index of the first token inside the grammar: the end of `tokens` if they now
        contain the complete tag. Return None if they do not.
        """
        # This runs for every token, so only the last tokens are searched: at most as many as the
        # tag has bytes.
        recent = tokens[max(self.n_prompt, len(tokens) - len(self.tag.encode())) :]
        return None if pieces_until_tag(self.tag, map(self.piece, recent)) is None else len(tokens)

    def forced_tokens(self, tokens: list[int], jump: str) -> tuple[list[int], bool]:
        """Return the tokens that the grammar forces after `tokens`, and whether the grammar is
        complete, so that the answer must end. `jump`: the jump-forward mode of the constraint,
        which decides how far forced text is looked up (`Matcher.forced_tokens`).
        """
        start_time = time.perf_counter()
        if not self.follow(tokens):
            return [], False
        is_complete = self.matcher.is_complete
        forced = [] if is_complete else self.matcher.forced_tokens(jump)
        self._seconds += time.perf_counter() - start_time
        return forced, is_complete

    def pop_seconds(self) -> tuple[float, float]:
        """Return the seconds spent in the grammar since the last call: the total, and the part of
        it inside draw().
        """
        seconds = self._seconds, self._draw_seconds
        self._seconds = self._draw_seconds = 0.0
        return seconds

    def _record_seconds(self, start_time: float) -> None:
        """Add the time since `start_time`, all of it inside draw(), to the grammar's seconds."""
        seconds = time.perf_counter() - start_time
        self._seconds += seconds
        self._draw_seconds += seconds

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
    """Return the number of pieces up to the one that completes `tag`, or None when the pieces do
    not contain the tag. `pieces`: the bytes of successive tokens. Return 0 for an empty tag.
    """
    if not tag:
        return 0
    text, tag_bytes = b"", tag.encode()
    for count, piece in enumerate(pieces, 1):
        text = text[-len(tag_bytes) :] + piece
        if tag_bytes in text:
            return count
    return None


def few_legal_tokens(bits: TokenBits) -> NDArray[np.int64] | None:
    """Return the ids of the tokens that a mask allows, in ascending order. Return None when more
    than MAX_FEW_BYTES bytes of the mask allow tokens, because then a full scan is faster.

    Shapes: bits `[n_vocab / 8]`, result `[tokens]`. Raises UnsatisfiableConstraint when the mask
    allows no token.
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
    """Return the error to raise when the grammar allows no token of the vocabulary next."""
    return UnsatisfiableConstraint(
        "no token of the model can follow in this grammar",
        hint="the grammar may need characters that the model's vocabulary does not have",
    )


def mask_logits(logits: Logits, bits: TokenBits) -> Callable[[], None]:
    """Write -inf into `logits` for the tokens that the mask `bits` forbids. Return a function that
    restores the original logits.

    Where nearly all tokens are allowed, as inside a JSON string, only the forbidden ones are
    visited.

    Shapes: logits `[n_vocab]`, bits `[n_vocab / 8]`. Raises UnsatisfiableConstraint when the mask
    allows no token.
    """
    not_full = np.flatnonzero(bits != FULL_BYTE)  # indices of bytes
    if len(not_full) * NEARLY_FULL_FRACTION < len(bits):
        inside = np.flatnonzero(np.unpackbits(~bits[not_full], bitorder="little"))
        tokens = not_full[inside >> 3] * 8 + (inside & 7)
        tokens = tokens[tokens < len(logits)]
        values = logits[tokens]
        logits[tokens] = -np.inf
        return partial(logits.__setitem__, tokens, values)
    few_legal_tokens(bits)  # raises when the mask allows no token
    original = logits.copy()
    allowed = np.unpackbits(bits, count=len(logits), bitorder="little").view(np.bool_)
    np.copyto(logits, -np.inf, where=~allowed)
    return partial(np.copyto, logits, original)
