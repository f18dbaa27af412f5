"""Charts of the phases of an answer and of a token."""

from collections.abc import Mapping

from llmcli.bench.phases import PHASES, TOKEN_PHASES, PhaseBreakdown
from llmcli.charts.chart import Axis, Chart, ChartRow, NamedValue, RowChart
from llmcli.charts.scale import format_number


def build_charts(breakdown: PhaseBreakdown, names: Mapping[str, str]) -> list[Chart]:
    """Build two charts: the milliseconds of each phase in an answer, and the microseconds of each
    phase for one token.

    `names`: the labels of some phases; all other phases are labeled with their own names.
    """
    phase_ms = {phase: breakdown.answer_seconds(phase)[0] * 1e3 for phase in PHASES}
    largest = max(phase_ms, key=lambda phase: phase_ms[phase])
    share = phase_ms[largest] / breakdown.total_seconds / 1e3
    answer_description = f"{format_number(breakdown.total_seconds * 1e3)} ms, of which {names.get(largest, largest)} {share:.1%}."
    parts = tuple(NamedValue(names.get(phase, phase), ms) for phase, ms in phase_ms.items())
    answer = RowChart(
        "An answer",
        answer_description,
        Axis("ms"),
        (ChartRow("median", parts, f"{format_number(breakdown.total_seconds * 1e3)} ms"),),
    )
    rows = []
    for phase in TOKEN_PHASES:
        middle, low, high = (value * 1e6 for value in breakdown.token_seconds(phase))
        if low > 0:  # a logarithmic axis cannot show 0
            marks = (NamedValue("p10", low), NamedValue("p50", middle), NamedValue("p90", high))
            rows.append(ChartRow(names.get(phase, phase), marks))
    token_description = "For each phase: the median token, and the first and the last tenth."
    token = (
        RowChart(
            "A token",
            token_description,
            Axis("µs a token", is_log=True),
            tuple(rows),
            draws_marks=True,
        )
        if rows
        else None
    )
    return [answer, *([token] if token else [])]
