"""A source as a file that llama.cpp runs: itself where it is a GGUF, else a copy in floats for as
long as it is needed.

The copy lies in the cache under the source's fingerprint. A run that is killed leaves it to be gone
on with.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import store
from llmcli.catalog.partial import make_folder
from llmcli.errors import UserError
from llmcli.units import size
from quant import quantize as road
from quant.writer import layout

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.quantize import Plan
    from quant.source import Source

FLOATS = ("F32", "F16", "BF16")


def copied(source: "Source") -> "Plan | None":
    """The copy in floats that this source needs to be run, None for a GGUF. What it holds in other
    types (FP8, packed codes) is F32 there; folds are left out: what they make is held against what
    was there before.
    """
    source = source.origin or source
    if not source.path.is_dir():
        return None
    return road.plan(source, source.dtype if source.dtype in FLOATS else "F32")


def check(source: "Source", hint: str = "name a model that has its tokenizer") -> None:
    """Raise UserError for a source that could not read a text."""
    if not any(key == "tokenizer.ggml.tokens" for key, _ in source.entries):
        raise UserError(f"{source.name} has no vocabulary: it cannot read a text", hint=hint)


def room(wanted: dict[Path, int]) -> None:
    """Raise UserError where folders (and what they need) have too little space, those of one disk
    taken together.
    """
    disks: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in wanted.items():
        there = next(one for one in (folder, *folder.parents) if one.exists())
        _, held = disks.get(there.stat().st_dev, (there, 0))
        disks[there.stat().st_dev] = (there, held + nbytes)
    for folder, nbytes in disks.values():
        if nbytes > (have := shutil.disk_usage(folder).free):
            raise UserError(
                f"{folder} has {have:,} bytes free, {nbytes:,} are needed",
                hint=f"free {nbytes - have:,} bytes",
            )


@contextmanager
def wordlist(source: "Source") -> Iterator[Path]:
    """A file of the source's metadata without a weight, with which llama.cpp reads words into
    tokens.
    """
    with tempfile.TemporaryDirectory(prefix="llmcli-") as folder:
        file = Path(folder) / f"{source.name}.gguf"
        file.write_bytes(layout(source.entries, (), source.alignment).header)
        yield file


@contextmanager
def runnable(source: "Source", config: "Config", ui: "UI", threads: int = 0) -> Iterator[Path]:
    """The file to run; a copy is made for the time and removed."""
    plan = copied(source)
    if plan is None:
        yield source.path
        return
    folder = config.cache / "bases"
    path = folder / f"{source.fingerprint}-{plan.file_type.name}.gguf"
    make_folder(folder)
    with store.locked(path.with_suffix(".lock"), ui, f"a copy of {source.name}"):
        ui.note(
            f"{source.name} is run from a copy in {plan.file_type.name}: {size(plan.nbytes)} for the time"
        )
        with ui.bar(
            f"copy {source.name} in {plan.file_type.name}", len(plan.steps), unit="tensors"
        ) as bar:
            road.run(plan, path, threads=threads, watch=lambda progress: bar.advance(1))
        os.utime(
            path, ns=(source.changed, source.changed)
        )  # made again it is the same to who had read it
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
