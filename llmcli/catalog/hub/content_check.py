"""Checks a file that is read in parts, in any order, against the digest that the hub lists: the
sha256 or, for a small file that git stores itself, the git blob id.

Such a digest needs all bytes in order. Parts that are read in the order of the file are hashed as they
arrive. A part that is read before its turn waits in memory, up to a limit for all files of a
checkpoint; beyond the limit it is read a second time when its turn comes. A short digest of every
block shows that both times, and whenever else a block is read again, its bytes are the same. So if
the digest is right in the end, all bytes that were used are right.
"""

import hashlib
import threading
from typing import TYPE_CHECKING

from quant.errors import DamagedSourceError

if TYPE_CHECKING:
    from quant.native.ggml import U8

BLOCK_BYTES = 1 << 13  # all reads begin and end at multiples of this, or at the end of the file
DIGEST_BYTES = 8  # of a block's sha256
MAX_WAITING_BYTES = 1 << 28  # of all parts of a checkpoint that are read before their turn
MAX_REREAD_BYTES = 1 << 23  # that are read a second time in one request


class WaitingBytes:
    """Counts the bytes of the parts that wait for their turn, of all files of a checkpoint."""

    def __init__(self, limit: int = MAX_WAITING_BYTES) -> None:
        self.limit, self.used = limit, 0
        self._lock = threading.Lock()

    def acquire(self, nbytes: int) -> bool:
        """Return whether `nbytes` more bytes may wait, and count them if they may."""
        with self._lock:
            is_allowed = self.used + nbytes <= self.limit
            self.used += nbytes * is_allowed
            return is_allowed

    def release(self, nbytes: int) -> None:
        """Count the bytes of a part that no longer waits."""
        with self._lock:
            self.used -= nbytes


class ContentCheck:
    """The check of one file with `size` bytes. `label` names the file in errors. `position`:
    the number of bytes that are hashed. `is_complete`: whether these are all, and their digest is
    right.
    """

    def __init__(self, label: str, size: int, digest: str, waiting: WaitingBytes) -> None:
        import numpy as np

        self.label, self.size, self.digest = label, size, digest
        self.is_complete = False
        self.reread_bytes = 0  # that were read only for the check
        self._hash = (
            hashlib.sha256()
            if len(digest) == 64
            else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        )
        self.position = 0  # the bytes before it are hashed
        self._digests = np.zeros(-(-size // BLOCK_BYTES), np.uint64)  # 0: the block was not read
        self._parts: dict[int, U8] = {}  # waiting parts, by their first byte
        self._waiting, self._lock = waiting, threading.RLock()
        self._compare_at_end()

    def aligned(self, first: int, last: int) -> tuple[int, int]:
        """Return the smallest range of whole blocks that contains the bytes first .. last."""
        end = -(-last // BLOCK_BYTES) * BLOCK_BYTES
        return first // BLOCK_BYTES * BLOCK_BYTES, min(end, self.size)

    def add(self, first: int, data: "U8") -> None:
        """Count whole blocks that were read from byte `first` on. Raises DamagedSourceError if a
        block was read before with other bytes, or if the file does not have its digest.
        """
        digests = _digest_blocks(data)
        blocks = slice(first // BLOCK_BYTES, first // BLOCK_BYTES + len(digests))
        with self._lock:
            known = self._digests[blocks]
            if ((known != digests) & (known != 0)).any():
                raise self._damaged("the server sent different bytes for the same part")
            self._digests[blocks] = digests
            if first > self.position:
                self._store_part(first, data)
                return
            self._hash_part(first, data)
            while self._parts and (start := min(self._parts)) <= self.position:
                self._hash_part(start, self._drop_part(start))
            self._compare_at_end()

    def next_reread(self, is_last: bool = False) -> tuple[int, int] | None:
        """Return the next bytes first .. last that must be read for the check, and whose turn it is
        although they were read before. With `is_last`, nobody else will read any bytes, so that
        bytes that were never read are returned, too. None if there are none.
        """
        with self._lock:
            first = self.position
            if first == self.size:
                return None
            limit = min([self.size, first + MAX_REREAD_BYTES, *self._parts])
            if is_last:
                return first, limit
            was_read = self._digests[first // BLOCK_BYTES : -(-limit // BLOCK_BYTES)] != 0
            n_blocks = len(was_read) if was_read.all() else int(was_read.argmin())
            return (first, min(first + n_blocks * BLOCK_BYTES, limit)) if n_blocks else None

    def _store_part(self, first: int, data: "U8") -> None:
        """Let a part wait for its turn if memory allows. If not, it will be read a second time."""
        if (old := self._parts.get(first)) is not None:
            if old.nbytes >= data.nbytes:
                return
            self._drop_part(first)
        while not self._waiting.acquire(data.nbytes):
            if (farthest := max(self._parts, default=first)) <= first:
                return
            self._drop_part(farthest)
        self._parts[first] = data

    def _drop_part(self, first: int) -> "U8":
        """Return a waiting part, which waits no longer."""
        part = self._parts.pop(first)
        self._waiting.release(part.nbytes)
        return part

    def _hash_part(self, first: int, data: "U8") -> None:
        """Hash the bytes of a part that follow the hashed ones."""
        if first + data.nbytes > self.position:
            self._hash.update(data[self.position - first :].data)
            self.position = first + data.nbytes

    def _compare_at_end(self) -> None:
        """Compare the digest if all bytes are hashed."""
        if self.position == self.size and not self.is_complete:
            if self._hash.hexdigest() != self.digest:
                raise self._damaged("it does not match its digest on the hub")
            self.is_complete = True

    def _damaged(self, reason: str) -> DamagedSourceError:
        """Return the error for a file with wrong bytes."""
        return DamagedSourceError(
            f"{self.label} was changed on its way: {reason}",
            hint="try again; if it happens twice, the mirror or a proxy changes files",
        )


def _digest_blocks(data: "U8") -> "U8":
    """Return a short digest of each block as uint64 [blocks], never 0."""
    import numpy as np

    view = data.data
    joined = b"".join(
        hashlib.sha256(view[at : at + BLOCK_BYTES]).digest()[:DIGEST_BYTES]
        for at in range(0, data.nbytes, BLOCK_BYTES)
    )
    return np.maximum(np.frombuffer(joined, np.uint64), 1)
