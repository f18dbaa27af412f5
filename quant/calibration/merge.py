"""Several calibrations of one model merged into one: sums and counts are added.

Files of the older imatrix form contain means and numbers of chunks instead of sums and rows. As in
load_imatrix (tools/imatrix/imatrix.cpp), each of their chunks counts as many rows as it has tokens,
for each expert alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quant.calibration import imatrix, moments, moments_writer
from quant.calibration.imatrix import Entry, Imatrix
from quant.calibration.imatrix_collector import Sums
from quant.calibration.moments import Moments, Second
from quant.calibration.moments_writer import Gathered, Input, MomentFile
from quant.errors import Refusal

USUAL = 512  # tokens of a chunk if no file records it
HINT = "merge files of one model only"


@dataclass(frozen=True, slots=True)
class Merged:
    """The outcome of a merge; `notes` are remarks for the user."""

    tensors: int
    chunks: int
    notes: tuple[str, ...]


def merged(paths: Sequence[Path]) -> tuple[Merged, list[bytes]]:
    """Return the pieces of the importance matrix that results from these files. Raises UserError if
    they are of different models.
    """
    files = [imatrix.load(path) for path in paths]
    values = sorted({file.chunk_size for file in files if file.chunk_size})
    usual = values[-1] if values else USUAL
    notes = list(_chunk_size_notes([(file.path, file.chunk_size) for file in files]))
    notes += [
        f"{file.path} has the older form: its chunks are taken as {usual} tokens each"
        for file in files
        if not file.chunk_size
    ]
    sums = Sums()
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
    return Merged(len(sums.sums), chunks, tuple(notes)), sums.file(
        datasets, chunks, usual, model or "", transform
    )


def merge_moments(paths: Sequence[Path], out: Path) -> Merged:
    """Write the moments that result from these files, one input at a time. Raises UserError if they
    are of different models.
    """
    files = [moments.load(path) for path in paths]
    first = files[0]
    for file in files[1:]:
        _require_same_moments(first, file)
    texts = [text for file in files for text in file.about.texts]
    notes = list(_chunk_size_notes([(file.path, file.about.chunk_size) for file in files]))
    if len(set(texts)) < len(texts):
        notes.append("two of the files have read the same text: it counts twice")
    datasets = tuple(dict.fromkeys(name for file in files for name in file.about.datasets))
    chunks = sum(file.about.chunks for file in files)
    about = replace(first.about, chunks=chunks, texts=tuple(texts), datasets=datasets)
    inputs = [
        Input(stored.names, stored.columns, stored.matrices, stored.mixed)
        for stored in first.inputs
    ]
    with MomentFile(out, about, inputs) as writer:
        for number, stored in enumerate(first.inputs):
            writer.put(number, _add_up([_counterpart(file, stored) for file in files]))
        writer.finish()
    return Merged(len(first.names), chunks, tuple(notes))


def _require_same_weights(first: Imatrix, file: Imatrix) -> None:
    """Raise UserError if the files are of different models. Weights of experts may be missing where
    no token used them.
    """
    for complete, partial in ((first, file), (file, first)):
        missing = [
            name
            for name in complete.entries.keys() - partial.entries.keys()
            if name.startswith("blk.")
        ]
        if missing := sorted(name for name in missing if "_exps" not in name):
            names = missing[0] + (f" and {len(missing) - 1} more" if missing[1:] else "")
            raise Refusal(
                f"{partial.path} is of another model than {complete.path}: it has no {names}",
                hint=HINT,
            )
    for name in sorted(first.entries.keys() & file.entries.keys()):
        if first.entries[name].count != file.entries[name].count:
            sizes = f"{file.entries[name].count} values, not {first.entries[name].count}"
            raise Refusal(
                f"{file.path} is of another model than {first.path}: {name} has {sizes}", hint=HINT
            )


def _add_entry(sums: Sums, name: str, entry: Entry, rows: int, file: Imatrix) -> None:
    values, counts = entry.sums().astype(np.float64) * rows, np.array(entry.divisors) * rows
    if name not in sums.sums:
        sums.sums[name], sums.counts[name] = values, counts
        return
    divisor_count = max(len(counts), len(sums.counts[name]))
    if divisor_count % len(counts) or divisor_count % len(sums.counts[name]):
        raise Refusal(
            f"{file.path} counts {name} {len(counts)} times, the others {len(sums.counts[name])}",
            hint=HINT,
        )
    sums.counts[name] = _repeat_counts(sums.counts[name], divisor_count) + _repeat_counts(
        counts, divisor_count
    )
    sums.sums[name] = sums.sums[name].reshape(divisor_count, -1) + values.reshape(divisor_count, -1)


def _repeat_counts(counts: moments_writer.F64, many: int) -> moments_writer.F64:
    return np.repeat(counts, many // len(counts))


def _require_same_moments(first: Moments, file: Moments) -> None:
    if file.about.transform != first.about.transform:
        raise _folds_error(first, file)
    if differing := sorted(first.names ^ file.names):
        raise Refusal(
            f"{file.path} is of another model than {first.path}:"
            f" only one of them has {differing[0]}",
            hint=HINT,
        )
    if differing := sorted(_mixed_weights(first) ^ _mixed_weights(file)):
        raise Refusal(
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
            raise Refusal(
                f"{file.path} is of another model than {first.path}: {stored.names[0]} has {sizes}",
                hint=HINT,
            )
    if file.about.model != first.about.model:
        raise Refusal(
            f"{file.path} was collected from another file of this model than {first.path}",
            hint=HINT,
        )


def _folds_error(first: Imatrix | Moments, file: Imatrix | Moments) -> Refusal:
    return Refusal(f"{file.path} was collected with other folds than {first.path}", hint=HINT)


def _mixed_weights(file: Moments) -> set[str]:
    return {name for stored in file.inputs if stored.mixed for name in stored.names}


def _counterpart(file: Moments, one: Second) -> Second:
    stored = file.of(one.names[0])
    assert stored is not None
    return stored


def _add_up(seconds: Sequence[Second]) -> Gathered:
    """Return the sums of these moments, added in float64. An expert without tokens in all of them
    stays without.
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
    return Gathered(second, first, counts)


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
