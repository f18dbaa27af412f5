"""The grammar of answers that consist of some tokens only (vLLM's `allowed_token_ids`). An end token
that is not one of them is forbidden, too.
"""

import json
from dataclasses import dataclass

import numpy as np

from llmcli.errors import UserError
from llmcli.runtime.constraint.base import Constraint, TokenBits


@dataclass(frozen=True, slots=True, eq=False)
class TokenSetGrammar:
    """A grammar that allows the same tokens at every position. `bits`: their mask."""

    constraint: Constraint
    bits: TokenBits
    not_enforced: tuple[str, ...] = ()

    def start(self, is_rigid: bool = False) -> "TokenSetMatcher":
        """Return a matcher. `is_rigid` has no effect."""
        return TokenSetMatcher(self.bits)


class TokenSetMatcher:
    """The state of an answer in the grammar, which never changes."""

    is_accepting = True
    is_complete = False

    def __init__(self, bits: TokenBits) -> None:
        self._bits = bits

    def mask(self) -> TokenBits:
        """Return the mask of the allowed tokens."""
        return self._bits

    def allows(self, token: int) -> bool:
        return bool(self._bits[token >> 3] >> (token & 7) & 1)

    def accept(self, token: int) -> None:
        """Do nothing, because the same tokens remain allowed."""

    def rewind(self, count: int) -> None:
        """Do nothing, because the same tokens remain allowed."""

    def forced_tokens(self, jump: str) -> list[int]:
        """Return no tokens: a set of one token would be repeated without end."""
        return []

    def copy(self) -> "TokenSetMatcher":
        return self

    def close(self) -> None:
        """Do nothing: no resources are used."""


def compile_token_set(constraint: Constraint, n_vocab: int) -> TokenSetGrammar:
    """Return the grammar of a constraint whose text is a JSON list of token ids. Raises UserError
    for an id outside a vocabulary of `n_vocab` tokens.
    """
    tokens = json.loads(constraint.text)
    if unknown := [token for token in tokens if not 0 <= token < n_vocab]:
        raise UserError(
            f"allowed_token_ids names token {unknown[0]}, but the vocabulary ends at {n_vocab - 1}",
            hint="run --json shows the ids of a model's tokens",
        )
    bits = np.zeros(8 * -(-n_vocab // 8), np.uint8)
    bits[tokens] = 1
    return TokenSetGrammar(constraint, np.packbits(bits, bitorder="little"))
