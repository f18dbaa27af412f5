"""Print notes and warnings about the plan of a quantization, before its file is written."""

from typing import TYPE_CHECKING

from llmcli.ui import UI
from llmcli.units import format_count
from quant.installation import install_kernels_advice

if TYPE_CHECKING:
    from quant.quantize.plan import Plan, TensorPlan


# With fewer activation rows per column of a weight, a longer calibration text still improves the
# quantized file.
MIN_ROWS_PER_COLUMN = 16


def print_plan_notes(plan: "Plan", ui: UI) -> None:
    """Print the notes of the plan, and warnings about its source and its statistics. Examples: the
    source is already quantized, or the imatrix has no data for some tensors.
    """
    for note in plan.notes:
        ui.note(note)
    for warning in plan.source.warnings:
        ui.warn(warning)
    if plan.requantized_types:
        ui.warn(
            f"the source is already quantized ({', '.join(plan.requantized_types)}): quantizing it "
            "again adds the error in the table to its own; a float checkpoint gives a better file"
        )
    _note_other_source(plan, ui)
    if plan.tensors_without_importance:
        examples = ", ".join(plan.tensors_without_importance[:3]) + (
            " …" if len(plan.tensors_without_importance) > 3 else ""
        )
        ui.note(
            f"the imatrix has no data for "
            f"{format_count(len(plan.tensors_without_importance), 'tensor')}, quantized without "
            f"importance weights: {examples}"
        )
    if plan.fallbacks:
        changes = ", ".join(
            sorted({f"{step.replaced_type} -> {step.type}" for step in plan.fallbacks})
        )
        ui.note(
            f"{len(plan.fallbacks)} of {len(plan.steps)} tensors have rows that do not fill "
            f"whole blocks: {changes}"
        )
    _note_few_rows(plan, ui)
    _note_slow_methods(plan, ui)
    _note_other_methods(plan, ui)


def _note_other_methods(plan: "Plan", ui: UI) -> None:
    """Print a note about the tensors that get their codes from another method than the plan's,
    because their input has no second moments, or the method does not suit them.
    """
    for name, steps in plan.methods.items():
        if name == plan.method.name:
            continue
        unmeasured: list[TensorPlan] = []
        others: list[TensorPlan] = []
        for step in steps:
            has_moments = plan.method.needs != "moments" or step.statistics.moments is not None
            (others if has_moments else unmeasured).append(step)
        if unmeasured:
            names = [step.weight.name for step in unmeasured[:3]]
            names += [] if len(unmeasured) <= 3 else ["…"]
            ui.note(
                f"{format_count(len(unmeasured), 'tensor')} quantized by {name}, because there are "
                f"no second moments of the input: {', '.join(names)}"
            )
        if others:
            types = ", ".join(sorted({step.type for step in others}))
            ui.note(
                f"{format_count(len(others), 'tensor')} quantized by {name}, because "
                f"{plan.method.name} does not suit the role or the type: {types}"
            )


def _note_other_source(plan: "Plan", ui: UI) -> None:
    """Print a note for each file of statistics that was collected from another model file than the
    plan's source.
    """
    statistics = [plan.imatrix, plan.moments.imatrix if plan.moments else None]
    for path, fingerprint in {
        imatrix.path: imatrix.model for imatrix in statistics if imatrix
    }.items():
        if fingerprint not in ("", plan.source.fingerprint):
            ui.note(
                f"{path} was collected from another file than {plan.source.name}: it helps if that "
                "is the same model in another type, or a close relative; otherwise it misleads"
            )


def _note_slow_methods(plan: "Plan", ui: UI) -> None:
    """Print a note if a method of the plan works without our C code, with the reason and what to
    do.
    """
    reasons = sorted({step.method.slow_reason() for step in plan.steps if step.method} - {""})
    if reasons:
        ui.note(
            "scales are searched with numpy, which is slower than llmcli's C code and gives other "
            f"bytes: {'; '.join(reasons)}"
        )
        ui.note(f"hint: {install_kernels_advice()}")


def _note_few_rows(plan: "Plan", ui: UI) -> None:
    """Print a note if the second moments of the plan's weights were collected from too short a
    text.

    A moment matrix with fewer activation rows than columns can be inverted only with damping, which
    reduces its benefit. With fewer than MIN_ROWS_PER_COLUMN rows per column, a longer text would
    still help.
    """
    if plan.moments is None or plan.method.needs != "moments":
        return
    moments = [
        moment
        for step in plan.steps
        if step.method and (moment := plan.moments.input_of(step.weight.name))
    ]
    if thin := [moment for moment in moments if moment.thin_matrices]:
        ui.note(
            f"the moments of {format_count(len(thin), 'tensor')} have fewer rows than columns: "
            "they are damped and help less than those of a longer text"
        )
    elif few := [
        moment
        for moment in moments
        if 0 < moment.fewest_rows < MIN_ROWS_PER_COLUMN * moment.columns
    ]:
        ui.note(
            f"the moments of {format_count(len(few), 'tensor')} have fewer than "
            f"{MIN_ROWS_PER_COLUMN} rows per column: a longer text would reduce the error"
        )
    if unseen := sum(moment.unseen_matrices for moment in moments):
        ui.note(
            f"expert matrices that no token reached: {unseen:,}; they are quantized as if all "
            "columns were equally important"
        )
