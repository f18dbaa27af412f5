"""What `llmcli pareto` found, as a table for people, as CSV, as a document."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from llmcli.commands.frontier import Point, Wish
from llmcli.units import size
from quant.certificate import Speed

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
    """One JSON document; `dominated_by` is null for what nothing beats."""

    def setting(one: Point) -> dict[str, Any]:
        found = {
            key: value for key, value in asdict(one).items() if key not in ("nbytes", "seconds")
        }
        told = {"tensor_bytes": one.nbytes, "elapsed_ms": one.seconds * 1000}
        return {**found, **told, "dominated_by": beaten.get(one.name)}

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
    """The table's lines, the smallest file first."""
    told = []
    for one in sorted(points, key=lambda one: one.nbytes):
        answers, speeds = one.answers, {speed.test[:2]: speed for speed in one.speed}
        told.append(
            (
                one.name,
                size(one.nbytes),
                f"{one.bits_per_weight:.2f}",
                f"{answers.kld.value:.5f} ± {answers.kld.error:.5f}",
                f"{answers.kld_ranks.get('99.9', answers.kld_most):.4f}",
                f"{answers.same_top.value:.2%}",
                f"{answers.perplexity_ratio.value:.4f}",
                *(_rate(speeds.get(test)) for test in ("pp", "tg")),
                f"{one.seconds:.1f}" if one.seconds else "",
                beaten.get(one.name, ""),
            )
        )
    return told


def markdown(points: Sequence[Point], beaten: dict[str, str]) -> str:
    """The table as Markdown that reads well as it is."""
    table = rows(points, beaten)
    widths = [max(map(len, column)) for column in zip(COLUMNS, *table, strict=True)]
    left = {0, len(COLUMNS) - 1}
    rule = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in (COLUMNS, rule, *table)
    ]
    doubt = max(one.doubt for one in points)
    lines += [
        "",
        "× is the base's speed, measured in turn; KLD ± its standard error"
        + (
            f", of which up to {doubt:.2g} is of the base's logits being kept in part"
            if doubt > 1e-9
            else ""
        ),
    ]
    return "\n".join(lines)


def text(points: Sequence[Point], beaten: dict[str, str]) -> str:
    """All figures, a line each, without units."""
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
    for one in points:
        answers, speeds = one.answers, {speed.test[:2]: speed for speed in one.speed}
        pp, tg = speeds.get("pp"), speeds.get("tg")
        writer.writerow(
            (
                one.name,
                one.file_type,
                one.method,
                one.nbytes,
                one.bits_per_weight,
                answers.kld.value,
                answers.kld.error,
                answers.kld_ranks.get("99.9", ""),
                answers.same_top.value,
                answers.perplexity.value,
                answers.perplexity_ratio.value,
                pp.made if pp else "",
                *((tg.made, tg.ratio, tg.low, tg.high) if tg else [""] * 4),
                one.seconds,
                beaten.get(one.name, ""),
            )
        )
    return out.getvalue().rstrip("\n")


def _rate(one: Speed | None) -> str:
    return f"{one.made:.1f} ({one.ratio:.2f}×)" if one else ""
