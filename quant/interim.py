"""What a calibration has gathered so far, on the disk, so that a killed run goes on: written whole
beside the old one, then renamed.

Everything is as it is in memory, in float64: a run that was killed ends with the same bytes as one
that was not. It knows sums and files, no models.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quant.calibrate import F64, Sums
from quant.gather import Seconds, held
from quant.momentfile import Input
from quant.records import Records

EVERY = 20.0  # seconds of work between two savings
SHARE = 20  # and this often the time that the last one took
DESCRIPTION = 0


@dataclass
class Progress:
    """Sums of all weights so far. Of the inputs whose second moments are gathered, `finished` are
    in their file, `seconds` are under way; `chunks` were read in this pass.
    """

    sums: Sums
    seconds: Seconds | None
    finished: set[int]
    chunks: int = 0


class Interim:
    """The file at `path`; `head` is all that the sums depend on. One with another head counts as
    none.
    """

    def __init__(self, path: Path, head: dict[str, Any], inputs: Sequence[Input]) -> None:
        self.path, self.head, self.inputs = path, head, inputs
        self._next = time.monotonic() + EVERY

    def load(self) -> Progress | None:
        """What an earlier run left; None where there is nothing, or not of this."""
        file = Records.resume(self.path, write=False)
        if file is None:
            return None
        try:
            return self._read(file) if file.head == self.head and file.numbers else None
        finally:
            file.close()

    def _read(self, file: Records) -> Progress | None:
        told = json.loads(file.get(DESCRIPTION))
        if file.numbers != set(range(told["records"])):  # cut off
            return None
        group = told["group"]
        progress = Progress(
            Sums(), Seconds(self.inputs, group) if group else None, set(told["finished"])
        )
        progress.chunks = told["chunks"]
        for name, (sums, counts) in told["sums"].items():
            progress.sums.sums[name], progress.sums.counts[name] = np.empty(sums), np.empty(counts)
        for number, array in enumerate(_arrays(progress), 1):
            array.reshape(-1)[:] = np.frombuffer(file.get(number), np.float64)
        return progress

    def due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() >= self._next

    def save(self, progress: Progress) -> None:
        """Let the disk have it all."""
        began = time.monotonic()
        beside = self.path.with_name(self.path.name + ".new")
        arrays = list(_arrays(progress))
        told = {
            "finished": sorted(progress.finished),
            "chunks": progress.chunks,
            "records": 1 + len(arrays),
            "group": progress.seconds.numbers if progress.seconds else [],
            "sums": {
                name: (sums.shape, progress.sums.counts[name].shape)
                for name, sums in progress.sums.sums.items()
            },
        }
        file = Records.begin(beside, self.head)
        try:
            description = {DESCRIPTION: json.dumps(told).encode()}
            file.put(
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
        beside.replace(self.path)
        self._next = time.monotonic() + max(EVERY, SHARE * (time.monotonic() - began))

    def discard(self) -> None:
        """There is nothing to go on with any more."""
        self.path.unlink(missing_ok=True)
        self.path.with_name(self.path.name + ".new").unlink(missing_ok=True)


def nbytes(inputs: Sequence[Input], group: Sequence[int]) -> int:
    """Bytes on the disk, about, while a group is under way: the file, and the one that replaces it."""
    return 2 * sum(held(inputs[number]) for number in group)


def _arrays(progress: Progress) -> Iterator[F64]:
    """All that is saved, in an order that the description tells."""
    for name, sums in progress.sums.sums.items():
        yield sums
        yield progress.sums.counts[name]
    if progress.seconds:
        for gathered in progress.seconds.gathered.values():
            for array in (gathered.second, gathered.first, gathered.counts):
                assert array.dtype == np.float64
                yield array
