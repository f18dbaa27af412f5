"""`llmcli eval`: parses the options, opens the models and the text, evaluates and prints."""

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
        help="The unquantized model (a REF), or a file written by --save-base.",
    ),
]
BaseFile = Annotated[
    Path | None,
    typer.Option(
        "--base-logits", metavar="FILE", help="The base's logits, from a --save-base file."
    ),
]
SaveBase = Annotated[
    Path | None,
    typer.Option(
        "--save-base",
        metavar="FILE",
        help="Save the logits of the base (or of SRC without a base) for --base-logits.",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        "-f",
        metavar="FILE",
        help="UTF-8 text to evaluate on; default: the built-in text, 256 KB of plays.",
    ),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx", "-c", "--ctx-size", min=1, help=f"Chunk length in tokens; default {CTX}."
    ),
]
Count = Annotated[
    int | None, typer.Option("--chunks", min=1, help="Maximum number of chunks to read.")
]
Quant = Annotated[
    str | None, typer.Option("--quant", metavar="TYPE", help="Quantize SRC to this type first.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Recompute everything, even what an earlier run finished.")
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
    """Measure a model's perplexity, and its divergence from a base.

    Protocol and definitions follow llama-perplexity; both models' logits are compared in float32.
    An interrupted run keeps its finished chunks: the same command resumes it. The base always uses
    an f16 cache, so that `--base SRC -ctk q8_0 -ctv q8_0` measures the cost of a cache type.
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
    _refuse_conflicts(base, base_logits, text, ctx, save_base)
    fit.check(options)
    saved_logits = baselogits.load(base_logits.expanduser()) if base_logits else None
    text_content, text_name = (None, str(base_logits)) if saved_logits else words_of(text)
    options = replace(options, ctx_size=saved_logits.n_ctx) if saved_logits else options
    model = side(_prepare_source(source, quant, config, ui).path, options, ui)
    base_options = replace(options, cache_type_k="f16", cache_type_v="f16")
    base_side = side(_prepare_base(base, config, ui).path, base_options, ui) if base else None
    check_apart(
        [save_base], [*model.header.files, *(base_side.header.files if base_side else ()), text]
    )
    target = save_base.expanduser() if save_base else None
    outcome = evaluating.run(
        evaluating.Wish(model, base_side, saved_logits, text_content, chunks, target, fresh),
        config,
        ui,
    )
    if saved_logits:
        saved_logits.close()
    quality.show(quality.Told(outcome, model, base_side, saved_logits, text_name), ui)


def _refuse_conflicts(
    base: str | None, kept: Path | None, text: Path | None, ctx: int | None, save: Path | None
) -> None:
    """Raise UsageError for options that cannot be combined with saved base logits."""
    from llmcli.errors import UsageError

    if kept is None:
        return
    for flag, given in (("--base", base), ("--text", text), ("--ctx", ctx), ("--save-base", save)):
        if given is not None:
            raise UsageError(
                f"{flag} cannot be combined with saved base logits: "
                "they belong to one model and one text",
                hint=f"leave out {flag}",
            )


def words_of(path: Path | None) -> tuple[str, str]:
    """Return the content and the name of a text; without a path, of the built-in text.

    Like llama.cpp's -f, leaves out a final line break. Raises UserError.
    """
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
                f"cannot read {path}: {error.strerror}", hint="--text takes a text file"
            ) from None
    return decoded(raw, name).removesuffix("\n"), name


def _prepare_source(ref: str, quant: str | None, config: "Config", ui: "UI") -> "Model":
    from llmcli.commands.ready import ready

    return ready(ref, quant, config, ui)


def _prepare_base(ref: str, config: "Config", ui: "UI") -> "Model":
    """Return the base as it is; a checkpoint is refused, because the user has to choose how it is
    rounded.

    Raises UserError.
    """
    from llmcli.commands.ready import derive, fetched
    from llmcli.errors import UserError

    model = fetched(ref, None, config, ui)
    if model.kind == "gguf":
        return derive(model, model.quant, config, ui) if model.quant else model
    raise UserError(
        f"{ref} is a checkpoint folder, but a base must be a GGUF",
        hint=f"llmcli convert {ref} -o base.gguf, then --base base.gguf; or --base {ref}:Q8_0",
    )


def side(path: Path, options: "RunOptions", ui: "UI") -> "Side":
    """Check the file and resolve the options, so that nothing is refused after minutes of work.

    Raises UserError.
    """
    from llmcli.commands.scorers import Side
    from llmcli.errors import UserError
    from llmcli.hardware import fit
    from llmcli.runtime import kv
    from quant import container

    header = container.read(path)
    container.check(header)
    kv.check(header.metadata, options.cache_type_k, options.cache_type_v)
    model_side = Side(header, *fit.decide(header, options, ui.warn))
    if not model_side.n_vocab:
        raise UserError(
            f"{path.name} has no vocabulary, so it cannot read text", hint="name another file"
        )
    return model_side
