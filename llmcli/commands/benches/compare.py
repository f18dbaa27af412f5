"""`llmcli bench compare`: which of two models, settings or saved runs is faster, and by how much at
least.
"""

from typing import Annotated

import typer

from llmcli.commands.grouped import grouped
from llmcli.commands.reporting import Charts, Report
from llmcli.commands.show import Json, start
from llmcli.commands.workers import Workers
from llmcli.errors import UsageError

Values = list[str] | None
A = Annotated[
    str,
    typer.Argument(
        metavar="A", help="A model; or a run: its number in the history, or its JSON file."
    ),
]
B = Annotated[
    str | None, typer.Argument(metavar="B", help="What it is compared with; default: A itself.")
]
SettingsA = Annotated[str, typer.Option("--a", metavar="'-t 1 …'", help="Settings of A alone.")]
SettingsB = Annotated[str, typer.Option("--b", metavar="'-t 2 …'", help="Settings of B alone.")]
Prompts = Annotated[Values, typer.Option("-p", "--n-prompt", help="Prompt lengths; default 512.")]
Gens = Annotated[Values, typer.Option("-n", "--n-gen", help="Generated lengths; default 128.")]
Depths = Annotated[Values, typer.Option("-d", "--n-depth", help="Tokens in the cache before.")]
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
        help="How long each test may take; default 8; a dozen pairs anyway.",
    ),
]
Precision = Annotated[
    float | None,
    typer.Option(
        "--precision", min=0.01, max=100, help="Percent that are precise enough; default 1."
    ),
]
Confidence = Annotated[
    float, typer.Option("--confidence", min=50, max=99.99, help="Percent, of all tests together.")
]
Apart = Annotated[bool, typer.Option("--apart", help="Load both in turn, never both at once.")]
Anyway = Annotated[
    bool, typer.Option("--anyway", help="Compare saved runs of other machines, or of other tests.")
]


def compare(
    a: A,
    b: B = None,
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
    apart: Apart = False,
    anyway: Anyway = False,
    report_file: Report = None,
    chart: Charts = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
    *,
    workers: Workers,
) -> None:
    """Compare the speed of two models, of two settings (--a '-t 1' --b '-t 2'), or of two saved
    runs.

    Models and settings are measured in pairs, some tokens of the one against as many of the other
    in random order, so that both meet the same moods of the machine. A difference is only called
    where the noise supports it.
    """
    from llmcli.commands import compare_page, comparing, reporting

    config, ui = start(json, offline)
    reporting.check(report_file)
    both = {
        "threads": threads,
        "batch": batch,
        "ubatch": ubatch,
        "type_k": type_k,
        "type_v": type_v,
        "gpu_layers": gpu_layers,
        "flash": flash,
    }
    before = comparing.saved(a, b, config, ui)
    if before:
        chosen = [
            settings_a,
            settings_b,
            n_prompt,
            n_gen,
            n_depth,
            workers.rpc,
            seconds,
            precision,
            apart,
        ]
        comparing.nothing_measured([*chosen, *both.values()])
        told = comparing.runs(*before, confidence / 100, anyway, ui)
    else:
        if anyway:
            raise UsageError(
                "--anyway is for saved runs, and these are models", hint="leave it out"
            )
        design = comparing.design(seconds, precision, confidence)
        workers.join(ui)
        tests = comparing.tests(n_prompt, n_gen, n_depth)
        wanted = [
            comparing.settled(tests, both, flag, own)
            for flag, own in (("--a", settings_a), ("--b", settings_b))
        ]
        if b is None and wanted[0] == wanted[1]:
            ui.note(
                "both sides are the same (A/A): what is told is this machine's noise; name another model, or --b"
            )
        one = comparing.named(a, settings_a, wanted[0], config, ui)
        other = comparing.named(b or a, settings_b, wanted[1], config, ui)
        told = comparing.measured(one, other, design, apart, ui)
    compare_page.tell(told, (report_file, chart), ui)


BENCHES = (grouped(compare),)
