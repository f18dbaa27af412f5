"""Builds the plans that `llmcli pareto` compares: one for each combination of a file type or size,
a method and a fold.

This happens before any file is written. It includes collecting missing statistics, choosing tensor
types for the sizes, and choosing the folds.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.errors import UsageError
from llmcli.model_loader import float_copy
from llmcli.runtime.requests.placement_options import PlacementOptions
from llmcli.workflows.calibration import ensure_statistics
from llmcli.workflows.pareto.settings import DEFAULT_TYPES, ParetoSettings
from llmcli.workflows.quantization import allocate, apply_folds, plan_mix
from llmcli.workflows.quantization.method_settings import MeasuredInputs
from llmcli.workflows.quantization.size_request import SizeRequest
from quant.calibration import imatrix, moments
from quant.calibration.expected_moments import ExpectedMoments
from quant.calibration.imatrix import Imatrix
from quant.calibration.moments import MomentsFile
from quant.folds import choose, folded_source
from quant.quantize.plan import method_by_name, plan_quantization
from quant.recipes import tensor_types
from quant.recipes.tensor_types import NO_OVERRIDES, TypeOverrides

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.model_loader.quantize_file import OpenedSource
    from llmcli.ui import UI
    from quant.quantize.plan import Plan
    from quant.source.source import Source

MeasuredStatistics = tuple[Imatrix | None, MomentsFile | None]


def build_plans(
    opened: "OpenedSource",
    settings: ParetoSettings,
    threads: int,
    placement: "PlacementOptions",
    config: "Config",
    ui: "UI",
) -> dict[str, "Plan"]:
    """Return the plan of each setting, by the setting's name.
    Raises UserError or UsageError if any setting is impossible.
    """
    source = opened.source
    float_copy.require_vocabulary(source)
    sizes = _split_list(settings.target_size)
    types = [
        tensor_types.parse_file_type(word).name
        for word in _split_list(
            DEFAULT_TYPES if settings.types is None and not sizes else settings.types
        )
    ]
    methods = [method_by_name(word).name for word in _split_list(settings.methods)]
    folds = list(dict.fromkeys(settings.fold or ["none"]))
    for size in sizes:
        SizeRequest(target_size=size).validate(
            is_split=False, has_file_type=False, has_overrides=False
        )
    if not (types or sizes) or not methods:
        raise UsageError("nothing to compare", hint=f"--types {DEFAULT_TYPES} --methods ggml")
    collects = any(choose.parse_fold_kinds(fold) for fold in folds) or any(
        method_by_name(method).needs == "moments" for method in methods
    )
    has_statistics = bool(collects or settings.imatrix or settings.moments)
    expected = MeasuredInputs(None, None, ExpectedMoments() if has_statistics else None)
    ggml_builder = _make_builder(source, "ggml", "none", expected, threads)
    for size in sizes:  # check all sizes before the slow measurements for the first one
        allocate.target_budget(source, ggml_builder.mix_plan, SizeRequest(target_size=size))
    if sizes or collects:
        opened.write_weights()
    measured = _load_statistics(source, settings, methods, folds, threads, placement, config, ui)
    plans = {}
    for fold in folds:
        for method in methods:
            builder = _make_builder(source, method, fold, MeasuredInputs(*measured, None), threads)
            for kind in [*types, *sizes]:
                sizing = SizeRequest(target_size=kind) if kind in sizes else SizeRequest()
                plan, _ = plan_mix.build_plan(sizing, builder, kind, NO_OVERRIDES, config, ui)
                name_parts = [
                    kind,
                    *([method] if len(methods) > 1 else []),
                    *([f"fold {fold}"] if len(folds) > 1 else []),
                ]
                plans[" ".join(name_parts)] = apply_folds.apply_folds(plan, fold, threads, ui)
    return plans


def _split_list(text: str | None) -> list[str]:
    return list(dict.fromkeys(word for item in (text or "").split(",") if (word := item.strip())))


def _load_statistics(
    source: "Source",
    settings: ParetoSettings,
    methods: Sequence[str],
    folds: Sequence[str],
    threads: int,
    placement: "PlacementOptions",
    config: "Config",
    ui: "UI",
) -> MeasuredStatistics:
    """Return the imatrix and the second moments: those of the user, or collected ones if the
    methods and folds need more.
    """
    sums = imatrix.load_imatrix(settings.imatrix) if settings.imatrix else None
    second_moments = moments.load_moments(settings.moments) if settings.moments else None
    active_fold = next((fold for fold in folds if choose.parse_fold_kinds(fold)), None)
    moments_method = next(
        (name for name in methods if method_by_name(name).needs == "moments"), None
    )
    if moments_method and second_moments is None:
        return ensure_statistics.ensure_statistics(
            ensure_statistics.StatisticsRequest(
                source, f"method {moments_method}", True, threads, placement=placement
            ),
            sums,
            config,
            ui,
        )
    if active_fold and sums is None and second_moments is None:
        return ensure_statistics.ensure_statistics(
            ensure_statistics.StatisticsRequest(
                source, f"--fold {active_fold}", False, threads, placement=placement
            ),
            sums,
            config,
            ui,
        )
    return sums, second_moments


def _make_builder(
    source: "Source", method: str, fold: str, inputs: MeasuredInputs, threads: int
) -> plan_mix.PlanBuilder:
    """Return a plan builder for one method and fold.

    Its provenance equals that in `quantize`, so that both commands share cached measurements.
    """
    has_fold = bool(choose.parse_fold_kinds(fold))
    provenance = {"method": method, "fold": fold * has_fold, **inputs.digests}

    def build(kind: str, overrides: TypeOverrides) -> "Plan":
        return plan_quantization(
            source,
            kind,
            overrides,
            imatrix=inputs.imatrix,
            method=method,
            moments=inputs.moments,
            expected=inputs.pending,
        )

    return plan_mix.PlanBuilder(
        source, build, provenance, threads, folded_source.HEADER_RESERVE_BYTES * has_fold
    )
