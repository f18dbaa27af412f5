"""Collects the statistics that a quantization method needs and the user did not provide.

They are collected once, from the built-in text or the user's, and cached under the source and the
text. An interrupted run resumes.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli import file_lock
from llmcli.atomic_files import make_folder
from llmcli.model_loader import float_copy
from llmcli.runtime.binding.library import version
from llmcli.runtime.requests.request import RunOptions
from llmcli.workflows.calibration import calibrate, texts
from llmcli.workflows.evaluation.text import CTX, side
from quant.calibration import imatrix
from quant.calibration.expected_moments import Pending
from quant.calibration.imatrix import Imatrix
from quant.calibration.moments import Moments, load
from quant.errors import Refusal
from quant.model_file import read_header

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import Side
    from quant.evaluation.evaluate import Chunks
    from quant.source.source import Source

UBATCH = 512


@dataclass(frozen=True, slots=True)
class Wish:
    """The statistics of a source that are needed: second moments (`needs_moments`), or only mean
    squares.

    `reason`: the flag that needs them, for messages. `text_files`: files to read, empty for the
    built-in text; `max_chunks`: chunks to read, None for all.
    """

    source: "Source"
    why: str
    moments: bool
    threads: int
    dry_run: bool = False
    text: tuple[Path, ...] = ()
    chunks: int | None = None


def gathered(
    request: Wish, sums: Imatrix | None, config: "Config", ui: "UI"
) -> tuple[Imatrix | None, Moments | None]:
    """Return the user's imatrix and the collected second moments; without moments, the collected
    imatrix.

    With `dry_run` nothing is collected. Raises UserError.
    """
    texts.given(request.text)  # a mistake in the texts is reported before a model is run
    if request.dry_run:
        ui.note(
            f"{request.why} would first collect statistics of each weight's inputs; "
            "types and sizes do not depend on them"
        )
        return sums, None
    file = _statistics_file(request, config, ui)
    return (sums, load(file)) if request.moments else (imatrix.load(file), None)


def pending(request: Wish, sums: Imatrix | None) -> Pending:
    """Describe the moments that will be collected; `sums` may be from the same text."""
    text_names = tuple(str(path) for path in request.text) or (texts.SHIPPED,)
    same_text_sums = sums if sums and sums.datasets == text_names else None
    return Pending(
        _cache_key(request),
        text_names,
        same_text_sums.chunks if same_text_sums else 0,
        same_text_sums.chunk_size if same_text_sums else 0,
    )


def reading(path: Path, request: Wish, ui: "UI") -> "tuple[Side, Chunks, tuple[str, ...]]":
    """Return the model as it reads the requested text, the text's chunks, and the names of the
    texts.

    Raises UserError.
    """
    n_ctx, flash_attn = (
        min(CTX, read_header.read(path).context_length or CTX),
        "off" if request.moments else "auto",
    )
    model_side = side(
        path,
        RunOptions(n_ctx, request.threads or None, None, UBATCH, UBATCH, "auto", flash_attn),
        ui,
    )
    try:
        return (model_side, *texts.chunks(model_side, request.text, request.chunks, None, ui))
    except Refusal as error:  # only the length was not checked before
        hint = "use a longer --calibration text; without one, the built-in text is read"
        raise Refusal(str(error), hint=hint if request.text else error.hint) from None


def long_enough(request: Wish, ui: "UI") -> None:
    """Raise UserError if the user's text is too short, before a float copy is made; uses only the
    tokenizer.
    """
    if request.text:
        with float_copy.wordlist(request.source.origin or request.source) as file:
            reading(file, request, ui)


def _statistics_file(request: Wish, config: "Config", ui: "UI") -> Path:
    source = request.source.origin or request.source
    # The fingerprint samples the source and may miss a small edit; its time stamp does not. The
    # time stamp is not part of a plan.
    folder, key = config.cache / "calibrations", f"{_cache_key(request)}-{source.changed:x}"
    imatrix_file, moments_file = folder / f"{key}.imatrix.gguf", folder / f"{key}.moments.gguf"
    target_file, description = (
        (moments_file, "second moments") if request.moments else (imatrix_file, "an imatrix")
    )
    make_folder(folder)
    with file_lock.locked(folder / f"{key}.lock", ui, f"the calibration of {source.name}"):
        if target_file.exists():
            ui.note(f"{request.why} needs {description}: using {target_file} from an earlier run")
            return target_file
        float_copy.check(source)
        if float_copy.copied(source):
            long_enough(request, ui)
        with float_copy.runnable(source, config, ui, request.threads) as path:
            model_side, text_chunks, text_names = reading(path, request, ui)
            ui.note(
                f"{request.why} needs {description}: collecting from {text_chunks.ids.size:,} "
                "tokens "
                "of "
                f"{text_names[0]} into {target_file}"
            )
            moments_target = moments_file if request.moments else None
            calibrate.run(
                calibrate.Wish(
                    model_side,
                    source.fingerprint,
                    text_chunks,
                    text_names,
                    imatrix_file,
                    moments_target,
                ),
                config,
                ui,
            )
    return target_file


def _cache_key(request: Wish) -> str:
    """Return the cache key: the source's fingerprint, the text, the chunk length and the llama.cpp
    version.
    """
    content = (
        b"".join(text.words.encode() for text in texts.given(request.text))
        if request.text
        else texts.digest()
    )
    key_parts = [
        (request.source.origin or request.source).fingerprint,
        hashlib.sha256(content).hexdigest(),
        CTX,
        version(),
    ]
    if request.text:
        key_parts.append([[text.name for text in texts.given(request.text)], request.chunks])
    elif request.chunks is not None:
        key_parts.append(request.chunks)
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:32]
