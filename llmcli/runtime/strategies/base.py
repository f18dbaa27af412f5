"""The interface of strategies. A strategy reads rows of logits and decides what the next pass
computes.

The engine computes the prompt in the request's own slot. From the last row of the prompt on, the
strategy decides. A strategy changes cells only through the ledger.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.pass_cost import PassCost
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import DecodingStrategy
from llmcli.runtime.sampling.chain import NativeChainFactory, RowLogits
from llmcli.runtime.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a strategy needs to draft tokens.

    - `drafters`: the drafters, in the order in which they are asked. `pass_cost`: the cost of a
      pass by its number of rows.
    - `max_rows`: maximum rows of a pass. `exact_rows`: up to this many rows in a pass, each row
      has, bit for bit, the logits of a pass of one row.
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
    """What a strategy works with. `native`: makes llama.cpp's sampler chains; None samples with
    numpy. `speculation`: None drafts no tokens.
    """

    vocabulary: Vocabulary
    native: NativeChainFactory | None
    ledger: Ledger
    speculation: Speculation | None = None


class StrategyType(Protocol):
    """A class of strategies; the registry finds it by `name`."""

    name: ClassVar[str]

    def __call__(
        self, request: Request, seed: int, resources: StrategyResources
    ) -> DecodingStrategy: ...


@functools.lru_cache(maxsize=4)
def end_tokens(vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return every token that ends an answer, `[end tokens]`."""
    return np.array(
        [token for token in range(vocabulary.n_vocab) if vocabulary.is_end(token)], np.int64
    )


def refuse_nan(row: RowLogits) -> None:
    """Raise UserError when a row contains NaN. It is enough to check the first row of an answer,
    because damaged weights show there.
    """
    logits = row.logits
    if (logits != logits).any():
        raise UserError(
            "the model computes no numbers (NaN): its weights are damaged",
            hint="download or convert the file again",
        )
