"""The interface of drafters. A drafter guesses the next tokens of an answer and estimates how
likely its guesses are right, so that the model can check several tokens in one pass (speculative
decoding).
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.eagle_context import EagleContext
from llmcli.runtime.binding.contexts.prediction_context import PredictionContext
from llmcli.runtime.drafting.draft_files.head_graph import HeadGraph
from llmcli.runtime.drafting.gain.pass_cost import PassCost
from llmcli.runtime.drafting.gain.tree_shape import ShapeLimits, TreeShape
from llmcli.runtime.requests.request import Request
from llmcli.runtime.requests.sequence import Sequence
from llmcli.runtime.requests.token_tree import NO_DRAFT, TokenTree
from llmcli.runtime.sampling.chain import RowLogits
from llmcli.runtime.vocabulary import Vocabulary

Probabilities = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens: a single path, or a tree.

    - `distributions`: for each node the distribution `[n_vocab]` from which its token was drawn,
      given the nodes before it that follow the same node; empty if the tokens were not drawn.
    - `candidates`: for each depth of the main path the drafter's guesses, the best first, with those
      that are not in the tree.
    - `reading_seconds`: seconds that the drafter spent on reading the text before the guesses.
    """

    tree: TokenTree = NO_DRAFT
    distributions: Rows[Probabilities] = ()
    candidates: Rows[Rows[int]] = ()
    reading_seconds: float = 0.0

    @classmethod
    def chain(cls, tokens: Rows[int]) -> "Draft":
        """Return a draft with a single path of tokens that were not drawn."""
        return cls(TokenTree.chain(tokens), candidates=tuple((token,) for token in tokens))


class DraftState(Protocol):
    """A drafter's state for one answer, which makes the guesses of this answer."""

    def follow(self, sequence: Sequence) -> None:
        """Read the tokens that were added to the answer since the last call. The first call is made
        after the prompt and one token of the answer.
        """
        ...

    def on_context_shift(self) -> None:
        """Update the state after tokens were dropped from the text, because the context was
        full.
        """
        ...

    def shape(self, limits: ShapeLimits) -> TreeShape:
        """Return the shape of the best draft within `limits`, with the chances of its guesses. It
        is empty when the drafter has no guesses.
        """
        ...

    def cost_seconds(self, n_depths: int) -> float:
        """Return the expected seconds for making a draft whose longest path has `n_depths` guesses.
        The pass in which the model checks them is not included.
        """
        ...

    def reading_seconds(self) -> float:
        """Return the expected seconds for reading the unread tokens of the text, which the drafter
        must do before it can guess.
        """
        ...

    def draft(self, shape: TreeShape) -> Draft:
        """Return a draft of this shape, the beginning of that of `shape()`. It may have fewer
        guesses, and is empty if the answer was cancelled.
        """
        ...

    def record_result(self, draft: Draft, tokens: Rows[int]) -> None:
        """Record what became of a draft: the model has chosen `tokens`. All but the last one are on
        a path of the tree that was checked, to which other drafters may have added guesses.
        """
        ...

    def close(self, tokens: Rows[int]) -> None:
        """Free all resources at the end of the answer. `tokens`: the whole text."""
        ...


@runtime_checkable
class RowObserver(Protocol):
    """A DraftState that also reads the logits of the pass that checked its guesses."""

    def observe_rows(
        self, last_token: int, tree: TokenTree, rows: Rows[RowLogits], path: Rows[int]
    ) -> None:
        """Read the logits of a pass, which are valid during the call. `rows`: the logits after the
        last token of the text before the pass, and after each node of `tree`. `path`: the nodes
        that were right.
        """
        ...


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """The things from which drafters are created.

    - `vocabulary`: the vocabulary of the model.
    - `uses_ngrams`: whether to draft from repetitions in the text.
    - `uses_pool`: whether to draft from the n-grams of earlier answers.
    - `uses_lookahead`: whether to draft from the model's own parallel predictions.
    - `draft_model`: the context of the draft model and the cost of its passes; None without a draft
      model.
    - `prediction`: the context of the model, and that of its prediction layers; None if it has none.
    - `eagle`: the context of an EAGLE-3 draft; None without one.
    - `heads`: the context of the model, and the draft heads for it; None without heads.
    """

    vocabulary: Vocabulary
    uses_ngrams: bool = False
    uses_pool: bool = False
    uses_lookahead: bool = False
    draft_model: tuple[Context, PassCost] | None = None
    prediction: tuple[Context, PredictionContext] | None = None
    eagle: EagleContext | None = None
    heads: tuple[Context, HeadGraph] | None = None


class Drafter(Protocol):
    """A method to guess tokens. The object exists as long as the model is loaded.

    - `order`: the drafter with the largest expected gain is used; of equal ones, that with the
      lowest number.
    - `draws`: whether guesses are drawn at random. The draft then contains their distributions.
    """

    name: ClassVar[str]
    order: ClassVar[int]
    draws: ClassVar[bool]

    @property
    def failure(self) -> UserError | None:
        """Return the error of llama.cpp after which nothing more is drafted; None without one."""
        ...

    @classmethod
    def create(cls, resources: DrafterResources) -> "Drafter | None":
        """Create the drafter. Return None when `resources` lack something that it needs."""
        ...

    def start(self, request: Request, seed: int) -> DraftState: ...
