"""Results of measurements of this machine, which are saved in the cache folder."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from llmcli.atomic_files import write_atomically
from llmcli.config import Config
from llmcli.errors import UserError
from quant.json_dataclasses import decode_value, encode_value, parse_object, read_file

Result = TypeVar("Result")  # a dataclass

MAX_FILE_BYTES = 1 << 12  # maximum size of the file of a result


def result_path(config: Config, folder: str, *conditions: object) -> Path:
    """Return the path of the file with the result of a measurement, which may not exist.
    `conditions`: on what the result depends, as JSON values.
    """
    key = hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:32]
    return config.cache / folder / f"{key}.json"


def read_or_measure(
    path: Path, kind: type[Result], measure: Callable[[], tuple[Result, bool]]
) -> Result:
    """Return the result that is saved in a file. If the file is missing or invalid, measure and save
    it. `measure`: also returns whether its result is steady enough to be saved.
    """
    result = _read(path, kind)
    if result is not None:
        return result
    result, is_steady = measure()
    if is_steady:
        fields: Any = encode_value(result)
        # if the result cannot be saved, the next run measures again
        with suppress(UserError):
            write_atomically(path, (json.dumps({"version": 1, **fields}) + "\n").encode())
    return result


def _read(path: Path, kind: type[Result]) -> Result | None:
    try:
        stored = parse_object(read_file(path, MAX_FILE_BYTES), MAX_FILE_BYTES)
        result: Result = decode_value(kind, stored, "")
    except (OSError, ValueError):
        return None
    return result if stored.get("version") == 1 else None
