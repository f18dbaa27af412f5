"""The work of `bench spec`: open a model with each method of drafting in turn, and measure it. The
options of the command are in llmcli/commands/bench/spec.py.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from llmcli.bench.spec.measure import MethodResult, MethodTrial, measure_method
from llmcli.bench.spec.task_kinds import TASK_NAMES, TaskKind, load_task_kind
from llmcli.bench.speed.parameter_grid import parse_words
from llmcli.config import Config
from llmcli.errors import UsageError, UserError
from llmcli.model_loader.prepare import prepare_model
from llmcli.model_loader.rehearsal.rehearse import rehearse_file
from llmcli.planning import resolve_options
from llmcli.planning.state_budget import state_budget
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.draft_settings import MIN_DRAFT_ROWS, DraftSettings
from llmcli.runtime.drafting import drafters
from llmcli.runtime.drafting.vocabulary_match import require_same_vocabulary
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.runner import Runner, open_runner
from llmcli.ui import UI
from quant.model_file.read_header import read_header

DRAFT_MODEL, NGRAM = "model", "ngram"  # the methods of -md and --ngram-draft
DEFAULT_CTX = 2048  # enough for the prompts and the longest answers
NOT_OFFERED = "this model has no such drafts"


@dataclass(frozen=True, slots=True)
class SpecRequest:
    """What to measure. `methods`: None for all that the model offers. `n_tokens`: tokens of the
    longest answers. `draft_ref`: the draft model.
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
    """The measurements of all methods. `obstacles`: for each other method, why the model does not
    offer it. `options`: as they were chosen for this machine.
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
    """How the model is opened for each method."""

    path: Path
    options: RunOptions
    placement: ModelPlacement
    draft_path: Path | None
    native_sampling: bool


def parse_methods(text: str | None, draft_ref: str | None) -> tuple[str, ...] | None:
    """Return the names in --methods; None without the option. Raises UserError or UsageError."""
    if text is None:
        return None
    names = tuple(dict.fromkeys(parse_words("--methods", [text], method_names())))
    if DRAFT_MODEL in names and draft_ref is None:
        raise UsageError("--methods model needs a draft model", hint="name it with -md REF")
    return names


def parse_tasks(text: str | None) -> tuple[TaskKind, ...]:
    """Return the kinds of tasks in --tasks; all without the option. Raises UserError."""
    names = parse_words("--tasks", [text], TASK_NAMES) if text is not None else TASK_NAMES
    return tuple(load_task_kind(name) for name in dict.fromkeys(names))


def method_names() -> list[str]:
    """Return the names of all methods, in the order in which drafters are preferred."""
    return [kind.name for kind in sorted(drafters().values(), key=lambda kind: kind.order)]


def run_benchmark(request: SpecRequest, config: Config, ui: UI) -> SpecResult:
    """Measure all requested methods. Raises UserError if a method cannot be measured that was
    requested by its name or with -md, or if there is none.
    """
    model = prepare_model(request.ref, None, config, ui)
    rehearse_file(model.path, config, ui)
    header = read_header(model.path)
    draft_path: Path | None = None
    if request.draft_ref is not None:
        draft_path = prepare_model(request.draft_ref, None, config, ui).path
        suggestion = model.entry.draft if model.entry else ""
        require_same_vocabulary(header, read_header(draft_path), suggestion)
        rehearse_file(draft_path, config, ui)
    trained = header.context_length or DEFAULT_CTX
    options = replace(
        request.options, ctx_size=request.options.ctx_size or min(DEFAULT_CTX, trained)
    )
    options, placement = resolve_options.resolve_options(header, options, ui.warn, note=ui.note)
    options = resolve_options.resolve_flash_attention(header, options, placement, config)
    opening = _OpenRequest(model.path, options, placement, draft_path, config.native_sampling)
    results: list[MethodResult] = []
    errors: dict[str, UserError] = {}
    uses_draft = False
    for name in request.methods or method_names():
        try:
            measured, file = _measure(name, opening, request, ui)
            results.append(measured)
            uses_draft = uses_draft or file is not None
        except UserError as error:
            if request.methods:
                raise
            errors[name] = error
    if draft_path is not None and not uses_draft and DRAFT_MODEL in errors:
        raise errors[DRAFT_MODEL]
    if not results:
        raise next(iter(errors.values()))
    obstacles = tuple((name, str(error)) for name, error in errors.items())
    return SpecResult(
        model.name, model.path, draft_path, options, request.n_tokens, tuple(results), obstacles
    )


def _measure(
    name: str, opening: _OpenRequest, request: SpecRequest, ui: UI
) -> tuple[MethodResult, Path | None]:
    """Open the model for the method `name`, and measure it. Return the result, and the file of -md
    if the method needed it. Raises UserError if the model does not offer the method.
    """
    n_steps = sum(request.n_pairs + len(task.prompts) for task in request.tasks)
    with ExitStack() as stack:
        with ui.status(f"loading for {name} …"):
            trial, file = _open_trial(stack, name, opening, request.n_tokens)
        with ui.bar(f"bench {name}", n_steps, "tests") as bar:
            result = measure_method(trial, request.tasks, request.n_pairs, lambda: bar.advance(1))
    return result, file


def _open_trial(
    stack: ExitStack, name: str, opening: _OpenRequest, n_tokens: int
) -> tuple[MethodTrial, Path | None]:
    """Open the model with the drafter `name`, until `stack` is closed. Methods other than `model`
    get the file of -md only if they need one; return it, too. Raises UserError if the model does
    not offer the method.
    """
    if name == DRAFT_MODEL and opening.draft_path is None:
        raise UserError("it needs a draft model (-md)", hint="-md REF")
    files = [opening.draft_path] if name == DRAFT_MODEL else [None, opening.draft_path]
    problem: UserError | None = None
    for file in dict.fromkeys(files):
        with ExitStack() as attempt:
            try:
                runner = attempt.enter_context(_open_runner(name, file, opening))
            except UserError as error:
                problem = problem or error
                continue
            speculation = runner.engine.resources.speculation
            chosen = [
                drafter
                for drafter in (speculation.drafters if speculation else ())
                if drafter.name == name
            ]
            if speculation and chosen:
                stack.push(attempt.pop_all())
                speculation = replace(speculation, drafters=tuple(chosen))
                return MethodTrial(runner, speculation, n_tokens), file
            is_too_small = runner.context.n_batch < MIN_DRAFT_ROWS
            problem = problem or UserError(runner.draft_obstacle if is_too_small else NOT_OFFERED)
    assert problem
    raise problem


@contextmanager
def _open_runner(name: str, file: Path | None, opening: _OpenRequest) -> Iterator[Runner]:
    """Open the model with the method `name` and the draft model `file`."""
    drafting = DraftSettings("on" if name == NGRAM else "auto", file, name, measures=True)
    with open_runner(
        opening.path,
        opening.options,
        placement=opening.placement,
        native_sampling=opening.native_sampling,
        drafting=drafting,
    ) as runner:
        # recurrent state may need a checkpoint before a draft
        runner.engine.schedule = replace(
            runner.engine.schedule, host_bytes=state_budget(runner.mapped_bytes)
        )
        yield runner
