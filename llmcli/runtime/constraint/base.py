"""The interface of constraints. A constraint is a grammar that an answer must follow, compiled for
one vocabulary.

A `Constraint` is the text that a user wrote, a `Grammar` is its compiled form, and a `Matcher` is
the progress of one answer in the grammar.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError

ConstraintKind = Literal["json_schema", "gbnf", "calls"]
TokenBits = NDArray[
    np.uint8
]  # one bit per token; the token with the lowest id has the lowest bit of the first byte

ENGINES = ("llguidance", "llama")
JUMP_MODES = ("lossless", "fast", "off")


class UnsatisfiableConstraint(UserError):
    """A grammar allows no further token in an answer. The cause is in the request, not in the model
    or the server.
    """


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be: a JSON document that fits a schema, a text that fits a GBNF grammar,
    or function calls (tool_calls.py).

    `jump`: how forced text is inserted. "off" does not insert it. "lossless" inserts a token
    without a draw when it is the only legal one, which gives the same text as "off". "fast"
    tokenizes all of the forced text at once.
    """

    kind: ConstraintKind
    text: str
    engine: str = "llguidance"
    jump: str = "lossless"


class Matcher(Protocol):
    """The progress of one answer in a grammar. End tokens are treated like other tokens: they are
    legal where the answer may end.
    """

    def mask(self) -> TokenBits:
        """Return which tokens may come next, as a bit mask. All bits are 0 when none may."""
        ...

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance by `token`, which must be allowed."""
        ...

    def rewind(self, count: int) -> None:
        """Go back by `count` tokens."""
        ...

    def forced_tokens(self, jump: str) -> list[int]:
        """Return the tokens that must come next; empty when there is a choice. `jump`: how they are
        found, as in `Constraint`.
        """
        ...

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        ...

    @property
    def is_complete(self) -> bool:
        """Return whether the answer must end here."""
        ...

    def copy(self) -> "Matcher":
        """Return an independent matcher in the same state."""
        ...

    def close(self) -> None: ...


class Grammar(Protocol):
    """A compiled constraint, from which a matcher for each answer is made."""

    @property
    def constraint(self) -> Constraint: ...

    def start(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        ...


def accepts(grammar: Grammar, tokens: list[int]) -> bool:
    """Return whether the grammar accepts `tokens` as a complete answer. `tokens`: without the end
    token.
    """
    matcher = grammar.start()
    try:
        for token in tokens:
            if not matcher.allows(token):
                return False
            matcher.accept(token)
        return matcher.is_accepting
    finally:
        matcher.close()


def single_token(bits: TokenBits) -> int | None:
    """Return the only token that a mask allows, or None when it allows none or several.

    Shapes: bits `[n_vocab / 8]`.
    """
    number = int.from_bytes(bits.tobytes(), "little")
    return number.bit_length() - 1 if number and not number & (number - 1) else None
