"""`llmcli bench phases`: generates answers, and prints how much time each phase takes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.command_line.command_context import start_command
from llmcli.commands.command_line.completion import complete_models
from llmcli.commands.options.arguments import Json, Trust
from llmcli.commands.options.groups import with_option_groups
from llmcli.commands.options.placement import PlacementGroup
from llmcli.commands.options.report import ReportOptions, show_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmcli.bench.phases import PhaseBreakdown
    from llmcli.charts.html_page import ReportPage
    from llmcli.config import Config
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.runtime.runner import Runner
    from llmcli.ui import UI

Prompt = Annotated[
    int, typer.Option("-p", "--n-prompt", min=1, help="Approximate tokens of the prompt.")
]
Gen = Annotated[int, typer.Option("-n", "--n-gen", min=2, help="Tokens of each answer.")]
Answers = Annotated[
    int, typer.Option("-r", "--repetitions", min=1, help="Number of measured answers.")
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", help="Threads; default: the cores.")
]
Flash = Annotated[str, typer.Option("-fa", "--flash-attn", help="on, off or auto.")]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]
Temp = Annotated[
    float | None,
    typer.Option("--temp", min=0, help="Temperature; 0: most likely token. Default: 0.8."),
]
PHASE_LABELS = {
    "tokenize": "template, tokenize",
    "prefill": "prefill (llama.cpp)",
    "decode": "decode (llama.cpp)",
    "python": "other Python code",
}
TEMPLATE_TOKENS = 256  # room in the context for the tokens of the chat template


def phases(
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            autocompletion=complete_models,
            help="catalog name, org/repo[:QUANT], file",
        ),
    ],
    n_prompt: Prompt = 128,
    n_gen: Gen = 64,
    repetitions: Answers = 5,
    threads: Threads = None,
    flash: Flash = "auto",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    temp: Temp = None,
    *,
    reporting: ReportOptions,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network connection.")] = False,
    trust: Trust = False,
    json: Json = False,
    placement_flags: PlacementGroup,
) -> None:
    """Measure how much of an answer's time prefill, decode, sampling and others take.

    Every answer has the same prompt, seed and length, and no cached tokens.
    """
    from llmcli.bench.phases import build_prompt, measure_phases
    from llmcli.bench.plots.phases import build_charts
    from llmcli.chat.display.stream_writer import StreamWriter
    from llmcli.planning import resolve_options
    from llmcli.runtime.requests.request import RunOptions
    from llmcli.runtime.sampling import default_sampling

    config, ui = start_command(json, offline, trust=trust)
    reporting.check_path()
    options = RunOptions(
        n_prompt + n_gen + TEMPLATE_TOKENS,
        threads,
        flash_attn=flash,
        cache_type_k=type_k,
        cache_type_v=type_v,
    )
    resolve_options.validate_options(options)
    options = options.with_placement(placement_flags.join(ui))
    sampling = default_sampling().with_values(
        {"seed": 1, **({} if temp is None else {"temp": temp})}
    )
    with _open_model(ref, options, config, ui) as (name, runner):
        prompt = build_prompt(runner, n_prompt)
        with ui.bar(f"bench {name}", 2 * (repetitions + 1), "tests") as bar:

            def tick() -> None:
                bar.advance(1)

            with _silent_stdout():
                breakdown = measure_phases(
                    runner, prompt, sampling, n_gen, repetitions, StreamWriter().write_event, tick
                )
        if json:
            ui.result(build_document(name, runner, breakdown, n_gen))
        else:
            _print_phases(name, runner, breakdown, n_gen, ui)
    show_report(
        lambda: _build_page(name, breakdown, n_gen),
        lambda: build_charts(breakdown, PHASE_LABELS),
        reporting,
        ui,
    )


def _build_page(name: str, breakdown: "PhaseBreakdown", n_gen: int) -> "ReportPage":
    from llmcli.bench import report_page
    from llmcli.bench.plots.phases import build_charts

    charts = build_charts(breakdown, PHASE_LABELS)
    about = f"{breakdown.prompt_tokens} tokens of prompt, {n_gen} of answer, {len(breakdown.answers)} answers"
    return report_page.build_page(
        f"Time of {name} by phase", about, [charts[0].description], charts
    )


@contextmanager
def _open_model(
    ref: str, options: "RunOptions", config: "Config", ui: "UI"
) -> "Iterator[tuple[str, Runner]]":
    from llmcli.model_loader.prepare import prepare_model
    from llmcli.model_loader.rehearsal.rehearse import rehearse_file
    from llmcli.planning import resolve_options
    from llmcli.runtime import runner
    from quant.model_file import read_header

    model = prepare_model(ref, None, config, ui)
    rehearse_file(model.path, config, ui)
    decided, placement = resolve_options.resolve_options(
        read_header.read_header(model.path), options, ui.warn, note=ui.note, config=config
    )
    with runner.open_runner(
        model.path, decided, placement=placement, native_sampling=config.native_sampling
    ) as open_runner:
        yield model.name, open_runner


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Within the block, discard everything written to stdout. The writing itself is still part of
    the measurement.
    """
    with Path(os.devnull).open("w", encoding="utf-8") as sink, redirect_stdout(sink):
        yield


