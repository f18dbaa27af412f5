"""What a constraint is: a grammar that an answer must follow, compiled for one vocabulary.

A `Constraint` is what a user wrote, a `Grammar` its compiled form, and a `Matcher` the progress of
one answer through it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError

ConstraintKind = Literal["json_schema", "gbnf", "calls"]
TokenBits = NDArray[
    np.uint8
]  # one bit per token, the lowest id in the lowest bit of the first byte

ENGINES = ("llguidance", "llama")
JUMP_MODES = ("lossless", "fast", "off")


class UnsatisfiableConstraint(UserError):
    """A grammar allows no further token in an answer. The request is at fault, not the model or the
    server.
    """


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be: a JSON document of a schema, a text of a GBNF grammar, or function
    calls (tool_calls.py).

    `jump`: how forced text is inserted without sampling. "lossless" takes a token that is the only
    legal one, with the same result as "off"; "fast" tokenizes the forced text at once.
    """

    kind: ConstraintKind
    text: str
    engine: str = "llguidance"
    jump: str = "lossless"


class Matcher(Protocol):
    """The progress of one answer in a grammar. End tokens are ordinary tokens, legal where the
    answer may end.
    """

    def mask(self) -> TokenBits:
        """Return the tokens that may come next, as bits; none at a dead end."""
        ...

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token that is allowed."""
        ...

    def rewind(self, count: int) -> None:
        """Go back by the last `count` tokens."""
        ...

    def forced_tokens(self, jump: str) -> list[int]:
        """Return the tokens that must come next, as far as `jump` looks; empty where there is a
        choice.
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
    """A compiled constraint."""

    @property
    def constraint(self) -> Constraint: ...

    def start(self) -> Matcher:
        """Return a matcher at the start of the grammar."""
        ...


def accepts(grammar: Grammar, tokens: list[int]) -> bool:
    """Return whether `tokens`, an answer without its end token, are complete in the grammar."""
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
    """Return the only token of a mask, or None when there are none or several.

    Shapes: bits `[n_vocab / 8]`.
    """
    number = int.from_bytes(bits.tobytes(), "little")
    return number.bit_length() - 1 if number and not number & (number - 1) else None
