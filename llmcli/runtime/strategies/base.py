"""What a strategy is: it reads rows of logits and says what the next pass computes.

The engine computes the prompt, in chunks, in the request's own slot; from the prompt's last row on
the strategy decides. It owns no cells: the ledger, which is asked for every change, does.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.curve import Curve
from llmcli.runtime.ledger import Ledger
from llmcli.runtime.request import Request
from llmcli.runtime.sampling.chain import NativeChains, Row
from llmcli.runtime.sequence import Sequence
from llmcli.types import Event, Finish


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is asked of a model: a token's bytes, whether it ends the answer, and how many there
    are.
    """

    piece: Callable[[int], bytes]
    ends: Callable[[int], bool]
    size: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """What guesses are made with: drafters, the one to ask first standing first, the price of a
    pass by its rows, and the most rows a pass may have; `alike`: the most that have bit for bit the
    logits of single ones. `reproducible`: what is drawn must not depend on what was guessed, nor on
    how fast.
    """

    drafters: tuple[Drafter, ...]
    curve: Curve
    most: int
    alike: int = 0
    reproducible: bool = False


NOTHING = Speculation((), Curve({1: 1.0}), 1)


@dataclass(frozen=True, slots=True)
class Means:
    """What a strategy works with; `native` None keeps its sampling to numpy, `speculation` None
    guesses nothing.
    """

    vocabulary: Vocabulary
    native: NativeChains | None
    ledger: Ledger
    speculation: Speculation | None = None


class Strategy(Protocol):
    """How one request is answered; made when it is submitted, alive until it is finished."""

    name: ClassVar[str]
    slots: int  # llama.cpp sequence ids it needs: the prompt's own and `Sequence.spare`

    def __init__(self, request: Request, seed: int, means: Means) -> None: ...

    def pending(self) -> list[tuple[int, int]]:
        """(slot, token) of each row of the next pass, where every token of the sequence is
        computed.
        """
        ...

    def accept(
        self, sequence: Sequence, rows: Iterator[Row], spent: float
    ) -> tuple[list[Event], Finish | None]:
        """Read the rows of a pass that took `spent` seconds: the tokens that came of it, and how
        the answer ends.
        """
        ...

    def shortened(self, sequence: Sequence) -> None:
        """The context was full, and some tokens have left the sequence; asked where `slots` is 1."""
        ...

    def make_way(self, sequence: Sequence, cells: int) -> None:
        """The context is full, and it may have `cells` of it; asked where `slots` is more than 1."""
        ...

    def restart(self, sequence: Sequence) -> None:
        """Others need its cells: it begins anew once there is room; asked where `slots` is more
        than 1.
        """
        ...

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """The answer ends, for whatever reason: what is still to be shown. Only `sequence.slot`
        stays claimed.
        """
        ...


@functools.lru_cache(maxsize=4)
def end_tokens(vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Every token that ends an answer."""
    return np.array([token for token in range(vocabulary.size) if vocabulary.ends(token)], np.int64)


def refuse_nan(row: Row) -> None:
    """Raise UserError where a damaged file makes no numbers; asked once an answer, it shows at
    once.
    """
    logits = row.logits
    if (logits != logits).any():
        raise UserError(
            "the model computes no numbers (NaN): its weights are damaged",
            hint="fetch the file again, or make it anew",
        )
