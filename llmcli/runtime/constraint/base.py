"""The interface of constrained decoding. A constraint is a JSON schema or a grammar that an answer
must follow.

`Constraint` is the text of the schema or grammar. `Grammar` is its compiled form for one model's
vocabulary. `Matcher` is the state of one answer in the grammar, which gives the mask of the next
token.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError

ConstraintKind = Literal["json_schema", "gbnf", "lark", "regex", "tokens", "calls"]
# A token mask: one bit per token, which is 1 if the token is allowed. Token 0 is the lowest bit of
# the first byte.
TokenBits = NDArray[np.uint8]

ENGINES = ("llguidance", "llama")  # the values of Constraint.engine
JUMP_MODES = ("lossless", "fast", "off")  # the values of Constraint.jump


class UnsatisfiableConstraint(UserError):
    """Raised when the grammar allows no token of the vocabulary next, so an answer cannot continue.
    The request is the cause, not the model or the server.
    """


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have, and how it is enforced.

    - `kind`: `text` is a JSON schema, a GBNF grammar, a grammar in llguidance's dialect of Lark, a
      regular expression, a JSON list of token ids, or a description of function calls
      (tool_calls.py).
    - `engine`: the library that computes the token masks.
    - `jump`: what happens to forced text, where the grammar allows a single continuation. "off"
      draws its tokens like all others. "lossless" inserts a token without a draw when no other
      token is allowed; the answer is the same as with "off". "fast" tokenizes all of the forced
      text at once, so the tokens may differ from those that the model would draw.
    - `is_strict`: a JSON schema of which something cannot be enforced is refused. Otherwise that is
      named in `Grammar.not_enforced`.
    """

    kind: ConstraintKind
    text: str
    engine: str = "llguidance"
    jump: str = "lossless"
    is_strict: bool = False


class Matcher(Protocol):
    """The state of one answer in a grammar, which advances with each token of the answer. End
    tokens are treated like other tokens: they are allowed where the answer may end.
    """

    def mask(self) -> TokenBits:
        """Return the mask of the tokens that the grammar allows next. It is all 0 when the grammar
        allows none. The next call may overwrite the returned array.

        Shape: `[n_vocab / 8]`.
        """
        ...

    def allows(self, token: int) -> bool:
        """Return whether the grammar allows `token` next."""
        ...

    def accept(self, token: int) -> None:
        """Advance the state by `token`, which the grammar must allow."""
        ...

    def rewind(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        ...

    def forced_tokens(self, jump: str) -> list[int]:
        """Return the next tokens if the grammar allows a single continuation, otherwise an empty
        list. `jump`: the mode in which they are found (`Constraint.jump`).
        """
        ...

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer so far is complete, so that it may end here."""
        ...

    @property
    def is_complete(self) -> bool:
        """Return whether the answer so far is complete and cannot be continued."""
        ...

    def copy(self) -> "Matcher":
        """Return an independent matcher in the same state."""
        ...

    def close(self) -> None: ...


class Grammar(Protocol):
    """A constraint compiled for one vocabulary. `start` makes a matcher for each answer."""

    @property
    def constraint(self) -> Constraint: ...

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """What the constraint demands and the grammar does not enforce, each with its place."""
        ...

    def start(self, is_rigid: bool = False) -> Matcher:
        """Return a new matcher in the state before the first token.

        `is_rigid`: an answer can be written in one way only, so that a search finds answers that
        differ. JSON has one space after each colon and comma, and forced text has the tokens that
        the tokenizer chooses. llama.cpp's engine ignores this.
        """
        ...


def accepts(grammar: Grammar, tokens: list[int]) -> bool:
    """Return whether the grammar accepts `tokens`, which contain no end token, as a complete
    answer.
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
    """Return the token that a mask allows if it allows exactly one, otherwise None.

    Shapes: bits `[n_vocab / 8]`.
    """
    number = int.from_bytes(bits.tobytes(), "little")
    return number.bit_length() - 1 if number and not number & (number - 1) else None
