"""Quantize a model that is named on the command line: open its weights, choose the output path, and
write the file. The commands `quantize`, `convert` and `pull` share these steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llmcli.text_input import expand_path
from llmcli.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmcli.catalog.fetch import FetchedModel
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.quantize.plan import Plan
    from quant.quantize.write import WriteReport
    from quant.source.blob import Blob
    from quant.source.source import Source


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """The options of a command for reading the source: a GGUF file or a checkpoint."""

    tokenizer: Path | None = None  # folder of tokenizer files; None: that of the checkpoint
    pre: str | None = None  # llama.cpp's name of the pre-tokenizer; None: chosen automatically
    allow_pickle: bool = False  # whether pickled weights may be read
    no_mtp: bool = False  # whether to leave out the layers that predict further tokens
    # Whether to download a checkpoint on the hub, instead of reading its weights from the hub.
    keep_source: bool = False
    # Whether to go on if llama.cpp would encode text differently, for an unknown reason.
    accept_tokenizer_differences: bool = False

    @property
    def flags(self) -> "Mapping[str, object]":
        """The values of the options that apply to checkpoint folders only, by flag."""
        return {
            "--tokenizer": self.tokenizer,
            "--pre": self.pre,
            "--allow-pickle": self.allow_pickle,
            "--no-mtp": self.no_mtp,
            "--accept-tokenizer-differences": self.accept_tokenizer_differences,
        }


DEFAULT_SOURCE_SETTINGS = SourceSettings()


@dataclass(frozen=True, slots=True)
class ConverterSettings:
    """The options of a command for llama.cpp's converter."""

    # Who converts a checkpoint; auto: llmcli itself where it has the model's family.
    converter: Literal["auto", "native", "llama.cpp"] = "auto"
    mmproj: bool = False  # whether to convert the vision or audio part to a file of its own


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """The options of a command for writing the file."""

    out: Path | None = None  # output path; None: chosen from the names of the model and the type
    threads: int = 0  # 0 uses all cores
    dry_run: bool = False  # whether to print the plan and write nothing
    force: bool = False  # whether to write the file even if it is up to date


def quantize_file(
    source: Path,
    file_type: str,
    out: Path,
    config: "Config",
    ui: "UI",
    *,
    blobs: "Mapping[str, Blob] | None" = None,
    allow_pickle: bool = False,
) -> Path:
    """Quantize a GGUF file or a checkpoint folder to the file `out`, and return its path. Progress
    and notes are printed on stderr, because the calling command prints its own result.

    `blobs`: safetensors files of the checkpoint that are not in the folder, by name. Raises
    UserError.
    """
    from llmcli.atomic_files import make_folder
    from llmcli.model_loader.plan_notes import print_plan_notes
    from quant.quantize import write
    from quant.quantize.plan import plan_quantization

    make_folder(out.parent)
    reading = SourceSettings(allow_pickle=allow_pickle)
    with open_by_converter(source, reading, ConverterSettings(), config, ui, blobs) as opened:
        plan = plan_quantization(opened.source, file_type)
        print_plan_notes(plan, ui)
        if not write.is_finished(plan, out):
            opened.write_weights()
        report = write_with_progress(plan, out, ui)
    if not report.already_finished:
        ui.note(
            f"{out.name}: {format_size(plan.bytes_after)}, "
            f"{plan.bits_per_weight:.2f} bits per weight, {report.seconds:.1f} s"
        )
    return out


