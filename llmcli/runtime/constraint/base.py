"""What a constraint is: a grammar that an answer must follow, compiled for one vocabulary.

A `Constraint` is what a user typed, a `Grammar` the same compiled, a `Matcher` one answer on its
way through it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError

Kind = Literal["json_schema", "gbnf", "calls"]
Bits = NDArray[np.uint8]  # a bit a token, the lowest id in the lowest bit of the first byte

ENGINES = ("llguidance", "llama")
JUMPS = ("lossless", "fast", "off")


class Unfollowable(UserError):
    """No token goes on in an answer's grammar. The request is to blame, not the model and not the
    server.
    """


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be: a JSON document of a schema, a text of a GBNF grammar, or function
    calls (calls.py).

    `jump`: text that must come is not drawn token by token. lossless: a token that is the only
    legal one is taken (the same answer as `off`); fast: forced text is cut into tokens at once, as
    the tokenizer cuts it.
    """

    kind: Kind
    text: str
    engine: str = "llguidance"
    jump: str = "lossless"


class Matcher(Protocol):
    """One answer's place in a grammar. Tokens that end an answer are tokens like others, legal
    where it accepts.
    """

    def mask(self) -> Bits:
        """The tokens that may come next; none where the grammar leads nowhere."""
        ...

    def allows(self, token: int) -> bool:
        """Whether `token` may come next."""
        ...

    def accept(self, token: int) -> None:
        """Go on by a token that is allowed."""
        ...

    def rewind(self, count: int) -> None:
        """Take the last `count` tokens back."""
        ...

    def forced(self, jump: str) -> list[int]:
        """The tokens that must come next, as far as `jump` looks; none where there is a choice."""
        ...

    @property
    def accepting(self) -> bool:
        """Whether the answer may end here."""
        ...

    @property
    def complete(self) -> bool:
        """Whether nothing but the end may follow."""
        ...

    def copy(self) -> "Matcher":
        """Another matcher at the same place."""
        ...

    def close(self) -> None: ...


class Grammar(Protocol):
    """A compiled constraint."""

    @property
    def constraint(self) -> Constraint: ...

    def start(self) -> Matcher:
        """A matcher at the beginning."""
        ...


def accepts(grammar: Grammar, tokens: list[int]) -> bool:
    """Whether `tokens`, an answer without its end token, are a whole text of the grammar."""
    matcher = grammar.start()
    try:
        for token in tokens:
            if not matcher.allows(token):
                return False
            matcher.accept(token)
        return matcher.accepting
    finally:
        matcher.close()


def single(bits: Bits) -> int | None:
    """The only token of a mask; None where there are none or several."""
    number = int.from_bytes(bits.tobytes(), "little")
    return number.bit_length() - 1 if number and not number & (number - 1) else None
