"""Builds the plans that `llmcli pareto` compares: one for each type or size, method and fold.

Missing statistics are collected, sizes allocated and folds chosen here, before any file is written.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.errors import UsageError
from llmcli.model_loader import float_copy
from llmcli.workflows.calibration import ensure_statistics
from llmcli.workflows.pareto.settings import TYPES, Settings
from llmcli.workflows.quantization import allocate, apply_folds, plan_mix
from llmcli.workflows.quantization.method_settings import Known
from llmcli.workflows.quantization.size_request import Sizing
from quant.calibration import imatrix, moments
from quant.calibration.imatrix import Imatrix
from quant.calibration.moments import Moments
from quant.folds import choose, folded_source
from quant.quantize import plan as planning
from quant.recipes import tensor_types
from quant.recipes.tensor_types import STOCK, Wishes

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.quantize.plan import Plan
    from quant.source.source import Source

Measured = tuple[Imatrix | None, Moments | None]


def plans_of(
    source: "Source", settings: Settings, threads: int, config: "Config", ui: "UI"
) -> dict[str, "Plan"]:
    """Return a plan for each setting, by its name.

    Raises UserError or UsageError if any setting is impossible.
    """
    float_copy.check(source)
    sizes = _split_list(settings.target_size)
    types = [
        tensor_types.parse(word).name
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
        allocate.reachable(source, ggml_builder.of, Sizing(target_size=size))
    measured = _load_statistics(source, settings, (methods, folds), threads, config, ui)
    plans = {}
    for fold in folds:
        for method in methods:
            builder = _make_builder(source, method, fold, measured, threads)
            for kind in [*types, *sizes]:
                sizing = Sizing(target_size=kind) if kind in sizes else Sizing()
                plan, _ = plan_mix.planned(sizing, builder, kind, STOCK, config, ui)
                name_parts = [
                    kind,
                    *([method] if len(methods) > 1 else []),
                    *([f"fold {fold}"] if len(folds) > 1 else []),
                ]
                plans[" ".join(name_parts)] = apply_folds.folded(plan, fold, threads, ui)
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
        return ensure_statistics.gathered(
            ensure_statistics.Wish(source, f"method {moments_method}", True, threads),
            sums,
            config,
            ui,
        )
    if active_fold and sums is None and second_moments is None:
        return ensure_statistics.gathered(
            ensure_statistics.Wish(source, f"--fold {active_fold}", False, threads),
            sums,
            config,
            ui,
        )
    return sums, second_moments


def _make_builder(
    source: "Source", method: str, fold: str, measured: Measured, threads: int
) -> plan_mix.Making:
    """Return a plan builder for one method and fold.

    The provenance is built as in quantize, so that both share their cached measurements.
    """
    inputs, has_fold = Known(*measured, None), bool(choose.parse(fold))
    steered = {"method": method, "fold": fold * has_fold, **inputs.digests}

    def make(kind: str, wishes: Wishes) -> "Plan":
        return planning.plan(source, kind, wishes, method=method, **inputs.given)

    return plan_mix.Making(source, make, steered, threads, folded_source.ROOM * has_fold)
