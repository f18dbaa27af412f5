"""Merges several calibrations of one model into one: sums and counts are added.

Files of the older imatrix form contain means and numbers of chunks instead of sums and numbers of
rows. As in load_imatrix (tools/imatrix/imatrix.cpp), each chunk of such a file counts as many rows
as it has tokens, and as many for each expert.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quant.calibration import imatrix, moments, moments_writer
from quant.calibration.imatrix import Imatrix, ImatrixEntry
from quant.calibration.imatrix_collector import ImatrixCollector
from quant.calibration.imatrix_writer import build_imatrix_file
from quant.calibration.moments import MomentsFile, StoredMoments
from quant.calibration.moments_writer import MomentsInput, MomentSums, MomentsWriter
from quant.errors import UserError

DEFAULT_CHUNK_TOKENS = 512  # tokens of a chunk if none of the files records it
MERGE_HINT = "merge files of one model only"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The outcome of a merge; `notes` are remarks for the user."""

    tensors: int
    chunks: int
    notes: tuple[str, ...]


def merge_imatrix(paths: Sequence[Path]) -> tuple[MergeResult, list[bytes]]:
    """Return the pieces of the merged importance matrix. Raises UserError if the files are of
    different models.
    """
    files = [imatrix.load_imatrix(path) for path in paths]
    values = sorted({file.chunk_size for file in files if file.chunk_size})
    usual = values[-1] if values else DEFAULT_CHUNK_TOKENS
    notes = list(_chunk_size_notes([(file.path, file.chunk_size) for file in files]))
    notes += [
        f"{file.path} has the older form: its chunks are taken as {usual} tokens each"
        for file in files
        if not file.chunk_size
    ]
    sums = ImatrixCollector()
    with_folds = [file for file in files if file.transform is not None]
    for file in files:
        _require_same_weights(files[0], file)
        if with_folds and file.transform not in (None, with_folds[0].transform):
            raise _folds_error(with_folds[0], file)
        for name, entry in file.entries.items():
            _add_entry(sums, name, entry, 1 if file.chunk_size else usual, file)
    notes += _model_notes([file for file in files if file.model])
    chunks = sum(file.chunks for file in files)
    datasets = list(dict.fromkeys(text for file in files for text in file.datasets))
    models, folds = {file.model for file in files}, {file.transform for file in files}
    model, transform = (values.pop() if len(values) == 1 else None for values in (models, folds))
    return MergeResult(len(sums.sums), chunks, tuple(notes)), build_imatrix_file(
        sums.sums, sums.counts, datasets, chunks, usual, model or "", transform
    )


def merge_moments(paths: Sequence[Path], out: Path) -> MergeResult:
    """Write the merged moments to `out`, one input at a time. Raises UserError if the files are of
    different models.
    """
    files = [moments.load_moments(path) for path in paths]
    first = files[0]
    for file in files[1:]:
        _require_same_moments(first, file)
    texts = [text for file in files for text in file.origin.texts]
    notes = list(_chunk_size_notes([(file.path, file.origin.chunk_size) for file in files]))
    if len(set(texts)) < len(texts):
        notes.append("two of the files have read the same text: it counts twice")
    datasets = tuple(dict.fromkeys(name for file in files for name in file.origin.datasets))
    chunks = sum(file.origin.chunks for file in files)
    about = replace(first.origin, chunks=chunks, texts=tuple(texts), datasets=datasets)
    inputs = [
        MomentsInput(stored.names, stored.columns, stored.matrices, stored.mixed)
        for stored in first.inputs
    ]
    with MomentsWriter(out, about, inputs) as writer:
        for number, stored in enumerate(first.inputs):
            writer.write_input(number, _add_up([_counterpart(file, stored) for file in files]))
        writer.finish()
    return MergeResult(len(first.names), chunks, tuple(notes))


def _require_same_weights(first: Imatrix, file: Imatrix) -> None:
    """Raise UserError if the files have different weights. Weights of experts may be missing from a
    file if no token used them.
    """
    for complete, partial in ((first, file), (file, first)):
        missing = [
            name
            for name in complete.entries.keys() - partial.entries.keys()
            if name.startswith("blk.")
        ]
        if missing := sorted(name for name in missing if "_exps" not in name):
            names = missing[0] + (f" and {len(missing) - 1} more" if missing[1:] else "")
            raise UserError(
                f"{partial.path} is of another model than {complete.path}: it has no {names}",
                hint=MERGE_HINT,
            )
    for name in sorted(first.entries.keys() & file.entries.keys()):
        if first.entries[name].count != file.entries[name].count:
            sizes = f"{file.entries[name].count} values, not {first.entries[name].count}"
            raise UserError(
                f"{file.path} is of another model than {first.path}: {name} has {sizes}",
                hint=MERGE_HINT,
            )


