"""`llmcli calibrate`: parse, read a text with a model, write what entered its weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.eval import CTX, Count, side, words_of
from llmcli.commands.plan import Flash, Layers, Threads, Ubatch
from llmcli.commands.show import Json, Ref, start

if TYPE_CHECKING:
    from llmcli.commands.scorers import Side
    from llmcli.ui import UI
    from quant.calibrate import Sums
    from quant.evaluate import Chunks

Out = Annotated[Path, typer.Option("--out", "-o", metavar="STATS", help="The new importance matrix.")]
Text = Annotated[Path, typer.Option("--text", "-f", metavar="FILE", help="UTF-8 text like what the model will read.")]
Ctx = Annotated[int, typer.Option("--ctx", "-c", "--ctx-size", min=1, help="Tokens of a chunk.")]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("calibrate")(calibrate)


def calibrate(
    ref: Ref,
    out: Out,
    text: Text,
    ctx: Ctx = CTX,
    chunks: Count = None,
    ubatch_size: Ubatch = 512,
    threads: Threads = None,
    gpu_layers: Layers = "auto",
    flash_attn: Flash = "auto",
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
) -> None:
    """Measure how much each input column of each weight matters, for `quantize --imatrix STATS`.

    Sums of squares over a text, from llama.cpp's own passes: llama-imatrix's file, which llama-quantize reads too, with
    the head of models that share it with their embedding.
    """
    from llmcli.catalog.partial import write_whole
    from llmcli.commands.ready import ready
    from llmcli.commands.scorers import tokens
    from llmcli.hardware import fit
    from llmcli.runtime.request import RunOptions
    from quant import evaluate

    config, ui = start(json, offline)
    options = RunOptions(ctx, threads, None, ubatch_size, ubatch_size, gpu_layers, flash_attn)
    fit.check(options)
    words = _words(text)
    subject = side(ready(ref, None, config, ui).path, options, ui)
    whole = evaluate.chunks(tokens(subject, words), ctx)
    some = evaluate.Chunks(whole.ids[:chunks])
    sums = _read(subject, some, ui)
    target = out.expanduser()
    write_whole(target, *sums.file([str(text)], some.count, ctx))
    _tell(sums, some, target, ui)


def _read(subject: "Side", text: "Chunks", ui: "UI") -> "Sums":
    """All of it, every chunk's products counted in."""
    from llmcli.runtime.activations import open_activations
    from llmcli.runtime.binding.model import open_model
    from quant.calibrate import Product, Sums

    sums, header = Sums(), subject.header
    named = {tensor.name for tensor in header.tensors if len(tensor.shape) > 1}
    with open_model(header.path, gpu_layers=subject.gpu_layers, latent=header.latent) as model:
        with open_activations(
            model, subject.context(1, model.n_vocab), named.__contains__,
            lambda seen: sums.add(Product(seen.name, seen.rows, seen.matrices, seen.experts, seen.key)),
        ) as activations, ui.bar(f"calibrate {header.path.name}", text.count, "chunks") as bar:  # fmt: skip
            for ids in text.ids:
                activations.read(ids)
                bar.advance(1)
    return sums


def _tell(sums: "Sums", text: "Chunks", out: Path, ui: "UI") -> None:
    unseen = sums.unseen()
    for name, count in list(unseen.items())[:3]:
        ui.warn(f"no token went to {count} of the experts of {name}: they are rounded as if all columns mattered alike")
    if len(unseen) > 3:
        ui.warn(f"so it is with {len(unseen) - 3} more tensors; a longer text may reach them")
    if ui.json:
        ui.result(_document(sums, text, out))
        return
    ui.text(f"{out}: {len(sums.sums)} tensors over {text.ids.size:,} tokens in {text.count} chunks of {text.n_ctx}")


def _document(sums: "Sums", text: "Chunks", out: Path) -> dict[str, Any]:
    return {
        "path": str(out), "bytes": out.stat().st_size, "tensors": len(sums.sums), "chunks": text.count,
        "n_ctx": text.n_ctx, "tokens": int(text.ids.size), "unseen_experts": sums.unseen(),
    }  # fmt: skip


def _words(path: Path) -> str:
    """The text; refused where it is the one that eval reads: figures of it would flatter."""
    from llmcli.errors import UserError

    words, name = words_of(path)
    if words == words_of(None)[0]:
        raise UserError(f"{name} is the text that eval reads: nothing may be calibrated with it", hint="another --text")
    return words
