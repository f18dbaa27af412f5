"""`llmcli bench REF`: measures prompt and generation speed with llama-bench's options."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line import completion, panels
from llmcli.commands.options.arguments import Trust
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.report import ReportOptions, ReportSettings, show_report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmcli.bench.history.history import History
    from llmcli.bench.speed.measure import SpeedResult
    from llmcli.bench.speed.parameter_grid import ParameterGrid, SpeedTest
    from llmcli.bench.speed.record import HistoryRecorder
    from llmcli.bench.speed.run import SpeedSettings
    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.ui import UI

Ref = Annotated[
    str | None,
    typer.Argument(
        metavar="REF",
        help="catalog name, org/repo[:QUANT], file",
        autocompletion=completion.complete_benches,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        "-hf",
        help="Same as REF, in llama-bench's form.",
        rich_help_panel=panels.MODEL,
    ),
]
Values = list[str] | None
Prompts = Annotated[
    Values,
    typer.Option(
        "-p", "--n-prompt", help="Prompt lengths; default 512.", rich_help_panel=panels.TESTS
    ),
]
Gens = Annotated[
    Values,
    typer.Option(
        "-n", "--n-gen", help="Generated lengths; default 128.", rich_help_panel=panels.TESTS
    ),
]
Pairs = Annotated[
    Values,
    typer.Option(
        "-pg",
        metavar="PP,TG",
        help="Prompt and generation in one test.",
        rich_help_panel=panels.TESTS,
    ),
]
Depths = Annotated[
    Values,
    typer.Option(
        "-d",
        "--n-depth",
        help="Tokens already in the cache; default 0.",
        rich_help_panel=panels.TESTS,
    ),
]
Batches = Annotated[
    Values,
    typer.Option(
        "-b", "--batch-size", help="Logical batch; default 2048.", rich_help_panel=panels.SPEED
    ),
]
Ubatches = Annotated[
    Values,
    typer.Option(
        "-ub", "--ubatch-size", help="Physical batch; default 512.", rich_help_panel=panels.SPEED
    ),
]
TypesK = Annotated[
    Values,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        help="KV cache type of K; default f16.",
        rich_help_panel=panels.CONTEXT,
    ),
]
TypesV = Annotated[
    Values,
    typer.Option(
        "-ctv",
        "--cache-type-v",
        help="KV cache type of V; default f16.",
        rich_help_panel=panels.CONTEXT,
    ),
]
Threads = Annotated[
    Values,
    typer.Option(
        "-t", "--threads", help="Threads; default: the cores.", rich_help_panel=panels.SPEED
    ),
]
Layers = Annotated[
    Values,
    typer.Option(
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
        help="GPU layers; default all.",
        rich_help_panel=panels.SPEED,
    ),
]
Flash = Annotated[
    Values,
    typer.Option(
        "-fa", "--flash-attn", help="on, off or auto (the default).", rich_help_panel=panels.SPEED
    ),
]
Parallel = Annotated[
    Values,
    typer.Option(
        "-np",
        "--parallel",
        help="Sequences computed together, each with its own KV cache.",
        rich_help_panel=panels.TESTS,
    ),
]
Repetitions = Annotated[
    int | None,
    typer.Option(
        "-r",
        "--repetitions",
        min=1,
        help="Runs of each test; default 5, in a sweep 10.",
        rich_help_panel=panels.TESTS,
    ),
]
Output = Annotated[
    str,
    typer.Option("-o", "--output", help="md, csv, json or jsonl.", rich_help_panel=panels.OUTPUT),
]
NoWarmup = Annotated[
    bool, typer.Option("--no-warmup", help="Skip the warm-up run.", rich_help_panel=panels.TESTS)
]
Sampling = Annotated[
    bool,
    typer.Option(
        "--sampling",
        help="Also measure with sampler chain and detokenizing, and their cost.",
        rich_help_panel=panels.TESTS,
    ),
]
NoHistory = Annotated[
    bool,
    typer.Option(
        "--no-history",
        help="Do not save the results for `bench history`.",
        rich_help_panel=panels.OUTPUT,
    ),
]
Remeasure = Annotated[
    bool,
    typer.Option(
        "--remeasure", help="Measure the memory bandwidth again.", rich_help_panel=panels.OUTPUT
    ),
]
ThreadsSweep = Annotated[
    bool,
    typer.Option(
        "--threads-sweep",
        help="Try 1 thread up to all CPUs, and compare.",
        rich_help_panel=panels.SWEEPS,
    ),
]
UbatchSweep = Annotated[
    bool,
    typer.Option(
        "--ubatch-sweep", help="Try physical batches of 64 to 2048.", rich_help_panel=panels.SWEEPS
    ),
]
KvSweep = Annotated[
    bool,
    typer.Option(
        "--kv-sweep",
        help="Try every KV cache type, the same for K and V.",
        rich_help_panel=panels.SWEEPS,
    ),
]
FaSweep = Annotated[
    bool,
    typer.Option(
        "--fa-sweep", help="Try flash attention on and off.", rich_help_panel=panels.SWEEPS
    ),
]
Quant = Annotated[
    str | None,
    typer.Option(
        "--quant", help="Quantize the model to this type first.", rich_help_panel=panels.MODEL
    ),
]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Make no network connection.", rich_help_panel=panels.MODEL),
]


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
    *,
    reporting: ReportOptions,
    quant: Quant = None,
    offline: Offline = False,
    trust: Trust = False,
    json: Annotated[bool, typer.Option("--json", help="Same as -o json.")] = False,
    placement_flags: PlacementGroup,
) -> None:
    """Measure prompt and generation speed, with llama-bench's options.

    Lists (-p 128,512), ranges (1-8*2) and repeated options span a grid of tests. `llmcli bench
    roofline REF` measures the limit set by memory, and how close a model comes to it. A sweep
    measures its values in turn and compares them.
    """
    from llmcli.bench.result_rows import OUTPUT_FORMATS
    from llmcli.bench.speed import sweep
    from llmcli.bench.speed.run import SpeedSettings
    from llmcli.errors import UsageError
    from llmcli.model_loader.prepare import prepare_model
    from llmcli.model_loader.rehearsal.rehearse import rehearse_file

    output_format = "json" if json else output
    if output_format not in OUTPUT_FORMATS:
        raise UsageError(
            f"-o {output!r} is unknown",
            hint=f"-o takes: {' '.join(OUTPUT_FORMATS)}",
        )
    name = ref or model
    if name is None:
        raise UsageError("no model given", hint="llmcli bench smollm2:135m")
    sweep_names = [name for name in sweep.SWEEPS if ctx.params[name]]
    tests = list(_build_grid(_apply_sweeps(sweep_names, ctx.params)).tests())
    run_settings = SpeedSettings(
        repetitions or (sweep.DEFAULT_ROUNDS if sweep_names else 5),
        not no_warmup,
        bool(sweep_names),
        sampling,
    )
    reporting.check_path()
    config, ui = _start(offline, trust, output_format)
    placement_options = placement_flags.join(ui)
    tests = [replace(test, placement_options=placement_options) for test in tests]
    prepared = prepare_model(name, quant, config, ui)
    rehearse_file(prepared.path, config, ui)
    results = _run_tests(prepared, name, tests, run_settings, ctx.params, config, ui)
    _print_results(results, output_format, sweep_names, ui)
    _show_charts(results, prepared, name, bool(sweep_names), reporting, ui)


def _print_results(
    results: "list[SpeedResult]", output_format: str, sweep_names: "Sequence[str]", ui: "UI"
) -> None:
    """Print the results in one of llama-bench's formats. Below a Markdown table, also print the
    comparison of a sweep and a warning about noise.
    """
    from llmcli.bench.speed import llama_bench_output, sweep
    from llmcli.ui import escape_controls, escape_json_controls, write_now

    escape = escape_json_controls if output_format.startswith("json") else escape_controls
    write_now(sys.stdout, escape(llama_bench_output.format_results(results, output_format)) + "\n")
    if sweep_names and output_format == "md":
        ui.text()
        table = sweep.build_table(results, sweep_names)
        ui.table(table.columns, table.rows, right=table.right_columns)
    if output_format == "md":
        for line in llama_bench_output.usage_lines(results):
            ui.text(line)
    if warning := llama_bench_output.noise_warning(results):
        ui.warn(warning)


def _show_charts(
    results: "list[SpeedResult]",
    prepared: "FetchedModel",
    name: str,
    is_sweep: bool,
    reporting: ReportSettings,
    ui: "UI",
) -> None:
    """Draw the charts in the terminal, and write the HTML report."""
    from llmcli.bench import report_page
    from llmcli.bench.plots import sweeps
    from quant.model_file import read_header

    header, bandwidth = read_header.read_header(prepared.path), results[0].bandwidth
    sweep_charts = sweeps.build_charts(results) if is_sweep else []
    show_report(
        lambda: report_page.build_test_page(name, results, header, bandwidth, sweep_charts),
        lambda: sweep_charts or report_page.build_charts(results, header, bandwidth),
        reporting,
        ui,
    )


def _run_tests(
    prepared: "FetchedModel",
    name: str,
    tests: "list[SpeedTest]",
    run_settings: "SpeedSettings",
    options: "Mapping[str, Any]",
    config: "Config",
    ui: "UI",
) -> "list[SpeedResult]":
    """Run the tests and return their results. Each result is saved to the history as soon as it is
    complete.
    """
    from llmcli.bench.history import history
    from llmcli.bench.speed import bandwidth_share
    from llmcli.bench.speed.run import run_tests
    from llmcli.units import format_count

    run_history = history.History(history.history_path(config), ui)
    recorder = None if options["no_history"] else _open_recorder(run_history, name, prepared, ui)
    run_settings = replace(
        run_settings,
        bandwidth=bandwidth_share.machine_bandwidth(
            run_history, ui, remeasure=options["remeasure"]
        ),
        config=config,
    )
    try:
        return run_tests(
            prepared.path,
            tests,
            run_settings,
            ui,
            recorder.save if recorder else lambda result: result,
        )
    except KeyboardInterrupt:
        if recorder and recorder.run_numbers:
            ui.note(
                f"saved {format_count(len(recorder.run_numbers), 'result')}: llmcli bench history"
            )
        raise


def _open_recorder(
    run_history: "History", name: str, prepared: "FetchedModel", ui: "UI"
) -> "HistoryRecorder":
    from llmcli.bench.speed.record import HistoryRecorder, ModelName
    from llmcli.runtime.model_identity import content_hash
    from quant.model_file import load_checks, read_header

    header = read_header.read_header(prepared.path)
    load_checks.check_loadable(header)
    return HistoryRecorder(
        run_history, ModelName(name, prepared.sha256 or None, content_hash(header)), ui.warn
    )


def _apply_sweeps(sweep_names: "Sequence[str]", typed: "Mapping[str, Any]") -> "dict[str, Any]":
    """Return the options, where each sweep sets the values of its options. Raises UsageError if the
    user also typed a value for such an option.
    """
    from llmcli.bench.speed import parameter_grid, sweep
    from llmcli.errors import UsageError
    from llmcli.hardware import host

    if sweep_names and typed["sampling"]:
        raise UsageError(
            "a sweep measures decoding alone", hint="leave out --sampling or the sweep"
        )
    options = dict(typed)
    # A micro-batch cannot be longer than the prompt: a short prompt would make all values equal.
    if "ubatch_sweep" in sweep_names:
        options["n_prompt"] = typed["n_prompt"] or [str(sweep.UBATCH_SIZES[-1])]
        options["n_gen"] = typed["n_gen"] or (None if len(sweep_names) > 1 else ["0"])
    lengths = [
        max(parameter_grid.parse_numbers(flag, typed[name] or ["2048"]))
        for flag, name in (("-b", "batch"), ("-p", "n_prompt"))
    ]
    for name in sweep_names:
        values = sweep.sweep_values(name, host.cpu_count(), host.core_count(), min(lengths))
        for option in sweep.SWEEPS[name]:
            if typed[option]:
                flag, option_flag = "--" + name.replace("_", "-"), "--" + sweep.OPTION_FLAGS[option]
                raise UsageError(
                    f"{flag} tries all values, but {option_flag} sets some",
                    hint=f"leave out {flag} or {option_flag}",
                )
            options[option] = values
    return options


def _build_grid(options: "Mapping[str, Any]") -> "ParameterGrid":
    """Return the values of all parameters. Options that were not typed have llama-bench's
    defaults.
    """
    from llmcli.bench.speed import parameter_grid
    from llmcli.hardware import host
    from llmcli.runtime.binding.contexts.cache_types import FLASH_MODES, KV_TYPES
    from llmcli.runtime.binding.contexts.context_options import MAX_SEQUENCES

    return parameter_grid.ParameterGrid(
        prompts=parameter_grid.parse_numbers("-p", options["n_prompt"] or ["512"]),
        generations=parameter_grid.parse_numbers("-n", options["n_gen"] or ["128"]),
        pairs=parameter_grid.parse_pairs(options["pg"] or []),
        depths=parameter_grid.parse_numbers("-d", options["n_depth"] or ["0"]),
        batches=parameter_grid.parse_numbers("-b", options["batch"] or ["2048"], 1),
        ubatches=parameter_grid.parse_numbers("-ub", options["ubatch"] or ["512"], 1),
        types_k=parameter_grid.parse_words("-ctk", options["type_k"] or ["f16"], list(KV_TYPES)),
        types_v=parameter_grid.parse_words("-ctv", options["type_v"] or ["f16"], list(KV_TYPES)),
        threads=parameter_grid.parse_numbers(
            "-t", options["threads"] or [str(host.core_count())], 1, host.MAX_THREADS
        ),
        gpu_layers=_parse_layers(options["gpu_layers"] or ["-1"]),
        flash=parameter_grid.parse_words("-fa", options["flash"] or ["auto"], list(FLASH_MODES)),
        parallel=parameter_grid.parse_numbers(
            "-np", options["parallel"] or ["1"], 1, MAX_SEQUENCES
        ),
    )


def _start(offline: bool, trust: bool, output_format: str) -> "tuple[Config, UI]":
    from llmcli import config
    from llmcli.ui import UI

    settings = config.load_config()
    settings = replace(
        settings,
        offline=settings.offline or offline,
        trust_files=settings.trust_files or trust,
    )
    # with -o json, stdout contains only the document: messages of a download go to stderr
    ui = UI(json=output_format != "md", color=settings.color)
    return settings, ui


def _parse_layers(texts: list[str]) -> list[int]:
    from llmcli.bench.speed import parameter_grid

    return [
        -1
        if text.strip() in ("-1", "all", "auto")
        else parameter_grid.parse_numbers("-ngl", [text])[0]
        for text in ",".join(texts).split(",")
    ]


BENCHES = (with_option_groups(speed),)
