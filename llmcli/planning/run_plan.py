"""The plan of a run: a model, its resolved options and the number of sequences."""

from dataclasses import dataclass, replace
from typing import Any

from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.draft_settings import DraftSettings, draft_context_options
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import context_options
from llmcli.units import format_count
from quant.model_file.model_header import ModelHeader


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A planned run, before its memory is checked. `options` must be resolved.

    `slots`: number of sequences in the context. `required_slots`: how many of them are needed for
    parallel answers; the others keep branches of a chat. `is_ctx_requested`: the user set the
    context size.
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
        """Return a copy of the plan with another number of sequences or other options."""
        return replace(self, slots=slots or self.slots, options=replace(self.options, **options))

    @property
    def draft_context(self) -> ContextOptions:
        """The options of the draft model's context."""
        return draft_context_options(self.context)

    def only_shortens_to(self, other: "RunPlan") -> bool:
        """Return whether `other` is a change that a user hardly notices: the context may be
        shorter, but the cache types are the same and all required sequences remain.
        """
        kinds = [(plan.options.cache_type_k, plan.options.cache_type_v) for plan in (self, other)]
        return kinds[0] == kinds[1] and other.slots >= self.required_slots

    @property
    def context(self) -> ContextOptions:
        """The options of the run's context."""
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
