"""Vectors as one NumPy file: float32 `[lines, values]`, in the order of the input. A line without a
vector has a row of NaN.

A second file, OUT.npy.json, says how the vectors were made and which lines have none. It also shows
whether OUT.npy is the complete output of a batch.
"""

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from llmcli.atomic_files import write_atomically
from llmcli.runtime.binding.contexts.pooled_context import Vector
from quant.json_dataclasses import parse_object

SUFFIX = ".npy"
MAX_ABOUT_BYTES = 1 << 28
READ_BYTES = 1 << 20
ERROR_START = b"{"  # of the record of a line that has an error; no base64 text contains it


def about_path(out: Path) -> Path:
    """Return the path of the file that describes the vectors in `out`."""
    return out.with_name(f"{out.name}.json")


def vector_record(vector: Vector) -> bytes:
    """Return a vector as a record of the journal."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes())


class NpyWriter:
    """Writes the file from the records of all lines. `size`: number of values of a vector.
    `identity` and `batch`: what the vectors depend on, and its hash. Afterwards `write_about` writes
    the second file.
    """

    def __init__(self, out: Path, size: int, batch: str, identity: Mapping[str, Any]) -> None:
        self._out, self._size, self._batch, self._identity = out, size, batch, identity
        self._errors: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()
        self._n_rows = 0

    def write(self, records: Sequence[bytes], output: BinaryIO) -> None:
        """Write the records, one row each, to `output`."""
        header = io.BytesIO()
        shape = (len(records), self._size)
        np.lib.format.write_array_header_1_0(
            header, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )
        self._write(header.getvalue(), output)
        missing = np.full(self._size, np.nan, "<f4").tobytes()
        for row, record in enumerate(records):
            if record.startswith(ERROR_START):
                self._errors.append({"row": row, **json.loads(record)})
                self._write(missing, output)
            else:
                self._write(base64.b64decode(record), output)
        self._n_rows = len(records)

    def write_about(self) -> None:
        """Write the file about the vectors. Raises UserError if the disk is full."""
        document = {
            "id": self._batch,
            "rows": self._n_rows,
            "values": self._size,
            "sha256": self._digest.hexdigest(),
            **self._identity,
            "errors": self._errors,
        }
        text = json.dumps(document, ensure_ascii=False, indent=1)
        write_atomically(about_path(self._out), text.encode("utf-8", "replace") + b"\n")

    def _write(self, data: bytes, output: BinaryIO) -> None:
        self._digest.update(data)
        output.write(data)


def count_failed(batch: str, out: Path) -> int | None:
    """Return how many rows of `out` have no vector; None if it is not the complete output of the
    batch with this id.
    """
    try:
        with about_path(out).open("rb") as stream:
            document = parse_object(stream.read(MAX_ABOUT_BYTES), MAX_ABOUT_BYTES)
        if document.get("id") != batch:
            return None
        digest = hashlib.sha256()
        with out.open("rb") as stream:
            while chunk := stream.read(READ_BYTES):
                digest.update(chunk)
    except (OSError, ValueError):
        return None
    errors = document.get("errors")
    is_same = document.get("sha256") == digest.hexdigest()
    return len(errors) if is_same and isinstance(errors, list) else None
