"""From a REF to a model that answers many: what serve, batch and the replicas begin with."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.commands.flags import Flags
    from llmcli.config import Config
    from llmcli.runtime.runner import Runner
    from llmcli.runtime.sampling import Sampling
    from llmcli.ui import UI

PARALLEL = 4  # answers at once where nobody says how many, as llama-server has it
GAP = 0.5  # seconds that somebody's prompt may keep others from their next token
IDLE_CELLS = 0  # that finished answers may hold beside running ones: the rest lies apart
# Rows of prompts for which a CPU's other answers step out of a pool that reads itself. The rest of
# a long prompt has as many (passes.py): 107 rows beside three others' cells took 5.9 ms each, alone
# 4.1 (two cores of an EPYC, 2026-11-23).
ASIDE = 64
# What a person at a terminal asks for, not a server: flag -> what to do instead.
PERSONAL = {
    "prompt": ("-p", "each request brings its own"),
    "file": ("-f", "each request brings its own"),
    "constraint": ("a grammar or schema", "a request asks for it with response_format"),
    "logprobs": ("--logprobs", "a request asks for them"),
    "markdown": ("--markdown", "the client draws"),
    "hide_thinking": ("--hidethinking", "thinking comes apart, as reasoning_content"),
    "endless": ("--endless", "an answer that only repeats itself ends"),
    "ignore_eos": ("--ignore-eos", "a request asks for it with ignore_eos"),
}


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model that answers many; `sampling` is what holds where a request says nothing: the
    defaults, the alias's settings, what was typed.
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
    """Open `ref` for `parallel` answers at once, with further sequences where prefixes can be kept;
    `apart` where another thread than this one will compute. `gap` None: nobody reads along, and
    prompts go in passes as long as they can be (four users with prompts of 512 tokens: 54 tokens a
    second with a gap of 2 s, 46 with 0.5, 2026-11). `private`: clients share nothing that was
    computed.

    Plan and fit checks are chat's. Raises UserError as they do, UsageError for a flag that means
    nothing here.
    """
    from llmcli.commands.opening import Models
    from llmcli.hardware import fit
    from llmcli.hardware.host import available_memory
    from llmcli.runtime.binding.devices import gpu_free
    from llmcli.runtime.reader import LEAST
    from llmcli.runtime.sampling import defaults
    from llmcli.runtime.schedule import Schedule
    from llmcli.serve import calls

    check(given)
    with closing(
        Models(given, config, ui, talks=True, parallel=parallel, answers=False, apart=apart)
    ) as models:
        opened = models.first(ref)
        opened.runner.show(calls.marks())
        _ask_to_think(opened.runner, given.reasoning)
        swap = fit.outside(available_memory())
        opened.runner.engine.schedule = Schedule(
            parallel,
            gap=gap,
            shared=not private,
            idle_cells=IDLE_CELLS,
            swap_bytes=swap,
            aside=ASIDE if gpu_free() is None else None,
            apart=LEAST if opened.runner.options.reading else None,
        )
        sampling = defaults().with_values(opened.settings).with_values(given.settings)
        system = (opened.system if given.system is None else given.system) or None
        yield Hosted(opened.name, opened.runner, system, sampling, opened.settings)


def _ask_to_think(runner: "Runner", wanted: str) -> None:
    """`--reasoning on` or `off` for every request that does not say it itself."""
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
    """Raise UsageError for flags of one conversation."""
    for name, (flag, instead) in PERSONAL.items():
        if getattr(given, name):
            raise UsageError(f"{flag} is for one answer; here there are many", hint=instead)
    if given.samples > 1 or given.search.beams > 1:
        flag = "--samples" if given.samples > 1 else "--beams"
        raise UsageError(
            f"{flag} is for one answer; here there are many", hint="each request says it: n, beams"
        )
    if given.on_full != "stop":
        raise UsageError(
            f"--on-full {given.on_full} is for a chat",
            hint="here an answer that fills its context ends",
        )
