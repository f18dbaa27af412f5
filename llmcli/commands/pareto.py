"""`llmcli pareto`: quantizes a model in several ways, measures each, prints the comparison."""

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
    """The settings to compare."""

    types: Annotated[
        str | None,
        typer.Option(metavar="TYPE,…", help=f"File types; default without sizes: {TYPES}."),
    ] = None
    target_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,…",
            help="Target sizes; types are chosen as by quantize --target-size.",
        ),
    ] = None
    methods: Annotated[
        str, typer.Option(metavar="NAME,…", help=f"How codes are chosen: {', '.join(METHODS)}.")
    ] = "ggml"
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Importance matrix for the rounding of every setting."),
    ] = None
    moments: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Second moments, for methods that need them; they include an imatrix. "
            "Missing statistics are collected from the built-in text, and kept.",
        ),
    ] = None
    fold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KINDS",
            help="Folds as in quantize, or none; repeatable: each is compared.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Measuring:
    """How the settings are evaluated and timed."""

    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            "-f",
            metavar="FILE",
            help="UTF-8 text to evaluate on; default: the built-in text.",
        ),
    ] = None
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=1, help="Chunk length in tokens.")] = 512
    chunks: Annotated[
        int, typer.Option("--chunks", min=1, help="Number of chunks to evaluate.")
    ] = 32
    threads: Annotated[
        int, typer.Option("-t", "--threads", min=0, help="Threads; 0 uses all cores.")
    ] = 0
    seconds: Annotated[
        float,
        typer.Option(
            min=0, max=3600, help="Measuring time of each of two speed tests; 0: no tests."
        ),
    ] = 4.0
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep the model files in this folder."),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Redo everything, even what an earlier run finished.")
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
        typer.Option("-o", "--output", help="Format of the table."),
    ] = "md",
    reading: Reading,
    workers: Workers,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, same as -o json.")
    ] = False,
) -> None:
    """Compare size, divergence and speed of several quantizations.

    Every setting is written to the cache, evaluated against the same logits of REF, and timed in
    turn with REF; the table names the settings that others dominate. An interrupted run keeps what
    is finished: the same command resumes it.
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
    source = weights.open_source(
        model.path if model else Path(ref),
        tokenizer=reading.tokenizer,
        pre=reading.pre,
        allow_pickle=reading.allow_pickle,
    )
    check_apart([report_file], [*source.files, settings.imatrix, settings.moments, measuring.text])
    plans = plans_of(source, settings, measuring.threads, config, ui)
    _print_notes(source, plans, ui)
    text_content, text_name = words_of(measuring.text)
    kept_folder = measuring.keep.expanduser() if measuring.keep else None
    request = frontier.Wish(
        source,
        plans,
        (text_content, text_name),
        measuring.ctx,
        measuring.chunks,
        measuring.threads,
        measuring.seconds,
        kept_folder,
        measuring.fresh,
    )
    points = frontier.run(request, config, ui)
    dominated = frontier.dominated(points)
    if ui.json:
        ui.result(pareto_table.document(request, points, dominated))
    else:
        ui.text(
            (pareto_table.text if output == "csv" else pareto_table.markdown)(points, dominated)
        )
    reporting.show(
        lambda: made(request, points, dominated),
        lambda: charts(points, dominated)[:1],
        (report_file, chart),
        ui,
    )


def _print_notes(source: "Source", plans: dict[str, "Plan"], ui: "UI") -> None:
    """Print notes about the source, and about tensors that another method quantizes."""
    for warning in source.warnings:
        ui.warn(warning)
    if kinds := next(iter(plans.values())).requantized:
        ui.warn(
            f"the source is already quantized ({', '.join(kinds)}): the results show what another "
            "quantization adds"
        )
    for name, plan in plans.items():
        for method_name, steps in plan.methods.items():
            if method_name != plan.method.name:
                ui.note(f"{name}: {len(steps)} tensors are quantized by {method_name}")
