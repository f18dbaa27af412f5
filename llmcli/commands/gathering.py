"""What a method needs to have measured, where the user gave no file of it: gathered once with the text that ships and
kept in the cache, under the source and that text. A killed run goes on where it was.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli.catalog import store
from llmcli.catalog.partial import make_folder
from llmcli.commands import bases, calibrating, texts
from llmcli.commands.eval import CTX, side
from llmcli.runtime.binding.library import version
from llmcli.runtime.request import RunOptions
from quant import container, imatrix
from quant.imatrix import Imatrix
from quant.moments import Moments, load

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.source import Source

UBATCH = 512


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted of a source: second `moments`, or sums of squares alone; `why` is told, as a flag."""

    source: "Source"
    why: str
    moments: bool
    threads: int
    dry_run: bool = False


def gathered(
    wish: Wish, sums: Imatrix | None, config: "Config", ui: "UI"
) -> tuple[Imatrix | None, Moments | None]:  # fmt: skip
    """`sums` as they were given, or gathered; and second moments where they are wanted. Raises Refusal."""
    if wish.dry_run:
        ui.note(f"{wish.why} would gather first what enters each weight; types and sizes do not depend on it")
        return sums, None
    file = _file(wish, config, ui)
    return (sums, load(file)) if wish.moments else (imatrix.load(file), None)


def _file(wish: Wish, config: "Config", ui: "UI") -> Path:
    source = wish.source.origin or wish.source
    folder, key = config.cache / "calibrations", _key(source)
    sums, second = folder / f"{key}.imatrix.gguf", folder / f"{key}.moments.gguf"
    wanted, what = (second, "second moments") if wish.moments else (sums, "an imatrix")
    make_folder(folder)
    with store.locked(folder / f"{key}.lock", ui, f"the calibration of {source.name}"):
        if wanted.exists():
            ui.note(f"{wish.why} needs {what}: what an earlier run gathered, {wanted}")
            return wanted
        bases.check(source)
        with bases.runnable(source, config, ui, wish.threads) as path:
            n_ctx, flash = min(CTX, container.read(path).context_length or CTX), "off" if wish.moments else "auto"
            subject = side(path, RunOptions(n_ctx, wish.threads or None, None, UBATCH, UBATCH, "auto", flash), ui)
            some, names = texts.chunks(subject, [], None, None, ui)
            ui.note(f"{wish.why} needs {what}: gathered from {some.ids.size:,} tokens of {names[0]}, into {wanted}")
            target = second if wish.moments else None
            calibrating.run(calibrating.Wish(subject, source.fingerprint, some, names, sums, target), config, ui)
    return wanted


def _key(source: "Source") -> str:
    """All that decides what would be gathered."""
    said = [source.fingerprint, hashlib.sha256(texts.digest()).hexdigest(), CTX, version()]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
