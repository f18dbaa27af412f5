"""The state of a running calibration on disk, from which a killed run can resume. Each save writes
a new file and renames it over the previous one.

All sums are stored in float64, as they are in memory. Therefore a resumed run gives the same bytes
as an uninterrupted one.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quant.calibration.imatrix_collector import F64, ImatrixCollector
from quant.calibration.moments_collector import MomentsCollector, sums_bytes
from quant.calibration.moments_writer import MomentsInput
from quant.gguf.resumable_writer import sync_folder
from quant.json_dataclasses import parse_json
from quant.record_log import RecordLog

SAVE_SECONDS = 20.0  # minimum time between two saves
# minimum time between two saves, as a multiple of the duration of the last save
SAVE_TIME_FACTOR = 20
DESCRIPTION_RECORD = 0
MAX_LAYOUT_BYTES = 1 << 24  # maximum size of the first record


@dataclass
class CalibrationProgress:
    """The state of a calibration.

    `sums` are the sums of squares of all weights so far. Second moments are collected in several
    passes over the text, each for one group of inputs. `finished` are the numbers of the inputs
    whose moments are complete in the moments file, `moments` are the sums of the group in progress
    (None if there is no such group), and `chunks` is the number of chunks that the present pass has
    read.
    """

    sums: ImatrixCollector
    moments: MomentsCollector | None
    finished: set[int]
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The first record of a state file. `records`: the number of records. `group`: the inputs of
    the present pass; the other fields are those of CalibrationProgress, with the shapes of the sums
    of squares and of their counts by weight.
    """

    finished: tuple[int, ...]
    chunks: int
    records: int
    group: tuple[int, ...]
    sums: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


class CalibrationState:
    """The file at `path` that stores the state of a calibration. `head` contains everything that
    the sums depend on; a file with a different head is ignored. `inputs` are the inputs whose
    second moments are collected.
    """

    def __init__(self, path: Path, head: dict[str, Any], inputs: Sequence[MomentsInput]) -> None:
        self.path, self.head, self.inputs = path, head, inputs
        self._next_save = time.monotonic() + SAVE_SECONDS

    def load(self) -> CalibrationProgress | None:
        """Return the progress that an earlier run saved, or None if there is no complete file with
        this head.
        """
        file = RecordLog.resume(self.path, write=False)
        if file is None:
            return None
        try:
            return self._restore(file) if file.head == self.head and file.numbers else None
        except ValueError:  # a damaged description, or records of other sizes
            return None
        finally:
            file.close()

    def _restore(self, file: RecordLog) -> CalibrationProgress | None:
        """Return the progress in an open state file, or None if the file is incomplete. Raises
        ValueError if it is damaged.
        """
        if DESCRIPTION_RECORD not in file.numbers:
            return None
        layout = parse_json(StateLayout, file.read(DESCRIPTION_RECORD), MAX_LAYOUT_BYTES)
        if file.numbers != set(range(layout.records)):  # incomplete
            return None
        shapes = [shape for pair in layout.sums.values() for shape in pair]
        elements = sum(math.prod(shape) for shape in shapes)
        known_inputs = set(range(len(self.inputs)))
        if 8 * elements > self.path.stat().st_size or not set(layout.group) <= known_inputs:
            raise ValueError("its description does not fit its records")
        progress = CalibrationProgress(
            ImatrixCollector(),
            MomentsCollector(self.inputs, list(layout.group)) if layout.group else None,
            set(layout.finished),
        )
        progress.chunks = layout.chunks
        for name, (sums, counts) in layout.sums.items():
            progress.sums.sums[name], progress.sums.counts[name] = np.empty(sums), np.empty(counts)
        arrays = list(_arrays(progress))
        if len(arrays) != layout.records - 1:
            raise ValueError("its description does not fit its records")
        for number, array in enumerate(arrays, 1):
            array.reshape(-1)[:] = np.frombuffer(file.read(number), np.float64)
        return progress

    def is_due(self) -> bool:
        """Return whether it is time for the next save."""
        return time.monotonic() >= self._next_save

    def save(self, progress: CalibrationProgress) -> None:
        """Write the progress to disk, and choose the time of the next save so that saving takes
        only a small share of the run.
        """
        started = time.monotonic()
        new_path = self.path.with_name(self.path.name + ".new")
        arrays = list(_arrays(progress))
        layout = {
            "finished": sorted(progress.finished),
            "chunks": progress.chunks,
            "records": 1 + len(arrays),
            "group": progress.moments.numbers if progress.moments else [],
            "sums": {
                name: (sums.shape, progress.sums.counts[name].shape)
                for name, sums in progress.sums.sums.items()
            },
        }
        file = RecordLog.create(new_path, self.head)
        try:
            description = {DESCRIPTION_RECORD: json.dumps(layout).encode()}
            file.append(
                {
                    **description,
                    **{
                        n: array.reshape(-1).view(np.uint8).data
                        for n, array in enumerate(arrays, 1)
                    },
                }
            )
        finally:
            file.close()
        new_path.replace(self.path)
        sync_folder(self.path.parent)
        self._next_save = time.monotonic() + max(
            SAVE_SECONDS, SAVE_TIME_FACTOR * (time.monotonic() - started)
        )

    def discard(self) -> None:
        """Delete the state file, and the new file that a killed save has left."""
        self.path.unlink(missing_ok=True)
        self.path.with_name(self.path.name + ".new").unlink(missing_ok=True)


def disk_bytes(inputs: Sequence[MomentsInput], group: Sequence[int]) -> int:
    """Return about how many bytes the state takes on disk while the moments of `group` are
    collected: the present file, and the new file that replaces it. `group` contains numbers of
    `inputs`.
    """
    return 2 * sum(sums_bytes(inputs[number]) for number in group)


def _arrays(progress: CalibrationProgress) -> Iterator[F64]:
    """Yield all arrays of the state in the order of their records: sums and counts of each weight,
    then the moments of each input. load() writes into the yielded arrays.
    """
    for name, sums in progress.sums.sums.items():
        yield sums
        yield progress.sums.counts[name]
    if progress.moments:
        for moment_sums in progress.moments.sums.values():
            for array in (moment_sums.second, moment_sums.first, moment_sums.counts):
                assert array.dtype == np.float64
                yield array
