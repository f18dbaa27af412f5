"""What a strategy is: it reads rows of logits and decides what the next pass computes.

The engine computes the prompt in the request's own slot; from the last row of the prompt on, the
strategy decides. The ledger owns the cells and is asked for every change.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.pass_cost import PassCost
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.sampling.chain import NativeChainFactory, RowLogits
from llmcli.types import Event, Finish


@dataclass(frozen=True, slots=True)
class ModelVocabulary:
    """What a strategy needs of a model: the bytes of a token, whether it ends the answer, and the
    number of tokens.
    """

    piece: Callable[[int], bytes]
    is_end: Callable[[int], bool]
    size: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """What drafts are made with.

    - `drafters`: in the order in which they are asked. `pass_cost`: the cost of a pass by its rows.
    - `max_rows`: rows of a pass. `exact_rows`: rows up to which each has, bit for bit, the logits
      of a single row.
    - `is_reproducible`: the answer must not depend on the guesses or on measured speed.
    """

    drafters: tuple[Drafter, ...]
    pass_cost: PassCost
    max_rows: int
    exact_rows: int = 0
    is_reproducible: bool = False


NO_SPECULATION = Speculation((), PassCost({1: 1.0}), 1)


@dataclass(frozen=True, slots=True)
class StrategyResources:
    """What a strategy works with. `native` None samples with numpy; `speculation` None drafts
    nothing.
    """

    vocabulary: ModelVocabulary
    native: NativeChainFactory | None
    ledger: Ledger
    speculation: Speculation | None = None


class DecodingStrategy(Protocol):
    """How one request is answered; created when it is submitted and used until it is finished."""

    name: ClassVar[str]
    slots: int  # llama.cpp sequence ids that it needs: the prompt's own and `Sequence.branch_slots`

    def __init__(self, request: Request, seed: int, resources: StrategyResources) -> None: ...

    def pending_rows(self) -> list[tuple[int, int]]:
        """Return (slot, token) of each row of the next pass, when all tokens of the sequence are
        computed.
        """
        ...

    def accept(
        self, sequence: Sequence, rows: Iterator[RowLogits], pass_seconds: float
    ) -> tuple[list[Event], Finish | None]:
        """Read the rows of a pass that took `pass_seconds` seconds. Return the events of the new
        tokens, and the finish if the answer ends.
        """
        ...

    def on_context_shift(self, sequence: Sequence) -> None:
        """React to tokens that were dropped from a full context; called when `slots` is 1."""
        ...

    def apply_overflow(self, sequence: Sequence, max_cells: int) -> None:
        """Drop tokens from a full context, of which the sequence may use `max_cells`; called when
        `slots` is more than 1.
        """
        ...

    def restart(self, sequence: Sequence) -> None:
        """Start again, because other requests need the cells; called when `slots` is above 1."""
        ...

    def finish(self, sequence: Sequence, finish: Finish) -> str:
        """End the answer and return the text that was held back. Only `sequence.slot` stays
        claimed.
        """
        ...


@functools.lru_cache(maxsize=4)
def end_tokens(vocabulary: ModelVocabulary) -> NDArray[np.int64]:
    """Return every token that ends an answer, `[end tokens]`."""
    return np.array(
        [token for token in range(vocabulary.size) if vocabulary.is_end(token)], np.int64
    )


def refuse_nan(row: RowLogits) -> None:
    """Raise UserError when a row contains NaN. Checked once per answer, because damaged weights
    show in the first row.
    """
    logits = row.logits
    if (logits != logits).any():
        raise UserError(
            "the model computes no numbers (NaN): its weights are damaged",
            hint="download or convert the file again",
        )
