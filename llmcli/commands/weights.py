"""From a name or a path to a model file: the source opened, the place found, the plan carried out.

Shared by quantize, convert and pull. It knows files and plans, no flags; what is said of them is
closing.py's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.ui import UI, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmcli.catalog.fetch import Model
    from llmcli.config import Config
    from quant.blob import Blob
    from quant.quantize import Plan, Report
    from quant.source import Source


def quantize_to(
    source: Path,
    file_type: str,
    out: Path,
    ui: UI,
    *,
    blobs: "Mapping[str, Blob] | None" = None,
    allow_pickle: bool = False,
) -> Path:
    """Quantize a file or folder to `out` for another command: progress and notes go to stderr only."""
    from llmcli.catalog.partial import make_folder
    from llmcli.commands.closing import tell
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
    path: Path,
    *,
    tokenizer: Path | None = None,
    pre: str | None = None,
    allow_pickle: bool = False,
    blobs: "Mapping[str, Blob] | None" = None,
) -> "Source":
    """A GGUF file or a checkpoint folder, ready to be planned; a GGUF has its own tokenizer and no
    pickles.

    A folder's tokenizer is proven here, before a weight is read. `blobs` are its safetensors where
    they are not in it; they are read ahead.
    """
    from llmcli.errors import UsageError
    from quant import quantize as road

    path = path.expanduser()
    if path.is_dir():
        from llmcli.commands.proving import proven
        from quant import convert
        from quant.ahead import ahead

        words = tokenizer.expanduser() if tokenizer else path
        opened = convert.open_folder(
            path, tokenizer=words, pre=pre, allow_pickle=allow_pickle, blobs=blobs
        )
        opened = proven(opened, words, pre)
        return ahead(opened) if blobs else opened
    flags = {"--tokenizer": tokenizer, "--pre": pre, "--allow-pickle": allow_pickle}
    if flag := next((name for name, value in flags.items() if value), None):
        raise UsageError(
            f"{flag} is for checkpoint folders; {path} is none", hint=f"leave {flag} out"
        )
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
    plan: "Plan",
    model: "Model | None",
    out: Path | None,
    config: "Config",
    ui: UI,
    *,
    mixed: bool,
    dry_run: bool,
) -> Iterator[Path]:
    """Where the new file goes: where told, beside a local source, or in the store, which is told of
    it.
    """
    if mixed:
        check_named(model, out)
    if out is not None:
        yield out.expanduser()
    elif model is None:
        yield beside(plan)
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


def check_named(model: "Model | None", out: Path | None) -> None:
    """Refuse a mixture of one's own of a model in the store that says not where it goes."""
    from llmcli.errors import UsageError

    if model is not None and out is None:
        raise UsageError(
            "a mixture of one's own needs a name of its own",
            hint=f"add -o {model.name}-custom.gguf",
        )


def beside(plan: "Plan") -> Path:
    """NAME-TYPE.gguf beside the source, a type already in the name replaced."""
    import re

    name = re.sub(
        r"[-._](I?Q\d\w*|TQ\d_0|MXFP4_MOE|B?F16|F32|FP16|FP32)$",
        "",
        plan.source.name,
        flags=re.IGNORECASE,
    )
    return plan.source.path.absolute().parent / f"{name}-{plan.file_type.name}.gguf"


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
            bar.describe(
                f"{progress.step.weight.name} {progress.step.weight.type} -> {progress.step.type}"
            )

        report = road.run(plan, out, threads=threads, force=force, watch=watch)
        bar.describe(f"quantize to {plan.file_type.name}")
    if report.resumed_bytes:
        made = f"{report.resumed} tensors, {size(report.resumed_bytes)}, were made then"
        ui.note(f"went on where an earlier run had stopped: {made}")
    return report
