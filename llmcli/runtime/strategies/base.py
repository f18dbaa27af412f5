"""The interface of decoding strategies. After each forward pass a strategy reads the logits of its
request, chooses the next tokens, and says which tokens the next pass computes.

The engine itself computes the prompt; the strategy takes over at the logits of the last prompt
token. A strategy changes the KV cache only through the ledger, which records the tokens of each
cell.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.drafting.base import Drafter
from llmcli.runtime.drafting.gain.pass_cost import PassCost
from llmcli.runtime.kv_cache.ledger import Ledger
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import DecodingStrategy
from llmcli.runtime.sampling.chain import NativeChainFactory, RowLogits
from llmcli.runtime.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafters and limits of speculative decoding. A row is one token that a forward pass
    computes.

    - `drafters`: the one with the largest expected gain drafts; of equal ones, the first.
    - `pass_cost`: the measured time of a pass by its number of rows.
    - `max_rows`: the maximum number of rows in a pass.
    - `exact_rows`: in a pass of at most this many rows, every row has bit for bit the logits that
      it would have in a pass by itself.
    - `is_reproducible`: the answer must not depend on the guesses or on measured speed.
    - `takes_longest`: every draft is as long as possible, even where it costs time.
    - `max_branches`: the most paths of a draft. With more than one, a draft may be a tree.
    """

    drafters: tuple[Drafter, ...]
    pass_cost: PassCost
    max_rows: int
    exact_rows: int = 0
    is_reproducible: bool = False
    takes_longest: bool = False
    max_branches: int = 1


@dataclass(frozen=True, slots=True)
class StrategyResources:
    """The parts of the engine that a strategy uses. The same object serves all requests.

    `native` makes llama.cpp's sampler chains; with None, numpy samples instead. With `speculation`
    None, no tokens are drafted. In a pass of at most `exact_rows` rows of an answer, every row has
    bit for bit the logits that it would have in a pass by itself.
    """

    vocabulary: Vocabulary
    native: NativeChainFactory | None
    ledger: Ledger
    speculation: Speculation | None = None
    exact_rows: int = 1


class StrategyType(Protocol):
    """A strategy class, which `strategies()` lists under `name`. Calling it creates the strategy
    object of one request.
    """

    name: ClassVar[str]

    def __call__(
        self, request: Request, seed: int, resources: StrategyResources
    ) -> DecodingStrategy: ...


@functools.lru_cache(maxsize=4)
def end_tokens(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """Return the ids of all tokens that end an answer, such as </s> and <|im_end|>.

    Shape: `[end tokens]`.
    """
    return np.array(
        [token for token in range(vocabulary.n_vocab) if vocabulary.is_end(token)], np.int32
    )


def refuse_nan(row: RowLogits) -> None:
    """Raise UserError when the logits of `row` contain NaN.

    Only the first row of an answer needs this check, because damaged weights already show there.
    """
    logits = row.logits
    if (logits != logits).any():
        raise UserError(
            "the model computes no numbers (NaN): its weights are damaged",
            hint="download or convert the file again",
        )
