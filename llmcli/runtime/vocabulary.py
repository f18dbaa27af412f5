"""What the runtime needs of a model's vocabulary."""

from typing import Protocol


class Vocabulary(Protocol):
    """The tokens of a model: their number, their bytes, which of them end an answer, and the
    tokenizer.
    """

    n_vocab: int

    def __hash__(self) -> int: ...

    def piece(self, token: int) -> bytes: ...

    def is_end(self, token: int) -> bool: ...

    def tokenize(self, text: str, *, special: bool) -> list[int]: ...
