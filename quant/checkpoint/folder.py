"""The JSON files of a checkpoint folder. Each is read at most once, and its size is limited."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quant.errors import UserError

MAX_JSON_BYTES = 1 << 27  # four times the largest known tokenizer.json
REFETCH_HINT = "fetch the file again"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint folder at `path`. Each JSON file is read when it is first needed, and then
    cached.
    """

    path: Path
    _documents: dict[str, dict[str, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def has_file(self, name: str) -> bool:
        """Return whether the folder has a file with this name."""
        return (self.path / name).is_file()

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file. Raises UserError if the file is missing, damaged or too
        large, or contains something other than an object.
        """
        if name not in self._documents:
            self._documents[name] = _read_json_object(self.path / name)
        return self._documents[name]

    def read_optional_json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, or {} if the file is missing. Raises UserError if the
        file is damaged or too large, or contains something other than an object.
        """
        return self.read_json(name) if self.has_file(name) else {}


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        if (size := file.stat().st_size) > MAX_JSON_BYTES:
            raise UserError(
                f"{file} has {size:,} bytes; the limit is {MAX_JSON_BYTES:,}", hint=REFETCH_HINT
            )
        data = file.read_bytes()
        value = json.loads(data)
        # JSON may contain half of a surrogate pair, which cannot be encoded: encode() raises
        # ValueError.
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}", hint=REFETCH_HINT) from None
    if not isinstance(value, dict):
        raise UserError(f"{file} does not hold a JSON object", hint=REFETCH_HINT)
    return value
