"""Open a model that generates many answers at once, for `serve`, `batch` and their replicas."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcli.errors import UsageError, UserError
from llmcli.units import format_size

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.model_loader.run_flags import RunFlags
    from llmcli.runtime.runner import Runner
    from llmcli.runtime.sampling import Sampling
    from llmcli.ui import UI

DEFAULT_PARALLEL = 4  # answers at once by default, as in llama-server
# longest time in seconds by which the prompt of a request may delay another request's next token
MAX_GAP_SECONDS = 0.5
# Cells that finished answers may keep in the cache while other answers run. Their other cells are
# offloaded to host memory.
IDLE_CELLS = 0
# On a CPU, prompts of at least this many tokens are computed in turns with the running answers,
# whose cells are offloaded during the prompt's passes.
DECODE_OFFLOAD_ROWS = 64
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
) -> "Iterator[ServerModel]":
    """Open the model `ref` for `parallel` answers at once, and close it after the `with` block. If
    prefixes can be cached, the context also has sequences for them.

    - `on_other_thread`: the model is opened on its own thread, because another thread will use it.
    - `max_gap_seconds`: the longest time by which a prompt may delay the next token of an answer.
      None: as long as it takes, for callers that do not wait for single tokens.
    - `is_private`: requests do not share cached prefixes.

    Raises UserError if the model cannot be opened or does not fit into memory, and UsageError for
    options that do not apply to a server.
    """
    from llmcli.api import tool_calls
    from llmcli.hardware.host import available_memory
    from llmcli.model_loader.open_model import ModelSwitcher
    from llmcli.planning import resolve_options
    from llmcli.runtime.binding.devices import free_gpu_bytes
    from llmcli.runtime.engine.prefill_context import MIN_ROWS
    from llmcli.runtime.engine.schedule import Schedule
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
        swap_bytes = resolve_options.offload_bytes(available_memory())
        if swap_bytes < resolve_options.OFFLOAD_BYTES:
            ui.note(
                f"answers that wait for free cells may keep {format_size(swap_bytes)} in memory "
                f"instead of {format_size(resolve_options.OFFLOAD_BYTES)}, a quarter of what is "
                "free; a smaller -c or -np frees more"
            )
        opened_model.runner.engine.schedule = Schedule(
            parallel,
            max_gap_seconds=max_gap_seconds,
            share_prefixes=not is_private,
            max_idle_cells=IDLE_CELLS,
            swap_bytes=swap_bytes,
            min_offload_rows=DECODE_OFFLOAD_ROWS if free_gpu_bytes() is None else None,
            min_prefill_rows=MIN_ROWS if has_prefill_context else None,
        )
        sampling = (
            default_sampling().with_values(opened_model.settings).with_values(run_flags.settings)
        )
        system = (opened_model.system if run_flags.system is None else run_flags.system) or None
        yield ServerModel(
            opened_model.name, opened_model.runner, system, sampling, opened_model.settings
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
