"""The entries of one model in the folder of the prefix cache, by the hashes of the texts up to which
they are usable. Several threads use an index at once.
"""

import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from llmcli.runtime.disk_cache.entry import Entry
from llmcli.runtime.disk_cache.folder import ForeignFile, StateFolder
from llmcli.runtime.disk_cache.token_hashes import BLOCK_TOKENS, HashChain
from llmcli.runtime.state_file_format import UnusableState


@dataclass(frozen=True, slots=True)
class PrefixSearch:
    """A text whose beginning is looked for: its tokens and its scope. `n_cached`: tokens that the
    pool has, which are not read unless `reads_all`.
    """

    tokens: tuple[int, ...]
    scope: str
    n_cached: int
    reads_all: bool = False


@dataclass(frozen=True, slots=True)
class DiskMatch:
    """Entries that together have the state of the first `length` tokens of a text, from the token
    `start` on. The entries are in the order of the text.
    """

    start: int
    length: int
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the states in all entries."""
        return sum(entry.state_bytes for entry in self.entries)


class EntryIndex:
    """The index of `folder`. `on_damage`: called with the name of a file that cannot be used, and
    the reason.
    """

    def __init__(self, folder: StateFolder, on_damage: Callable[[str, str], None]) -> None:
        self.folder, self._on_damage = folder, on_damage
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._cells: dict[bytes, Entry] = {}  # by the hash of the text up to a block
        self._whole: dict[bytes, Entry] = {}
        self._lengths: dict[int, int] = {}  # usable lengths of whole states, with their number
        self._changed_ns = -1
        self._unusable: set[str] = set()  # files that could not be deleted

    def __len__(self) -> int:
        return len(self._entries)

    def refresh(self) -> None:
        """Find the entries that this or another process has added to the folder, and forget those
        that were dropped.
        """
        changed_ns = self.folder.changed_ns()
        if changed_ns == self._changed_ns:
            return
        names = self.folder.list_names()
        with self._lock:
            lost, new = self._entries.keys() - names, names - self._entries.keys()
        for name in lost:
            self.discard(name)
        self._unusable &= names  # a file that could be deleted may be written again
        for name in sorted(new - self._unusable):
            try:
                self.add(self.folder.read_head(name))
            except UnusableState as error:
                self.reject(name, error)
            except OSError:  # another process has dropped it
                continue
        self._changed_ns = changed_ns

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        with self._lock:
            if entry.name in self._entries:
                return
            self._entries[entry.name] = entry
            for length, digest in entry.ends:
                if entry.kind == "cells":
                    self._cells.setdefault(digest, entry)
                else:
                    self._whole[digest] = entry
                    self._lengths[length] = self._lengths.get(length, 0) + 1

    def discard(self, name: str) -> None:
        """Forget an entry that is no longer in the folder."""
        with self._lock:
            entry = self._entries.pop(name, None)
            for length, digest in entry.ends if entry else ():
                held = self._cells if entry and entry.kind == "cells" else self._whole
                if (found := held.get(digest)) and found.name == name:
                    del held[digest]
                if entry and entry.kind == "whole":
                    self._lengths[length] -= 1
                    if not self._lengths[length]:
                        del self._lengths[length]

    def reject(self, name: str, error: Exception) -> None:
        """Forget an entry that cannot be used, and delete it unless it is of another user."""
        self.discard(name)
        if not isinstance(error, ForeignFile):
            self.folder.delete(name)
        self._unusable.add(name)
        self._on_damage(name, str(error))

    def find_missing(self, digests: Sequence[bytes], queued: Container[bytes]) -> range:
        """Return the first blocks of a text that follow one another and are in no entry. `digests`:
        the hashes of the text up to the end of each block. `queued`: those that will be written.
        """
        held, count = self._cells, len(digests)
        missing = (
            at for at in range(count) if digests[at] not in queued and digests[at] not in held
        )
        start = next(missing, count)
        ends = (at for at in range(start, count) if digests[at] in queued or digests[at] in held)
        return range(start, next(ends, count))

    def has_whole(self, digest: bytes) -> bool:
        """Return whether an entry has the whole state of a text with this hash."""
        return digest in self._whole

    def names_of(self, digests: Sequence[bytes]) -> list[str]:
        """Return the names of the entries with the cells of these blocks, each once, in order."""
        with self._lock:
            return list(
                dict.fromkeys(found.name for each in digests if (found := self._cells.get(each)))
            )

    def matches(self, search: PrefixSearch, chain: HashChain, min_tokens: int) -> list[DiskMatch]:
        """Return the entries with the beginning of a text, the longest beginning first: parts that
        follow the tokens that the pool has, and whole states. Each saves at least `min_tokens`
        tokens. `chain`: the hashes of its scope.
        """
        tokens, min_length = search.tokens, search.n_cached + min_tokens
        start = 0 if search.reads_all else search.n_cached
        hashes = chain.blocks(tokens)
        found: list[DiskMatch] = []
        with self._lock:
            end = start // BLOCK_TOKENS
            parts: dict[str, Entry] = {}
            while end < len(hashes) and (entry := self._cells.get(hashes[end])):
                parts[entry.name] = entry
                end += 1
            if BLOCK_TOKENS * end >= min_length:
                found.append(DiskMatch(start, BLOCK_TOKENS * end, tuple(parts.values())))
            for length in self._lengths:
                if min_length <= length <= len(tokens) and (
                    whole := self._whole.get(chain.prefix(tokens, length))
                ):
                    found.append(DiskMatch(0, length, (whole,)))
        return sorted(found, key=lambda match: -match.length)
