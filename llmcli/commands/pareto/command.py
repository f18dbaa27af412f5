"""`llmcli pareto`: quantizes a model in several ways, measures each file, and prints a
comparison.
"""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Ref, Trust
from llmcli.commands.options.files import SourceOptions
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.report import ReportOptions, show_report
from llmcli.commands.pareto.options import MeasurementOptions, ParetoOptions
from llmcli.model_loader.pickle_hint import pickle_hint
from llmcli.text_input import expand_path
from llmcli.units import format_count

if TYPE_CHECKING:
    from llmcli.ui import UI
    from quant.quantize.plan import Plan
    from quant.source.source import Source


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("pareto")(with_option_groups(pareto))


@pickle_hint()
def pareto(
    ref: Ref,
    *,
    settings: ParetoOptions,
    measuring: MeasurementOptions,
    reporting: ReportOptions,
    output: Annotated[
        Literal["md", "csv", "json"],
        typer.Option("-o", "--output", help="Format of the table."),
    ] = "md",
    reading: SourceOptions,
    placement_flags: PlacementGroup,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON document on stdout, same as -o json.")
    ] = False,
) -> None:
    """Compare size, divergence and speed of several quantizations.

    Every setting is written to the cache, evaluated against the logits of REF, and timed in
    alternation with REF. For each dominated setting, the table names one that is smaller or closer
    to REF and no worse otherwise. An interrupted run keeps its finished results: the same command
    resumes it.
    """
    from llmcli.atomic_files import require_distinct_paths
    from llmcli.commands.pareto import table
    from llmcli.commands.pareto.page import build_charts, build_page
    from llmcli.model_loader import quantize_file
    from llmcli.workflows.evaluation.text import read_evaluation_text
    from llmcli.workflows.pareto import compare
    from llmcli.workflows.pareto.plans import build_plans

    config, ui = start_command(json or output == "json", offline, reading.allow_pickle, trust)
    reporting.check_path()
    placement = placement_flags.join(ui)
    model = quantize_file.find_model(ref, config, ui, keep_source=True)
    path = model.path if model else expand_path(ref).absolute()
    with quantize_file.open_by_converter(
        path, reading, quantize_file.ConverterSettings(), config, ui
    ) as opened:
        source = opened.source
        require_distinct_paths(
            [reporting.report_file],
            [*source.files, settings.imatrix, settings.moments, measuring.text],
        )
        plans = build_plans(opened, settings, measuring.threads, placement, config, ui)
        _print_notes(source, plans, ui)
        request = compare.ParetoRequest(
            source,
            plans,
            read_evaluation_text(measuring.text),
            measuring.ctx,
            measuring.chunks,
            measuring.threads,
            measuring.seconds,
            measuring.keep,
            measuring.fresh,
            placement,
            opened.write_weights,
        )
        points = compare.compare(request, config, ui)
    dominated = compare.dominated_by(points)
    if ui.json:
        ui.result(table.build_document(request, points, dominated))
    else:
        ui.text((table.format_csv if output == "csv" else table.format_markdown)(points, dominated))
    show_report(
        lambda: build_page(request, points, dominated),
        lambda: build_charts(points, dominated)[:1],
        reporting,
        ui,
    )


def _print_notes(source: "Source", plans: dict[str, "Plan"], ui: "UI") -> None:
    """Print warnings about the source, and a note for each setting in which another method than the
    requested one quantizes some tensors.
    """
    for warning in source.warnings:
        ui.warn(warning)
    if kinds := next(iter(plans.values())).requantized_types:
        ui.warn(
            f"the source is already quantized ({', '.join(kinds)}): the results show what another "
            "quantization adds"
        )
    for name, plan in plans.items():
        for method_name, steps in plan.methods.items():
            if method_name != plan.method.name:
                ui.note(f"{name}: {format_count(len(steps), 'tensor')} quantized by {method_name}")
