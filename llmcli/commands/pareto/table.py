"""The results of `llmcli pareto` as a table, as CSV and as a JSON document."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmcli.units import size
from llmcli.workflows.pareto.compare import Point, Wish
from quant.certificate.certificate import Speed

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


def document(wish: Wish, points: Sequence[Point], beaten: dict[str, str]) -> dict[str, Any]:
    """Return the JSON document; `dominated_by` is null for settings that nothing dominates."""

    def setting(one: Point) -> dict[str, Any]:
        fields = {
            key: value for key, value in asdict(one).items() if key not in ("nbytes", "seconds")
        }
        more_fields = {"tensor_bytes": one.nbytes, "elapsed_ms": one.seconds * 1000}
        return {**fields, **more_fields, "dominated_by": beaten.get(one.name)}

    return {
        "source": {
            "name": wish.source.name,
            "path": str(wish.source.path),
            "fingerprint": wish.source.fingerprint,
        },
        "text": wish.text[1],
        "n_ctx": wish.n_ctx,
        "settings": [setting(one) for one in points],
    }


def rows(points: Sequence[Point], beaten: dict[str, str]) -> list[tuple[str, ...]]:
    """Return the rows of the table, the smallest file first."""
    lines = []
    for point in sorted(points, key=lambda one: one.nbytes):
        answers, speeds = point.answers, {speed.test[:2]: speed for speed in point.speed}
        lines.append(
            (
                point.name,
                size(point.nbytes),
                f"{point.bits_per_weight:.2f}",
                f"{answers.kld.value:.5f} ± {answers.kld.error:.5f}",
                f"{answers.kld_ranks.get('99.9', answers.kld_most):.4f}",
                f"{answers.same_top.value:.2%}",
                f"{answers.perplexity_ratio.value:.4f}",
                *(_format_speed(speeds.get(test)) for test in ("pp", "tg")),
                f"{point.seconds:.1f}" if point.seconds else "",
                beaten.get(point.name, ""),
            )
        )
    return lines


def markdown(points: Sequence[Point], beaten: dict[str, str]) -> str:
    """Return the table as aligned Markdown."""
    table = rows(points, beaten)
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
    doubt = max(one.doubt for one in points)
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


def text(points: Sequence[Point], beaten: dict[str, str]) -> str:
    """Return all results as CSV, one setting per line, without units."""
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
                pp.made if pp else "",
                *((tg.made, tg.ratio, tg.low, tg.high) if tg else [""] * 4),
                point.seconds,
                beaten.get(point.name, ""),
            )
        )
    return out.getvalue().rstrip("\n")


def _format_speed(one: Speed | None) -> str:
    return f"{one.made:.1f} ({one.ratio:.2f}×)" if one else ""
