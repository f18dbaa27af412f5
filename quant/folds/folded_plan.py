"""The plan of a folded model, made from the plan of the unfolded one: types, sizes and method stay
the same; weights and calibration statistics are folded.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from quant.folds.fold import Fold, combine_folds
from quant.folds.folded_source import fold_source
from quant.folds.folded_statistics import fold_statistics
from quant.quantize.plan import Plan


def fold_plan(plan: Plan, folds: Sequence[Fold], kinds: str) -> Plan:
    """Return the plan that writes the folded model. Its settings, which the file records, contain
    the digest of the folds. `kinds` are the kinds of folds as text ("awq,deal"). If no fold changes
    a tensor, return `plan` itself.
    """
    source, edits = fold_source(plan.source, folds, kinds), combine_folds(folds)
    if source is plan.source:
        return plan
    steps = tuple(
        replace(
            step,
            weight=weight,
            statistics=fold_statistics(step.statistics, edits.get(weight.name)),
        )
        for step, weight in zip(plan.steps, source.weights, strict=True)
    )
    settings = json.dumps(json.loads(plan.settings) | {"fold": source.fold_digest}, sort_keys=True)
    return replace(plan, source=source, steps=steps, settings=settings)
