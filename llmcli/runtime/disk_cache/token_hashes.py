"""Hashes of the beginnings of a text, by which saved states are found.

A text is hashed in blocks of BLOCK_TOKENS tokens. The hash of a block covers the hash of the block
before it, so it stands for the whole text up to its end (as in vLLM's prefix cache). The first
block follows the hash of the model, its settings and the scope: equal texts of other models or of
clients that share nothing have other hashes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmcli.runtime.kv_cache.common_prefix import common_prefix

BLOCK_TOKENS = 16
HASH_BYTES = 16
BLOCK_BYTES = 4 * BLOCK_TOKENS


def world_digest(world: Mapping[str, Any]) -> str:
    """Return the hash of a model and its settings, in hexadecimal."""
    return _hash(json.dumps(dict(world), sort_keys=True).encode()).hex()


class HashChain:
    """The hashes of one text, which usually grows. `root`: the hexadecimal hash of the model and its
    settings. `scope`: the client whose text it is; empty if all clients share.
    """

    def __init__(self, root: str, scope: str = "") -> None:
        self.root = _hash(f"{root}\0{scope}".encode("utf-8", "surrogatepass"))
        self._tokens: list[int] = []
        self._hashes: list[bytes] = []

    def blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the hash of each full block of a text. Blocks that are those of the last call are
        not hashed again.
        """
        n_known = len(self._tokens)
        if list(tokens[:n_known]) != self._tokens:  # comparing all at once is fastest
            n_known = common_prefix(self._tokens, tokens)
        del self._hashes[n_known // BLOCK_TOKENS :], self._tokens[n_known:]
        self._tokens += tokens[n_known:]
        first = len(self._hashes) * BLOCK_TOKENS
        data = np.array(tokens[first:], "<i4").tobytes()
        last = self._hashes[-1] if self._hashes else self.root
        for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
            last = _hash(last + data[start : start + BLOCK_BYTES])
            self._hashes.append(last)
        return list(self._hashes)

    def prefix(self, tokens: Sequence[int], length: int) -> bytes:
        """Return the hash of the first `length` tokens of a text, which need not end a block.
        `blocks` must have been called with the text.
        """
        count, rest = divmod(length, BLOCK_TOKENS)
        last = self._hashes[count - 1] if count else self.root
        tail = np.array(tokens[length - rest : length], "<i4").tobytes()
        return _hash(last + tail) if rest else last


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]
