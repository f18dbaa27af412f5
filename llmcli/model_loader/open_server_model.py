"""Opens a model for many answers at once, for serve, batch and the replicas."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.model_loader.run_flags import Flags
    from llmcli.runtime.runner import Runner
    from llmcli.runtime.sampling import Sampling
    from llmcli.ui import UI

PARALLEL = 4  # answers at once by default, as in llama-server
GAP = 0.5  # longest delay in seconds that a prompt may cause to another request's next token
# cells that finished answers may keep in the cache while others run; the rest is offloaded
IDLE_CELLS = 0
# prompt rows from which decodes on a CPU leave the pool while the prompt is computed
ASIDE = 64
# options of a person at a terminal, which a server refuses: name -> (spelling, hint)
PERSONAL = {
    "prompt": ("-p", "each request contains its own prompt"),
    "file": ("-f", "each request contains its own prompt"),
    "constraint": ("a grammar or schema", "requests set it with response_format"),
    "logprobs": ("--logprobs", "requests set it themselves"),
    "markdown": ("--markdown", "the client renders Markdown"),
    "hide_thinking": ("--hidethinking", "thinking is separate, in reasoning_content"),
    "endless": ("--endless", "an answer that only repeats itself ends"),
    "ignore_eos": ("--ignore-eos", "requests set it with ignore_eos"),
}


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model that answers many requests.

    `sampling` applies where a request sets nothing: the defaults, then the alias's settings, then
    typed options.
    """

    name: str
    runner: "Runner"
    system: str | None
    sampling: "Sampling"
    settings: Mapping[str, Any]


@contextmanager
def host(
    ref: str,
    given: "Flags",
    config: "Config",
    ui: "UI",
    parallel: int = PARALLEL,
    apart: bool = False,
    gap: float | None = GAP,
    private: bool = False,
) -> "Iterator[Hosted]":
    """Open `ref` for `parallel` answers at once, with more sequences if prefixes can be cached.

    `on_other_thread`: another thread computes. `max_gap_seconds`: longest delay of a token in
    seconds; None if nobody waits for tokens, so that prompt passes are as long as possible.
    `is_private`: requests share no cached prefix. Planning and fit checks are those of chat.

    Raises UserError, and UsageError for options that do not apply.
    """
    from llmcli.api import tool_calls
    from llmcli.hardware.host import available_memory
    from llmcli.model_loader.open_model import Models
    from llmcli.planning import resolve_options
    from llmcli.runtime.binding.devices import gpu_free
    from llmcli.runtime.engine.prefill_context import LEAST
    from llmcli.runtime.engine.schedule import Schedule
    from llmcli.runtime.sampling import defaults

    check(given)
    with closing(
        Models(given, config, ui, talks=True, parallel=parallel, answers=False, apart=apart)
    ) as models:
        opened_model = models.first(ref)
        opened_model.runner.show(tool_calls.marks())
        _set_reasoning(opened_model.runner, given.reasoning)
        swap = resolve_options.outside(available_memory())
        opened_model.runner.engine.schedule = Schedule(
            parallel,
            gap=gap,
            shared=not private,
            idle_cells=IDLE_CELLS,
            swap_bytes=swap,
            aside=ASIDE if gpu_free() is None else None,
            apart=LEAST if opened_model.runner.options.reading else None,
        )
        sampling = defaults().with_values(opened_model.settings).with_values(given.settings)
        system = (opened_model.system if given.system is None else given.system) or None
        yield Hosted(
            opened_model.name, opened_model.runner, system, sampling, opened_model.settings
        )


def _set_reasoning(runner: "Runner", wanted: str) -> None:
    """Apply `--reasoning on` or `off` to every request that does not set it.

    Raises UserError if the template cannot switch thinking.
    """
    if wanted not in ("auto", "on", "off"):
        raise UsageError(f"--reasoning is {wanted!r}", hint="--reasoning takes on, off or auto")
    if wanted == "auto":
        return
    template = runner.template
    if template is None or not template.switches:
        raise UserError(
            "this model's template has no switch for thinking", hint="leave out --reasoning"
        )
    template.reasoning = wanted == "on"


def check(given: "Flags") -> None:
    """Raise UsageError for options that apply to a single conversation."""
    for name, (flag, instead) in PERSONAL.items():
        if getattr(given, name):
            raise UsageError(f"{flag} does not apply to serve and batch", hint=instead)
    if given.samples > 1 or given.search.beams > 1:
        flag = "--samples" if given.samples > 1 else "--beams"
        raise UsageError(
            f"{flag} does not apply to serve and batch", hint="requests set it with n or beams"
        )
    if given.on_full != "stop":
        raise UsageError(
            f"--on-full {given.on_full} applies only to chat",
            hint="here an answer ends when its context is full",
        )
