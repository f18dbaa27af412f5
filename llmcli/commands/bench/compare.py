"""`llmcli bench compare`: measures which of two models, settings or saved runs is faster."""

from typing import Annotated

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.options.arguments import Json, Trust
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.report import ReportOptions
from llmcli.errors import UsageError

Values = list[str] | None
SideA = Annotated[
    str,
    typer.Argument(
        metavar="A", help="A model; or a saved run: its history number or its JSON file."
    ),
]
SideB = Annotated[
    str | None, typer.Argument(metavar="B", help="What A is compared with; default: A itself.")
]
SettingsA = Annotated[str, typer.Option("--a", metavar="'-t 1 ...'", help="Settings of A only.")]
SettingsB = Annotated[str, typer.Option("--b", metavar="'-t 2 ...'", help="Settings of B only.")]
Prompts = Annotated[Values, typer.Option("-p", "--n-prompt", help="Prompt lengths; default 512.")]
Gens = Annotated[Values, typer.Option("-n", "--n-gen", help="Generated lengths; default 128.")]
Depths = Annotated[
    Values, typer.Option("-d", "--n-depth", help="Tokens already in the cache; default 0.")
]
Threads = Annotated[
    str | None, typer.Option("-t", "--threads", help="Threads of both; default: the cores.")
]
Batch = Annotated[
    str | None, typer.Option("-b", "--batch-size", help="Logical batch of both; default 2048.")
]
Ubatch = Annotated[
    str | None, typer.Option("-ub", "--ubatch-size", help="Physical batch of both; default 512.")
]
TypeK = Annotated[
    str | None, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K; default f16.")
]
TypeV = Annotated[
    str | None, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V; default f16.")
]
Layers = Annotated[
    str | None,
    typer.Option("-ngl", "--n-gpu-layers", "--gpu-layers", help="GPU layers; default all."),
]
Flash = Annotated[
    str | None, typer.Option("-fa", "--flash-attn", help="on, off or auto (the default).")
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=0.1,
        max=86400,
        help="Longest time of a test; default 8; at least a dozen pairs are measured.",
    ),
]
Precision = Annotated[
    float | None,
    typer.Option(
        "--precision", min=0.01, max=100, help="Stop at this precision, in percent; default 1."
    ),
]
Confidence = Annotated[
    float, typer.Option("--confidence", min=50, max=99.99, help="Percent, for all tests jointly.")
]
Separately = Annotated[
    bool, typer.Option("--apart", help="Load A and B in turn, never both at once.")
]
Anyway = Annotated[
    bool,
    typer.Option("--anyway", help="Compare saved runs even of different machines or tests."),
]


def compare(
    a: SideA,
    b: SideB = None,
    settings_a: SettingsA = "",
    settings_b: SettingsB = "",
    n_prompt: Prompts = None,
    n_gen: Gens = None,
    n_depth: Depths = None,
    threads: Threads = None,
    batch: Batch = None,
    ubatch: Ubatch = None,
    type_k: TypeK = None,
    type_v: TypeV = None,
    gpu_layers: Layers = None,
    flash: Flash = None,
    seconds: Seconds = None,
    precision: Precision = None,
    confidence: Confidence = 99.0,
    in_turn: Separately = False,
    anyway: Anyway = False,
    *,
    reporting: ReportOptions,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    placement_flags: PlacementGroup,
) -> None:
    """Compare the speed of two models, two settings or two saved runs.

    Settings are given as --a '-t 1' --b '-t 2'. Models and settings are measured in pairs, a few
    tokens each in random order, so that changes of the machine affect both sides. A difference is
    reported only if it is larger than the noise.
    """
    from llmcli.bench.compare import run
    from llmcli.commands.bench.reports.compare import print_result

    config, ui = start_command(json, offline, trust=trust)
    reporting.check_path()
    shared_settings = {
        "threads": threads,
        "batch": batch,
        "ubatch": ubatch,
        "type_k": type_k,
        "type_v": type_v,
        "gpu_layers": gpu_layers,
        "flash": flash,
    }
    saved_runs = run.load_saved_runs(a, b, config, ui)
    if saved_runs:
        measuring_options = [
            settings_a,
            settings_b,
            n_prompt,
            n_gen,
            n_depth,
            *placement_flags.typed,
            seconds,
            precision,
            in_turn,
        ]
        run.refuse_measuring_options([*measuring_options, *shared_settings.values()])
        result = run.compare_saved_runs(*saved_runs, confidence / 100, anyway, ui)
    else:
        if anyway:
            raise UsageError(
                "--anyway applies to saved runs, not to models", hint="leave out --anyway"
            )
        design = run.build_design(seconds, precision, confidence)
        tests = run.build_tests(n_prompt, n_gen, n_depth, placement_flags.join(ui))
        tests_by_side = [
            run.with_side_settings(tests, shared_settings, flag, side_settings)
            for flag, side_settings in (("--a", settings_a), ("--b", settings_b))
        ]
        if b is None and tests_by_side[0] == tests_by_side[1]:
            ui.note(
                "both sides are the same (A/A): the result is this machine's noise; "
                "name another model, or add --b"
            )
        side_a = run.build_side(a, settings_a, tests_by_side[0], config, ui)
        side_b = run.build_side(b or a, settings_b, tests_by_side[1], config, ui)
        result = run.measure(side_a, side_b, design, in_turn, ui)
    print_result(result, reporting, ui)


BENCHES = (with_option_groups(compare),)
