"""The results of `llmcli pareto` as Markdown, CSV and JSON."""

import csv
import io
from collections.abc import Sequence
from typing import Any

from llmcli.units import format_size
from llmcli.workflows.pareto.compare import ParetoPoint, ParetoRequest
from quant.certificate.certificate import SpeedComparison
from quant.json_dataclasses import encode_value

COLUMNS = (
    "setting",
    "size",
    "bits/weight",
    "KLD",
    "99.9 %",
    "same top",
    "PPL / base's",
    "prompt t/s",
    "generation t/s",
    "seconds",
    "beaten by",
)


def build_document(
    request: ParetoRequest, points: Sequence[ParetoPoint], dominated: dict[str, str]
) -> dict[str, Any]:
    """Return the JSON document. `dominated`: for each dominated setting, the setting that dominates
    it; all other settings have the JSON value null.
    """

    def setting_fields(point: ParetoPoint) -> dict[str, Any]:
        fields = {
            key: value
            for key, value in encode_value(point).items()
            if key not in ("nbytes", "seconds")
        }
        more_fields = {"tensor_bytes": point.nbytes, "elapsed_ms": point.seconds * 1000}
        return {**fields, **more_fields, "dominated_by": dominated.get(point.name)}

    return {
        "source": {
            "name": request.source.name,
            "path": str(request.source.path),
            "fingerprint": request.source.fingerprint,
        },
        "text": request.text.name,
        "n_ctx": request.n_ctx,
        "settings": [setting_fields(point) for point in points],
    }


def table_rows(points: Sequence[ParetoPoint], dominated: dict[str, str]) -> list[tuple[str, ...]]:
    """Return the rows of the table, ordered by file size."""
    lines = []
    for point in sorted(points, key=lambda point: point.nbytes):
        answers, speeds = point.answers, {speed.test[:2]: speed for speed in point.speed}
        lines.append(
            (
                point.name,
                format_size(point.nbytes),
                f"{point.bits_per_weight:.2f}",
                f"{answers.kld.value:.5f} ± {answers.kld.error:.5f}",
                f"{answers.kld_ranks.get('99.9', answers.kld_most):.4f}",
                f"{answers.same_top.value:.2%}",
                f"{answers.perplexity_ratio.value:.4f}",
                *(_format_speed(speeds.get(test)) for test in ("pp", "tg")),
                f"{point.seconds:.1f}" if point.seconds else "",
                dominated.get(point.name, ""),
            )
        )
    return lines


def format_markdown(points: Sequence[ParetoPoint], dominated: dict[str, str]) -> str:
    """Return the table as Markdown with aligned columns."""
    table = table_rows(points, dominated)
    widths = [max(map(len, column)) for column in zip(COLUMNS, *table, strict=True)]
    left_aligned = {0, len(COLUMNS) - 1}
    separators = [
        "-" * w if i in left_aligned else "-" * (w - 1) + ":" for i, w in enumerate(widths)
    ]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(w) if i in left_aligned else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in (COLUMNS, separators, *table)
    ]
    doubt = max(point.doubt for point in points)
    lines += [
        "",
        "× is relative to the base, measured in turn; KLD ± its standard error"
        + (
            f", of which up to {doubt:.2g} comes from sampling the base's logits"
            if doubt > 1e-9
            else ""
        ),
    ]
    return "\n".join(lines)


def format_csv(points: Sequence[ParetoPoint], dominated: dict[str, str]) -> str:
    """Return all results as CSV with one setting per line. Values have no units."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = (
        "setting",
        "file_type",
        "method",
        "bytes",
        "bits_per_weight",
        "kld",
        "kld_error",
        "kld_99_9",
        "same_top",
        "perplexity",
        "perplexity_ratio",
        "pp_ts",
        "tg_ts",
        "tg_ratio",
        "tg_ratio_low",
        "tg_ratio_high",
        "seconds",
        "dominated_by",
    )
    writer.writerow(names)
    for point in points:
        answers, speeds = point.answers, {speed.test[:2]: speed for speed in point.speed}
        pp, tg = speeds.get("pp"), speeds.get("tg")
        writer.writerow(
            (
                point.name,
                point.file_type,
                point.method,
                point.nbytes,
                point.bits_per_weight,
                answers.kld.value,
                answers.kld.error,
                answers.kld_ranks.get("99.9", ""),
                answers.same_top.value,
                answers.perplexity.value,
                answers.perplexity_ratio.value,
                pp.quantized if pp else "",
                *((tg.quantized, tg.ratio, tg.low, tg.high) if tg else [""] * 4),
                point.seconds,
                dominated.get(point.name, ""),
            )
        )
    return out.getvalue().rstrip("\n")


def _format_speed(speed: SpeedComparison | None) -> str:
    return f"{speed.quantized:.1f} ({speed.ratio:.2f}×)" if speed else ""
