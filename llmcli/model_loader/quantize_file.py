"""From a name or path to a model file: open the source, choose the output path, write the plan.
Shared by quantize, convert and pull.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.quantize.plan import Plan
    from quant.quantize.write import WriteReport
    from quant.source.blob import Blob
    from quant.source.source import Source


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """How a source is read.

    `pre`: llama.cpp's name of the pre-tokenizer. `keep_source`: download a checkpoint whole.
    """

    tokenizer: Path | None = None
    pre: str | None = None
    allow_pickle: bool = False
    keep_source: bool = False


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """How a file is written.

    `threads`: 0 uses all cores. `force`: write the file even if it is up to date.
    """

    out: Path | None = None
    threads: int = 0
    dry_run: bool = False
    force: bool = False


def quantize_file(
    source: Path,
    file_type: str,
    out: Path,
    ui: "UI",
    *,
    blobs: "Mapping[str, Blob] | None" = None,
    allow_pickle: bool = False,
) -> Path:
    """Quantize a file or folder to `out` for another command; progress and notes go to stderr only.

    Raises UserError.
    """
    from llmcli.atomic_files import make_folder
    from llmcli.model_loader.plan_notes import print_plan_notes
    from quant.quantize.plan import plan_quantization

    make_folder(out.parent)
    plan = plan_quantization(open_source(source, allow_pickle=allow_pickle, blobs=blobs), file_type)
    print_plan_notes(plan, ui)
    report = write_with_progress(plan, out, ui)
    if not report.already_finished:
        ui.note(
            f"{out.name}: {format_size(plan.bytes_after)}, {plan.bits_per_weight:.2f} bits per weight, "
            f"{report.seconds:.1f} s"
        )
    return out


def open_source(
    path: Path,
    *,
    tokenizer: Path | None = None,
    pre: str | None = None,
    allow_pickle: bool = False,
    blobs: "Mapping[str, Blob] | None" = None,
) -> "Source":
    """Open a GGUF file or a checkpoint folder as a source that can be planned.

    A folder's tokenizer is verified before any weight is read. `blobs` are safetensors that are
    stored outside the folder, such as on the hub; they are read ahead. Raises UserError, and
    UsageError for checkpoint options with a GGUF.
    """
    from llmcli.errors import UsageError
    from quant.quantize.write import open_gguf

    path = path.expanduser()
    if path.is_dir():
        from llmcli.model_loader.verify_tokenizer import verify_tokenizer
        from quant.convert import checkpoint_source
        from quant.quantize.read_ahead import read_ahead

        words = tokenizer.expanduser() if tokenizer else path
        opened = checkpoint_source.open_checkpoint(
            path, tokenizer=words, pre=pre, allow_pickle=allow_pickle, blobs=blobs
        )
        opened = verify_tokenizer(opened, words, pre)
        return read_ahead(opened) if blobs else opened
    flags = {"--tokenizer": tokenizer, "--pre": pre, "--allow-pickle": allow_pickle}
    if flag := next((name for name, value in flags.items() if value), None):
        raise UsageError(
            f"{flag} applies to checkpoint folders; {path} is not a folder",
            hint=f"leave out {flag}",
        )
    return open_gguf(path)


def find_model(
    text: str, config: "Config", ui: "UI", keep_source: bool = False
) -> "FetchedModel | None":
    """Return the model from the catalog or the hub; None if `text` is a path.

    A checkpoint that is not on this disk stays on the hub (`blobs`) unless `keep_source`.
    """
    path = Path(text).expanduser()
    if path.exists() or text.endswith(".gguf") or text.startswith((".", "/", "~")):
        return None
    from llmcli.catalog import fetch, remote_checkpoint

    model = fetch.find_model(text, config, ui)
    if model is None and not keep_source:
        model = remote_checkpoint.open_remote_checkpoint(text, config, ui)
    return model or fetch.fetch_model(text, config, ui)


@contextmanager
def output_path(
    plan: "Plan",
    model: "FetchedModel | None",
    out: Path | None,
    config: "Config",
    ui: "UI",
    *,
    is_custom: bool,
    dry_run: bool,
) -> Iterator[Path]:
    """Yield the output path: `out`, a file next to a local source, or a file in the store, which is
    recorded afterwards.

    `is_custom`: the tensor types differ from the file type's recipe, so that the store cannot hold
    the file. Raises UsageError.
    """
    if is_custom:
        require_output_path(model, out)
    if out is not None:
        yield out.expanduser()
    elif model is None:
        yield default_output_path(plan)
    else:
        from llmcli import file_lock
        from llmcli.atomic_files import make_folder
        from llmcli.catalog import store

        target = store.quantized_path(config, model, plan.file_type.name)
        if dry_run:
            yield target
            return
        with file_lock.hold_lock(store.lock_path(config, model.name), ui, model.name):
            make_folder(target.parent)
            yield target
            if target.exists():
                store.record_quantized(config, model, plan.file_type.name, model.record)


def require_output_path(model: "FetchedModel | None", out: Path | None) -> None:
    """Raise UsageError if a custom mixture of a model in the store has no output path."""
    from llmcli.errors import UsageError

    if model is not None and out is None:
        raise UsageError(
            "a custom type mixture needs an output path",
            hint=f"add -o {model.name}-custom.gguf",
        )


def default_output_path(plan: "Plan") -> Path:
    """Return NAME-TYPE.gguf in the source's folder; a type already in the name is replaced."""
    import re

    name = re.sub(
        r"[-._](I?Q\d\w*|TQ\d_0|MXFP4_MOE|B?F16|F32|FP16|FP32)$",
        "",
        plan.source.name,
        flags=re.IGNORECASE,
    )
    return plan.source.path.absolute().parent / f"{name}-{plan.file_type.name}.gguf"


def write_with_progress(
    plan: "Plan", out: Path, ui: "UI", *, threads: int = 0, force: bool = False
) -> "WriteReport":
    """Write the plan's file under a progress bar; print a note if the file is finished already or
    was resumed.
    """
    from quant.quantize import write

    if not force and write.is_finished(plan, out):
        ui.note(
            f"{plan.files(out)[0]} is up to date, made from this source with these settings: "
            "nothing to do (--force makes it again)"
        )
        return write.write_model(plan, out, threads=threads)
    with ui.bar(f"quantize to {plan.file_type.name}", len(plan.steps), unit="tensors") as bar:

        def watch(progress: write.WriteProgress) -> None:
            bar.advance(1)
            bar.describe(
                f"{progress.step.weight.name} {progress.step.weight.type} -> {progress.step.type}"
            )

        report = write.write_model(plan, out, threads=threads, force=force, on_tensor=watch)
        bar.describe(f"quantize to {plan.file_type.name}")
    if report.resumed_bytes:
        ui.note(
            f"resumed an earlier run: {report.resumed} tensors, {format_size(report.resumed_bytes)}, "
            "were already written"
        )
    return report
