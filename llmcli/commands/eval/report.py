"""The result of an evaluation as a table and as a JSON document."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcli.workflows.evaluation.evaluate import Outcome
from llmcli.workflows.evaluation.models import Side
from quant.evaluation.base_logits import BaseLogits
from quant.evaluation.metrics import Against, Estimate, Spread

if TYPE_CHECKING:
    from llmcli.ui import UI


@dataclass(frozen=True, slots=True)
class Told:
    """The result of an evaluation and its subjects. `text_name`: name of the text, or of the file
    of base logits that contains it.
    """

    outcome: Outcome
    model: Side
    base: Side | None
    kept: BaseLogits | None
    text: str


def show(told: Told, ui: "UI") -> None:
    """Print the report, as JSON under --json."""
    if ui.json:
        ui.result(document(told))
        return
    result, figures = told.outcome, told.outcome.quality
    options = told.model.options
    base_name = told.base.header.path.name if told.base else told.kept.name if told.kept else None
    ui.text(
        f"{told.model.header.path.name} · {told.model.header.file_type} · K "
        f"{options.cache_type_k}, "
        f"V {options.cache_type_v}" + (f" · against {base_name}" if base_name else "")
    )
    ui.text(
        f"{told.text}: {result.chunks} chunks of {result.n_ctx} tokens, "
        f"{figures.positions:,} positions scored"
    )
    ui.text()
    rows = [("perplexity", _format_estimate(figures.perplexity, 4))]
    if figures.against:
        rows += _base_rows(figures.against)
    ui.table(("", "value ± standard error"), rows, right=("value ± standard error",))
    if figures.against:
        ui.text()
        _print_percentiles(figures.against, ui)
        _print_sampling_error(figures.against, ui)


def _base_rows(found: Against) -> list[tuple[str, str]]:
    return [
        ("perplexity of the base", _format_estimate(found.base, 4)),
        ("perplexity / base's", _format_estimate(found.ratio, 5)),
        ("ln of the ratio", _format_estimate(found.log_ratio, 6)),
        ("perplexity − base's", _format_estimate(found.difference, 5)),
        (
            "correlation of the logs",
            "-" if found.correlation is None else f"{found.correlation:.2%}",
        ),
        ("mean KL divergence", _format_estimate(found.kld, 6)),
        ("same top", _format_percent(found.same_top)),
        ("mean Δp", _format_percent(found.delta)),
        ("RMS Δp", _format_percent(found.delta_rms)),
    ]


def _print_percentiles(found: Against, ui: "UI") -> None:
    """Print the percentiles of both distributions next to each other."""
    medians = (50.0, found.klds.median, found.deltas.median)
    ranks = sorted({*found.klds.ranks, *found.deltas.ranks, 50.0}, reverse=True)
    rows = [("maximum", f"{found.klds.most:.6f}", f"{found.deltas.most:.3%}")]
    for rank in ranks:
        kld, delta = (
            medians[1:]
            if rank == 50.0
            else (found.klds.ranks.get(rank), found.deltas.ranks.get(rank))
        )
        rows.append(
            (
                "median" if rank == 50.0 else f"{rank:.1f} %",
                "" if kld is None else f"{kld:.6f}",
                "" if delta is None else f"{delta:.3%}",
            )
        )
    rows.append(("minimum", f"{found.klds.least:.6f}", f"{found.deltas.least:.3%}"))
    ui.table(("", "KL divergence", "Δp"), rows, right=("KL divergence", "Δp"))


def _print_sampling_error(found: Against, ui: "UI") -> None:
    if found.doubt:
        ui.text()
        ui.text(
            "the base's logits are a sample, which contributes "
            f"{found.doubt:.6f} to the error of the mean divergence"
        )


def _format_estimate(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def _format_percent(estimate: Estimate) -> str:
    return f"{estimate.value:.3%} ± {estimate.error:.3%}"


def document(told: Told) -> dict[str, Any]:
    """Return the JSON document; fields about the base are null without one."""
    result, figures, options = told.outcome, told.outcome.quality, told.model.options
    against = figures.against
    return {
        "model": _model_json(told.model),
        "base": _model_json(told.base)
        if told.base
        else _base_logits_json(told.kept)
        if told.kept
        else None,
        "text": told.text,
        "text_tokens": result.tokens,
        "n_ctx": result.n_ctx,
        "chunks": result.chunks,
        "positions": figures.positions,
        "resumed_chunks": result.resumed,
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
        "kl_divergence_sampling_error": against.doubt if against else None,
        "delta_p": {**_estimate_json(against.delta), **_spread_json(against.deltas)}
        if against
        else None,
        "rms_delta_p": _estimate_json(against.delta_rms) if against else None,
        "same_top": _estimate_json(against.same_top) if against else None,
        "elapsed_ms": result.seconds * 1000,
    }


def _model_json(side: Side) -> dict[str, Any]:
    header = side.header
    return {
        "name": header.path.name,
        "path": str(header.path),
        "file_type": header.file_type,
        "file_bytes": sum(Path(file).stat().st_size for file in header.files),
        "tensor_bytes": header.tensor_bytes,
        "bits_per_weight": header.bits_per_weight,
    }


def _base_logits_json(kept: BaseLogits) -> dict[str, Any]:
    return {"name": kept.name, "path": str(kept.path)}


def _estimate_json(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "error": estimate.error}


def _spread_json(spread: Spread) -> dict[str, Any]:
    return {
        "minimum": spread.least,
        "maximum": spread.most,
        "median": spread.median,
        "percentiles": {f"{rank:g}": value for rank, value in spread.ranks.items()},
    }
