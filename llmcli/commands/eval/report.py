"""The result of an evaluation as a table and as a JSON document."""

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
    """The result of an evaluation, and the models that were evaluated.

    `text_name` is the name of the text, or of the file of base logits that contains the text.
    """

    result: EvaluationResult
    model: EvaluationSide
    base: EvaluationSide | None
    base_logits: BaseLogitsFile | None
    text_name: str


def print_report(report: EvaluationReport, ui: "UI") -> None:
    """Print the report, as JSON under --json."""
    if ui.json:
        ui.result(build_document(report))
        return
    result, figures = report.result, report.result.quality
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
        f"{figures.positions:,} positions scored"
    )
    ui.text()
    rows = [("perplexity", _format_estimate(figures.perplexity, 4))]
    if figures.comparison:
        rows += _base_rows(figures.comparison)
    ui.table(("", "value ± standard error"), rows, right=("value ± standard error",))
    if figures.comparison:
        ui.text()
        _print_percentiles(figures.comparison, ui)
        _print_sampling_error(figures.comparison, ui)


def _base_rows(against: BaseComparison) -> list[tuple[str, str]]:
    return [
        ("perplexity of the base", _format_estimate(against.base, 4)),
        ("perplexity / base's", _format_estimate(against.ratio, 5)),
        ("ln of the ratio", _format_estimate(against.log_ratio, 6)),
        ("perplexity − base's", _format_estimate(against.difference, 5)),
        (
            "correlation of the logs",
            "-" if against.correlation is None else f"{against.correlation:.2%}",
        ),
        ("mean KL divergence", _format_estimate(against.kld, 6)),
        ("same top", _format_percent(against.same_top)),
        ("mean Δp", _format_percent(against.delta)),
        ("RMS Δp", _format_percent(against.delta_rms)),
    ]


def _print_percentiles(against: BaseComparison, ui: "UI") -> None:
    """Print the percentiles of the KL divergence and of Δp next to each other."""
    medians = (50.0, against.klds.median, against.deltas.median)
    ranks = sorted({*against.klds.percentiles, *against.deltas.percentiles, 50.0}, reverse=True)
    rows = [("maximum", f"{against.klds.maximum:.6f}", f"{against.deltas.maximum:.3%}")]
    for rank in ranks:
        kld, delta = (
            medians[1:]
            if rank == 50.0
            else (against.klds.percentiles.get(rank), against.deltas.percentiles.get(rank))
        )
        rows.append(
            (
                "median" if rank == 50.0 else f"{rank:.1f} %",
                "" if kld is None else f"{kld:.6f}",
                "" if delta is None else f"{delta:.3%}",
            )
        )
    rows.append(("minimum", f"{against.klds.minimum:.6f}", f"{against.deltas.minimum:.3%}"))
    ui.table(("", "KL divergence", "Δp"), rows, right=("KL divergence", "Δp"))


def _print_sampling_error(against: BaseComparison, ui: "UI") -> None:
    if against.kld_draw_error:
        ui.text()
        ui.text(
            "the base's logits are a sample, which contributes "
            f"{against.kld_draw_error:.6f} to the error of the mean divergence"
        )


def _format_estimate(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def _format_percent(estimate: Estimate) -> str:
    return f"{estimate.value:.3%} ± {estimate.error:.3%}"


def build_document(report: EvaluationReport) -> dict[str, Any]:
    """Return the JSON document; fields about the base are null without one."""
    result, figures, options = report.result, report.result.quality, report.model.options
    against = figures.comparison
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
        "positions": figures.positions,
        "resumed_chunks": result.resumed_chunks,
        "type_k": options.cache_type_k,
        "type_v": options.cache_type_v,
        "flash_attn": options.flash_attn,
        "n_batch": options.batch_size,
        "n_ubatch": options.ubatch_size,
        "n_threads": options.threads,
        "perplexity": _estimate_json(figures.perplexity),
        "base_perplexity": _estimate_json(against.base) if against else None,
        "correlation": against.correlation if against else None,
        "ln_perplexity_ratio": _estimate_json(against.log_ratio) if against else None,
        "perplexity_ratio": _estimate_json(against.ratio) if against else None,
        "perplexity_difference": _estimate_json(against.difference) if against else None,
        "kl_divergence": {**_estimate_json(against.kld), **_spread_json(against.klds)}
        if against
        else None,
        "kl_divergence_sampling_error": against.kld_draw_error if against else None,
        "delta_p": {**_estimate_json(against.delta), **_spread_json(against.deltas)}
        if against
        else None,
        "rms_delta_p": _estimate_json(against.delta_rms) if against else None,
        "same_top": _estimate_json(against.same_top) if against else None,
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
