"""Merges several calibrations of one model into one, by adding their sums and counts.

Files of the older imatrix form contain means and numbers of chunks instead of sums and numbers of
rows. As in load_imatrix (tools/imatrix/imatrix.cpp), each chunk of such a file counts as one row
for each of its tokens, and every expert gets this count.
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
from quant.calibration.text_record import TextRecord
from quant.errors import UserError

DEFAULT_CHUNK_TOKENS = 512  # tokens of a chunk if none of the files records it
MERGE_HINT = "merge files of one model only"


@dataclass(frozen=True, slots=True)
class MergeResult:
    """The outcome of a merge: the number of weights (`tensors`), the number of chunks of all files
    together, and remarks for the user (`notes`).
    """

    tensors: int
    chunks: int
    notes: tuple[str, ...]


def merge_imatrix(paths: Sequence[Path]) -> tuple[MergeResult, list[bytes]]:
    """Merge importance matrix files. Return the outcome, and the content of the merged file as byte
    strings to be written one after another. Raises UserError if the files are of different models.
    """
    files = [imatrix.load_imatrix(path) for path in paths]
    chunk_sizes = sorted({file.chunk_size for file in files if file.chunk_size})
    default_chunk_size = chunk_sizes[-1] if chunk_sizes else DEFAULT_CHUNK_TOKENS
    notes = list(_chunk_size_notes([(file.path, file.chunk_size) for file in files]))
    notes += [
        f"{file.path} has the older form: its chunks are taken as {default_chunk_size} tokens each"
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
            _add_entry(sums, name, entry, 1 if file.chunk_size else default_chunk_size, file)
    notes += _model_notes([file for file in files if file.model])
    chunks = sum(file.chunks for file in files)
    text = TextRecord.merge([file.text for file in files])
    models, folds = {file.model for file in files}, {file.transform for file in files}
    model, transform = (values.pop() if len(values) == 1 else None for values in (models, folds))
    return MergeResult(len(sums.sums), chunks, tuple(notes)), build_imatrix_file(
        sums.sums, sums.counts, text, chunks, default_chunk_size, model or "", transform
    )


def merge_moments(paths: Sequence[Path], out: Path) -> MergeResult:
    """Merge moments files and write the result to `out`, one input at a time. Raises UserError if
    the files are of different models.
    """
    files = [moments.load_moments(path) for path in paths]
    first = files[0]
    for file in files[1:]:
        _require_same_moments(first, file)
    texts = [text for file in files for text in file.origin.texts]
    notes = list(_chunk_size_notes([(file.path, file.origin.chunk_size) for file in files]))
    if len(set(texts)) < len(texts):
        notes.append("two of the files have read the same text: it counts twice")
    text = TextRecord.merge([file.origin.text for file in files])
    chunks = sum(file.origin.chunks for file in files)
    origin = replace(first.origin, chunks=chunks, texts=tuple(texts), text=text)
    inputs = [
        MomentsInput(stored.names, stored.columns, stored.matrices, stored.mixed)
        for stored in first.inputs
    ]
    with MomentsWriter(out, origin, inputs) as writer:
        for number, stored in enumerate(first.inputs):
            writer.write_input(number, _add_up([_counterpart(file, stored) for file in files]))
        writer.finish()
    return MergeResult(len(first.names), chunks, tuple(notes))


def _require_same_weights(first: Imatrix, file: Imatrix) -> None:
    """Raise UserError if one file has weights that the other does not have, or has them in other
    sizes. Weights of experts may be missing, because llama-imatrix omits them if no token used an
    expert.
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
    """Add the entry of the weight `name` to `sums`. Each of its divisors counts `rows` rows: 1, or
    the chunk size for files of the older form. Files may differ in how many divisors a weight has,
    if one number is a multiple of the other; the fewer divisors are then repeated.
    """
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


def _repeat_counts(counts: moments_writer.F64, length: int) -> moments_writer.F64:
    return np.repeat(counts, length // len(counts))


def _require_same_moments(first: MomentsFile, file: MomentsFile) -> None:
    """Raise UserError if the moments of `file` cannot be added to those of `first`: if the folds,
    the weights, the sizes, the mixed inputs or the model differ.
    """
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
    """Return the names of the weights whose moments are those of attention's mixtures."""
    return {name for stored in file.inputs if stored.mixed for name in stored.names}


def _counterpart(file: MomentsFile, stored_input: StoredMoments) -> StoredMoments:
    """Return the input in `file` that corresponds to an input of another file."""
    stored = file.input_of(stored_input.names[0])
    assert stored is not None
    return stored


def _add_up(moments_of_files: Sequence[StoredMoments]) -> MomentSums:
    """Return the sums of the moments of one input in several files, added in float64. An expert
    that received no token in any file has a count of 0.
    """
    shape = moments_of_files[0]
    total = MomentSums.zeros(shape.matrices, shape.columns)
    for stored in moments_of_files:
        for matrix, count in enumerate(stored.counts):
            if count:
                total.triangle(matrix).add_matrix(stored.sums(matrix))
                total.first[matrix] += stored.first_sums(matrix)
        total.counts[...] += stored.counts
    return total


def _model_notes(files: Sequence[Imatrix]) -> Iterator[str]:
    """Yield a note if the files were collected from different model files."""
    if differing := next((file for file in files if file.model != files[0].model), None):
        yield (
            f"{differing.path} was collected from another file than {files[0].path}: useful if both are"
            " the same or nearly the same model, misleading otherwise"
        )


def _chunk_size_notes(files: Sequence[tuple[Path, int]]) -> Iterator[str]:
    """Yield a note if the files were collected with chunks of different sizes."""
    sizes = {size for _, size in files if size}
    if len(sizes) > 1:
        listing = ", ".join(f"{path} in chunks of {size}" for path, size in files if size)
        yield f"the texts were read in chunks of different sizes: {listing}"
