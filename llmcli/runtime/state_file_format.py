"""The container of KV states on disk: files of single conversations (kv_state_file.py), and those of
the prefix cache (disk_cache/).

Format: MAGIC; the length of the head (4 bytes, little endian); the head (JSON: the identity of the
model and its settings, sizes, sha256); the tokens (int32); the state as llama.cpp wrote it.
llama.cpp does not check the bytes of a state, so everything is checked here before llama.cpp reads
them.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from quant.json_dataclasses import parse_object

VERSION = 1
MAGIC = b"llmcliKV"
MAX_HEAD_BYTES = 1 << 16  # maximum length of a head; a longer one is not read
Bytes = bytes | memoryview


class UnusableState(Exception):
    """Raised for a saved state that cannot be used. The message is the reason, such as "it is
    damaged".
    """


@dataclass(frozen=True, slots=True)
class StateBody:
    """The tokens and the state of a file, of which the checksum is right."""

    tokens: tuple[int, ...]
    state: memoryview


def encode_file(
    tokens: Sequence[int], state: Bytes, world: Mapping[str, Any], **more: Any
) -> list[Bytes]:
    """Return the contents of a file, as pieces to be written one after another. `world`: the
    identity of the model and its settings. `more`: further fields of the head.
    """
    token_bytes = np.array(tokens, "<i4").tobytes()
    head = json.dumps(
        {
            "version": VERSION,
            "world": dict(world),
            "tokens": len(tokens),
            "state_bytes": len(state),
            "sha256": _digest(token_bytes, state),
            **more,
        }
    ).encode()
    assert len(head) <= MAX_HEAD_BYTES, len(head)
    return [MAGIC, len(head).to_bytes(4, "little"), head, token_bytes, state]


def read_head(file: BinaryIO) -> dict[str, Any]:
    """Read the start of a file, and return its JSON head. Raises UnusableState when it is not that
    of a state.
    """
    size = int.from_bytes(file.read(len(MAGIC) + 4).removeprefix(MAGIC), "little")
    raw = file.read(size) if size <= MAX_HEAD_BYTES else b""
    try:
        head = parse_object(raw, MAX_HEAD_BYTES)
    except ValueError:
        head = {}
    if head.get("version") != VERSION:
        raise UnusableState("it is damaged: it does not start like a KV state")
    return head


def check_sizes(file: BinaryIO, head: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of tokens and of bytes of the state that a head names. Raises UnusableState
    if the file, which is read up to the end of its head, has another size.
    """
    count, nbytes = head.get("tokens"), head.get("state_bytes")
    if not isinstance(count, int) or not isinstance(nbytes, int) or count < 1 or nbytes < 1:
        raise UnusableState("it is damaged: its header has no sizes")
    n_bytes = os.fstat(file.fileno()).st_size - file.tell()
    if n_bytes != 4 * count + nbytes:
        raise UnusableState(
            f"it is damaged: {n_bytes} bytes follow its header instead of {4 * count + nbytes}"
        )
    return count, nbytes


def read_body(file: BinaryIO, head: Mapping[str, Any], n_vocab: int) -> StateBody:
    """Read the tokens and the state after the head. Raises UnusableState if their size or their
    checksum is wrong, or a token is outside the vocabulary.
    """
    count, nbytes = check_sizes(file, head)
    body = memoryview(file.read(4 * count + nbytes))
    tokens, state = body[: 4 * count], body[4 * count :]
    if _digest(tokens, state) != head.get("sha256"):
        raise UnusableState("it is damaged: its bytes have changed since they were written")
    ids = np.frombuffer(tokens, "<i4")
    if len(state) != nbytes or ids.min() < 0 or ids.max() >= n_vocab:
        raise UnusableState("it is damaged: it has tokens outside the vocabulary")
    return StateBody(tuple(ids.tolist()), state)


def _digest(tokens: Bytes, state: Bytes) -> str:
    """Return the SHA-256 of the tokens' bytes and the state, in hexadecimal."""
    digest = hashlib.sha256(tokens)
    digest.update(state)
    return digest.hexdigest()
