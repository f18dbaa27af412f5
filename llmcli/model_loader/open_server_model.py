"""Open a model that generates many answers at once, for `serve`, `batch` and their replicas."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError, UserError

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.model_loader.earlier_load import EarlierLoad
    from llmcli.model_loader.planned_memory import PlannedMemory
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.engine.schedule import Schedule
    from llmcli.runtime.runner import Runner
    from llmcli.runtime.sampling import Sampling
    from llmcli.ui import UI

DEFAULT_PARALLEL = 4  # answers at once by default, as in llama-server
# longest time in seconds by which the prompt of a request may delay another request's next token
MAX_GAP_SECONDS = 0.5
# Options for a person at a terminal, which serve and batch refuse: the name of the field of
# RunFlags, the flag, and a hint.
PERSONAL_FLAGS = {
    "prompt": ("-p", "each request contains its own prompt"),
    "file": ("-f", "each request contains its own prompt"),
    "constraint": ("a grammar or schema", "requests set it with response_format"),
    "logprobs": ("--logprobs", "requests set it themselves"),
    "markdown": ("--markdown", "the client renders Markdown"),
    "hide_thinking": ("--hidethinking", "thinking is separate, in reasoning_content"),
    "ignore_eos": ("--ignore-eos", "requests set it with ignore_eos"),
}
# All fields of RunFlags that `refuse_personal_flags` refuses.
REFUSED_FIELDS = frozenset((*PERSONAL_FLAGS, "samples", "search", "on_full"))


@dataclass(frozen=True, slots=True)
class ServerModel:
    """A loaded model with the values that apply to requests which do not set them."""

    name: str
    runner: "Runner"
    system: str | None  # system text; None for none
    # Sampling settings. Typed options replace those of the model's alias, which replace the
    # defaults.
    sampling: "Sampling"
    settings: Mapping[str, Any]  # the settings of the model's alias alone


@contextmanager
def open_server_model(
    ref: str,
    run_flags: "RunFlags",
    config: "Config",
    ui: "UI",
    parallel: int = DEFAULT_PARALLEL,
    on_other_thread: bool = False,
    max_gap_seconds: float | None = MAX_GAP_SECONDS,
    is_private: bool = False,
    max_default_ctx: int | None = None,
    earlier: "EarlierLoad | None" = None,
) -> "Iterator[ServerModel]":
    """Open the model `ref` for `parallel` answers at once, and close it after the `with` block. If
    prefixes can be cached, the context also has sequences for them.

    - `on_other_thread`: the model is opened on its own thread, because another thread will use it.
    - `max_gap_seconds`: the longest time by which a prompt may delay the next token of an answer.
      None: as long as it takes, for callers that do not wait for single tokens.
    - `is_private`: requests do not share cached prefixes.
    - `max_default_ctx`: the largest context in tokens if `run_flags` sets no size. None: that of
      all commands.
    - `earlier`: what `predict_server_memory` or an earlier load has found, if there was one.

    Raises UserError if the model cannot be opened or does not fit into memory, and UsageError for
    options that do not apply to a server.
    """
    from llmcli.api import tool_calls
    from llmcli.model_loader.open_model import ModelSwitcher
    from llmcli.planning.resolve_options import DEFAULT_MAX_CTX
    from llmcli.runtime.sampling import default_sampling

    refuse_personal_flags(run_flags)
    with closing(
        ModelSwitcher(
            run_flags,
            config,
            ui,
            is_chat=True,
            parallel=parallel,
            must_generate=False,
            on_other_thread=on_other_thread,
            max_default_ctx=max_default_ctx or DEFAULT_MAX_CTX,
            earlier=earlier,
        )
    ) as models:
        opened_model = models.open(ref)
        opened_model.runner.show_control_tokens(tool_calls.call_marks())
        _set_reasoning(opened_model.runner, run_flags.reasoning)
        runner = opened_model.runner
        has_prefill_context = runner.engine.prefill_reader is not None
        if runner.options.prefill_cells and not has_prefill_context:
            ui.note(
                "this build of llama.cpp stores its KV cache in an unknown format:"
                " prompts are computed without flash attention"
            )
        opened_model.runner.engine.schedule = _make_schedule(
            runner, parallel, max_gap_seconds, share_prefixes=not is_private
        )
        sampling = (
            default_sampling().with_values(opened_model.settings).with_values(run_flags.settings)
        )
        system = (opened_model.system if run_flags.system is None else run_flags.system) or None
        yield ServerModel(
            opened_model.name, opened_model.runner, system, sampling, opened_model.settings
        )


def predict_server_memory(
    ref: str, run_flags: "RunFlags", config: "Config", ui: "UI", parallel: int
) -> "PlannedMemory":
    """Return the memory that open_server_model() will take. Raises UserError if no setting of the
    model fits.
    """
    from llmcli.model_loader.open_model import ModelSwitcher

    with closing(
        ModelSwitcher(run_flags, config, ui, is_chat=True, parallel=parallel, must_generate=False)
    ) as models:
        return models.predict_memory(ref)


def _make_schedule(
    runner: "Runner", parallel: int, max_gap_seconds: float | None, share_prefixes: bool
) -> "Schedule":
    """Return the limits for passes and queues of an engine that generates `parallel` answers at
    once. Only on a CPU do cells of other answers slow a pass down so much that they may be copied
    to host memory while the pool has room.
    """
    from llmcli.planning.state_budget import state_budget
    from llmcli.runtime.binding.placement.devices import free_gpu_bytes
    from llmcli.runtime.engine.forward_pass import TILE_ROWS
    from llmcli.runtime.engine.prefill_context import MIN_ROWS
    from llmcli.runtime.engine.schedule import Schedule

    options = runner.options
    # without kv_offload, the cells and their attention are on the CPU
    is_on_cpu = options.gpu_layers == "0" or not options.kv_offload or free_gpu_bytes() is None
    return Schedule(
        parallel,
        max_gap_seconds=max_gap_seconds,
        share_prefixes=share_prefixes,
        host_bytes=state_budget(runner.mapped_bytes),
        measure_host_bytes=partial(state_budget, runner.mapped_bytes),
        idle_offload="measured" if is_on_cpu else "room",
        min_offload_rows=TILE_ROWS if is_on_cpu else None,
        min_prefill_rows=MIN_ROWS if runner.engine.prefill_reader is not None else None,
    )


def _set_reasoning(runner: "Runner", mode: str) -> None:
    """Make `mode`, the value of --reasoning, the default of all requests. "auto" leaves thinking to
    the chat template.

    Raises UsageError for an unknown mode, and UserError if the template cannot turn thinking on or
    off.
    """
    if mode not in ("auto", "on", "off"):
        raise UsageError(f"--reasoning is {mode!r}", hint="--reasoning takes on, off or auto")
    if mode == "auto":
        return
    template = runner.template
    if template is None or not template.thinking_variables:
        raise UserError(
            "this model's template has no switch for thinking", hint="leave out --reasoning"
        )
    template.reasoning = mode == "on"


def refuse_personal_flags(run_flags: "RunFlags") -> None:
    """Raise UsageError if an option was typed that makes sense only for a single conversation, such
    as --markdown.
    """
    for name, (flag, hint) in PERSONAL_FLAGS.items():
        if getattr(run_flags, name):
            raise UsageError(f"{flag} does not apply to serve and batch", hint=hint)
    changed_search = [
        name
        for name, value in run_flags.search.as_dict().items()
        if value != type(run_flags.search)().as_dict()[name]
    ]
    if run_flags.samples > 1 or changed_search:
        flag = "--samples" if run_flags.samples > 1 else f"--{changed_search[0].replace('_', '-')}"
        raise UsageError(
            f"{flag} does not apply to serve and batch", hint="requests set it with n or beams"
        )
    if run_flags.on_full != "stop":
        raise UsageError(
            f"--on-full {run_flags.on_full} applies only to chat",
            hint="here an answer ends when its context is full; with serve --context-shift it goes on",
        )
