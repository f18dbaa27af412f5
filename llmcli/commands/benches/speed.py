"""`llmcli bench REF`: parse llama-bench's words, measure, print."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands import completion
from llmcli.commands.grouped import grouped
from llmcli.commands.reporting import Charts, Report
from llmcli.commands.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from llmcli.bench.grid import Grid, Test
    from llmcli.bench.history import History
    from llmcli.bench.keep import Keeper
    from llmcli.bench.kernel import Result
    from llmcli.bench.run import How
    from llmcli.catalog.fetch import Model as Found
    from llmcli.config import Config
    from llmcli.ui import UI

Ref = Annotated[
    str | None,
    typer.Argument(
        metavar="REF",
        help="catalog name, org/repo[:QUANT], file",
        autocompletion=completion.benches,
    ),
]
Model = Annotated[
    str | None, typer.Option("-m", "--model", "-hf", help="The same, in llama-bench's words.")
]
Values = list[str] | None
Prompts = Annotated[Values, typer.Option("-p", "--n-prompt", help="Prompt lengths; default 512.")]
Gens = Annotated[Values, typer.Option("-n", "--n-gen", help="Generated lengths; default 128.")]
Pairs = Annotated[
    Values, typer.Option("-pg", metavar="PP,TG", help="Prompt and generation together.")
]
Depths = Annotated[Values, typer.Option("-d", "--n-depth", help="Tokens in the cache before.")]
Batches = Annotated[Values, typer.Option("-b", "--batch-size", help="Logical batch; default 2048.")]
Ubatches = Annotated[
    Values, typer.Option("-ub", "--ubatch-size", help="Physical batch; default 512.")
]
TypesK = Annotated[
    Values, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K; default f16.")
]
TypesV = Annotated[
    Values, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V; default f16.")
]
Threads = Annotated[Values, typer.Option("-t", "--threads", help="Threads; default: the cores.")]
Layers = Annotated[
    Values, typer.Option("-ngl", "--n-gpu-layers", "--gpu-layers", help="GPU layers; default all.")
]
Flash = Annotated[
    Values, typer.Option("-fa", "--flash-attn", help="on, off or auto (the default).")
]
Parallel = Annotated[
    Values,
    typer.Option(
        "-np", "--parallel", help="Sequences that are computed together, each with KV of its own."
    ),
]
Repetitions = Annotated[
    int | None,
    typer.Option(
        "-r", "--repetitions", min=1, help="How often each test runs; default 5, in a sweep 10."
    ),
]
Output = Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.")]
NoWarmup = Annotated[bool, typer.Option("--no-warmup", help="Skip the run that does not count.")]
Sampling = Annotated[
    bool,
    typer.Option(
        "--sampling", help="Also with the sampler chain and detokenizing, and what they add."
    ),
]
NoHistory = Annotated[
    bool, typer.Option("--no-history", help="Keep nothing of it for `bench history`.")
]
Remeasure = Annotated[
    bool, typer.Option("--remeasure", help="Read this machine's memory anew: bandwidth is kept.")
]
ThreadsSweep = Annotated[
    bool, typer.Option("--threads-sweep", help="Try 1 thread up to all CPUs; tell the fastest.")
]
UbatchSweep = Annotated[
    bool, typer.Option("--ubatch-sweep", help="Try physical batches of 64 to 2048.")
]
KvSweep = Annotated[
    bool, typer.Option("--kv-sweep", help="Try every KV cache type, K and V alike.")
]
FaSweep = Annotated[bool, typer.Option("--fa-sweep", help="Try flash attention on and off.")]
Quant = Annotated[
    str | None, typer.Option("--quant", help="Quantize the model to this type first.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Make no connection.")]


def speed(
    ctx: typer.Context,
    ref: Ref = None,
    model: Model = None,
    n_prompt: Prompts = None,
    n_gen: Gens = None,
    pg: Pairs = None,
    n_depth: Depths = None,
    batch: Batches = None,
    ubatch: Ubatches = None,
    type_k: TypesK = None,
    type_v: TypesV = None,
    threads: Threads = None,
    gpu_layers: Layers = None,
    flash: Flash = None,
    parallel: Parallel = None,
    repetitions: Repetitions = None,
    output: Output = "md",
    no_warmup: NoWarmup = False,
    sampling: Sampling = False,
    no_history: NoHistory = False,
    remeasure: Remeasure = False,
    threads_sweep: ThreadsSweep = False,
    ubatch_sweep: UbatchSweep = False,
    kv_sweep: KvSweep = False,
    fa_sweep: FaSweep = False,
    report_file: Report = None,
    chart: Charts = None,
    quant: Quant = None,
    offline: Offline = False,
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
    *,
    workers: Workers,
) -> None:
    """Measure prompt and generation speed, in llama-bench's words.

    Lists (-p 128,512), ranges (1-8*2) and repeated flags span a grid of tests. `llmcli bench
    roofline REF` measures what memory allows, and how far a model is from it. A sweep measures its
    values in turn and compares them.
    """
    from llmcli.bench import report, sweep
    from llmcli.bench.run import How
    from llmcli.commands import reporting
    from llmcli.commands.ready import ready
    from llmcli.errors import UsageError

    form = "json" if json else output
    if form not in report.FORMATS:
        raise UsageError(
            f"-o does not know {output!r}", hint=f"-o takes: {' '.join(report.FORMATS)}"
        )
    name = ref or model
    if name is None:
        raise UsageError("no model given", hint="llmcli bench smollm2:135m")
    swept = [name for name in sweep.SWEEPS if ctx.params[name]]
    tests = list(_grid(_swept(swept, ctx.params)).tests())
    how = How(repetitions or (sweep.ROUNDS if swept else 5), not no_warmup, bool(swept), sampling)
    reporting.check(report_file)
    config, ui = _start(offline, form, workers)
    found = ready(name, quant, config, ui)
    results = _measured(found, name, tests, how, ctx.params, config, ui)
    _tell(results, form, swept, ui)
    _draw(results, found, name, (bool(swept), report_file, chart), ui)


def _tell(results: "list[Result]", form: str, swept: "Sequence[str]", ui: "UI") -> None:
    """The results as text; a sweep's comparison below them."""
    from llmcli.bench import report, sweep
    from llmcli.ui import put, visible

    put(sys.stdout, visible(report.text(results, form)) + "\n")
    if swept and form == "md":
        ui.text()
        ui.table(*sweep.table(results, swept))
    if warning := report.noise(results):
        ui.warn(warning)


