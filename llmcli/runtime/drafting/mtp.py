"""Drafts with the prediction layers of the model itself (MTP, also called NextN).

They get the hidden states after the last layer of the model, and have a KV cache of one layer.

Source: DeepSeek-V3, section 2.2; llama.cpp, common_speculative_impl_draft_mtp of
common/speculative.cpp.
"""

from typing import ClassVar

from llmcli.runtime.binding.contexts.prediction_context import States, read_states
from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.hidden_state_drafter import HiddenStateDrafter


class PredictionDrafter(HiddenStateDrafter):
    """The drafter of a model's prediction layers."""

    name: ClassVar[str] = "mtp"
    order: ClassVar[int] = 15

    @classmethod
    def create(cls, resources: DrafterResources) -> "PredictionDrafter | None":
        """Create the drafter. Return None when the model has no prediction layers."""
        if resources.prediction is None:
            return None
        target, context = resources.prediction
        return cls(target, context, resources.vocabulary)

    def read_states(self, count: int) -> States:
        """Return the hidden states of the first `count` rows of the model's last pass."""
        return read_states(self.target, count).copy()


DRAFTERS = (PredictionDrafter,)
