"""`llmcli quantize`: parse, plan, write, tell. What a tensor becomes is quant's affair."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcli.commands.file_types import with_types
from llmcli.commands.pickles import AllowPickle, offered
from llmcli.commands.show import start
from llmcli.ui import UI, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmcli.catalog.fetch import Model
    from llmcli.config import Config
    from quant.blob import Blob
    from quant.quantize import Plan, Report
    from quant.source import Source

DEFAULT = "Q4_K_M"
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="DIR", help="Take the tokenizer's files from another folder."),
]
Pre = Annotated[
    str | None,
    typer.Option("--pre", metavar="NAME", help="llama.cpp's name of the pre-tokenizer, where it is not known."),
]
KeepSource = Annotated[
    bool, typer.Option("--keep-source", help="Download a checkpoint whole and keep it, instead of reading it once.")
]
TensorTypes = Annotated[
    list[str] | None,
    typer.Option("--tensor-type", metavar="REGEX=TYPE", help="A type for the tensors whose name fits; repeatable."),
]
HeadType = Annotated[str | None, typer.Option(metavar="TYPE", help="A type for output.weight.")]
EmbeddingType = Annotated[str | None, typer.Option(metavar="TYPE", help="A type for token_embd.weight.")]
LeaveHead = Annotated[bool, typer.Option("--leave-output-tensor", help="Leave output.weight as it is.")]
Pure = Annotated[bool, typer.Option("--pure", help="One type for all matrices, without the recipe's mixture.")]
ImatrixFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="An importance matrix that steers the rounding, as llama-imatrix makes it."),
]
SplitSize = Annotated[
    str | None,
    typer.Option(metavar="N(M|G)", help="Write shards NAME-00001-of-0000N.gguf with at most so much of tensors each."),
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("quantize")(with_types(quantize))


@offered()
def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A GGUF file, a checkpoint folder, or a model's name.")],
    quant: Annotated[
        str | None, typer.Option("-t", "--type", metavar="TYPE", help=f"The file type; {DEFAULT} unless told.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="OUT", help="The new file; NAME-TYPE.gguf beside SRC unless told."),
    ] = None,
    tensor_type: TensorTypes = None,
    output_tensor_type: HeadType = None,
    token_embedding_type: EmbeddingType = None,
    leave_output_tensor: LeaveHead = False,
    pure: Pure = False,
    imatrix: ImatrixFile = None,
    split_max_size: SplitSize = None,
    tokenizer: Tokenizer = None,
    pre: Pre = None,
    allow_pickle: AllowPickle = False,
    keep_source: KeepSource = False,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 takes all cores.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Make it anew although it is there.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Make no connection.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Make a smaller GGUF from a checkpoint folder or a GGUF, in one pass, on all cores."""
    from quant import imatrix as importance
    from quant import quantize as road
    from quant import recipe
    from quant.planning import shard_size

    config, ui = start(json, offline, allow_pickle)
    model = find_model(source, config, ui, keep_source)
    kind = recipe.parse(quant or (model.quant if model else None) or DEFAULT)
    if quant and quant.upper() in recipe.ALIASES:
        ui.note(f"{quant.upper()} means {kind.name}")
    wishes = recipe.Wishes(
        tuple(tensor_type or ()), pure, output_tensor_type, token_embedding_type, leave_output_tensor
    )
    weights = importance.load(imatrix.expanduser()) if imatrix else None
    most = shard_size(split_max_size) if split_max_size else 0
    place, blobs = (model.path, model.blobs) if model else (Path(source), None)
    opened = open_source(place, tokenizer=tokenizer, pre=pre, allow_pickle=allow_pickle, blobs=blobs)
    plan = road.plan(opened, kind.name, wishes, weights, most)
    tell(plan, ui)
    mixed = wishes.any or bool(imatrix or most)
    with placed(plan, model, out, config, ui, mixed=mixed, dry_run=dry_run) as target:
        report = None if dry_run else write(plan, target, ui, threads=threads, force=force)
    close(plan, target, report, ui)


