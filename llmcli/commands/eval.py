"""`llmcli eval`: parse, find the models and the text, evaluate, print."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.grouped import grouped
from llmcli.commands.plan import Batch, Flash, Layers, Threads, TypeK, TypeV, Ubatch
from llmcli.commands.show import Json, start
from llmcli.commands.workers import Workers

if TYPE_CHECKING:
    from llmcli.catalog.fetch import Model
    from llmcli.commands.scorers import Side
    from llmcli.config import Config
    from llmcli.runtime.request import RunOptions
    from llmcli.ui import UI

CTX = 512
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="REF",
        help="The model before it was quantized; or a file that --save-base wrote.",
    ),
]
BaseFile = Annotated[
    Path | None,
    typer.Option(
        "--base-logits", metavar="FILE", help="The base, from a file that --save-base wrote."
    ),
]
SaveBase = Annotated[
    Path | None,
    typer.Option(
        "--save-base",
        metavar="FILE",
        help="Keep what the base (or else SRC) expects, for --base-logits.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        "-f",
        metavar="FILE",
        help="UTF-8 text to be read; default: 256 KB of plays that ship.",
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option("--ctx", "-c", "--ctx-size", min=1, help=f"Tokens of a chunk; default {CTX}."),
]
Count = Annotated[
    int | None, typer.Option("--chunks", min=1, help="Read no more chunks than these.")
]
Quant = Annotated[
    str | None, typer.Option("--quant", metavar="TYPE", help="Quantize SRC to this type first.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Compute all anew, also what an earlier run has finished.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("eval")(grouped(evaluate))


def evaluate(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="catalog name, org/repo[:QUANT], GGUF file or folder"),
    ],
    base: Base = None,
    text: Text = None,
    ctx: Ctx = None,
    chunks: Count = None,
    save_base: SaveBase = None,
    base_logits: BaseFile = None,
    quant: Quant = None,
    batch_size: Batch = 2048,
    ubatch_size: Ubatch = 512,
    threads: Threads = None,
    gpu_layers: Layers = "auto",
    flash_attn: Flash = "auto",
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    fresh: Fresh = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
    *,
    workers: Workers,
) -> None:
    """Measure a model on a text: perplexity, and its divergence from the model that it was made of.

    Protocol and definitions are llama-perplexity's; both models' logits are held against each other
    in float32. Ctrl-C and kills lose nothing that is finished: the same command goes on. A base has
    an f16 cache, so that `--base SRC -ctk q8_0 -ctv q8_0` tells what a cache type costs.
    """
    from llmcli.catalog.partial import check_apart
    from llmcli.commands import evaluating, quality
    from llmcli.hardware import fit
    from llmcli.runtime.request import RunOptions
    from quant import baselogits

    config, ui = start(json, offline)
    workers.join(ui)
    if base and baselogits.recognised(Path(base).expanduser()):
        base_logits, base = Path(base), None
    options = RunOptions(
        ctx or CTX, threads, None, batch_size, ubatch_size, gpu_layers, flash_attn, type_k, type_v
    )
    _refuse(base, base_logits, text, ctx, save_base)
    fit.check(options)
    kept = baselogits.load(base_logits.expanduser()) if base_logits else None
    words, name = (None, str(base_logits)) if kept else words_of(text)
    options = replace(options, ctx_size=kept.n_ctx) if kept else options
    model = side(_source(source, quant, config, ui).path, options, ui)
    plain = replace(options, cache_type_k="f16", cache_type_v="f16")
    other = side(_base(base, config, ui).path, plain, ui) if base else None
    check_apart([save_base], [*model.header.files, *(other.header.files if other else ()), text])
    target = save_base.expanduser() if save_base else None
    outcome = evaluating.run(
        evaluating.Wish(model, other, kept, words, chunks, target, fresh), config, ui
    )
    if kept:
        kept.close()
    quality.show(quality.Told(outcome, model, other, kept, name), ui)


def _refuse(
    base: str | None, kept: Path | None, text: Path | None, ctx: int | None, save: Path | None
) -> None:
    """Wishes that exclude each other."""
    from llmcli.errors import UsageError

    if kept is None:
        return
    for flag, given in (("--base", base), ("--text", text), ("--ctx", ctx), ("--save-base", save)):
        if given is not None:
            why = "they are of one model and one text"
            raise UsageError(
                f"{flag} does not go with kept base logits: {why}", hint=f"leave out {flag}"
            )


def words_of(path: Path | None) -> tuple[str, str]:
    """The text and its name. As llama.cpp's -f a last line break is left out."""
    from importlib import resources

    from llmcli.errors import UserError
    from llmcli.utf8 import decoded

    if path is None:
        raw, name = (
            (resources.files("quant") / "texts" / "evaluation.txt").read_bytes(),
            "the plays that ship",
        )
    else:
        try:
            raw, name = path.expanduser().read_bytes(), str(path)
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}", hint="--text takes a file of text"
            ) from None
    return decoded(raw, name).removesuffix("\n"), name


def _source(ref: str, quant: str | None, config: "Config", ui: "UI") -> "Model":
    from llmcli.commands.ready import ready

    return ready(ref, quant, config, ui)


def _base(ref: str, config: "Config", ui: "UI") -> "Model":
    """The base as it is: a checkpoint would first be rounded, and that is for the user to ask for."""
    from llmcli.commands.ready import derive, fetched
    from llmcli.errors import UserError

    model = fetched(ref, None, config, ui)
    if model.kind == "gguf":
        return derive(model, model.quant, config, ui) if model.quant else model
    raise UserError(
        f"{ref} is a checkpoint folder, a base must be a GGUF",
        hint=f"llmcli convert {ref} -o base.gguf, then --base base.gguf; or --base {ref}:Q8_0",
    )


def side(path: Path, options: "RunOptions", ui: "UI") -> "Side":
    """Checked and decided, so that nothing is refused after minutes."""
    from llmcli.commands.scorers import Side
    from llmcli.errors import UserError
    from llmcli.hardware import fit
    from llmcli.runtime import kv
    from quant import container

    header = container.read(path)
    container.check(header)
    kv.check(header.metadata, options.cache_type_k, options.cache_type_v)
    found = Side(header, *fit.decide(header, options, ui.warn))
    if not found.n_vocab:
        raise UserError(
            f"{path.name} has no vocabulary: it cannot read text", hint="name another file"
        )
    return found
