"""Open what drafting needs for a model: the draft model, the EAGLE-3 draft, the draft heads or the
model's prediction layers, and the measured cost of passes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmcli.errors import UserError
from llmcli.runtime.binding.contexts.context import Context
from llmcli.runtime.binding.contexts.eagle_context import EagleContext, LayerInputs
from llmcli.runtime.binding.contexts.open_context import (
    open_context,
    open_eagle_context,
    open_prediction_context,
)
from llmcli.runtime.binding.contexts.prediction_context import prediction_options, stop_states
from llmcli.runtime.binding.model import Model, open_model
from llmcli.runtime.binding.placement.model_placement import ModelPlacement
from llmcli.runtime.draft_settings import (
    MIN_DRAFT_ROWS,
    NO_DRAFTING,
    DraftSettings,
    can_be_exact,
    uses_gpu,
)
from llmcli.runtime.drafting import drafters
from llmcli.runtime.drafting.base import DrafterResources
from llmcli.runtime.drafting.draft_contexts import draft_context_options, eagle_context_options
from llmcli.runtime.drafting.draft_files.eagle3_match import EAGLE3, count_layers, read_layers
from llmcli.runtime.drafting.draft_files.head_graph import open_heads
from llmcli.runtime.drafting.draft_length import MIN_GAIN
from llmcli.runtime.drafting.gain.pass_cost import (
    MAX_PASS_ROWS,
    PASS_ROWS,
    MeasuredPasses,
    PassCost,
    measure_pass_cost,
)
from llmcli.runtime.requests.request import RunOptions
from llmcli.runtime.strategies.base import Speculation
from quant.model_file import read_header
from quant.model_file.model_header import ModelHeader


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """An open model that drafts are made for, and how it was opened. `passes`: the cost of its passes
    as an earlier load has measured it; None: it is measured.
    """

    header: ModelHeader
    model: Model
    context: Context  # must be empty while the cost of passes is measured
    options: RunOptions
    placement: ModelPlacement
    passes: MeasuredPasses | None = None

    @property
    def can_be_exact(self) -> bool:
        """Return whether several tokens in a pass can have the same logits as one by one."""
        return can_be_exact(self.header, self.options, uses_gpu(self.placement))


class OpenedSpeculation(NamedTuple):
    """The drafts of an open model.

    - `speculation`: None when drafting is off or cannot save time. `obstacle`: why it cannot; "" if
      it is off.
    - `passes`: the cost of passes, for another load of the model; None if drafting is off.
    """

    speculation: Speculation | None
    obstacle: str
    passes: MeasuredPasses | None


@contextmanager
def open_speculation(settings: DraftSettings, target: DraftTarget) -> Iterator[OpenedSpeculation]:
    """Create the drafters for a model and measure the cost of its passes. Without a gain nothing is
    drafted, unless it shall be measured; then nothing that was opened for drafts stays open, and
    the context keeps no hidden states.

    A draft model is opened on the same devices as the model, with the options of
    draft_contexts.py. It is closed after the `with` block. Its file was checked by
    `DraftSettings.for_draft_file`.
    """
    with ExitStack() as stack:
        opened = _create_speculation(stack, settings, target)
        if opened.speculation is None:
            stack.close()
            stop_states(target.context)
        yield opened


def _create_speculation(
    stack: ExitStack, settings: DraftSettings, target: DraftTarget
) -> OpenedSpeculation:
    """Do as `open_speculation`. `stack` closes what was opened."""
    context, options = target.context, target.options
    output_rows = min(MAX_PASS_ROWS, context.n_outputs, context.n_batch)
    if settings == NO_DRAFTING or output_rows < MIN_DRAFT_ROWS:
        return OpenedSpeculation(None, "", None)
    eagle = (
        stack.enter_context(_open_eagle3(settings.model, target))
        if settings.model and settings.method == EAGLE3
        else None
    )
    cost = (
        PassCost(target.passes.seconds, target.passes.exact_rows)
        if target.passes
        else measure_pass_cost(context, output_rows)
    )
    exact_rows = cost.exact_rows if target.can_be_exact else 0
    max_rows = output_rows if settings.is_requested and not options.reproducible else exact_rows
    if not settings.measures and not _pays(cost, max_rows):
        return OpenedSpeculation(None, _explain_no_gain(cost, max_rows), cost.measured)
    draft = (
        stack.enter_context(_open_draft_model(settings.model, target))
        if settings.model and settings.method in ("auto", "model")
        else None
    )
    uses_ngrams = settings.method in ("auto", "ngram") and (
        settings.ngram == "on" or (settings.ngram == "auto" and max_rows > 0)
    )
    prediction = (
        stack.enter_context(
            open_prediction_context(target.model, context, prediction_options(context.options))
        )
        if context.outputs_states
        else None
    )
    heads = (
        stack.enter_context(open_heads(settings.heads, target.header, options.threads or 1))
        if settings.heads
        else None
    )
    resources = DrafterResources(
        vocabulary=target.model,
        uses_ngrams=uses_ngrams,
        uses_pool=settings.method == "pool" or (settings.method == "auto" and uses_ngrams),
        uses_lookahead=settings.method == "lookahead",
        draft_model=draft,
        prediction=(context, prediction) if prediction else None,
        eagle=eagle,
        heads=(context, heads) if heads else None,
    )
    drafter_types = sorted(drafters().values(), key=lambda drafter_type: drafter_type.order)
    created = tuple(
        drafter for drafter_type in drafter_types if (drafter := drafter_type.create(resources))
    )
    # Drafts that the user has not asked for do not change the answer of a seed.
    is_reproducible = options.reproducible or not settings.is_requested
    max_branches = context.max_branches if context.can_branch and not is_reproducible else 1
    speculation = Speculation(
        created, cost, max_rows, exact_rows, is_reproducible, max_branches=max_branches
    )
    if not created:
        return OpenedSpeculation(None, "no method can draft for this model", cost.measured)
    return OpenedSpeculation(speculation, "", cost.measured)


@contextmanager
def _open_eagle3(path: Path, target: DraftTarget) -> Iterator[EagleContext]:
    """Open the EAGLE-3 draft in the file `path`, which was checked by `for_draft_file`. Yield its
    context.

    Raises UserError with --reproducible if the draft reads the state after the last layer: then
    llama.cpp computes the last layer for more rows, which may change the last bits of the logits.
    """
    draft_header = read_header.read_header(path)
    layers, n_layers = read_layers(draft_header), count_layers(target.header)
    if target.options.reproducible and max(layers) == n_layers:
        raise UserError(
            f"--reproducible cannot draft with {path.name}, which reads the state after the last "
            "layer",
            hint="leave out --model-draft or --reproducible",
        )
    width = draft_header.get_int("target_hidden_size") or 0
    inputs = LayerInputs(target.context, layers, n_layers, width)
    with (
        open_model(path, target.placement.for_draft().for_header(draft_header)) as model,
        open_eagle_context(model, inputs, eagle_context_options(target.context.options)) as eagle,
    ):
        yield eagle


@contextmanager
def _open_draft_model(path: Path, target: DraftTarget) -> Iterator[tuple[Context, PassCost]]:
    """Open the draft model in the file `path`, which was checked by `for_draft_file`. Yield its
    context and the measured cost of its passes.
    """
    draft_header = read_header.read_header(path)
    context_options = draft_context_options(target.context.options)
    with (
        open_model(path, target.placement.for_draft().for_header(draft_header)) as model,
        open_context(model, context_options) as draft_context,
    ):
        assert not draft_context.is_recurrent, f"{draft_header.architecture} has recurrent state"
        yield draft_context, measure_pass_cost(draft_context, PASS_ROWS[0])


def _pays(cost: PassCost, max_rows: int) -> bool:
    """Return whether there is a size of passes, up to `max_rows` tokens, at which drafting saves
    time if all guesses are right.
    """
    return any(
        n_rows * cost.single_seconds > MIN_GAIN * cost(n_rows)
        for n_rows in PASS_ROWS
        if n_rows <= max_rows
    )


def _explain_no_gain(cost: PassCost, max_rows: int) -> str:
    """Return why no size of passes up to `max_rows` tokens saves time."""
    if max_rows == 0:
        return (
            "with --reproducible a draft must not change the logits, but a pass over several "
            "tokens gives other logits than separate passes here"
        )
    return (
        f"on this machine a pass over {MIN_DRAFT_ROWS} tokens takes "
        f"{cost.ratio(MIN_DRAFT_ROWS):.1f} times as long as one over a single token"
    )
