"""Make a file that llama.cpp can run from a source of weights: the GGUF itself, or a temporary copy
of a checkpoint as a GGUF of floats.

The copy is in the cache folder, under the fingerprint of the source. If its writing is interrupted,
the next run resumes it.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli import file_lock
from llmcli.atomic_files import make_folder
from llmcli.errors import UserError
from llmcli.model_loader.rehearsal.rehearse import rehearse_file
from llmcli.units import format_size
from quant.gguf.layout import lay_out_file
from quant.quantize import write
from quant.quantize.plan import plan_quantization
from quant.recipes.file_types import FLOAT_FILE_TYPES

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.quantize.plan import Plan
    from quant.source.source import Source


def float_copy_plan(source: "Source") -> "Plan | None":
    """Return the plan of the float copy that a source needs before llama.cpp can run it. Return
    None for a GGUF, which needs none.

    Weights that are not floats (FP8, packed codes) become F32. If `source` has folds applied, the
    source without folds is copied, because results are compared with it.
    """
    source = source.origin or source
    if not source.path.is_dir():
        return None
    return plan_quantization(source, source.dtype if source.dtype in FLOAT_FILE_TYPES else "F32")


def require_vocabulary(source: "Source", hint: str = "name a model that has its tokenizer") -> None:
    """Raise UserError, with `hint`, if the source has no vocabulary and so cannot read text."""
    if not any(key == "tokenizer.ggml.tokens" for key, _ in source.entries):
        raise UserError(f"{source.name} has no vocabulary, so it cannot read text", hint=hint)


def require_disk_space(bytes_by_folder: dict[Path, int]) -> None:
    """Raise UserError if a disk has too little free space. `bytes_by_folder`: how many bytes each
    folder needs. The folders need not exist. Those on the same disk are added up.
    """
    disks: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in bytes_by_folder.items():
        existing_folder = next(
            ancestor for ancestor in (folder, *folder.parents) if ancestor.exists()
        )
        _, needed_bytes = disks.get(existing_folder.stat().st_dev, (existing_folder, 0))
        disks[existing_folder.stat().st_dev] = (existing_folder, needed_bytes + nbytes)
    for folder, nbytes in disks.values():
        if nbytes > (free_bytes := shutil.disk_usage(folder).free):
            raise UserError(
                f"{folder} has {free_bytes:,} bytes free, but {nbytes:,} are needed",
                hint=f"free at least {nbytes - free_bytes:,} bytes",
            )


@contextmanager
def vocabulary_only_gguf(source: "Source") -> Iterator[Path]:
    """Yield the path of a temporary GGUF with the metadata of the source and no weights. It is
    enough to tokenize with llama.cpp, and is deleted after the `with` block.
    """
    with tempfile.TemporaryDirectory(prefix="llmcli-") as folder:
        file = Path(folder) / f"{source.name}.gguf"
        file.write_bytes(lay_out_file(source.entries, (), source.alignment).header)
        yield file


@contextmanager
def open_runnable(source: "Source", config: "Config", ui: "UI", threads: int = 0) -> Iterator[Path]:
    """Yield the path of a GGUF file of the source that llama.cpp can run. If it is a float copy, it
    is deleted after the `with` block. `threads`: 0 uses all cores.

    Raises UserError if the copy cannot be written.
    """
    plan = float_copy_plan(source)
    if plan is None:
        rehearse_file(source.path, config, ui)
        yield source.path
        return
    folder = config.cache / "bases"
    copy_path = folder / f"{source.fingerprint}-{plan.file_type.name}.gguf"
    make_folder(folder)
    with file_lock.hold_lock(copy_path.with_suffix(".lock"), ui, f"a copy of {source.name}"):
        ui.note(
            f"{source.name} is run from a temporary copy in {plan.file_type.name}: "
            f"{format_size(plan.nbytes)}"
        )
        with ui.bar(
            f"copy {source.name} in {plan.file_type.name}", len(plan.steps), unit="tensors"
        ) as bar:
            write.write_model(
                plan, copy_path, threads=threads, on_tensor=lambda progress: bar.advance(1)
            )
        # With the source's time stamp, a copy that is written again counts as the same file.
        os.utime(copy_path, ns=(source.newest_mtime_ns, source.newest_mtime_ns))
        try:
            rehearse_file(copy_path, config, ui)
            yield copy_path
        finally:
            copy_path.unlink(missing_ok=True)
