"""`llmcli calibrate`: parse, read a text with a model, write what entered its weights; or add up
what was written.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmcli.commands.eval import CTX, Count, Fresh, side
from llmcli.commands.grouped import grouped
from llmcli.commands.plan import Flash, Layers, Threads, Ubatch
from llmcli.commands.show import Json, start
from llmcli.commands.workers import Workers

if TYPE_CHECKING:
    from llmcli.commands.calibrating import Outcome, Wish
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.source import Source

Refs = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC",
        help="catalog name, org/repo[:QUANT], GGUF file or folder; with --merge, files",
    ),
]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="STATS", help="The new importance matrix.")
]
MomentsOut = Annotated[
    Path | None,
    typer.Option(
        "--moments", metavar="FILE", help="Gather full second moments, too, into this file."
    ),
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        "-f",
        metavar="FILE",
        help="UTF-8 text to be read; repeatable. Default: what ships.",
    ),
]
Ctx = Annotated[int, typer.Option("--ctx", "-c", "--ctx-size", min=1, help="Tokens of a chunk.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Shuffle the chunks that --chunks takes the first of."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="N(M|G)", help="Hold no more sums of --moments than this at a time."
    ),
]
Merge = Annotated[
    bool, typer.Option("--merge", help="SRC are files of calibrations, .dat too: add them up.")
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("calibrate")(grouped(calibrate))


def calibrate(
    refs: Refs,
    out: Out,
    moments: MomentsOut = None,
    text: Texts = None,
    ctx: Ctx = CTX,
    chunks: Count = None,
    seed: Seed = None,
    memory: Memory = None,
    merge: Merge = False,
    ubatch_size: Ubatch = 512,
    threads: Threads = None,
    gpu_layers: Layers = "auto",
    flash_attn: Flash = "auto",
    fresh: Fresh = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Json = False,
    *,
    workers: Workers,
) -> None:
    """Measure how much each input column of each weight matters, for `quantize --imatrix STATS` and
    `--moments FILE`.

    Sums of squares over a text, from llama.cpp's own passes: llama-imatrix's file, which
    llama-quantize reads too, with the head of models that share it with their embedding. Killed
    runs go on where they were.
    """
    from llmcli.catalog.partial import check_apart
    from llmcli.commands import bases, calibrating, texts
    from llmcli.hardware import fit
    from llmcli.runtime.request import RunOptions
    from quant.planning import shard_size

    config, ui = start(json, offline)
    if merge:
        read = {
            "--text": text,
            "--chunks": chunks,
            "--seed": seed,
            "--rpc": workers.rpc,
            "-ts": workers.tensor_split,
        }
        _refuse({**read, "--moments": moments, "--memory": memory, "--threads": threads})
        _merge([Path(ref).expanduser() for ref in refs], out.expanduser(), ui)
        return
    _check(len(refs), memory, moments)
    if moments and flash_attn == "auto":
        flash_attn = "off"  # it would hide how attention mixes values
    elif moments and flash_attn == "on":
        ui.note(
            "flash attention hides how values are mixed: there will be no moments of attn_v that gptq can use"
        )
    options = RunOptions(ctx, threads, None, ubatch_size, ubatch_size, gpu_layers, flash_attn)
    fit.check(options)
    room = shard_size(memory, "--memory", "memory") if memory else None
    workers.join(ui)
    texts.given(text or [])  # a mistake in them is told before a model is fetched
    source = _source(refs[0], config, ui)
    check_apart([out, moments], [*source.files, *(text or [])])
    with bases.runnable(source, config, ui, threads or 0) as path:
        subject = side(path, options, ui)
        some, names = texts.chunks(subject, text or [], chunks, seed, ui)
        target = moments.expanduser() if moments else None
        wish = calibrating.Wish(
            subject, source.fingerprint, some, names, out.expanduser(), target, room, fresh
        )
        outcome = calibrating.run(wish, config, ui)
    _tell(wish, outcome, ui)


def _check(models: int, memory: str | None, moments: Path | None) -> None:
    """Raise UsageError for what cannot be calibrated."""
    from llmcli.errors import UsageError

    if models > 1:
        raise UsageError(
            f"{models} models are named, one can be calibrated", hint="--merge adds files up"
        )
    if memory and not moments:
        raise UsageError(
            "--memory is for the sums of --moments",
            hint="add --moments FILE, or leave out --memory",
        )


def _source(ref: str, config: "Config", ui: "UI") -> "Source":
    """The model as it is: a checkpoint is not rounded first, unless its name says so (NAME:TYPE)."""
    from llmcli.catalog import fetch
    from llmcli.commands import pickles, weights
    from llmcli.commands.ready import fetched, ready

    with pickles.offered(lambda: ["llmcli", "convert", ref, "-o", "floats.gguf", "--allow-pickle"]):
        if fetch.resolve(ref, config).ref.quant:
            return weights.open_source(ready(ref, None, config, ui).path)
        return weights.open_source(fetched(ref, None, config, ui, keep_source=True).path)


def _refuse(given: dict[str, object]) -> None:
    """Raise UsageError for what says how a text is read."""
    from llmcli.errors import UsageError

    for flag, value in given.items():
        if value is not None:
            raise UsageError(
                f"{flag} does not go with --merge: nothing is read", hint=f"leave out {flag}"
            )


def _merge(paths: list[Path], out: Path, ui: "UI") -> None:
    """Files of one kind made one."""
    from llmcli.catalog.partial import check_apart, check_place, write_whole
    from llmcli.errors import UserError
    from llmcli.units import several
    from quant import merge
    from quant.moments import recognised

    check_apart([out], paths)
    check_place(out)
    second = [path for path in paths if recognised(path)]
    if second and len(second) < len(paths):
        other = next(path for path in paths if path not in second)
        raise UserError(
            f"{second[0]} holds second moments, {other} sums of squares",
            hint="merge files of one kind",
        )
    if second:
        made = merge.merge_moments(paths, out)
    else:
        made, pieces = merge.merged(paths)
        write_whole(out, *pieces)
        if len({path.resolve() for path in paths}) < len(paths):
            ui.warn("a file is named twice: it counts twice")
    for note in made.notes:
        ui.warn(note)
    if ui.json:
        ui.result(
            {
                "path": str(out),
                "bytes": out.stat().st_size,
                "tensors": made.tensors,
                "chunks": made.chunks,
            }
        )
    else:
        ui.text(
            f"{out}: {made.tensors} tensors over {made.chunks} chunks of {several(len(paths), 'file')}"
        )


def _tell(wish: "Wish", outcome: "Outcome", ui: "UI") -> None:
    from llmcli.units import several

    sums, text, out = outcome.sums, wish.text, wish.out
    unseen, dead = sums.unseen(), sums.dead()
    for name, count in list(unseen.items())[:3]:
        ui.warn(
            f"no token went to {count} of the experts of {name}: they are rounded as if all columns mattered alike"
        )
    if len(unseen) > 3:
        ui.warn(f"so it is with {len(unseen) - 3} more tensors; a longer text may reach them")
    if dead:
        name, count = next(iter(dead.items()))
        more = f", and columns of {several(len(dead) - 1, 'more weight')}" if len(dead) > 1 else ""
        ui.note(
            f"nothing but zeros entered {several(count, 'column')} of {name}{more}: what they hold is not used"
        )
    thin = _thin(wish, ui)
    if ui.json:
        ui.result(
            {
                "path": str(out),
                "bytes": out.stat().st_size,
                "tensors": len(sums.sums),
                "chunks": text.count,
                "n_ctx": text.n_ctx,
                "tokens": int(text.ids.size),
                "unseen_experts": unseen,
                "dead_columns": dead,
                "resumed_chunks": outcome.resumed,
                "moments": str(wish.moments) if wish.moments else None,
                "moments_bytes": wish.moments.stat().st_size if wish.moments else None,
                "passes": outcome.passes,
                "rank_deficient": thin,
            }
        )
        return
    ui.text(
        f"{out}: {len(sums.sums)} tensors over {text.ids.size:,} tokens in {text.count} chunks of {text.n_ctx}"
    )
    if wish.moments:
        ui.text(f"{wish.moments}: their second moments")


def _thin(wish: "Wish", ui: "UI") -> dict[str, int]:
    """Of each weight's second moments so many matrices had fewer rows than columns; told with what
    would do.
    """
    from quant import moments

    if not wish.moments:
        return {}
    found = [one for one in moments.load(wish.moments).inputs if one.thin]
    if found:
        worst = max(
            found, key=lambda one: one.columns / min(count for count in one.counts if count)
        )
        least = min(count for count in worst.counts if count)
        enough = int(wish.text.ids.size * worst.columns / least) + 1
        ui.warn(
            f"the text is short for {len(found)} of the inputs: {worst.names[0]} has {worst.columns:,} columns and saw "
            f"{least:,.0f} rows{' at one expert' if worst.matrices > 1 else ''}, so that its second moments are not of "
            f"full rank; some {enough:,} tokens would do (this text: {wish.text.ids.size:,})"
        )
    return {name: one.thin for one in found for name in one.names}
