"""Charts of the phases of an answer and of a token."""

from collections.abc import Mapping

from llmcli.bench.phases import PER_TOKEN, PHASES, Breakdown
from llmcli.charts.chart import Axis, Chart, Row, Rows, Value
from llmcli.charts.scale import figure


def charts(found: Breakdown, names: Mapping[str, str]) -> list[Chart]:
    """Build the chart of an answer's milliseconds by phase and of a token's microseconds.

    `names`: longer labels of some phases.
    """
    phase_ms = {phase: found.answer(phase)[0] * 1e3 for phase in PHASES}
    largest = max(phase_ms, key=lambda phase: phase_ms[phase])
    share = phase_ms[largest] / found.seconds / 1e3
    says = f"{figure(found.seconds * 1e3)} ms, of which {names.get(largest, largest)} {share:.1%}."
    parts = tuple(Value(names.get(phase, phase), ms) for phase, ms in phase_ms.items())
    answer = Rows(
        "An answer", says, Axis("ms"), (Row("median", parts, f"{figure(found.seconds * 1e3)} ms"),)
    )
    rows = []
    for phase in PER_TOKEN:
        middle, low, high = (value * 1e6 for value in found.token(phase))
        if low > 0:  # a logarithmic axis has no 0
            marks = (Value("p10", low), Value("p50", middle), Value("p90", high))
            rows.append(Row(names.get(phase, phase), marks))
    says_token = "For each phase: the median token, and the first and the last tenth."
    token = (
        Rows("A token", says_token, Axis("µs a token", log=True), tuple(rows), dots=True)
        if rows
        else None
    )
    return [answer, *([token] if token else [])]
