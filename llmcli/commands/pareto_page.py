"""The pictures of `llmcli pareto`: divergence over size, speed over size, and the page with all
figures.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmcli.bench import page
from llmcli.bench.charts.chart import Axis, Chart, Plot, Series, Table
from llmcli.bench.charts.chart import Point as Place
from llmcli.bench.charts.scale import figure
from llmcli.commands.frontier import Point, Wish
from llmcli.commands.pareto_table import COLUMNS, rows
from llmcli.units import size

if TYPE_CHECKING:
    from llmcli.bench.charts.page import Page

MIB = 2**20


def charts(points: Sequence[Point], beaten: dict[str, str]) -> list[Chart]:
    """Mean divergence over size, and speed over size, a line for each method.

    Speed is in units of the base's, which was measured in turn with each: tokens a second of
    minutes that are apart would tell the machine's moods.
    """
    best = [one for one in points if one.name not in beaten]
    says = f"Lower and further left is better; nothing beats {', '.join(one.name for one in best)}."
    drawn: list[Chart] = []
    apart = _series(
        [(one, one.answers.kld.value) for one in points if one.answers.kld.value > 0], beaten
    )
    if apart:
        axis = Axis("mean KL divergence", log=True)
        drawn.append(
            Plot("Divergence over size", says, Axis("MiB of tensors", log=True), axis, apart)
        )
    timed = _series([(one, speed.ratio) for one in points if (speed := one.generation)], beaten)
    if timed:
        told = "Generation, in units of the base's speed, which was measured in turn with each: higher is better."
        sizes, speeds = Axis("MiB of tensors", log=True), Axis("times the base's speed")
        drawn.append(Plot("Speed over size", told, sizes, speeds, timed))
    return drawn


def made(wish: Wish, points: Sequence[Point], beaten: dict[str, str]) -> "Page":
    """The whole page."""
    first = points[0].answers
    about = f"{first.chunks} chunks of {first.n_ctx} tokens of {first.text}; the base ran in {first.base}"
    lead = [
        f"{one.name}: {size(one.nbytes)}, KL divergence {figure(one.answers.kld.value)} ± "
        f"{figure(one.answers.kld.error, 2)}"
        for one in sorted(points, key=lambda one: one.nbytes)
        if one.name not in beaten
    ]
    lead += [f"{name} is beaten by {other}." for name, other in beaten.items()]
    table = Table(COLUMNS, tuple(rows(points, beaten)), frozenset(range(1, len(COLUMNS) - 1)))
    return page.of_others(
        f"{wish.source.name}: size, divergence, speed",
        about,
        lead,
        charts(points, beaten),
        [("All settings", table)],
    )


def _series(values: Sequence[tuple[Point, float]], beaten: dict[str, str]) -> tuple[Series, ...]:
    """The settings by method and folds, the smallest first."""
    methods: dict[str, list[Place]] = {}
    for one, value in sorted(values, key=lambda each: each[0].nbytes):
        note = "beaten" if one.name in beaten else ""
        label = f"{one.method}, folds {one.fold}" if one.fold else one.method
        methods.setdefault(label, []).append(
            Place(one.nbytes / MIB, value, one.name.split()[0], note)
        )
    return tuple(Series(name, tuple(places)) for name, places in methods.items())
