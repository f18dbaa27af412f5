"""The vocabulary of a model, as the runtime uses it."""

from typing import Protocol


class Vocabulary(Protocol):
    """The tokens of a model: how many there are, the bytes of each, which of them end an answer,
    and a tokenizer.
    """

    n_vocab: int

    def __hash__(self) -> int: ...

    def piece(self, token: int) -> bytes: ...

    def is_end(self, token: int) -> bool: ...

    def tokenize(self, text: str, *, special: bool) -> list[int]: ...
