"""The plan of a run: model, options and number of sequences."""

from dataclasses import dataclass, replace
from typing import Any

from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import context_options
from llmcli.runtime.draft_settings import DraftSettings, draft_context_options
from llmcli.units import format_count
from quant.model_file.model_header import ModelHeader


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run to check. `options` are resolved.

    `is_ctx_requested`: the user chose the context size. Of the `slots` sequences, `required_slots`
    are for parallel answers; the others keep branches of a chat.
    """

    name: str
    header: ModelHeader
    options: RunOptions
    gpu_layers: int
    drafting: DraftSettings
    slots: int = 1
    required_slots: int = 1
    is_ctx_requested: bool = False

    def with_changes(self, slots: int | None = None, **options: Any) -> "RunPlan":
        """Return a copy with another number of sequences or other options."""
        return replace(self, slots=slots or self.slots, options=replace(self.options, **options))

    @property
    def draft_context(self) -> ContextOptions:
        """The context options of the draft model."""
        return draft_context_options(self.context)

    def only_shortens_to(self, other: "RunPlan") -> bool:
        """Return whether `other` only has a shorter context and nothing else that a user would
        notice.
        """
        kinds = [(plan.options.cache_type_k, plan.options.cache_type_v) for plan in (self, other)]
        return kinds[0] == kinds[1] and other.slots >= self.required_slots

    @property
    def context(self) -> ContextOptions:
        """The context options of the run."""
        return context_options(self.options, self.slots, self.drafting, self.gpu_layers)

    def describe(self, other: "RunPlan") -> str:
        """Describe the changes from this run to `other` in words."""
        own_options, other_options = self.options, other.options
        changes = []
        if own_options.ctx_size != other_options.ctx_size:
            changes.append(
                f"{other_options.ctx_size:,} tokens of context instead of {own_options.ctx_size:,}"
            )
        if (own_options.cache_type_k, own_options.cache_type_v) != (
            other_options.cache_type_k,
            other_options.cache_type_v,
        ):
            changes.append(
                f"a {other_options.cache_type_k} KV cache instead of {own_options.cache_type_k}"
            )
        if self.required_slots > other.slots:
            changes.append(
                f"{format_count(other.slots, 'sequence')} instead of {self.required_slots}"
            )
        return ", ".join(changes) or "one branch of the chat; other branches are computed again"

    def describe_flags(self, other: "RunPlan") -> str:
        """Describe the changes from this run to `other` as flags to type."""
        kinds = other.options.cache_type_k, other.options.cache_type_v
        words = [f"-c {other.options.ctx_size}"]
        if kinds != (self.options.cache_type_k, self.options.cache_type_v):
            words.append(f"-ctk {kinds[0]} -ctv {kinds[1]}")
        return " ".join(words) + (
            f", {format_count(other.slots, 'sequence')} at once"
            if self.required_slots > other.slots
            else ""
        )
