"""The protocol of a model's vocabulary. Sampling, constraints and strategies use it instead of the
llama.cpp model, so that tests can pass a small one.
"""

from typing import Protocol


class Vocabulary(Protocol):
    """The tokens of a model, with ids from 0 to `n_vocab` - 1."""

    n_vocab: int

    def __hash__(self) -> int: ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; empty for a token that is not text."""
        ...

    def is_end(self, token: int) -> bool:
        """Return whether the token ends an answer."""
        ...

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Return the token ids of a text. `special`: names of control tokens in the text, such as
        <|im_end|>, become control tokens.
        """
        ...