def build_document(
    name: str, runner: "Runner", breakdown: "PhaseBreakdown", n_gen: int
) -> dict[str, Any]:
    """Return the JSON document of the measurement. Times are in milliseconds."""
    from llmcli.bench.phases import PHASES, TOKEN_PHASES

    answer_seconds = breakdown.total_seconds
    return {
        "model": {"name": name, "path": str(runner.header.path)},
        "threads": runner.options.threads,
        "prompt_tokens": breakdown.prompt_tokens,
        "generated_tokens": n_gen,
        "answer_ms": answer_seconds * 1e3,
        "phases": {
            phase: {
                "answer_ms": _as_ms(("p50", "min", "max"), breakdown.answer_seconds(phase)),
                "share": breakdown.answer_seconds(phase)[0] / answer_seconds,
                **(
                    {"token_ms": _as_ms(("p50", "p10", "p90"), breakdown.token_seconds(phase))}
                    if phase in TOKEN_PHASES
                    else {}
                ),
            }
            for phase in PHASES
        },
        "clocks_ms": breakdown.clock_seconds * 1e3,
        "answers": [
            {phase: answer.phases[phase] * 1e3 for phase in PHASES} for answer in breakdown.answers
        ],
    }


def _as_ms(names: "Sequence[str]", seconds: "Sequence[float]") -> dict[str, float]:
    return {name: value * 1e3 for name, value in zip(names, seconds, strict=True)}


def _print_phases(
    name: str, runner: "Runner", breakdown: "PhaseBreakdown", n_gen: int, ui: "UI"
) -> None:
    from llmcli.bench.phases import PHASES, TOKEN_PHASES
    from llmcli.units import format_count

    threads = format_count(runner.options.threads or 1, "thread")
    counts = f"{breakdown.prompt_tokens} prompt tokens, {format_count(len(breakdown.answers), 'answer')} of {n_gen}"
    ui.text(f"{name} · {runner.header.file_type} · {threads} · {counts}")
    rows = []
    for phase in PHASES:
        median_seconds, min_seconds, max_seconds = breakdown.answer_seconds(phase)
        token_cells = (
            [f"{value * 1e6:.0f}" for value in breakdown.token_seconds(phase)]
            if phase in TOKEN_PHASES
            else [""] * 3
        )
        span = f"{min_seconds * 1e3:.2f}-{max_seconds * 1e3:.2f}"
        rows.append(
            (
                PHASE_LABELS.get(phase, phase),
                f"{median_seconds * 1e3:.2f}",
                span,
                f"{median_seconds / breakdown.total_seconds:.2%}",
                *token_cells,
            )
        )
    rows.append(("total", f"{breakdown.total_seconds * 1e3:.2f}", *[""] * 5))
    columns = ("phase", "ms per answer", "min-max", "share", "µs per token", "p10", "p90")
    ui.table(columns, rows, right=columns[1:])
    ui.text(
        f"the timers themselves take {breakdown.clock_seconds * 1e6:.0f} µs per token, "
        f"most of it in {PHASE_LABELS['python']}"
    )


BENCHES = (with_option_groups(phases),)
