"""A plan after folds: the same types, sizes and method, with folded weights and calibration
statistics.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from quant.folds.fold import Fold, edits
from quant.folds.folded_source import apply
from quant.folds.folded_statistics import followed
from quant.quantize.plan import Plan


def folded(plan: Plan, folds: Sequence[Fold], how: str) -> Plan:
    """Return the plan that writes the folded model. Its settings contain the digest of
    the folds.
    """
    source, changes = apply(plan.source, folds, how), edits(folds)
    if source is plan.source:
        return plan
    steps = tuple(
        replace(step, weight=weight, evidence=followed(step.evidence, changes.get(weight.name)))
        for step, weight in zip(plan.steps, source.weights, strict=True)
    )
    settings = json.dumps(json.loads(plan.settings) | {"fold": source.fold}, sort_keys=True)
    return replace(plan, source=source, steps=steps, settings=settings)