def open_source(
    path: Path,
    settings: SourceSettings = DEFAULT_SOURCE_SETTINGS,
    blobs: "Mapping[str, Blob] | None" = None,
) -> "Source":
    """Open a GGUF file or a checkpoint folder as a Source, from which a quantization is planned.
    The tokenizer of a checkpoint is checked against llama.cpp before any weight is read.

    `blobs`: safetensors files of the checkpoint that are not in the folder, such as files on the
    hub, by name. They are read ahead while earlier weights are quantized.

    Raises UserError, and UsageError if `path` is a file and an option for checkpoints is given.
    """
    from llmcli.errors import UsageError
    from quant.quantize.write import open_gguf

    if path.is_dir():
        from llmcli.model_loader.verify_tokenizer import verify_tokenizer
        from quant.convert import checkpoint_source
        from quant.quantize.read_ahead import read_ahead

        tokenizer_folder = settings.tokenizer or path
        source = checkpoint_source.open_checkpoint(
            path,
            tokenizer=tokenizer_folder,
            pre=settings.pre,
            allow_pickle=settings.allow_pickle,
            with_prediction=not settings.no_mtp,
            blobs=blobs,
        )
        source = verify_tokenizer(
            source, tokenizer_folder, settings.pre, settings.accept_tokenizer_differences
        )
        return read_ahead(source) if blobs else source
    if flag := next((name for name, value in settings.flags.items() if value), None):
        raise UsageError(
            f"{flag} applies to checkpoint folders; {path} is not a folder",
            hint=f"leave out {flag}",
        )
    return open_gguf(path)


def find_model(
    text: str, config: "Config", ui: "UI", keep_source: bool = False
) -> "FetchedModel | None":
    """Return the model that `text` names in the catalog or on the hub. Return None if `text` is the
    path of a file or folder instead.

    A model that is not on this disk is downloaded, except a checkpoint on the hub: only its small
    files are fetched, and its weights are read from the hub later (`blobs` of the result).
    `keep_source` downloads it, too. Raises UserError.
    """
    path = expand_path(text)
    if path.exists() or text.endswith(".gguf") or text.startswith((".", "/", "~")):
        return None
    from llmcli.catalog import fetch, remote_checkpoint

    model = fetch.find_model(text, config, ui)
    if model is None and not keep_source:
        model = remote_checkpoint.open_remote_checkpoint(text, config, ui)
    return model or fetch.fetch_model(text, config, ui)


@dataclass(frozen=True)
class OpenedSource:
    """A source that can be planned. `write_weights` must be called before its weights are read:
    llama.cpp's converter, where it is used, converts them only then. `converter`: who converts a
    checkpoint, "native" or "llama.cpp"; "" for a GGUF.
    """

    source: "Source"
    converter: str = ""
    write_weights: "Callable[[], None]" = lambda: None


@contextmanager
def open_by_converter(
    path: Path,
    reading: SourceSettings,
    conversion: ConverterSettings,
    config: "Config",
    ui: "UI",
    blobs: "Mapping[str, Blob] | None" = None,
) -> Iterator[OpenedSource]:
    """Open a GGUF file or a checkpoint folder as a Source, as `open_source` does. If llmcli has no
    family for the checkpoint, or if the user has chosen it, llama.cpp's converter converts it; what
    that writes is deleted when the with block ends. Raises UserError.
    """
    from llmcli.errors import UsageError
    from llmcli.model_loader.llama_converter import choose_converter

    if reason := choose_converter.reason_for_llama_cpp(path, conversion.converter):
        from llmcli.model_loader.llama_converter.converted_source import convert_checkpoint

        if reading.tokenizer is not None:
            raise UsageError(
                "--tokenizer does not apply to llama.cpp's converter, which reads the files in the "
                "checkpoint's folder",
                hint=f"put the tokenizer's files into {path}",
            )
        with convert_checkpoint(
            path,
            reason,
            config,
            ui,
            pre=reading.pre,
            allow_pickle=reading.allow_pickle,
            no_mtp=reading.no_mtp,
            accept_tokenizer_differences=reading.accept_tokenizer_differences,
        ) as checkpoint:
            yield OpenedSource(
                checkpoint.source, choose_converter.LLAMA_CPP, checkpoint.write_weights
            )
        return
    source = open_source(path, reading, blobs)
    yield OpenedSource(source, "native" if path.is_dir() else "")


