"""The results of a comparison for docs/quality.md: a table of the changes by method, and a CSV file
with every figure.
"""

import csv
import io
from collections.abc import Iterable, Sequence

from scripts.quality.table import Ratio, TextResult

CSV_FIELDS = (
    "model",
    "calibration_chunks",
    "calibration_texts",
    "type",
    "method",
    "scored_on",
    "tensor_bytes",
    "kld",
    "kld_standard_error",
    "kld_99_9",
    "same_top_percent",
    "perplexity_ratio",
    "change_percent",
    "change_low",
    "change_high",
    "best_other",
    "best_other_percent",
    "best_other_low",
    "best_other_high",
    "statistics_seconds",
    "quantization_seconds",
    "peak_bytes",
)


def change_table(found: Iterable[TextResult], baseline: str) -> str:
    """Return a Markdown table with a line for each model, type and text, and a column for each
    method, the others before ours: the divergence of the baseline, and the changes against it in
    percent. The last two columns compare gptq, and the best of our methods, with the best of the
    others.
    """
    lines: dict[tuple[str, str, str], dict[str, TextResult]] = {}
    others, own = dict[str, None](), dict[str, None]()
    for result in found:
        line = lines.setdefault((result.key.teacher, result.key.type, result.text), {})
        line[result.key.method] = result
        if result.change:
            (own if result.rival else others)[result.key.method] = None
    methods = [*others, *own]
    head = (
        *("model", "type", "text", "baseline KLD", *methods),
        *("gptq against the best of the others", "best of ours against it"),
    )
    table = [
        "| " + " | ".join(head) + " |",
        "|---|---|---|" + "--:|" * (1 + len(methods)) + "---|---|",
    ]
    for names, line in lines.items():
        changes = [line[method].change if method in line else None for method in methods]
        compared = [result for result in line.values() if result.rival]
        best = min(compared, key=lambda result: _rival(result)[1].value, default=None)
        cells = (
            *names,
            f"{line[baseline].comparison.kld.value:.6f}" if baseline in line else "",
            *(_minus(_percent(change)[0]) if change else "–" for change in changes),
            "".join(
                f"{_rival_change(result)}, {_rival(result)[0]}"
                for result in compared
                if result.key.method == "gptq"
            ),
            f"{_rival_change(best)}, {best.key.method}" if best else "",
        )
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table)


def _rival(result: TextResult) -> tuple[str, Ratio]:
    """Return the rival of one of our methods and the comparison with it."""
    assert result.rival
    return result.rival


def _rival_change(result: TextResult) -> str:
    """Return the change of one of our methods against its rival, with its interval."""
    value, low, high = map(_minus, _percent(_rival(result)[1]))
    return f"{value} ({low} to {high})"


def _minus(number: str) -> str:
    """Return a number with the minus sign of printed text."""
    return number.replace("-", "−")


def csv_table(found: Iterable[TextResult]) -> str:
    """Return the text of a CSV file with a line for each result."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for result in found:
        first, comparison = result.rows[0], result.comparison
        name, rival_change = result.rival or ("", None)
        chunks = first.key.calibration.rpartition(" ")[2]
        writer.writerow(
            (
                *(first.key.teacher, chunks, len(result.rows) if chunks else 0),
                *(first.key.type, first.key.method, result.text, first.nbytes),
                *(f"{value:.6f}" for value in (comparison.kld.value, comparison.kld.error)),
                f"{comparison.klds.percentiles[99.9]:.4f}",
                f"{100 * comparison.same_top.value:.2f}",
                f"{comparison.ratio.value:.4f}",
                *_percent(result.change),
                *(name, *_percent(rival_change)),
                *(f"{first.statistics_seconds:.0f}", f"{first.seconds:.1f}"),
                max(first.rss, first.statistics_rss) or "",
            )
        )
    return file.getvalue()


def _percent(change: Ratio | None) -> Sequence[str]:
    """Return a change and the ends of its interval in percent; empty texts for None."""
    if change is None:
        return ("", "", "")
    return [f"{100 * (share - 1):+.1f}" for share in (change.value, change.low, change.high)]
