"""`llmcli bench phases`: parse, make answers, print where their time went."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.grouped import grouped
from llmcli.commands.reporting import Charts, Report
from llmcli.commands.show import Json, start
from llmcli.commands.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmcli.bench.charts.page import Page
    from llmcli.bench.phases import Breakdown
    from llmcli.config import Config
    from llmcli.runtime.request import RunOptions
    from llmcli.runtime.runner import Runner
    from llmcli.ui import UI

Prompt = Annotated[
    int, typer.Option("-p", "--n-prompt", min=1, help="Tokens of the prompt, about.")
]
Gen = Annotated[int, typer.Option("-n", "--n-gen", min=2, help="Tokens of each answer.")]
Answers = Annotated[
    int, typer.Option("-r", "--repetitions", min=1, help="How many answers are measured.")
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", help="Threads; default: the cores.")
]
Flash = Annotated[str, typer.Option("-fa", "--flash-attn", help="on, off or auto.")]
TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]
TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]
Temp = Annotated[
    float | None,
    typer.Option("--temp", min=0, help="Temperature, 0: the likeliest token. Default: 0.8."),
]
NAMES = {
    "tokenize": "template, tokenize",
    "prefill": "prefill (llama.cpp)",
    "decode": "decode (llama.cpp)",
    "python": "the rest of Python",
}
ROOM = 256  # tokens that a template may add


def phases(
    ref: Annotated[str, typer.Argument(metavar="REF", help="catalog name, org/repo[:QUANT], file")],
    n_prompt: Prompt = 128,
    n_gen: Gen = 64,
    repetitions: Answers = 5,
    threads: Threads = None,
    flash: Flash = "auto",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    temp: Temp = None,
    report_file: Report = None,
    chart: Charts = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
    *,
    workers: Workers,
) -> None:
    """Tell where the time of an answer goes: tokenizing, prefill, decode, sampling, detokenizing,
    Python.

    The same prompt and seed each time, answers of the same length, nothing of one kept for the
    next.
    """
    from llmcli.bench import phases as measuring
    from llmcli.bench.pictures import parts
    from llmcli.chat.render import Stream
    from llmcli.commands import reporting
    from llmcli.hardware import fit
    from llmcli.runtime.request import RunOptions
    from llmcli.runtime.sampling import defaults

    config, ui = start(json, offline)
    reporting.check(report_file)
    options = RunOptions(
        n_prompt + n_gen + ROOM, threads, flash_attn=flash, cache_type_k=type_k, cache_type_v=type_v
    )
    fit.check(options)
    workers.join(ui)
    sampling = defaults().with_values({"seed": 1, **({} if temp is None else {"temp": temp})})
    with _opened(ref, options, config, ui) as (name, runner):
        prompt = measuring.text(runner, n_prompt)
        with ui.bar(f"bench {name}", 2 * (repetitions + 1), "tests") as bar:

            def tick() -> None:
                bar.advance(1)

            with _nowhere():
                found = measuring.measure(
                    runner, prompt, sampling, n_gen, repetitions, Stream().show, tick
                )
        if json:
            ui.result(document(name, runner, found, n_gen))
        else:
            _tell(name, runner, found, n_gen, ui)
    reporting.show(
        lambda: _page(name, found, n_gen),
        lambda: parts.charts(found, NAMES),
        (report_file, chart),
        ui,
    )


def _page(name: str, found: "Breakdown", n_gen: int) -> "Page":
    from llmcli.bench import page
    from llmcli.bench.pictures import parts

    drawn = parts.charts(found, NAMES)
    about = (
        f"{found.prompt_tokens} tokens of prompt, {n_gen} of answer, {len(found.answers)} answers"
    )
    return page.of_others(f"Where the time of {name} goes", about, [drawn[0].says], drawn)


@contextmanager
def _opened(
    ref: str, options: "RunOptions", config: "Config", ui: "UI"
) -> "Iterator[tuple[str, Runner]]":
    from llmcli.commands.ready import ready
    from llmcli.hardware import fit
    from llmcli.runtime import runner
    from quant import container

    model = ready(ref, None, config, ui)
    decided, layers = fit.decide(container.read(model.path), options, ui.warn)
    with runner.open_runner(
        model.path, decided, gpu_layers=layers, native_sampling=config.native_sampling
    ) as opened:
        yield model.name, opened


@contextmanager
def _nowhere() -> Iterator[None]:
    """A screen that nobody sees: what is written there is written as ever."""
    with Path(os.devnull).open("w", encoding="utf-8") as sink, redirect_stdout(sink):
        yield


def document(name: str, runner: "Runner", found: "Breakdown", n_gen: int) -> dict[str, Any]:
    """One JSON document; times in milliseconds."""
    from llmcli.bench.phases import PER_TOKEN, PHASES

    whole = found.seconds
    return {
        "model": {"name": name, "path": str(runner.header.path)},
        "threads": runner.options.threads,
        "prompt_tokens": found.prompt_tokens,
        "generated_tokens": n_gen,
        "answer_ms": whole * 1e3,
        "phases": {
            phase: {
                "answer_ms": _named(("p50", "min", "max"), found.answer(phase)),
                "share": found.answer(phase)[0] / whole,
                **(
                    {"token_ms": _named(("p50", "p10", "p90"), found.token(phase))}
                    if phase in PER_TOKEN
                    else {}
                ),
            }
            for phase in PHASES
        },
        "clocks_ms": found.clocks * 1e3,
        "answers": [{phase: one.phases[phase] * 1e3 for phase in PHASES} for one in found.answers],
    }


def _named(names: "Sequence[str]", seconds: "Sequence[float]") -> dict[str, float]:
    return {name: value * 1e3 for name, value in zip(names, seconds, strict=True)}


def _tell(name: str, runner: "Runner", found: "Breakdown", n_gen: int, ui: "UI") -> None:
    from llmcli.bench.phases import PER_TOKEN, PHASES
    from llmcli.units import several

    threads = several(runner.options.threads or 1, "thread")
    counts = (
        f"{found.prompt_tokens} prompt tokens, {several(len(found.answers), 'answer')} of {n_gen}"
    )
    ui.text(f"{name} · {runner.header.file_type} · {threads} · {counts}")
    rows = []
    for phase in PHASES:
        middle, least, most = found.answer(phase)
        token = (
            [f"{value * 1e6:.0f}" for value in found.token(phase)]
            if phase in PER_TOKEN
            else [""] * 3
        )
        span = f"{least * 1e3:.2f}-{most * 1e3:.2f}"
        rows.append(
            (
                NAMES.get(phase, phase),
                f"{middle * 1e3:.2f}",
                span,
                f"{middle / found.seconds:.2%}",
                *token,
            )
        )
    rows.append(("in all", f"{found.seconds * 1e3:.2f}", *[""] * 5))
    columns = ("phase", "ms an answer", "least-most", "share", "µs a token", "p10", "p90")
    ui.table(columns, rows, right=columns[1:])
    ui.text(
        f"the clocks themselves: {found.clocks * 1e6:.0f} µs a token, most of it in the rest of Python"
    )


BENCHES = (grouped(phases),)
