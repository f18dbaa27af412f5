"""State of a running calibration on disk, so that a killed run can resume. Each save writes a new
file and renames it over the previous one.

All sums are stored in float64 as they are in memory, so that a resumed run gives the same bytes as
an uninterrupted one.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quant.calibration.imatrix_collector import F64, ImatrixCollector
from quant.calibration.moments_collector import MomentsCollector, sums_bytes
from quant.calibration.moments_writer import MomentsInput
from quant.record_log import RecordLog

SAVE_SECONDS = 20.0  # least seconds of work between two saves
# least work between two saves, as a multiple of the duration of the last save
SAVE_TIME_FACTOR = 20
DESCRIPTION_RECORD = 0


@dataclass
class CalibrationProgress:
    """The state of a calibration: the sums of all weights so far, and `chunks`, the number of
    chunks read in this pass.

    Of the inputs whose second moments are collected, those in `finished` are complete in the
    moments file, and those in `moments` are in progress.
    """

    sums: ImatrixCollector
    moments: MomentsCollector | None
    finished: set[int]
    chunks: int = 0


class CalibrationState:
    """The state file at `path`. `head` contains everything that the sums depend on; a state file
    with another head is ignored.
    """

    def __init__(self, path: Path, head: dict[str, Any], inputs: Sequence[MomentsInput]) -> None:
        self.path, self.head, self.inputs = path, head, inputs
        self._next = time.monotonic() + SAVE_SECONDS

    def load(self) -> CalibrationProgress | None:
        """Return the progress that an earlier run saved, or None if there is none for this head."""
        file = RecordLog.resume(self.path, write=False)
        if file is None:
            return None
        try:
            return self._restore(file) if file.head == self.head and file.numbers else None
        finally:
            file.close()

    def _restore(self, file: RecordLog) -> CalibrationProgress | None:
        description = json.loads(file.read(DESCRIPTION_RECORD))
        if file.numbers != set(range(description["records"])):  # incomplete
            return None
        group = description["group"]
        progress = CalibrationProgress(
            ImatrixCollector(),
            MomentsCollector(self.inputs, group) if group else None,
            set(description["finished"]),
        )
        progress.chunks = description["chunks"]
        for name, (sums, counts) in description["sums"].items():
            progress.sums.sums[name], progress.sums.counts[name] = np.empty(sums), np.empty(counts)
        for number, array in enumerate(_arrays(progress), 1):
            array.reshape(-1)[:] = np.frombuffer(file.read(number), np.float64)
        return progress

    def is_due(self) -> bool:
        """Return whether enough time has passed since the last save."""
        return time.monotonic() >= self._next

    def save(self, progress: CalibrationProgress) -> None:
        """Save the progress."""
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
        self._next = time.monotonic() + max(
            SAVE_SECONDS, SAVE_TIME_FACTOR * (time.monotonic() - started)
        )

    def discard(self) -> None:
        """Delete the state files."""
        self.path.unlink(missing_ok=True)
        self.path.with_name(self.path.name + ".new").unlink(missing_ok=True)


def disk_bytes(inputs: Sequence[MomentsInput], group: Sequence[int]) -> int:
    """Return the approximate bytes on disk while a group is in progress: of the state file, and of
    the next one that will replace it.
    """
    return 2 * sum(sums_bytes(inputs[number]) for number in group)


def _arrays(progress: CalibrationProgress) -> Iterator[F64]:
    """Yield all arrays of the state in the order of the description."""
    for name, sums in progress.sums.sums.items():
        yield sums
        yield progress.sums.counts[name]
    if progress.moments:
        for gathered in progress.moments.sums.values():
            for array in (gathered.second, gathered.first, gathered.counts):
                assert array.dtype == np.float64
                yield array