def quantize_to(
    source: Path, file_type: str, out: Path, ui: UI, *, blobs: "Mapping[str, Blob] | None" = None,
    allow_pickle: bool = False,
) -> Path:  # fmt: skip
    """Quantize a file or folder to `out` for another command: progress and notes go to stderr only."""
    from llmcli.catalog.partial import make_folder
    from quant import quantize as road

    make_folder(out.parent)
    plan = road.plan(open_source(source, allow_pickle=allow_pickle, blobs=blobs), file_type)
    tell(plan, ui)
    report = write(plan, out, ui)
    if not report.present:
        ui.note(
            f"{out.name}: {size(plan.bytes_after)}, {plan.bits_per_weight:.2f} bits per weight, {report.seconds:.1f} s"
        )
    return out


def open_source(
    path: Path, *, tokenizer: Path | None = None, pre: str | None = None, allow_pickle: bool = False,
    blobs: "Mapping[str, Blob] | None" = None,
) -> "Source":  # fmt: skip
    """A GGUF file or a checkpoint folder, ready to be planned; a GGUF has its own tokenizer and no pickles.

    A folder's tokenizer is proven here, before a weight is read. `blobs` are its safetensors where they are
    not in it; they are read ahead.
    """
    from llmcli.commands.proving import proven
    from llmcli.errors import UsageError
    from quant import convert
    from quant import quantize as road
    from quant.ahead import ahead

    path = path.expanduser()
    if path.is_dir():
        words = tokenizer.expanduser() if tokenizer else path
        opened = convert.open_folder(path, tokenizer=words, pre=pre, allow_pickle=allow_pickle, blobs=blobs)
        opened = proven(opened, words, pre)
        return ahead(opened) if blobs else opened
    flags = {"--tokenizer": tokenizer, "--pre": pre, "--allow-pickle": allow_pickle}
    if flag := next((name for name, value in flags.items() if value), None):
        raise UsageError(f"{flag} is for checkpoint folders; {path} is none", hint=f"leave {flag} out")
    return road.open_gguf(path)


def find_model(text: str, config: "Config", ui: UI, keep_source: bool = False) -> "Model | None":
    """The catalog's or the hub's model; None for what is plainly a path, which needs no catalog.

    A checkpoint that is not here stays on the hub (`blobs`), unless `keep_source`.
    """
    path = Path(text).expanduser()
    if path.exists() or text.endswith(".gguf") or text.startswith((".", "/", "~")):
        return None
    from llmcli.catalog import fetch, straight

    here = fetch.find(text, config, ui)
    if here is None and not keep_source:
        here = straight.open_checkpoint(text, config, ui)
    return here or fetch.obtain(text, config, ui)


@contextmanager
def placed(
    plan: "Plan", model: "Model | None", out: Path | None, config: "Config", ui: UI, *, mixed: bool, dry_run: bool
) -> Iterator[Path]:
    """Where the new file goes: where told, beside a local source, or in the store, which is told of it."""
    from llmcli.errors import UsageError

    if out is not None:
        yield out.expanduser()
    elif model is None:
        yield beside(plan)
    elif mixed:
        raise UsageError("a mixture of one's own needs a name of its own", hint=f"add -o {model.name}-custom.gguf")
    else:
        from llmcli.catalog import store
        from llmcli.catalog.partial import make_folder

        target = store.derived_path(config, model, plan.file_type.name)
        if dry_run:
            yield target
            return
        with store.locked(store.lock_file(config, model.name), ui, model.name):
            make_folder(target.parent)
            yield target
            if target.exists():
                store.record_derived(config, model, plan.file_type.name, model.record)


def beside(plan: "Plan") -> Path:
    """NAME-TYPE.gguf beside the source, a type already in the name replaced."""
    import re

    name = re.sub(r"[-._](I?Q\d\w*|TQ\d_0|MXFP4_MOE|B?F16|F32|FP16|FP32)$", "", plan.source.name, flags=re.IGNORECASE)
    return plan.source.path.absolute().parent / f"{name}-{plan.file_type.name}.gguf"


def tell(plan: "Plan", ui: UI) -> None:
    """Say before the work begins what the user should know of it."""
    for note in plan.notes:
        ui.note(note)
    for warning in plan.source.warnings:
        ui.warn(warning)
    if plan.requantized:
        ui.warn(
            f"the source is quantized already ({', '.join(plan.requantized)}): rounding it again adds its error "
            "(the table's error column) to the error it has; a float checkpoint gives a better file"
        )
    if plan.unweighed:
        some = ", ".join(plan.unweighed[:3]) + (" …" if len(plan.unweighed) > 3 else "")
        ui.note(f"the imatrix does not speak of {len(plan.unweighed)} tensors, rounded without it: {some}")
    if plan.fallbacks:
        changes = ", ".join(sorted({f"{step.wanted} -> {step.type}" for step in plan.fallbacks}))
        ui.note(f"{len(plan.fallbacks)} of {len(plan.steps)} tensors do not fill whole blocks with a row: {changes}")


