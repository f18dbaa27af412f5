"""`llmcli bench REF`: parse llama-bench's words, measure, print."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from llmcli.ui import UI

Model = Annotated[str | None, typer.Option("-m", "--model", "-hf", help="The same, in llama-bench's words.")]
Values = list[str] | None
Prompts = Annotated[Values, typer.Option("-p", "--n-prompt", help="Prompt lengths; default 512.")]
Gens = Annotated[Values, typer.Option("-n", "--n-gen", help="Generated lengths; default 128.")]
Pairs = Annotated[Values, typer.Option("-pg", metavar="PP,TG", help="Prompt and generation together.")]
Depths = Annotated[Values, typer.Option("-d", "--n-depth", help="Tokens in the cache before.")]
Batches = Annotated[Values, typer.Option("-b", "--batch-size", help="Logical batch; default 2048.")]
Ubatches = Annotated[Values, typer.Option("-ub", "--ubatch-size", help="Physical batch; default 512.")]
TypesK = Annotated[Values, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K; default f16.")]
TypesV = Annotated[Values, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V; default f16.")]
Threads = Annotated[Values, typer.Option("-t", "--threads", help="Threads; default: the cores.")]
Layers = Annotated[Values, typer.Option("-ngl", "--n-gpu-layers", "--gpu-layers", help="GPU layers; default all.")]
Flash = Annotated[Values, typer.Option("-fa", "--flash-attn", help="on, off or auto (the default).")]
Repetitions = Annotated[int, typer.Option("-r", "--repetitions", min=1, help="How often each test runs.")]
Output = Annotated[str, typer.Option("-o", "--output", help="md, csv, json or jsonl.")]
NoWarmup = Annotated[bool, typer.Option("--no-warmup", help="Skip the run that does not count.")]
Quant = Annotated[str | None, typer.Option("--quant", help="Quantize the model to this type first.")]
Offline = Annotated[bool, typer.Option("--offline", help="Make no connection.")]


def speed(
    ref: Annotated[str | None, typer.Argument(metavar="REF", help="catalog name, org/repo[:QUANT], file")] = None,
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
    repetitions: Repetitions = 5,
    output: Output = "md",
    no_warmup: NoWarmup = False,
    quant: Quant = None,
    offline: Offline = False,
    json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False,
) -> None:
    """Measure prompt and generation speed, in llama-bench's words.

    Lists (-p 128,512), ranges (1-8*2) and repeated flags span a grid of tests. `llmcli bench roofline REF` measures
    what memory allows, and how far a model is from it.
    """
    from llmcli.bench import grid, report
    from llmcli.bench.run import run
    from llmcli.errors import UsageError
    from llmcli.hardware import host
    from llmcli.runtime.binding.context import FLASH, KV_TYPES
    from llmcli.ui import put, visible

    form = "json" if json else output
    if form not in report.FORMATS:
        raise UsageError(f"-o does not know {output!r}", hint=f"-o takes: {' '.join(report.FORMATS)}")
    name = ref or model
    if name is None:
        raise UsageError("no model given", hint="llmcli bench smollm2:135m")
    wanted = grid.Grid(
        prompts=grid.numbers("-p", n_prompt or ["512"]),
        gens=grid.numbers("-n", n_gen or ["128"]),
        pairs=grid.pairs(pg or []),
        depths=grid.numbers("-d", n_depth or ["0"]),
        batches=grid.numbers("-b", batch or ["2048"], 1),
        ubatches=grid.numbers("-ub", ubatch or ["512"], 1),
        types_k=grid.words("-ctk", type_k or ["f16"], list(KV_TYPES)),
        types_v=grid.words("-ctv", type_v or ["f16"], list(KV_TYPES)),
        threads=grid.numbers("-t", threads or [str(host.cores())], 1, host.MOST_THREADS),
        gpu_layers=_layers(gpu_layers or ["-1"]),
        flash=grid.words("-fa", flash or ["auto"], list(FLASH)),
    )
    path, ui = _prepare(name, quant, offline, form)
    results = run(path, list(wanted.tests()), repetitions, ui, warmup=not no_warmup)
    put(sys.stdout, visible(report.text(results, form)) + "\n")


def _prepare(name: str, quant: str | None, offline: bool, form: str) -> "tuple[Path, UI]":
    from dataclasses import replace

    from llmcli import config
    from llmcli.commands.ready import ready
    from llmcli.ui import UI

    settings = config.load()
    settings = replace(settings, offline=settings.offline or offline)
    # Under -o json stdout carries the document alone: what a pull has to say goes to stderr.
    ui = UI(json=form != "md", color=settings.color)
    return ready(name, quant, settings, ui).path, ui


def _layers(texts: list[str]) -> list[int]:
    from llmcli.bench import grid

    return [
        -1 if text.strip() in ("-1", "all", "auto") else grid.numbers("-ngl", [text])[0]
        for text in ",".join(texts).split(",")
    ]


BENCHES = (speed,)