def _add_entry(
    sums: ImatrixCollector, name: str, entry: ImatrixEntry, rows: int, file: Imatrix
) -> None:
    values, counts = entry.sums().astype(np.float64) * rows, np.array(entry.divisors) * rows
    if name not in sums.sums:
        sums.sums[name], sums.counts[name] = values, counts
        return
    divisor_count = max(len(counts), len(sums.counts[name]))
    if divisor_count % len(counts) or divisor_count % len(sums.counts[name]):
        raise UserError(
            f"{file.path} counts {name} {len(counts)} times, the others {len(sums.counts[name])}",
            hint=MERGE_HINT,
        )
    sums.counts[name] = _repeat_counts(sums.counts[name], divisor_count) + _repeat_counts(
        counts, divisor_count
    )
    sums.sums[name] = sums.sums[name].reshape(divisor_count, -1) + values.reshape(divisor_count, -1)


def _repeat_counts(counts: moments_writer.F64, many: int) -> moments_writer.F64:
    return np.repeat(counts, many // len(counts))


def _require_same_moments(first: MomentsFile, file: MomentsFile) -> None:
    if file.origin.transform != first.origin.transform:
        raise _folds_error(first, file)
    if differing := sorted(first.names ^ file.names):
        raise UserError(
            f"{file.path} is of another model than {first.path}:"
            f" only one of them has {differing[0]}",
            hint=MERGE_HINT,
        )
    if differing := sorted(_mixed_weights(first) ^ _mixed_weights(file)):
        raise UserError(
            f"{file.path} and {first.path} measured {differing[0]} in different places:"
            " before and after attention",
            hint="calibrate both with one version, and without --flash-attn on",
        )
    for stored in first.inputs:
        counterpart = _counterpart(file, stored)
        if (counterpart.names, counterpart.columns, counterpart.matrices) != (
            stored.names,
            stored.columns,
            stored.matrices,
        ):
            size = f"{counterpart.matrices} x {counterpart.columns} columns"
            sizes = f"{size}, not {stored.matrices} x {stored.columns}"
            raise UserError(
                f"{file.path} is of another model than {first.path}: {stored.names[0]} has {sizes}",
                hint=MERGE_HINT,
            )
    if file.origin.model != first.origin.model:
        raise UserError(
            f"{file.path} was collected from another file of this model than {first.path}",
            hint=MERGE_HINT,
        )


def _folds_error(first: Imatrix | MomentsFile, file: Imatrix | MomentsFile) -> UserError:
    return UserError(
        f"{file.path} was collected with other folds than {first.path}", hint=MERGE_HINT
    )


def _mixed_weights(file: MomentsFile) -> set[str]:
    return {name for stored in file.inputs if stored.mixed for name in stored.names}


def _counterpart(file: MomentsFile, stored_input: StoredMoments) -> StoredMoments:
    stored = file.input_of(stored_input.names[0])
    assert stored is not None
    return stored


def _add_up(seconds: Sequence[StoredMoments]) -> MomentSums:
    """Return the sums of these moments, added in float64. An expert that received no token in any
    of them has a count of 0.
    """
    shape = seconds[0]
    second = np.zeros((shape.matrices, shape.columns, shape.columns))
    first = np.zeros((shape.matrices, shape.columns))
    counts = np.zeros(shape.matrices)
    for stored in seconds:
        for matrix, count in enumerate(stored.counts):
            if count:
                second[matrix] += stored.sums(matrix)
                first[matrix] += stored.first_sums(matrix)
        counts += stored.counts
    return MomentSums(second, first, counts)


def _model_notes(files: Sequence[Imatrix]) -> Iterator[str]:
    """Yield a note if the files record different models."""
    if other := next((file for file in files if file.model != files[0].model), None):
        yield (
            f"{other.path} was collected from another file than {files[0].path}: useful if both are"
            " the same or nearly the same model, misleading otherwise"
        )


def _chunk_size_notes(files: Sequence[tuple[Path, int]]) -> Iterator[str]:
    sizes = {size for _, size in files if size}
    if len(sizes) > 1:
        listing = ", ".join(f"{path} in chunks of {size}" for path, size in files if size)
        yield f"the texts were read in chunks of different sizes: {listing}"