def _draw(
    results: "list[Result]",
    found: "Found",
    name: str,
    how: "tuple[bool, Path | None, bool | None]",
    ui: "UI",
) -> None:
    """The pictures of what was printed, in the terminal and on a page; `how`: a sweep, --report,
    --chart.
    """
    from llmcli.bench import page
    from llmcli.bench.pictures import sweeps
    from llmcli.commands import reporting
    from quant import container

    swept, path, chart = how
    header, bandwidth = container.read(found.path), results[0].bandwidth
    more = sweeps.charts(results) if swept else []
    reporting.show(
        lambda: page.of_tests(name, results, header, bandwidth, more),
        lambda: more or page.charts(results, header, bandwidth),
        (path, chart),
        ui,
    )


def _measured(
    found: "Found",
    name: str,
    tests: "list[Test]",
    how: "How",
    given: "Mapping[str, Any]",
    config: "Config",
    ui: "UI",
) -> "list[Result]":
    """The results, each kept in the history as soon as it is there."""
    from dataclasses import replace

    from llmcli.bench import history, reach
    from llmcli.bench.run import run
    from llmcli.units import several

    kept = history.History(history.path(config), ui)
    keeper = None if given["no_history"] else _keeper(kept, name, found, ui)
    how = replace(how, bandwidth=reach.known(kept, ui, again=given["remeasure"]))
    try:
        return run(found.path, tests, how, ui, keeper.keep if keeper else lambda result: result)
    except KeyboardInterrupt:
        if keeper and keeper.numbers:
            ui.note(f"{several(len(keeper.numbers), 'result')} kept: llmcli bench history")
        raise


