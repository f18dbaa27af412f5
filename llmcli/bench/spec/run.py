"""The work of `bench spec`: open a model with each method of drafting in turn, and measure it. The
options of the command are in llmcli/commands/bench/spec.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmcli.bench.spec.measure import MethodResult, MethodTrial, measure_method
from llmcli.bench.spec.task_kinds import TASK_NAMES, TaskKind, load_task_kind
from llmcli.bench.speed.parameter_grid import parse_words
from llmcli.config import Config
from llmcli.errors import UserError
from llmcli.model_loader.draft_file import use_draft_file
from llmcli.model_loader.prepare import prepare_model
from llmcli.model_loader.rehearsal.rehearse import rehearse_file
from llmcli.planning import resolve_options
from llmcli.planning.state_budget import state_budget
from llmcli.runtime.binding.model import AllocationError
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.draft_settings import (
    DRAFT_FILES,
    MIN_DRAFT_ROWS,
    DraftSettings,
    read_draft_file,
    require_draft_file,
    uses_gpu,
)
from llmcli.runtime.drafting import drafters
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import open_runner
from llmcli.ui import UI
from quant.model_file.model_header import ModelHeader
from quant.model_file.read_header import read_header

NGRAM = "ngram"
DEFAULT_CTX = 2048
PROMPT_TOKENS = 1024  # room in the context for a prompt with its chat template
NOT_OFFERED = "this model has no such drafts"


@dataclass(frozen=True, slots=True)
class SpecRequest:
    """What to measure. `methods`: None for all that the model offers. `n_tokens`: tokens of the
    longest answers. `draft_ref`: the draft file.
    """

    ref: str
    methods: tuple[str, ...] | None
    tasks: tuple[TaskKind, ...]
    n_tokens: int
    n_pairs: int
    draft_ref: str | None
    options: RunOptions


@dataclass(frozen=True, slots=True)
class SpecResult:
    """The measurements of all methods. `obstacles`: for each other method, why it was not measured.
    `options`: as they were chosen for this machine.
    """

    name: str
    path: Path
    draft_path: Path | None
    options: RunOptions
    n_tokens: int
    methods: tuple[MethodResult, ...]
    obstacles: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    """How the model is opened. `drafting`: the settings of each method."""

    path: Path
    options: RunOptions
    placement: ModelPlacement
    drafting: dict[str, DraftSettings]
    native_sampling: bool


def parse_methods(text: str | None, draft_ref: str | None) -> tuple[str, ...] | None:
    """Return the names in --methods; None without the option. Raises UserError or UsageError."""
    if text is None:
        return None
    names = tuple(dict.fromkeys(parse_words("--methods", [text], method_names())))
    for name in names:
        require_draft_file("--methods", name, draft_ref)
    return names


def parse_tasks(text: str | None) -> tuple[TaskKind, ...]:
    """Return the kinds of tasks in --tasks; all without the option. Raises UserError."""
    names = parse_words("--tasks", [text], TASK_NAMES) if text is not None else TASK_NAMES
    return tuple(load_task_kind(name) for name in dict.fromkeys(names))


def method_names() -> list[str]:
    """Return the names of all methods, in the order in which drafters are preferred."""
    return [kind.name for kind in sorted(drafters().values(), key=lambda kind: kind.order)]


def run_benchmark(request: SpecRequest, config: Config, ui: UI) -> SpecResult:
    """Measure all requested methods. What fails after the first measurement is an obstacle of its
    method. Raises UserError if a method cannot be measured that was requested by its name or with
    -md, or if there is none.
    """
    model = prepare_model(request.ref, None, config, ui)
    rehearse_file(model.path, config, ui)
    header = read_header(model.path)
    names = request.methods or tuple(method_names())
    draft: DraftSettings | None = None
    if request.draft_ref is not None:
        draft_file = read_draft_file(prepare_model(request.draft_ref, None, config, ui).path)
        # says more than that the file does not fit the model
        _require_use(request, draft_file.method)
        draft = use_draft_file(draft_file, DraftSettings(), model, header, config, ui)
        draft = replace(draft, method=draft_file.method, measures=True)
    trained = header.context_length or DEFAULT_CTX
    default_ctx = max(DEFAULT_CTX, request.n_tokens + PROMPT_TOKENS)
    options = replace(
        request.options, ctx_size=request.options.ctx_size or min(default_ctx, trained)
    )
    options, placement = resolve_options.resolve_options(
        header, options, ui.warn, note=ui.note, config=config
    )
    options = resolve_options.resolve_flash_attention(header, options, placement, config)
    drafting, obstacles = _choose_settings(names, draft, header, options, placement)
    if request.methods and obstacles:
        name, obstacle = next(iter(obstacles.items()))
        raise UserError(str(obstacle), hint=f"leave {name} out of --methods")
    opening = _OpenRequest(model.path, options, placement, drafting, config.native_sampling)
    results: dict[str, MethodResult] = {}
    failures: list[UserError] = []
    # the draft file first: if it cannot be opened, the command ends before it has measured
    for name in sorted(drafting, key=lambda name: drafting[name].file is None):
        try:
            results[name] = _measure(name, opening, request, ui)
        except UserError as error:
            is_requested = bool(request.methods) or drafting[name].file is not None
            if not results and (is_requested or isinstance(error, AllocationError)):
                raise
            failures.append(error)
            obstacles[name] = error
    if not results:
        raise next(iter((*failures, *obstacles.values())))
    return SpecResult(
        model.name,
        model.path,
        draft.file if draft else None,
        options,
        request.n_tokens,
        tuple(results[name] for name in names if name in results),
        tuple((name, str(obstacles[name])) for name in names if name in obstacles),
    )


def _require_use(request: SpecRequest, method: str) -> None:
    """Raise UserError if --methods does not name `method`, for which the draft file is, or names
    another one that needs a file.
    """
    if request.methods is None:
        return
    if method not in request.methods:
        raise UserError(
            f"-md {request.draft_ref} is for the method {method}, which --methods does not name",
            hint=f"add {method} to --methods, or leave out -md",
        )
    for name in request.methods:
        if name in DRAFT_FILES and name != method:
            raise UserError(
                f"--methods {name} needs {DRAFT_FILES[name]}, but {request.draft_ref} is for {method}",
                hint=f"leave {name} out of --methods, or name another file with -md",
            )


def _choose_settings(
    names: Iterable[str],
    draft: DraftSettings | None,
    header: ModelHeader,
    options: RunOptions,
    placement: ModelPlacement,
) -> tuple[dict[str, DraftSettings], dict[str, UserError]]:
    """Return the settings of each method that can be measured, and why each other method cannot, as
    far as the files show it. `draft`: the settings of the method of the draft file; None without
    one.
    """
    settings: dict[str, DraftSettings] = {}
    obstacles: dict[str, UserError] = {}
    for name in names:
        if draft and name == draft.method:
            settings[name] = draft
            continue
        if name in DRAFT_FILES:
            obstacles[name] = UserError(f"it needs {DRAFT_FILES[name]} (-md)")
            continue
        ngram = "on" if name == NGRAM else "auto"
        settings[name] = DraftSettings(ngram, method=name, measures=True)
        try:
            settings[name].uses_prediction(header, options, uses_gpu(placement))
        except UserError as error:
            del settings[name]
            obstacles[name] = error
    return settings, obstacles


def _measure(name: str, opening: _OpenRequest, request: SpecRequest, ui: UI) -> MethodResult:
    """Open the model for the method `name`, and measure it. Raises UserError if the model does not
    offer the method.
    """
    n_steps = sum(request.n_pairs + len(task.prompts) for task in request.tasks)
    with ExitStack() as stack:
        with ui.status(f"loading for {name} …"):
            trial = stack.enter_context(_open_trial(name, opening, request.n_tokens))
        with ui.bar(f"bench {name}", n_steps, "tests") as bar:
            return measure_method(trial, request.tasks, request.n_pairs, lambda: bar.advance(1))


@contextmanager
def _open_trial(name: str, opening: _OpenRequest, n_tokens: int) -> Iterator[MethodTrial]:
    """Open the model with the drafter `name`. Raises UserError if the model does not offer it."""
    with open_runner(
        opening.path,
        opening.options,
        placement=opening.placement,
        native_sampling=opening.native_sampling,
        drafting=opening.drafting[name],
    ) as runner:
        # recurrent state may need a checkpoint before a draft
        runner.engine.schedule = replace(
            runner.engine.schedule, host_bytes=state_budget(runner.mapped_bytes)
        )
        speculation = runner.engine.resources.speculation
        chosen = tuple(
            drafter
            for drafter in (speculation.drafters if speculation else ())
            if drafter.name == name
        )
        if not speculation or not chosen:
            is_too_small = runner.context.n_batch < MIN_DRAFT_ROWS
            raise UserError(runner.draft_obstacle if is_too_small else NOT_OFFERED)
        yield MethodTrial(runner, replace(speculation, drafters=chosen), n_tokens)
