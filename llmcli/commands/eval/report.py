"""The result of an evaluation as text and as a JSON document."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.workflows.evaluation.evaluate import EvaluationResult
from llmcli.workflows.evaluation.models import EvaluationSide
from quant.evaluation.base_logits import BaseLogitsFile
from quant.evaluation.metrics import BaseComparison, Distribution, Estimate

if TYPE_CHECKING:
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The result of an evaluation, with the evaluated model and the base.

    `text_name`: the name of the text, or of the base-logits file that contains the text. `base`,
    `base_logits`: the base as a model, or as a file of saved logits; at most one is set.
    """

    result: EvaluationResult
    model: EvaluationSide
    base: EvaluationSide | None
    base_logits: BaseLogitsFile | None
    text_name: str


def print_report(report: EvaluationReport, ui: "UI") -> None:
    """Print the result as tables, or as a JSON document with --json."""
    if ui.json:
        ui.result(build_document(report))
        return
    result, quality = report.result, report.result.quality
    options = report.model.options
    base_name = (
        report.base.header.path.name
        if report.base
        else report.base_logits.name
        if report.base_logits
        else None
    )
    ui.text(
        f"{report.model.header.path.name} · {report.model.header.file_type} · K "
        f"{options.cache_type_k}, "
        f"V {options.cache_type_v}" + (f" · against {base_name}" if base_name else "")
    )
    ui.text(
        f"{report.text_name}: {result.chunks} chunks of {result.n_ctx} tokens, "
        f"{quality.positions:,} positions scored"
    )
    ui.text()
    rows = [("perplexity", _format_estimate(quality.perplexity, 4))]
    if quality.comparison:
        rows += _base_rows(quality.comparison)
    ui.table(("", "value ± standard error"), rows, right=("value ± standard error",))
    if quality.comparison:
        ui.text()
        _print_percentiles(quality.comparison, ui)
        _print_sampling_error(quality.comparison, ui)


def _base_rows(comparison: BaseComparison) -> list[tuple[str, str]]:
    return [
        ("perplexity of the base", _format_estimate(comparison.base, 4)),
        ("perplexity / base's", _format_estimate(comparison.ratio, 5)),
        ("ln of the ratio", _format_estimate(comparison.log_ratio, 6)),
        ("perplexity − base's", _format_estimate(comparison.difference, 5)),
        (
            "correlation of the logs",
            "-" if comparison.correlation is None else f"{comparison.correlation:.2%}",
        ),
        ("mean KL divergence", _format_estimate(comparison.kld, 6)),
        ("same top", _format_percent(comparison.same_top)),
        ("mean Δp", _format_percent(comparison.delta)),
        ("RMS Δp", _format_percent(comparison.delta_rms)),
    ]


def _print_percentiles(comparison: BaseComparison, ui: "UI") -> None:
    """Print a table with the percentiles of the KL divergence and of Δp."""
    medians = (50.0, comparison.klds.median, comparison.deltas.median)
    ranks = sorted(
        {*comparison.klds.percentiles, *comparison.deltas.percentiles, 50.0}, reverse=True
    )
    rows = [("maximum", f"{comparison.klds.maximum:.6f}", f"{comparison.deltas.maximum:.3%}")]
    for rank in ranks:
        kld, delta = (
            medians[1:]
            if rank == 50.0
            else (comparison.klds.percentiles.get(rank), comparison.deltas.percentiles.get(rank))
        )
        rows.append(
            (
                "median" if rank == 50.0 else f"{rank:.1f} %",
                "" if kld is None else f"{kld:.6f}",
                "" if delta is None else f"{delta:.3%}",
            )
        )
    rows.append(("minimum", f"{comparison.klds.minimum:.6f}", f"{comparison.deltas.minimum:.3%}"))
    ui.table(("", "KL divergence", "Δp"), rows, right=("KL divergence", "Δp"))


def _print_sampling_error(comparison: BaseComparison, ui: "UI") -> None:
    if comparison.kld_draw_error:
        ui.text()
        ui.text(
            "the base's logits are a sample, which contributes "
            f"{comparison.kld_draw_error:.6f} to the error of the mean divergence"
        )


def _format_estimate(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def _format_percent(estimate: Estimate) -> str:
    return f"{estimate.value:.3%} ± {estimate.error:.3%}"


def build_document(report: EvaluationReport) -> dict[str, Any]:
    """Return the JSON document. Fields about the base are null if there is no base."""
    result, quality, options = report.result, report.result.quality, report.model.options
    comparison = quality.comparison
    return {
        "model": _model_json(report.model),
        "base": _model_json(report.base)
        if report.base
        else _base_logits_json(report.base_logits)
        if report.base_logits
        else None,
        "text": report.text_name,
        "text_tokens": result.tokens,
        "n_ctx": result.n_ctx,
        "chunks": result.chunks,
        "positions": quality.positions,
        "resumed_chunks": result.resumed_chunks,
        "type_k": options.cache_type_k,
        "type_v": options.cache_type_v,
        "flash_attn": options.flash_attn,
        "n_batch": options.batch_size,
        "n_ubatch": options.ubatch_size,
        "n_threads": options.threads,
        "perplexity": _estimate_json(quality.perplexity),
        "base_perplexity": _estimate_json(comparison.base) if comparison else None,
        "correlation": comparison.correlation if comparison else None,
        "ln_perplexity_ratio": _estimate_json(comparison.log_ratio) if comparison else None,
        "perplexity_ratio": _estimate_json(comparison.ratio) if comparison else None,
        "perplexity_difference": _estimate_json(comparison.difference) if comparison else None,
        "kl_divergence": {**_estimate_json(comparison.kld), **_spread_json(comparison.klds)}
        if comparison
        else None,
        "kl_divergence_sampling_error": comparison.kld_draw_error if comparison else None,
        "delta_p": {**_estimate_json(comparison.delta), **_spread_json(comparison.deltas)}
        if comparison
        else None,
        "rms_delta_p": _estimate_json(comparison.delta_rms) if comparison else None,
        "same_top": _estimate_json(comparison.same_top) if comparison else None,
        "elapsed_ms": result.seconds * 1000,
    }


def _model_json(side: EvaluationSide) -> dict[str, Any]:
    header = side.header
    return {
        "name": header.path.name,
        "path": str(header.path),
        "file_type": header.file_type,
        "file_bytes": sum(Path(file).stat().st_size for file in header.files),
        "tensor_bytes": header.tensor_bytes,
        "bits_per_weight": header.bits_per_weight,
    }


def _base_logits_json(base_logits: BaseLogitsFile) -> dict[str, Any]:
    return {"name": base_logits.name, "path": str(base_logits.path)}


def _estimate_json(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "error": estimate.error}


def _spread_json(spread: Distribution) -> dict[str, Any]:
    return {
        "minimum": spread.minimum,
        "maximum": spread.maximum,
        "median": spread.median,
        "percentiles": {f"{rank:g}": value for rank, value in spread.percentiles.items()},
    }
