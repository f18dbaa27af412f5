"""Several calibrations of one model made into one: sums add up, and so do counts.

Files of the older form tell means and chunks, not sums and rows: as in load_imatrix
(tools/imatrix/imatrix.cpp) a chunk of theirs counts as many rows as it has tokens, for each expert
alike. It knows files, no models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quant import imatrix, momentfile, moments
from quant.calibrate import Sums
from quant.errors import Refusal
from quant.imatrix import Entry, Imatrix
from quant.momentfile import Gathered, Input, MomentFile
from quant.moments import Moments, Second

USUAL = 512  # tokens of a chunk, where no file tells
HINT = "merge files of one model only"


@dataclass(frozen=True, slots=True)
class Merged:
    """What came of it: `notes` are what the reader should know."""

    tensors: int
    chunks: int
    notes: tuple[str, ...]


def merged(paths: Sequence[Path]) -> tuple[Merged, list[bytes]]:
    """The pieces of the importance matrix that these are together; raises Refusal for those of
    different models.
    """
    files = [imatrix.load(path) for path in paths]
    known = sorted({file.chunk_size for file in files if file.chunk_size})
    usual = known[-1] if known else USUAL
    notes = list(_contexts([(file.path, file.chunk_size) for file in files]))
    notes += [
        f"{file.path} is of the older form: its chunks are taken for {usual} tokens each"
        for file in files
        if not file.chunk_size
    ]
    sums = Sums()
    told = [file for file in files if file.transform is not None]
    for file in files:
        _same(files[0], file)
        if told and file.transform not in (None, told[0].transform):
            raise _other_folds(told[0], file)
        for name, entry in file.entries.items():
            _add(sums, name, entry, 1 if file.chunk_size else usual, file)
    notes += _kin([file for file in files if file.model])
    chunks = sum(file.chunks for file in files)
    datasets = list(dict.fromkeys(text for file in files for text in file.datasets))
    models, folds = {file.model for file in files}, {file.transform for file in files}
    model, transform = (known.pop() if len(known) == 1 else None for known in (models, folds))
    return Merged(len(sums.sums), chunks, tuple(notes)), sums.file(
        datasets, chunks, usual, model or "", transform
    )


def merge_moments(paths: Sequence[Path], out: Path) -> Merged:
    """Write the moments that these are together, one input at a time; raises Refusal for those of
    different models.
    """
    files = [moments.load(path) for path in paths]
    first = files[0]
    for file in files[1:]:
        _alike(first, file)
    texts = [text for file in files for text in file.about.texts]
    notes = list(_contexts([(file.path, file.about.chunk_size) for file in files]))
    if len(set(texts)) < len(texts):
        notes.append("two of the files have read the same text: it counts twice")
    datasets = tuple(dict.fromkeys(name for file in files for name in file.about.datasets))
    chunks = sum(file.about.chunks for file in files)
    about = replace(first.about, chunks=chunks, texts=tuple(texts), datasets=datasets)
    inputs = [Input(one.names, one.columns, one.matrices, one.mixed) for one in first.inputs]
    with MomentFile(out, about, inputs) as made:
        for number, one in enumerate(first.inputs):
            made.put(number, _sum([_of(file, one) for file in files]))
        made.finish()
    return Merged(len(first.names), chunks, tuple(notes))


def _same(first: Imatrix, file: Imatrix) -> None:
    """Refuse by name what is of another model; experts' weights may be missing where none was seen."""
    for one, other in ((first, file), (file, first)):
        missing = [
            name for name in one.entries.keys() - other.entries.keys() if name.startswith("blk.")
        ]
        if missing := sorted(name for name in missing if "_exps" not in name):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            why = f"{other.path} is of another model than {one.path}: it has no {missing[0]}{more}"
            raise Refusal(why, hint=HINT)
    for name in sorted(first.entries.keys() & file.entries.keys()):
        if first.entries[name].count != file.entries[name].count:
            sizes = f"{file.entries[name].count} values, not {first.entries[name].count}"
            raise Refusal(
                f"{file.path} is of another model than {first.path}: {name} has {sizes}", hint=HINT
            )


