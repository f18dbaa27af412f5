"""`RunPlan`: what a run will load and allocate, so that its memory can be checked before."""

from dataclasses import dataclass, replace
from typing import Any

from llmcli.runtime.binding.contexts.context_options import ContextOptions
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.draft_settings import DraftSettings
from llmcli.runtime.drafting.draft_contexts import (
    draft_context_options,
    eagle_context_options,
)
from llmcli.runtime.drafting.draft_files.eagle3_match import EAGLE3
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import context_options
from llmcli.units import format_count
from quant.model_file.model_header import ModelHeader


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A planned run: a model and its options, before its memory is checked."""

    name: str  # name of the model, for messages
    header: ModelHeader
    options: RunOptions  # with all values resolved (resolve_options.py)
    placement: ModelPlacement  # of the weights
    drafting: DraftSettings
    slots: int = 1  # number of sequences in the context
    # How many of the sequences are needed for parallel answers. The others only cache the branches
    # of a chat.
    required_slots: int = 1
    is_ctx_requested: bool = False  # whether the user has set the context size

    def with_changes(self, slots: int | None = None, **options: Any) -> "RunPlan":
        """Return a copy of the plan with other `slots`, if given, and with some run options
        changed.
        """
        return replace(self, slots=slots or self.slots, options=replace(self.options, **options))

    @property
    def draft_context(self) -> ContextOptions:
        """Return the options of the llama.cpp context of the draft model, or of the EAGLE-3 draft."""
        options = eagle_context_options if self.drafting.method == EAGLE3 else draft_context_options
        return options(self.context)

    def only_shortens_to(self, other: "RunPlan") -> bool:
        """Return whether a change to the plan `other` keeps the cache types and all required
        sequences, so that at most the context becomes shorter. A user hardly notices this.
        """
        kinds = [(plan.options.cache_type_k, plan.options.cache_type_v) for plan in (self, other)]
        return kinds[0] == kinds[1] and other.slots >= self.required_slots

    @property
    def context(self) -> ContextOptions:
        """Return the options of the llama.cpp context of the run."""
        return context_options(self.options, self.slots, self.drafting, self.placement, self.header)

    def describe(self, other: "RunPlan") -> str:
        """Return the changes from this plan to `other` in words, such as "4,096 tokens of context
        instead of 8,192".
        """
        own_options, other_options = self.options, other.options
        changes = []
        if own_options.ctx_size != other_options.ctx_size:
            changes.append(
                f"{other_options.ctx_size:,} tokens of context instead of {own_options.ctx_size:,}"
            )
        kinds = [(item.cache_type_k, item.cache_type_v) for item in (own_options, other_options)]
        if kinds[0] != kinds[1]:
            own_kind, other_kind = map(_describe_cache_types, kinds)
            changes.append(f"a {other_kind} KV cache instead of {own_kind}")
        if self.placement != other.placement:
            changes.append(
                f"{_describe_layers(other.placement)} instead of {_describe_layers(self.placement)}"
            )
        if self.required_slots > other.slots:
            changes.append(
                f"{format_count(other.slots, 'sequence')} instead of {self.required_slots}"
            )
        return ", ".join(changes) or "one branch of the chat; other branches are computed again"

    def describe_flags(self, other: "RunPlan") -> str:
        """Return the changes from this plan to `other` as flags, such as "-c 4096 -ctk q8_0 -ctv
        q8_0". Fewer sequences are described in words.
        """
        kinds = other.options.cache_type_k, other.options.cache_type_v
        words = []
        if (changed := other.placement) != self.placement:
            words.append(f"-ngl {changed.gpu_layers if changed.gpu_layers >= 0 else 'all'}")
            if changed.cpu_moe_layers:
                count = changed.cpu_moe_layers
                words.append(f"--n-cpu-moe {count if count >= 0 else 'all'}")
            if changed.tensor_split and changed.tensor_split != self.placement.tensor_split:
                words.append(f"-ts {','.join(f'{share:g}' for share in changed.tensor_split)}")
        if other.options.ctx_size != self.options.ctx_size or not words:
            words.append(f"-c {other.options.ctx_size}")
        if kinds != (self.options.cache_type_k, self.options.cache_type_v):
            words.append(f"-ctk {kinds[0]} -ctv {kinds[1]}")
        return " ".join(words) + (
            f", {format_count(other.slots, 'sequence')} at once"
            if self.required_slots > other.slots
            else ""
        )


def _describe_cache_types(kinds: tuple[str, str]) -> str:
    """Return the types of K and V in words: "q8_0" for both, or "q8_0 and q4_0"."""
    return " and ".join(dict.fromkeys(kinds))


def _describe_layers(placement: ModelPlacement) -> str:
    """Return in words how many layers are on devices."""
    if not placement.gpu_layers:
        return "no layers on the GPU"
    layers = "all layers" if placement.gpu_layers < 0 else f"{placement.gpu_layers} layers"
    experts = " but some experts" if placement.cpu_moe_layers else ""
    return f"{layers}{experts} on the GPU"
