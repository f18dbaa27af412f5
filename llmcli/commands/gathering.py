"""What a method needs to have measured, where the user gave no file of it: gathered once, with the
text that ships or a text of the user's, and kept in the cache under the source and that text. A
killed run goes on where it was.
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
from quant.errors import Refusal
from quant.imatrix import Imatrix
from quant.moments import Moments, load
from quant.pending import Pending

if TYPE_CHECKING:
    from llmcli.commands.scorers import Side
    from llmcli.config import Config
    from llmcli.ui import UI
    from quant.evaluate import Chunks
    from quant.source import Source

UBATCH = 512


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted of a source: second `moments`, or sums of squares alone; `why` is told, as a
    flag. The first `chunks` (None: all) of `text` are read, of the text that ships where that is
    empty.
    """

    source: "Source"
    why: str
    moments: bool
    threads: int
    dry_run: bool = False
    text: tuple[Path, ...] = ()
    chunks: int | None = None


def gathered(
    wish: Wish, sums: Imatrix | None, config: "Config", ui: "UI"
) -> tuple[Imatrix | None, Moments | None]:
    """`sums` as they were given, or gathered; and second moments where they are wanted. Raises
    Refusal.
    """
    texts.given(wish.text)  # a mistake in them is told before a model is run
    if wish.dry_run:
        ui.note(
            f"{wish.why} would gather first what enters each weight; types and sizes do not depend on it"
        )
        return sums, None
    file = _file(wish, config, ui)
    return (sums, load(file)) if wish.moments else (imatrix.load(file), None)


def pending(wish: Wish, sums: Imatrix | None) -> Pending:
    """The moments that a wish's text will give; `sums` may be of the same."""
    names = tuple(str(path) for path in wish.text) or (texts.SHIPPED,)
    known = sums if sums and sums.datasets == names else None
    return Pending(
        _key(wish), names, known.chunks if known else 0, known.chunk_size if known else 0
    )


def reading(path: Path, wish: Wish, ui: "UI") -> "tuple[Side, Chunks, tuple[str, ...]]":
    """A file as it reads the text of a wish, the chunks of that, and their texts' names."""
    n_ctx, flash = (
        min(CTX, container.read(path).context_length or CTX),
        "off" if wish.moments else "auto",
    )
    subject = side(
        path, RunOptions(n_ctx, wish.threads or None, None, UBATCH, UBATCH, "auto", flash), ui
    )
    try:
        return (subject, *texts.chunks(subject, wish.text, wish.chunks, None, ui))
    except Refusal as error:  # all but its length was looked at before
        hint = "a longer --calibration text; without one, the text that ships is read"
        raise Refusal(str(error), hint=hint if wish.text else error.hint) from None


def long_enough(wish: Wish, ui: "UI") -> None:
    """Raise Refusal for a text of the user's that is too short, before a copy is made: the list of
    words tells it.
    """
    if wish.text:
        with bases.wordlist(wish.source.origin or wish.source) as file:
            reading(file, wish, ui)


def _file(wish: Wish, config: "Config", ui: "UI") -> Path:
    source = wish.source.origin or wish.source
    # samples miss a small edit of the source, its time does not; it is no part of what a plan
    # depends on
    folder, key = config.cache / "calibrations", f"{_key(wish)}-{source.changed:x}"
    sums, second = folder / f"{key}.imatrix.gguf", folder / f"{key}.moments.gguf"
    wanted, what = (second, "second moments") if wish.moments else (sums, "an imatrix")
    make_folder(folder)
    with store.locked(folder / f"{key}.lock", ui, f"the calibration of {source.name}"):
        if wanted.exists():
            ui.note(f"{wish.why} needs {what}: what an earlier run gathered, {wanted}")
            return wanted
        bases.check(source)
        if bases.copied(source):
            long_enough(wish, ui)
        with bases.runnable(source, config, ui, wish.threads) as path:
            subject, some, names = reading(path, wish, ui)
            ui.note(
                f"{wish.why} needs {what}: gathered from {some.ids.size:,} tokens of {names[0]}, into {wanted}"
            )
            target = second if wish.moments else None
            calibrating.run(
                calibrating.Wish(subject, source.fingerprint, some, names, sums, target), config, ui
            )
    return wanted


def _key(wish: Wish) -> str:
    """All that decides what would be gathered, as far as the source's fingerprint tells it."""
    words = (
        b"".join(text.words.encode() for text in texts.given(wish.text))
        if wish.text
        else texts.digest()
    )
    said = [
        (wish.source.origin or wish.source).fingerprint,
        hashlib.sha256(words).hexdigest(),
        CTX,
        version(),
    ]
    if wish.text:
        said.append([[text.name for text in texts.given(wish.text)], wish.chunks])
    elif wish.chunks is not None:
        said.append(wish.chunks)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