def find_convertible(
    text: str, conversion: ConverterSettings, config: "Config", ui: "UI", keep_source: bool = False
) -> "FetchedModel | None":
    """Return the model that `text` names, as `find_model` does. A checkpoint on the hub is
    downloaded whole if llama.cpp's converter is used, because that reads files. Raises UserError.
    """
    from llmcli.model_loader.llama_converter import choose_converter

    needs_files = conversion.mmproj or conversion.converter == choose_converter.LLAMA_CPP
    model = find_model(text, config, ui, keep_source or needs_files)
    return model and choose_converter.download_for_llama_cpp(
        text, model, conversion.converter, config, ui
    )


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
    """Yield the path to which the plan's file is to be written: `out`; without it, a path next to a
    local source, or a path in the store for a `model` of the catalog or the hub. In the last case,
    the path is locked during the `with` block, and the written file is recorded in the store.

    `is_custom`: whether tensor types differ from the recipe of the file type. The store holds only
    files that follow a recipe, so UsageError is raised for such a file without `out`.
    """
    if is_custom:
        require_output_path(model, out)
    if out is not None:
        from quant.quantize.output_files import require_output_name

        require_output_name(out)
        yield out
    elif model is None:
        yield default_output_path(plan.source, plan.file_type.name)
    else:
        from llmcli import file_lock
        from llmcli.atomic_files import make_folder
        from llmcli.catalog import remote_checkpoint, store

        target = store.quantized_path(config, model, plan.file_type.name)
        if dry_run:
            yield target
            return
        with file_lock.hold_lock(store.lock_path(config, model.name), ui, model.name):
            make_folder(target.parent)
            yield target
            if target.exists():
                record = remote_checkpoint.build_record(model)
                store.record_quantized(config, model, plan.file_type.name, record)


def require_output_path(model: "FetchedModel | None", out: Path | None) -> None:
    """Raise UsageError if a file with a custom mixture of types is to be made of a `model` of the
    catalog or the hub, and `out` is None: the store holds no such files.
    """
    from llmcli.errors import UsageError

    if model is not None and out is None:
        raise UsageError(
            "a custom type mixture needs an output path",
            hint=f"add -o {model.name}-custom.gguf",
        )


def default_output_path(source: "Source", file_type: str) -> Path:
    """Return the path NAME-TYPE.gguf in the folder of the source. TYPE replaces a type at the end of
    the source's name. If the source is in the Hugging Face cache, the path is in the current folder
    instead, because files that are added there would count as damage.
    """
    import re

    from quant.quantize.output_files import cached_repo

    folder, name = source.path.absolute().parent, source.name
    if repo := cached_repo(source.path):
        # the name of a checkpoint folder in the cache is a commit
        folder, name = Path(), repo.rpartition("/")[2] if source.path.is_dir() else name
    name = re.sub(
        r"[-._](I?Q\d\w*|TQ\d_0|MXFP4(?:_MOE)?|NVFP4|B?F16|F32|FP16|FP32)$",
        "",
        name,
        flags=re.IGNORECASE,
    )
    return folder.absolute() / f"{name}-{file_type}.gguf"


def write_with_progress(
    plan: "Plan", out: Path, ui: "UI", *, threads: int = 0, force: bool = False
) -> "WriteReport":
    """Write the plan's file to `out` and show a progress bar. Print a note if the file is already
    up to date, or if an interrupted run was resumed. `threads`: 0 uses all cores. `force`: write
    the file even if it is up to date.
    """
    from llmcli.catalog.remote_checkpoint import describe_check
    from quant.quantize import write

    if not force and write.is_finished(plan, out):
        ui.note(
            f"{plan.files(out)[0]} is up to date, made from this source with these settings: "
            "nothing to do (--force makes it again)"
        )
        return write.write_model(plan, out, threads=threads)
    with ui.bar(f"quantize to {plan.file_type.name}", len(plan.steps), unit="tensors") as bar:

        def show_progress(progress: write.WriteProgress) -> None:
            bar.advance(1)
            bar.describe(
                f"{progress.step.weight.name} {progress.step.weight.type} -> {progress.step.type}"
            )

        report = write.write_model(plan, out, threads=threads, force=force, on_tensor=show_progress)
        bar.describe(f"quantize to {plan.file_type.name}")
    if note := describe_check(plan.source.blobs):
        ui.note(note)
    if report.resumed_bytes:
        ui.note(
            f"resumed an earlier run: {report.resumed} tensors, "
            f"{format_size(report.resumed_bytes)}, were already written"
        )
    return report
