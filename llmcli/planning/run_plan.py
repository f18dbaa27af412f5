"""RunPlan: model, options and sequences of a run."""

from dataclasses import dataclass, replace
from typing import Any

from llmcli.runtime.binding.context_options import ContextOptions
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import context_options
from llmcli.runtime.speculation import DraftSettings, draft_context_options
from llmcli.units import several
from quant.model_file.model_header import ModelHeader


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be run. `options` are decided (fit.py); `asked`: the context's size is the user's
    wish, not ours.

    Of `slots` sequences `needed` are for answers at once, the rest keep branches.
    """

    name: str
    header: ModelHeader
    options: RunOptions
    gpu_layers: int
    drafting: DraftSettings
    slots: int = 1
    needed: int = 1
    asked: bool = False

    def but(self, slots: int | None = None, **options: Any) -> "Wish":
        """The same with another number of sequences, or other options."""
        return replace(self, slots=slots or self.slots, options=replace(self.options, **options))

    @property
    def draft(self) -> ContextOptions:
        """The draft model's context beside it."""
        return draft_context_options(self.context)

    def shortened(self, other: "Wish") -> bool:
        """Whether `other` has a shorter context, and no more is changed that anybody would see."""
        kinds = [(one.options.cache_type_k, one.options.cache_type_v) for one in (self, other)]
        return kinds[0] == kinds[1] and other.slots >= self.needed

    @property
    def context(self) -> ContextOptions:
        """The context that this would be."""
        return context_options(self.options, self.slots, self.drafting, self.gpu_layers)

    def told(self, other: "Wish") -> str:
        """What `other` has that this has not, in words."""
        mine, its = self.options, other.options
        changes = []
        if mine.ctx_size != its.ctx_size:
            changes.append(f"{its.ctx_size:,} tokens of context instead of {mine.ctx_size:,}")
        if (mine.cache_type_k, mine.cache_type_v) != (its.cache_type_k, its.cache_type_v):
            changes.append(f"a {its.cache_type_k} KV cache instead of {mine.cache_type_k}")
        if self.needed > other.slots:
            changes.append(f"{several(other.slots, 'sequence')} instead of {self.needed}")
        return ", ".join(changes) or "one branch of the chat, others are computed again"

    def flags(self, other: "Wish") -> str:
        """The same as flags to type."""
        kinds = other.options.cache_type_k, other.options.cache_type_v
        words = [f"-c {other.options.ctx_size}"]
        if kinds != (self.options.cache_type_k, self.options.cache_type_v):
            words.append(f"-ctk {kinds[0]} -ctv {kinds[1]}")
        return " ".join(words) + (
            f", {several(other.slots, 'sequence')} at once" if self.needed > other.slots else ""
        )
