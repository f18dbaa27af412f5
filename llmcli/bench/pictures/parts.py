"""Where the time of an answer and of a token goes, as bars and marks."""

from collections.abc import Mapping

from llmcli.bench.charts.chart import Axis, Chart, Row, Rows, Value
from llmcli.bench.charts.scale import figure
from llmcli.bench.phases import PER_TOKEN, PHASES, Breakdown


def charts(found: Breakdown, names: Mapping[str, str]) -> list[Chart]:
    """An answer's milliseconds phase by phase, and a token's microseconds; `names` of phases that
    have longer ones.
    """
    each = {phase: found.answer(phase)[0] * 1e3 for phase in PHASES}
    largest = max(each, key=lambda phase: each[phase])
    share = each[largest] / found.seconds / 1e3
    says = f"{figure(found.seconds * 1e3)} ms, of which {names.get(largest, largest)} {share:.1%}."
    parts = tuple(Value(names.get(phase, phase), ms) for phase, ms in each.items())
    answer = Rows(
        "An answer", says, Axis("ms"), (Row("median", parts, f"{figure(found.seconds * 1e3)} ms"),)
    )
    rows = []
    for phase in PER_TOKEN:
        middle, low, high = (value * 1e6 for value in found.token(phase))
        if low > 0:  # there is no 0 on a logarithmic axis
            marks = (Value("p10", low), Value("p50", middle), Value("p90", high))
            rows.append(Row(names.get(phase, phase), marks))
    told = "The middle token of each phase, and the first and last tenth."
    token = (
        Rows("A token", told, Axis("µs a token", log=True), tuple(rows), dots=True)
        if rows
        else None
    )
    return [answer, *([token] if token else [])]
