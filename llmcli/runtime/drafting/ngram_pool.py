"""Drafts from a pool of n-grams of earlier answers: if the last tokens occurred in an earlier text of
the same client, guess that the same tokens follow.

Prompt lookup (ngram.py) knows only the text of the answer itself. The pool also knows what the model
has written before: another answer to the same prompt, an edit of the same file, the same phrases of
a template. It lives as long as the model is loaded, and is shared by all slots.

A pool is a hash table of fixed size, whose newer entries replace older ones. Clients have separate
pools, because the speed of an answer would otherwise reveal the texts of others.

Source: llama.cpp, common/ngram-mod.cpp, whose table is shared by the slots of its server, too.
"""

from collections import OrderedDict
from collections.abc import Sequence as Tokens
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.drafting.base import Draft, DrafterResources
from llmcli.runtime.drafting.gain.acceptance import Acceptance
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape, chain_shape
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence

KEY_TOKENS = 8  # tokens that must be equal
POOL_ENTRIES = 1 << 17  # entries of a client's pool, 12 bytes each
MAX_POOLS = 16  # clients with a pool; the pool of the one that was idle longest is dropped
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, with irregular bits
MASK = (1 << 64) - 1
# The hash of a key is the sum of its tokens times these factors, modulo 2**64.
FACTORS = tuple(pow(MULTIPLIER, KEY_TOKENS - at, 1 << 64) for at in range(KEY_TOKENS))
NO_TOKEN = -1


class NgramPool:
    """The table of one client: for the hash of a key, the token that followed it last."""

    def __init__(self) -> None:
        self._hashes = np.zeros(POOL_ENTRIES, np.uint64)
        self._tokens = np.full(POOL_ENTRIES, NO_TOKEN, np.int32)
        self.acceptance = Acceptance()

    def add(self, tokens: Tokens[int]) -> None:
        """Add all n-grams of a text."""
        if len(tokens) <= KEY_TOKENS:
            return
        values = np.array(tokens, np.uint64)
        count = len(tokens) - KEY_TOKENS
        hashes = np.zeros(count, np.uint64)
        for at, factor in enumerate(FACTORS):
            hashes += values[at : at + count] * np.uint64(factor)
        places = _places(hashes)
        self._hashes[places] = hashes
        self._tokens[places] = values[KEY_TOKENS:].astype(np.int32)

    def next_token(self, key: list[int]) -> int:
        """Return the token that followed the last KEY_TOKENS tokens of `key`, or NO_TOKEN."""
        value = sum(t * f for t, f in zip(key[-KEY_TOKENS:], FACTORS, strict=True)) & MASK
        place = (value >> 32) % POOL_ENTRIES
        return int(self._tokens[place]) if int(self._hashes[place]) == value else NO_TOKEN


def _places(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the places of hashes in the table."""
    return ((hashes >> np.uint64(32)) % np.uint64(POOL_ENTRIES)).astype(np.int64)


class PoolDrafter:
    """The pools of all clients."""

    name: ClassVar[str] = "pool"
    order: ClassVar[int] = 12
    draws: ClassVar[bool] = False
    failure: ClassVar[None] = None

    def __init__(self) -> None:
        self._pools: OrderedDict[str, NgramPool] = OrderedDict()  # the last used one last

    @classmethod
    def create(cls, resources: DrafterResources) -> "PoolDrafter | None":
        """Create the drafter. Return None when drafting from repetitions is turned off."""
        return cls() if resources.uses_pool else None

    def start(self, request: Request, seed: int) -> "PoolDrafts":
        """Return the state for a new answer, with the pool of its client."""
        if request.client not in self._pools:
            self._pools[request.client] = NgramPool()
        self._pools.move_to_end(request.client)
        while len(self._pools) > MAX_POOLS:
            self._pools.popitem(last=False)
        return PoolDrafts(self._pools[request.client])


class PoolDrafts:
    """The guesses of one answer. The text is added to the pool at the end of the answer."""

    def __init__(self, pool: NgramPool) -> None:
        self.pool = pool
        self.tokens: list[int] = []
        self.guesses: list[int] = []  # after the present text

    def follow(self, sequence: Sequence) -> None:
        self.tokens, self.guesses = sequence.tokens, []
        self.pool.acceptance.forget()

    def on_context_shift(self) -> None:
        """Do nothing: only the last tokens matter."""

    def _guess(self, count: int) -> list[int]:
        """Return at most `count` guesses."""
        text = [*self.tokens[-KEY_TOKENS:], *self.guesses]
        while len(text) >= KEY_TOKENS and len(self.guesses) < count:
            token = self.pool.next_token(text)
            if token == NO_TOKEN:
                break
            self.guesses.append(token)
            text.append(token)
        return self.guesses[:count]

    def shape(self, limits: ShapeLimits) -> TreeShape:
        chances = self.pool.acceptance.chances(len(self._guess(limits.chain_length)))
        return chain_shape([best for (best,) in chances])

    def cost_seconds(self, n_depths: int) -> float:
        return 0.0

    def reading_seconds(self) -> float:
        return 0.0

    def draft(self, shape: TreeShape) -> Draft:
        """Return the first guesses."""
        return Draft.chain(self._guess(len(shape)))

    def record_result(self, draft: Draft, tokens: Tokens[int]) -> None:
        self.pool.acceptance.record(draft.candidates, tokens)

    def close(self, tokens: Tokens[int]) -> None:
        """Add the text to the pool."""
        self.pool.add(tokens)


DRAFTERS = (PoolDrafter,)