def write(plan: "Plan", out: Path, ui: UI, *, threads: int = 0, force: bool = False) -> "Report":
    """Run the plan under a bar; says so where there was nothing to do, or less than all."""
    from quant import quantize as road

    if not force and road.finished(plan, out):
        there = f"{plan.files(out)[0]} is there already, made from this source with these settings"
        ui.note(f"{there}: nothing to do (--force makes it anew)")
        return road.run(plan, out, threads=threads)
    with ui.bar(f"quantize to {plan.file_type.name}", len(plan.steps), unit="tensors") as bar:

        def watch(progress: road.Progress) -> None:
            bar.advance(1)
            bar.describe(f"{progress.step.weight.name} {progress.step.weight.type} -> {progress.step.type}")

        report = road.run(plan, out, threads=threads, force=force, watch=watch)
        bar.describe(f"quantize to {plan.file_type.name}")
    if report.resumed_bytes:
        made = f"{report.resumed} tensors, {size(report.resumed_bytes)}, were made then"
        ui.note(f"went on where an earlier run had stopped: {made}")
    return report


def close(plan: "Plan", out: Path, report: "Report | None", ui: UI) -> None:
    """The closing table, or the document of --json."""
    from quant.quantize import tally

    lines = report.tallies if report else tally(plan)
    if ui.json:
        ui.result(_document(plan, out, report))
        return
    columns = ("type", "tensors", "before", "after", "bits/weight", "error", "seconds")
    rows = [
        (line.type, str(line.tensors), size(line.bytes_before), size(line.bytes_after), f"{line.bits_per_weight:.2f}",
         "" if line.error is None else f"{line.error:.2%}", "" if line.seconds is None else f"{line.seconds:.2f}")
        for line in lines
    ]  # fmt: skip
    total = (
        "total",
        str(len(plan.steps)),
        size(plan.bytes_before),
        size(plan.bytes_after),
        f"{plan.bits_per_weight:.2f}",
        "",
        f"{report.seconds:.2f}" if report else "",
    )
    ui.table(columns, [*rows, total], right=columns[1:])
    files = plan.files(out)
    named = str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    if report is None:
        ui.text(f"would write {named} ({size(plan.nbytes)}); nothing was written")
    else:
        ui.text(f"{named} ({size(plan.nbytes)}, {report.seconds:.1f} s)")


def _document(plan: "Plan", out: Path, report: "Report | None") -> dict[str, Any]:
    from quant.quantize import tally

    return {
        "path": str(plan.files(out)[0]),
        "files": [str(file) for file in plan.files(out)],
        "file_type": plan.file_type.name,
        "bytes": plan.nbytes,
        "tensor_bytes": plan.bytes_after,
        "source_tensor_bytes": plan.bytes_before,
        "bits_per_weight": plan.bits_per_weight,
        "tensors": len(plan.steps),
        "fallbacks": len(plan.fallbacks),
        "requantized_from": list(plan.requantized),
        "imatrix": str(plan.imatrix.path) if plan.imatrix else None,
        "without_importance": len(plan.unweighed),
        "types": {
            line.type: {
                "tensors": line.tensors,
                "bytes": line.bytes_after,
                "source_bytes": line.bytes_before,
                "relative_rmse": line.error,
                "elapsed_ms": None if line.seconds is None else line.seconds * 1000,
            }
            for line in (report.tallies if report else tally(plan))
        },
        "dry_run": report is None,
        "present": bool(report and report.present),
        "resumed_tensors": report.resumed if report else 0,
        "resumed_bytes": report.resumed_bytes if report else 0,
        "sha256": _sha256(report) if report and not plan.most else None,
        "elapsed_ms": report.seconds * 1000 if report else 0.0,
    }


def _sha256(report: "Report") -> str:
    """The finished file's digest: taken while it was written, else read now."""
    from llmcli.catalog.store import measure

    return report.sha256 or measure(report.out).sha256
