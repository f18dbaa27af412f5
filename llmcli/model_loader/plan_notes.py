"""Notes and warnings about a plan, printed before its file is written."""

from typing import TYPE_CHECKING

from llmcli.ui import UI

if TYPE_CHECKING:
    from quant.quantize.plan import Plan


MIN_ROWS_PER_COLUMN = (
    16  # rows per column of an input; with fewer, a longer text still improves the file
)


def print_plan_notes(plan: "Plan", ui: UI) -> None:
    """Print what the user should know before the plan is written."""
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
        some = ", ".join(plan.tensors_without_importance[:3]) + (
            " …" if len(plan.tensors_without_importance) > 3 else ""
        )
        ui.note(
            f"the imatrix has no data for {len(plan.tensors_without_importance)} tensors; "
            f"they are quantized without importance weights: {some}"
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
    for name, steps in plan.methods.items():
        if name != plan.method.name:
            types = ", ".join(sorted({step.type for step in steps}))
            ui.note(
                f"{len(steps)} tensors are quantized by {name}, because {plan.method.name} does "
                f"not support their types: {types}"
            )


def _note_other_source(plan: "Plan", ui: UI) -> None:
    """Print a note for statistics that were collected from another file."""
    known = [plan.imatrix, plan.moments.imatrix if plan.moments else None]
    for path, model in {one.path: one.model for one in known if one}.items():
        if model not in ("", plan.source.fingerprint):
            ui.note(
                f"{path} was collected from another file than {plan.source.name}: it helps if that "
                "is the same model in another type, or a close relative; otherwise it misleads"
            )


def _note_few_rows(plan: "Plan", ui: UI) -> None:
    """Print a note if the second moments have too few rows.

    Moments with fewer rows than columns cannot be inverted without damping, which reduces the gain;
    up to `MIN_ROWS_PER_COLUMN` rows per column a longer text still helps.
    """
    if plan.moments is None or plan.method.needs != "moments":
        return
    known = [
        second
        for step in plan.steps
        if step.method and (second := plan.moments.input_of(step.weight.name))
    ]
    if thin := [second for second in known if second.thin_matrices]:
        ui.note(
            f"the moments of {len(thin)} tensors have fewer rows than columns: they are damped "
            "and help less than those of a longer text"
        )
    elif few := [
        second for second in known if 0 < second.fewest_rows < MIN_ROWS_PER_COLUMN * second.columns
    ]:
        ui.note(
            f"the moments of {len(few)} tensors have fewer than {MIN_ROWS_PER_COLUMN} rows per column: "
            "a longer text would reduce the error"
        )
    if unseen := sum(second.unseen_matrices for second in known):
        ui.note(
            f"no token reached {unseen} expert matrices: they are quantized as if all columns "
            "were equally important"
        )
