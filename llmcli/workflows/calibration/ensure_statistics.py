"""Collects the statistics that a quantization method or fold needs and the user has not provided.

They are collected from the built-in text or the user's text, and cached by source and text. An
interrupted run resumes.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmcli import file_lock
from llmcli.atomic_files import make_folder
from llmcli.model_loader import float_copy
from llmcli.runtime.binding.library import llama_cpp_version
from llmcli.runtime.requests.placement_options import NO_PLACEMENT, PlacementOptions
from llmcli.runtime.requests.request import RunOptions
from llmcli.workflows.calibration import calibrate, texts
from llmcli.workflows.evaluation.text import DEFAULT_CTX, prepare_side
from quant.calibration import imatrix
from quant.calibration.expected_moments import ExpectedMoments
from quant.calibration.imatrix import Imatrix
from quant.calibration.moments import MomentsFile, load_moments
from quant.errors import UserError
from quant.model_file import read_header

if TYPE_CHECKING:
    from llmcli.config import Config
    from llmcli.ui import UI
    from llmcli.workflows.evaluation.models import EvaluationSide
    from quant.calibration.text_record import TextRecord
    from quant.evaluation.evaluate import TextChunks
    from quant.source.source import Source

UBATCH_SIZE = 512


@dataclass(frozen=True, slots=True)
class StatisticsRequest:
    """The statistics that are needed for a source: second moments if `needs_moments`, otherwise an
    imatrix.

    `reason`: the option that needs the statistics, for messages. `dry_run`: collect nothing.
    `text_files`: the texts to read; empty: the built-in text. `max_chunks`: maximum number of
    chunks to read; None: all.
    """

    source: "Source"
    reason: str
    needs_moments: bool
    threads: int
    dry_run: bool = False
    text_files: tuple[Path, ...] = ()
    max_chunks: int | None = None
    placement: PlacementOptions | None = None


def ensure_statistics(
    request: StatisticsRequest, imatrix_given: Imatrix | None, config: "Config", ui: "UI"
) -> tuple[Imatrix | None, MomentsFile | None]:
    """Return the needed statistics: from the cache if possible, otherwise collect them.

    With `needs_moments`, return `imatrix_given` and the second moments; otherwise, the collected
    imatrix and None. With `dry_run`, nothing is collected, and the result is `imatrix_given` and
    None. Raises UserError.
    """
    texts.read_user_texts(request.text_files)  # report an unreadable text before a model is run
    if request.dry_run:
        ui.note(
            f"{request.reason} would first collect statistics of each weight's inputs; "
            "types and sizes do not depend on them"
        )
        return imatrix_given, None
    file = _statistics_file(request, config, ui)
    return (
        (imatrix_given, load_moments(file))
        if request.needs_moments
        else (imatrix.load_imatrix(file), None)
    )


def expected_statistics(request: StatisticsRequest, sums: Imatrix | None) -> ExpectedMoments:
    """Return a description of the second moments that will be collected during quantization.
    `sums`: the imatrix; if it was collected from the same text, its number of chunks is known.
    """
    text = texts.describe_texts(request.text_files)
    same_text_sums = sums if sums and sums.text.names == text.names else None
    return ExpectedMoments(
        _cache_key(request),
        text,
        same_text_sums.chunks if same_text_sums else 0,
        same_text_sums.chunk_size if same_text_sums else 0,
    )


def prepare_text(
    path: Path, request: StatisticsRequest, ui: "UI"
) -> "tuple[EvaluationSide, TextChunks, TextRecord]":
    """Return three values: the model with its run options, the chunks of the requested text, and
    what statistics record about it. Raises UserError if the text is too short.
    """
    n_ctx, flash_attn = (
        min(DEFAULT_CTX, read_header.read_header(path).context_length or DEFAULT_CTX),
        "off" if request.needs_moments else "auto",
    )
    model_side = prepare_side(
        path,
        RunOptions(
            n_ctx,
            request.threads or None,
            None,
            UBATCH_SIZE,
            UBATCH_SIZE,
            "auto",
            flash_attn,
        ).with_placement(request.placement or NO_PLACEMENT),
        ui,
    )
    try:
        return (
            model_side,
            *texts.calibration_chunks(model_side, request.text_files, request.max_chunks, None, ui),
        )
    except UserError as error:  # the text is too short
        hint = "use a longer --calibration text; without one, the built-in text is read"
        raise UserError(str(error), hint=hint if request.text_files else error.hint) from None


def require_long_text(request: StatisticsRequest, ui: "UI") -> None:
    """Raise UserError if the user's text is too short. This needs only the tokenizer, so it can be
    called before a slow float copy of the source is written.
    """
    if request.text_files:
        with float_copy.vocabulary_only_gguf(request.source.origin or request.source) as file:
            prepare_text(file, request, ui)


def _statistics_file(request: StatisticsRequest, config: "Config", ui: "UI") -> Path:
    """Return the cached file with the needed statistics. If it does not exist, collect the
    statistics.
    """
    source = request.source.origin or request.source
    # The fingerprint only samples the source and may miss a small edit. The time stamp shows such
    # an edit; it is only part of the file name, because plans must not depend on it.
    folder, key = config.cache / "calibrations", f"{_cache_key(request)}-{source.newest_mtime_ns:x}"
    imatrix_file, moments_file = folder / f"{key}.imatrix.gguf", folder / f"{key}.moments.gguf"
    target_file, description = (
        (moments_file, "second moments") if request.needs_moments else (imatrix_file, "an imatrix")
    )
    make_folder(folder)
    with file_lock.hold_lock(folder / f"{key}.lock", ui, f"the calibration of {source.name}"):
        if target_file.exists():
            ui.note(
                f"{request.reason} needs {description}: using {target_file} from an earlier run"
            )
            return target_file
        float_copy.require_vocabulary(source)
        if float_copy.float_copy_plan(source):
            require_long_text(request, ui)
        with float_copy.open_runnable(source, config, ui, request.threads) as path:
            model_side, text_chunks, text_record = prepare_text(path, request, ui)
            ui.note(
                f"{request.reason} needs {description}: collecting from {text_chunks.ids.size:,} "
                "tokens "
                "of "
                f"{text_record.names[0]} into {target_file}"
            )
            moments_target = moments_file if request.needs_moments else None
            calibrate.run_calibration(
                calibrate.CalibrationRequest(
                    model_side,
                    source.fingerprint,
                    text_chunks,
                    text_record,
                    imatrix_file,
                    moments_target,
                ),
                config,
                ui,
            )
    return target_file


def _cache_key(request: StatisticsRequest) -> str:
    """Return a hash of everything that the statistics depend on: the source's fingerprint, the
    text, the chunk length and the version of llama.cpp.
    """
    key_parts = [
        (request.source.origin or request.source).fingerprint,
        texts.digest_texts(request.text_files),
        DEFAULT_CTX,
        llama_cpp_version(),
    ]
    if request.text_files:
        key_parts.append(
            [[text.name for text in texts.read_user_texts(request.text_files)], request.max_chunks]
        )
    elif request.max_chunks is not None:
        key_parts.append(request.max_chunks)
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:32]
