"""`llmcli pareto`: parse, plan every setting, make and measure them, print the picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.commands.grouped import grouped
from llmcli.commands.pickles import offered
from llmcli.commands.reporting import Charts, Report
from llmcli.commands.show import Ref, start
from llmcli.commands.workers import Workers
from llmcli.commands.writing import Reading
from quant.methods import METHODS

if TYPE_CHECKING:
    from llmcli.ui import UI
    from quant.planning import Plan
    from quant.source import Source


TYPES = "Q2_K,Q3_K_M,Q4_K_M,Q5_K_M,Q6_K"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is set beside one another."""

    types: Annotated[
        str | None,
        typer.Option(metavar="TYPE,…", help=f"File types; {TYPES} where no sizes are given."),
    ] = None
    target_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,…", help="Sizes, each with types chosen as quantize --target-size does."
        ),
    ] = None
    methods: Annotated[
        str, typer.Option(metavar="NAME,…", help=f"How codes are chosen: {', '.join(METHODS)}.")
    ] = "ggml"
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="An importance matrix that steers the rounding of all."),
    ] = None
    moments: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Second moments, for methods that need them; an imatrix as well. What is needed and not given is "
            "gathered with the text that ships, and kept.",
        ),
    ] = None
    fold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KINDS",
            help="Folds as quantize has them, or none; repeatable: each is set beside.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Measuring:
    """How they are read and timed."""

    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            "-f",
            metavar="FILE",
            help="UTF-8 text to be read; default: the plays that ship.",
        ),
    ] = None
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=1, help="Tokens of a chunk.")] = 512
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Read so many chunks.")] = 32
    threads: Annotated[
        int, typer.Option("-t", "--threads", min=0, help="Threads; 0 takes all cores.")
    ] = 0
    seconds: Annotated[
        float,
        typer.Option(
            min=0, max=3600, help="Seconds of measuring speed for each of two tests; 0: none."
        ),
    ] = 4.0
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep the files that are made, in this folder."),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Make all anew, also what an earlier run has finished.")
    ] = False


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("pareto")(grouped(pareto))


@offered()
def pareto(
    ref: Ref,
    *,
    settings: Settings,
    measuring: Measuring,
    report_file: Report = None,
    chart: Charts = None,
    output: Annotated[
        Literal["md", "csv", "json"],
        typer.Option("-o", "--output", help="How the table is printed."),
    ] = "md",
    reading: Reading,
    workers: Workers,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, as -o json.")
    ] = False,
) -> None:
    """Quantize a model in several ways; tell size, divergence and speed of each, and which others
    beat.

    Every setting is made in the cache, read against the same logits of REF, and timed in turn with
    it. Ctrl-C and kills lose nothing that is finished: the same command goes on.
    """
    from llmcli.catalog.partial import check_apart
    from llmcli.commands import frontier, pareto_table, reporting, weights
    from llmcli.commands.eval import words_of
    from llmcli.commands.pareto_page import charts, made
    from llmcli.commands.settings import plans_of

    config, ui = start(json or output == "json", offline, reading.allow_pickle)
    reporting.check(report_file)
    workers.join(ui)
    model = weights.find_model(ref, config, ui, keep_source=True)
    opened = weights.open_source(
        model.path if model else Path(ref),
        tokenizer=reading.tokenizer,
        pre=reading.pre,
        allow_pickle=reading.allow_pickle,
    )
    check_apart([report_file], [*opened.files, settings.imatrix, settings.moments, measuring.text])
    plans = plans_of(opened, settings, measuring.threads, config, ui)
    _tell(opened, plans, ui)
    words, name = words_of(measuring.text)
    keep = measuring.keep.expanduser() if measuring.keep else None
    wish = frontier.Wish(
        opened,
        plans,
        (words, name),
        measuring.ctx,
        measuring.chunks,
        measuring.threads,
        measuring.seconds,
        keep,
        measuring.fresh,
    )
    points = frontier.run(wish, config, ui)
    beaten = frontier.dominated(points)
    if ui.json:
        ui.result(pareto_table.document(wish, points, beaten))
    else:
        ui.text((pareto_table.text if output == "csv" else pareto_table.markdown)(points, beaten))
    reporting.show(
        lambda: made(wish, points, beaten),
        lambda: charts(points, beaten)[:1],
        (report_file, chart),
        ui,
    )


def _tell(source: "Source", plans: dict[str, "Plan"], ui: "UI") -> None:
    """What is to be known before: of the source, and of tensors that another method does."""
    for warning in source.warnings:
        ui.warn(warning)
    if kinds := next(iter(plans.values())).requantized:
        ui.warn(
            f"the source is quantized already ({', '.join(kinds)}): what is told is what another rounding adds"
        )
    for name, plan in plans.items():
        for other, steps in plan.methods.items():
            if other != plan.method.name:
                ui.note(f"{name}: {len(steps)} tensors go through {other}'s search")
