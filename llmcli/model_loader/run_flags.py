"""`RunFlags`: the options of `chat`, `run`, `serve` and `batch` as one value."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmcli.model_loader.placement_flags import NO_PLACEMENT_FLAGS, PlacementFlags

if TYPE_CHECKING:
    from llmcli.runtime.constraint.base import Constraint
    from llmcli.runtime.requests.beam_settings import BeamSettings
    from llmcli.runtime.requests.request import RunOptions


@dataclass(frozen=True, slots=True)
class RunFlags:
    """The parsed options of a command line that runs a model. A value of None or an empty value
    means that the user did not type the option. Then the settings of the model's alias apply, or
    the defaults.

    `typed`: the names of the fields of `options` that the user typed.
    """

    options: "RunOptions"
    settings: Mapping[str, object]
    search: "BeamSettings"
    typed: frozenset[str] = frozenset()
    model: str | None = None
    quant: str | None = None
    offline: bool = False
    trust: bool = False
    prompt: str | None = None
    file: str | None = None
    system: str | None = None
    chat_template: str | None = None
    raw: bool = False
    no_profile: bool = False
    placement: PlacementFlags = NO_PLACEMENT_FLAGS
    predict: int | None = None
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    on_full: str = "stop"
    endless: bool = False
    reasoning_budget: int | None = None
    samples: int = 1
    reasoning: str = "auto"
    markdown: bool = False
    hide_thinking: bool = False
    logprobs: int = 0
    constraint: "Constraint | None" = None
    draft: str = "auto"
    ngram_draft: str = "auto"
    model_draft: str | None = None
    fit: str = ""


def split_threads(flags: "RunFlags", replicas: int) -> "RunFlags":
    """Return the flags for one of `replicas` server processes on a machine: the number of threads
    becomes its share of the cores, unless the user typed it. More threads than cores would be slow.
    """
    from llmcli.hardware import host

    if flags.options.threads is not None:
        return flags
    return replace(
        flags, options=replace(flags.options, threads=max(1, host.core_count() // replicas))
    )
