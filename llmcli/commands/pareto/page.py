"""The charts and the HTML report of `llmcli pareto`: divergence over size, speed over size, and a
table of all results.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.bench import report_page
from llmcli.charts.chart import Axis, Chart, Plot, Point, Series, Table
from llmcli.charts.scale import format_number
from llmcli.commands.pareto.table import COLUMNS, table_rows
from llmcli.units import format_size
from llmcli.workflows.pareto.compare import ParetoPoint, ParetoRequest

if TYPE_CHECKING:
    from llmcli.charts.html_page import ReportPage

MIB = 2**20


def build_charts(points: Sequence[ParetoPoint], dominated: dict[str, str]) -> list[Chart]:
    """Return two charts: the mean KL divergence over size, and the speed over size. Each method has
    a line. `dominated`: for each dominated setting, the setting that dominates it.

    The speed is relative to the base, because the base was measured in alternation with each
    setting. Absolute speeds that are measured minutes apart would mostly show changes of the
    machine.
    """
    front = [point for point in points if point.name not in dominated]
    names = ", ".join(point.name for point in front)
    divergence_caption = f"Lower and further left is better; not dominated: {names}."
    charts: list[Chart] = []
    divergences = _build_series(
        [(point, point.answers.kld.value) for point in points if point.answers.kld.value > 0],
        dominated,
    )
    if divergences:
        axis = Axis("mean KL divergence", is_log=True)
        charts.append(
            Plot(
                "Divergence over size",
                divergence_caption,
                Axis("MiB of tensors", is_log=True),
                axis,
                divergences,
            )
        )
    speed_series = _build_series(
        [(point, speed.ratio) for point in points if (speed := point.generation)], dominated
    )
    if speed_series:
        speed_caption = (
            "Generation speed relative to the base, measured in turn with each setting: "
            "higher is better."
        )
        sizes, speeds = Axis("MiB of tensors", is_log=True), Axis("times the base's speed")
        charts.append(Plot("Speed over size", speed_caption, sizes, speeds, speed_series))
    return charts


def build_page(
    request: ParetoRequest, points: Sequence[ParetoPoint], dominated: dict[str, str]
) -> "ReportPage":
    """Return the HTML report."""
    first_answers = points[0].answers
    about = (
        f"{first_answers.chunks} chunks of {first_answers.n_ctx} tokens of {first_answers.text}; "
        f"the base ran in {first_answers.base}"
    )
    lead = [
        f"{point.name}: {format_size(point.nbytes)}, KL divergence {format_number(point.answers.kld.value)} ± "
        f"{format_number(point.answers.kld.error, 2)}"
        for point in sorted(points, key=lambda point: point.nbytes)
        if point.name not in dominated
    ]
    lead += [f"{name} is dominated by {dominating}." for name, dominating in dominated.items()]
    table = Table(
        COLUMNS, tuple(table_rows(points, dominated)), frozenset(range(1, len(COLUMNS) - 1))
    )
    return report_page.build_page(
        f"{request.source.name}: size, divergence, speed",
        about,
        lead,
        build_charts(points, dominated),
        [("All settings", table)],
    )


def _build_series(
    values: Sequence[tuple[ParetoPoint, float]], dominated: dict[str, str]
) -> tuple[Series, ...]:
    """Return one line for each combination of method and folds. Its points are ordered by file
    size. `values`: each setting with its value on the y axis.
    """
    methods: dict[str, list[Point]] = {}
    for setting, value in sorted(values, key=lambda value: value[0].nbytes):
        note = "dominated" if setting.name in dominated else ""
        label = f"{setting.method}, folds {setting.fold}" if setting.fold else setting.method
        methods.setdefault(label, []).append(
            Point(setting.nbytes / MIB, value, setting.name.split()[0], note)
        )
    return tuple(Series(name, tuple(points)) for name, points in methods.items())
