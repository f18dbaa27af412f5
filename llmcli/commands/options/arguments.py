"""Arguments and options that many commands share, such as REF, --json and --threads."""

from typing import Annotated

import typer

from llmcli.commands.command_line.completion import complete_models
from llmcli.workflows.evaluation.text import DEFAULT_CTX

Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF",
        autocompletion=complete_models,
        help="catalog name, org/repo[:QUANT], file or folder",
    ),
]


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Use the model file without first loading it in a separate process."
    ),
]


Context = Annotated[
    int | None, typer.Option("-c", "--ctx-size", help="Context size in tokens; default: as chat.")
]


Batch = Annotated[int, typer.Option("-b", "--batch-size", help="Logical batch size in tokens.")]


Ubatch = Annotated[int, typer.Option("-ub", "--ubatch-size", help="Physical batch size in tokens.")]


Threads = Annotated[
    int | None, typer.Option("-t", "--threads", help="Threads; default: the cores.")
]


Layers = Annotated[
    str, typer.Option("-ngl", "--gpu-layers", help="Layers on the GPU: a number, all, auto.")
]


Flash = Annotated[str, typer.Option("-fa", "--flash-attn", help="Flash attention: on, off, auto.")]


TypeK = Annotated[str, typer.Option("-ctk", "--cache-type-k", help="KV cache type of K.")]


TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="KV cache type of V.")]


Parallel = Annotated[
    int, typer.Option("-np", "--parallel", min=1, help="Number of sequences at once.")
]


Unified = Annotated[
    bool,
    typer.Option(
        "--kv-unified/--no-kv-unified",
        "-kvu/-no-kvu",
        help="One pool of cells, or one per sequence.",
    ),
]


Quant = Annotated[
    str | None, typer.Option("--quant", metavar="TYPE", help="Plan as if quantized to this type.")
]


DraftMethod = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="METHOD",
        help="Add the memory of drafts by this method, as run --draft takes it.",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--model-draft",
        metavar="REF",
        autocompletion=complete_models,
        help="Add a draft model, an EAGLE-3 draft or draft heads.",
    ),
]
NgramDraft = Annotated[
    str,
    typer.Option(
        "--ngram-draft", metavar="MODE", help="Draft from repetitions in the text: on, off, auto."
    ),
]


Measure = Annotated[
    bool, typer.Option("--measure", help="Load the model, too, and print the difference.")
]


Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx", "-c", "--ctx-size", min=1, help=f"Chunk length in tokens; default {DEFAULT_CTX}."
    ),
]


ChunkCount = Annotated[
    int | None, typer.Option("--chunks", min=1, help="Maximum number of chunks to read.")
]


Fresh = Annotated[
    bool, typer.Option("--fresh", help="Recompute everything, even what an earlier run finished.")
]


DEFAULT_MODEL = "smollm2:135m"
REF_HELP = "A model: catalog name, org/repo[:QUANT], file.gguf or folder."
