"""An entry of the prefix cache on disk: a file with the state of a text, or of a part of it."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from llmcli.runtime.disk_cache.token_hashes import HASH_BYTES
from llmcli.runtime.state_file_format import UnusableState, check_sizes, read_head

# "cells": the cells of a part of a text, usable up to the end of each of its blocks.
# "whole": all state of a text, usable at its end and where it has a checkpoint.
Kind = Literal["cells", "whole"]
NAME = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}\.(cells|whole)\.kv")
MAX_ENDS = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """What the head of a file says of it.

    - `start`: the first token of the text whose state is in the file; 0 for a whole state.
    - `ends`: the lengths of the text up to which the file is usable, ascending, each with the hash
      of the text up to there.
    - `checkpoints`: length and bytes of each checkpoint after the state of a whole text.
    - `state_bytes`: bytes of the state and the checkpoints.
    """

    kind: Kind
    start: int
    ends: tuple[tuple[int, bytes], ...]
    state_bytes: int
    checkpoints: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """Return the length of the text."""
        return self.ends[-1][0]

    @property
    def name(self) -> str:
        """Return the name of the file."""
        return f"{self.ends[-1][1].hex()}.{self.kind}.kv"

    def head_fields(self) -> dict[str, Any]:
        """Return the fields of the head, beside those of every state file."""
        fields = {
            "kind": self.kind,
            "start": self.start,
            "ends": [[length, digest.hex()] for length, digest in self.ends],
            "checkpoints": [list(checkpoint) for checkpoint in self.checkpoints],
        }
        checked = json.dumps(fields, sort_keys=True).encode()
        return {**fields, "fields_sha256": hashlib.sha256(checked).hexdigest()}


def read_entry_head(file: BinaryIO, name: str, world: Mapping[str, Any]) -> Entry:
    """Read the head of a file with this name, and leave the file after it. `world`: the model and
    the settings that it must be of. Raises UnusableState if it is damaged or of others.
    """
    head = read_head(file)
    count, state_bytes = check_sizes(file, head)
    if head.get("world") != dict(world):
        raise UnusableState("it is of another model or other settings")
    try:
        entry = Entry(
            _kind(head["kind"]),
            _size(head["start"]),
            tuple((_size(length), bytes.fromhex(digest)) for length, digest in head["ends"]),
            state_bytes,
            tuple((_size(length), _size(nbytes)) for length, nbytes in head["checkpoints"]),
        )
    except (KeyError, TypeError, ValueError):
        raise UnusableState("it is damaged: its header is incomplete") from None
    lengths = [length for length, _ in entry.ends]
    is_consistent = (
        0 < len(lengths) <= MAX_ENDS
        and lengths == sorted(set(lengths))
        and entry.start < lengths[0]
        and count == entry.end - entry.start
        and (entry.kind == "cells" or entry.start == 0)
        and sum(nbytes for _, nbytes in entry.checkpoints) < state_bytes
        and all(length in lengths for length, _ in entry.checkpoints)
        and entry.name == name
        and entry.head_fields()["fields_sha256"] == head.get("fields_sha256")
    )
    if not is_consistent:
        raise UnusableState("it is damaged: its header contradicts itself or its name")
    return entry


def _kind(value: Any) -> Kind:
    if value not in ("cells", "whole"):
        raise ValueError(value)
    return "cells" if value == "cells" else "whole"


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ValueError(value)
    return value
