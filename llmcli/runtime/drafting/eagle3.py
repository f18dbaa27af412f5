"""Drafts with an EAGLE-3 draft, a model of one layer that reads the inputs of three layers of the
model (binding/contexts/eagle_context.py).

In the cache of the draft, a token has its position in the text; in llama.cpp's own tools it is one
less. Only differences of positions matter to the layer, because they turn its queries and keys.
The first token of a text has no state before it, and is left out, as in training.

Source: EAGLE-3 (Li et al. 2025); llama.cpp, common_speculative_impl_draft_eagle3 of
common/speculative.cpp.
"""

from typing import ClassVar

from llmcli.runtime.binding.contexts.eagle_context import EagleContext
from llmcli.runtime.binding.contexts.prediction_context import States
from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.hidden_state_drafter import HiddenStateDrafter
from llmcli.runtime.vocabulary import Vocabulary


class EagleDrafter(HiddenStateDrafter):
    """The drafter of an EAGLE-3 draft."""

    name: ClassVar[str] = "eagle3"
    order: ClassVar[int] = 16
    computes_first_row: ClassVar[bool] = False

    def __init__(self, context: EagleContext, vocabulary: Vocabulary) -> None:
        self.draft = context
        super().__init__(context.inputs.context, context, vocabulary)

    @classmethod
    def create(cls, resources: DrafterResources) -> "EagleDrafter | None":
        """Create the drafter. Return None without an EAGLE-3 draft."""
        if resources.eagle is None:
            return None
        return cls(resources.eagle, resources.vocabulary)

    def read_states(self, count: int) -> States:
        """Return the layer inputs of the first `count` rows of the model's last pass."""
        return self.draft.inputs.read(count)

    def encode(self, states: States) -> States:
        """Return the hidden states of rows from their layer inputs."""
        return self.draft.encode(states)


DRAFTERS = (EagleDrafter,)