def _add(sums: Sums, name: str, entry: Entry, rows: int, file: Imatrix) -> None:
    values, counts = entry.sums().astype(np.float64) * rows, np.array(entry.divisors) * rows
    if name not in sums.sums:
        sums.sums[name], sums.counts[name] = values, counts
        return
    many = max(len(counts), len(sums.counts[name]))
    if many % len(counts) or many % len(sums.counts[name]):
        raise Refusal(
            f"{file.path} counts {name} {len(counts)} times, the others {len(sums.counts[name])}",
            hint=HINT,
        )
    sums.counts[name] = _spread(sums.counts[name], many) + _spread(counts, many)
    sums.sums[name] = sums.sums[name].reshape(many, -1) + values.reshape(many, -1)


def _spread(counts: momentfile.F64, many: int) -> momentfile.F64:
    return np.repeat(counts, many // len(counts))


def _alike(first: Moments, file: Moments) -> None:
    if file.about.transform != first.about.transform:
        raise _other_folds(first, file)
    if apart := sorted(first.names ^ file.names):
        raise Refusal(
            f"{file.path} is of another model than {first.path}: {apart[0]} is in one alone",
            hint=HINT,
        )
    if apart := sorted(_mixed(first) ^ _mixed(file)):
        why = f"{file.path} and {first.path} look at {apart[0]} in two places: before attention and behind it"
        raise Refusal(why, hint="calibrate both with one version, and without --flash-attn on")
    for one in first.inputs:
        other = _of(file, one)
        if (other.names, other.columns, other.matrices) != (one.names, one.columns, one.matrices):
            sizes = (
                f"{other.matrices} x {other.columns} columns, not {one.matrices} x {one.columns}"
            )
            raise Refusal(
                f"{file.path} is of another model than {first.path}: {one.names[0]} has {sizes}",
                hint=HINT,
            )
    if file.about.model != first.about.model:
        raise Refusal(
            f"{file.path} was gathered from another file of this model than {first.path}", hint=HINT
        )


def _other_folds(first: Imatrix | Moments, file: Imatrix | Moments) -> Refusal:
    return Refusal(f"{file.path} was gathered under other folds than {first.path}", hint=HINT)


def _mixed(file: Moments) -> set[str]:
    return {name for one in file.inputs if one.mixed for name in one.names}


def _of(file: Moments, one: Second) -> Second:
    found = file.of(one.names[0])
    assert found is not None
    return found


def _sum(seconds: Sequence[Second]) -> Gathered:
    """In float64. An expert that nobody has seen stays unseen."""
    one = seconds[0]
    second = np.zeros((one.matrices, one.columns, one.columns))
    first = np.zeros((one.matrices, one.columns))
    counts = np.zeros(one.matrices)
    for each in seconds:
        for matrix, count in enumerate(each.counts):
            if count:
                second[matrix] += each.sums(matrix)
                first[matrix] += each.first_sums(matrix)
        counts += each.counts
    return Gathered(second, first, counts)


def _kin(files: Sequence[Imatrix]) -> Iterator[str]:
    """What is said of files that tell what they were gathered from, and tell two things."""
    if other := next((file for file in files if file.model != files[0].model), None):
        yield (
            f"{other.path} was gathered from another file than {files[0].path}: of use where both are the same model "
            "in two types, or near kin; any other's steers wrongly"
        )


def _contexts(files: Sequence[tuple[Path, int]]) -> Iterator[str]:
    sizes = {size for _, size in files if size}
    if len(sizes) > 1:
        told = ", ".join(f"{path} in chunks of {size}" for path, size in files if size)
        yield f"the texts were read otherwise: {told}"
