"""Builds the plans that `llmcli pareto` compares: one for each type or size, method and fold.

Missing statistics are collected, sizes allocated and folds chosen here, before any file is written.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.commands import allocating, bases, folding, gathering, mixes
from llmcli.commands.pareto import TYPES, Settings
from llmcli.commands.quantize import Known
from llmcli.commands.sizing import Sizing
from llmcli.errors import UsageError
from quant import imatrix, moments, planning, recipe
from quant.folds import choose, rewrite
from quant.imatrix import Imatrix
from quant.moments import Moments
from quant.recipe import STOCK, Wishes

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.planning import Plan
    from quant.source import Source

Measured = tuple[Imatrix | None, Moments | None]


def plans_of(
    source: "Source", settings: Settings, threads: int, config: "Config", ui: "UI"
) -> dict[str, "Plan"]:
    """Return a plan for each setting, by its name.

    Raises UserError or UsageError if any setting is impossible.
    """
    bases.check(source)
    sizes = _split_list(settings.target_size)
    types = [
        recipe.parse(word).name
        for word in _split_list(TYPES if settings.types is None and not sizes else settings.types)
    ]
    methods = [planning.named(word).name for word in _split_list(settings.methods)]
    folds = list(dict.fromkeys(settings.fold or ["none"]))
    for size in sizes:
        Sizing(target_size=size).check(split=False, typed=False, wished=False)
    if not (types or sizes) or not methods:
        raise UsageError("nothing to compare", hint=f"--types {TYPES} --methods ggml")
    ggml_builder = _make_builder(source, "ggml", "none", (None, None), threads)
    for size in sizes:  # check all sizes before the first is measured for minutes
        allocating.reachable(source, ggml_builder.of, Sizing(target_size=size))
    measured = _load_statistics(source, settings, (methods, folds), threads, config, ui)
    plans = {}
    for fold in folds:
        for method in methods:
            builder = _make_builder(source, method, fold, measured, threads)
            for kind in [*types, *sizes]:
                sizing = Sizing(target_size=kind) if kind in sizes else Sizing()
                plan, _ = mixes.planned(sizing, builder, kind, STOCK, config, ui)
                name_parts = [
                    kind,
                    *([method] if len(methods) > 1 else []),
                    *([f"fold {fold}"] if len(folds) > 1 else []),
                ]
                plans[" ".join(name_parts)] = folding.folded(plan, fold, threads, ui)
    return plans


def _split_list(text: str | None) -> list[str]:
    return list(dict.fromkeys(word for part in (text or "").split(",") if (word := part.strip())))


def _load_statistics(
    source: "Source",
    settings: Settings,
    wanted: tuple[Sequence[str], Sequence[str]],
    threads: int,
    config: "Config",
    ui: "UI",
) -> Measured:
    """Return the user's statistics, plus those that the requested methods and folds need."""
    methods, folds = wanted
    sums = imatrix.load(settings.imatrix.expanduser()) if settings.imatrix else None
    second_moments = moments.load(settings.moments.expanduser()) if settings.moments else None
    active_fold = next((fold for fold in folds if choose.parse(fold)), None)
    moments_method = next(
        (name for name in methods if planning.named(name).needs == "moments"), None
    )
    if moments_method and second_moments is None:
        return gathering.gathered(
            gathering.Wish(source, f"method {moments_method}", True, threads), sums, config, ui
        )
    if active_fold and sums is None and second_moments is None:
        return gathering.gathered(
            gathering.Wish(source, f"--fold {active_fold}", False, threads), sums, config, ui
        )
    return sums, second_moments


def _make_builder(
    source: "Source", method: str, fold: str, measured: Measured, threads: int
) -> mixes.Making:
    """Return a plan builder for one method and fold.

    The provenance is built as in quantize, so that both share their cached measurements.
    """
    inputs, has_fold = Known(*measured, None), bool(choose.parse(fold))
    steered = {"method": method, "fold": fold * has_fold, **inputs.digests}

    def make(kind: str, wishes: Wishes) -> "Plan":
        return planning.plan(source, kind, wishes, method=method, **inputs.given)

    return mixes.Making(source, make, steered, threads, rewrite.ROOM * has_fold)
