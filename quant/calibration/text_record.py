"""What statistics record about the texts that they were collected from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from quant.calibration.text_overlap import merge_samples


@dataclass(frozen=True, slots=True)
class TextRecord:
    """The texts of a calibration.

    - `names`: of their files, or of the built-in text.
    - `kinds`: what kinds of text they are, such as "code"; empty if unknown.
    - `windows`: a sample of their content (text_overlap.py); empty if unknown.
    """

    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    windows: tuple[int, ...] = ()

    @classmethod
    def merge(cls, records: "Sequence[TextRecord]") -> Self:
        """Return the record of the texts of several calibrations. What one of them does not know is
        unknown of all.
        """
        names, kinds = (
            tuple(dict.fromkeys(item for record in records for item in getattr(record, field)))
            for field in ("names", "kinds")
        )
        return cls(
            names,
            kinds if all(record.kinds for record in records) else (),
            merge_samples(record.windows for record in records)
            if all(record.windows for record in records)
            else (),
        )


UNKNOWN_TEXT = TextRecord()
