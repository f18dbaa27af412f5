"""`llmcli bench spec`: measures what each way of drafting tokens brings."""

from typing import Annotated

import typer

from llmcli.commands.command_line import panels
from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import Json, Trust
from llmcli.commands.options.groups import option_group, with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.report import ReportSettings

Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="NAME,...",
        help="The methods of --draft to measure; default: all that the model offers.",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="KIND,...",
        help="Kinds of prompts: summary, edit, extraction, code, free; default: all.",
    ),
]
Gen = Annotated[int, typer.Option("-n", "--n-gen", min=8, help="Tokens of the longest answers.")]
Pairs = Annotated[
    int,
    typer.Option(
        "--pairs", min=1, help="Pairs of answers for each kind; an interval needs at least 6."
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--model-draft",
        metavar="REF",
        autocompletion=complete_models,
        help="The draft model, EAGLE-3 draft or draft heads to measure.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        min=1,
        help="Context size in tokens; default 2048, or more for long answers.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", help="Threads; default: as many cores as suit the model."),
]
ThreadsBatch = Annotated[
    int | None, typer.Option("-tb", "--threads-batch", help="Threads for prompts.")
]
Batch = Annotated[int, typer.Option("-b", "--batch-size", help="Logical batch size in tokens.")]
Ubatch = Annotated[int, typer.Option("-ub", "--ubatch-size", help="Physical batch size in tokens.")]
Layers = Annotated[
    str,
    typer.Option(
        "-ngl", "--gpu-layers", "--n-gpu-layers", help="Layers on the GPU: a number, all, auto."
    ),
]
Flash = Annotated[str, typer.Option("-fa", "--flash-attn", help="on, off or auto.")]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]
PageOptions = Annotated[
    ReportSettings,
    option_group(
        panels.OUTPUT,
        report_file=typer.Option(
            "-o", "--report", metavar="FILE", help="Write a page of charts and tables."
        ),
        chart=typer.Option(
            "--chart/--no-chart",
            help="Draw charts in the terminal; default: only if stdout is a terminal.",
        ),
    ),
]


def spec(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            autocompletion=complete_models,
            help="catalog name, org/repo[:QUANT], file",
        ),
    ],
    methods: Methods = None,
    tasks: Tasks = None,
    n_gen: Gen = 96,
    pairs: Pairs = 6,
    draft_ref: DraftModel = None,
    ctx_size: Context = None,
    threads: Threads = None,
    threads_batch: ThreadsBatch = None,
    batch: Batch = 2048,
    ubatch: Ubatch = 512,
    gpu_layers: Layers = "auto",
    flash: Flash = "auto",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    *,
    reporting: PageOptions,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    placement_flags: PlacementGroup,
) -> None:
    """Measure what each way of drafting tokens brings, on several kinds of tasks.

    For each method: how many guesses are right by their depth in a draft, tokens a pass, the speed
    against plain decoding in interleaved pairs, and the speed that acceptance and the measured cost
    of passes allow.
    """
    from llmcli.bench.spec import run
    from llmcli.commands.bench.reports.spec import print_result
    from llmcli.planning import resolve_options
    from llmcli.runtime.requests.request import RunOptions

    config, ui = start_command(json, offline, trust=trust)
    reporting.check_path()
    options = RunOptions(
        ctx_size,
        threads,
        threads_batch,
        batch_size=batch,
        ubatch_size=ubatch,
        gpu_layers=gpu_layers,
        flash_attn=flash,
        cache_type_k=type_k,
        cache_type_v=type_v,
    )
    resolve_options.validate_options(options)
    request = run.SpecRequest(
        ref,
        run.parse_methods(methods, draft_ref),
        run.parse_tasks(tasks),
        n_gen,
        pairs,
        draft_ref,
        options.with_placement(placement_flags.join(ui)),
    )
    print_result(run.run_benchmark(request, config, ui), reporting, ui)


BENCHES = (with_option_groups(spec),)