def _keeper(kept: "History", name: str, found: "Found", ui: "UI") -> "Keeper":
    from llmcli.bench.keep import Keeper, Name
    from llmcli.runtime.identity import content
    from quant import container

    header = container.read(found.path)
    container.check(header)
    return Keeper(kept, Name(name, found.sha256 or None, content(header)), ui.warn)


def _swept(swept: "Sequence[str]", given: "Mapping[str, Any]") -> "dict[str, Any]":
    """What was typed, with the values of the sweeps; raises UsageError where both say something."""
    from llmcli.bench import grid, sweep
    from llmcli.errors import UsageError
    from llmcli.hardware import host

    if swept and given["sampling"]:
        raise UsageError("a sweep decodes alone", hint="leave out --sampling or the sweep")
    chosen = dict(given)
    # A micro-batch is no longer than what is computed at once: a short prompt would not tell them
    # apart.
    if "ubatch_sweep" in swept:
        chosen["n_prompt"] = given["n_prompt"] or [str(sweep.UBATCHES[-1])]
        chosen["n_gen"] = given["n_gen"] or (None if len(swept) > 1 else ["0"])
    lengths = [
        max(grid.numbers(flag, given[name] or ["2048"]))
        for flag, name in (("-b", "batch"), ("-p", "n_prompt"))
    ]
    for name in swept:
        found = sweep.values(name, host.cpus(), host.cores(), min(lengths))
        for option in sweep.SWEEPS[name]:
            if given[option]:
                flag, typed = "--" + name.replace("_", "-"), "--" + sweep.FLAGS[option]
                raise UsageError(
                    f"{flag} tries all values, {typed} names some",
                    hint=f"leave out {flag} or {typed}",
                )
            chosen[option] = found
    return chosen


def _grid(given: "Mapping[str, Any]") -> "Grid":
    """The values of every option; the defaults are llama-bench's."""
    from llmcli.bench import grid
    from llmcli.hardware import host
    from llmcli.runtime.binding.cache_types import FLASH, KV_TYPES
    from llmcli.runtime.binding.context import MAX_SEQUENCES

    return grid.Grid(
        prompts=grid.numbers("-p", given["n_prompt"] or ["512"]),
        gens=grid.numbers("-n", given["n_gen"] or ["128"]),
        pairs=grid.pairs(given["pg"] or []),
        depths=grid.numbers("-d", given["n_depth"] or ["0"]),
        batches=grid.numbers("-b", given["batch"] or ["2048"], 1),
        ubatches=grid.numbers("-ub", given["ubatch"] or ["512"], 1),
        types_k=grid.words("-ctk", given["type_k"] or ["f16"], list(KV_TYPES)),
        types_v=grid.words("-ctv", given["type_v"] or ["f16"], list(KV_TYPES)),
        threads=grid.numbers("-t", given["threads"] or [str(host.cores())], 1, host.MOST_THREADS),
        gpu_layers=_layers(given["gpu_layers"] or ["-1"]),
        flash=grid.words("-fa", given["flash"] or ["auto"], list(FLASH)),
        parallel=grid.numbers("-np", given["parallel"] or ["1"], 1, MAX_SEQUENCES),
    )


def _start(offline: bool, form: str, workers: Workers) -> "tuple[Config, UI]":
    from dataclasses import replace

    from llmcli import config
    from llmcli.ui import UI

    settings = config.load()
    settings = replace(settings, offline=settings.offline or offline)
    # Under -o json stdout carries the document alone: what a pull has to say goes to stderr.
    ui = UI(json=form != "md", color=settings.color)
    workers.join(ui)
    return settings, ui


def _layers(texts: list[str]) -> list[int]:
    from llmcli.bench import grid

    return [
        -1 if text.strip() in ("-1", "all", "auto") else grid.numbers("-ngl", [text])[0]
        for text in ",".join(texts).split(",")
    ]


BENCHES = (grouped(speed),)
