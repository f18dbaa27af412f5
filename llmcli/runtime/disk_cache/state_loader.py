"""The thread that reads entries of the prefix cache, so that running answers do not wait for it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llmcli.runtime.binding.kv_state.state_ranges import (
    CellRange,
    ForeignLayout,
    check_range,
    join_ranges,
)
from llmcli.runtime.disk_cache.entry import Entry
from llmcli.runtime.disk_cache.entry_index import DiskMatch, EntryIndex
from llmcli.runtime.disk_cache.token_hashes import HashChain
from llmcli.runtime.kv_cache.checkpoints import Checkpoint
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.state_file_format import StateBody, UnusableState

MIN_LOADED_TOKENS = 32  # fewer tokens are computed
Load = Future[SwappedState | None]


class StateLoader:
    """Finds and reads entries. `is_worth`: returns whether entries of a number of bytes that save a
    number of tokens are faster to read than the tokens are to compute. `record`: called with the
    bytes and the seconds of reading. `by_channel`: in which order the context stores its values.
    """

    def __init__(
        self,
        index: EntryIndex,
        n_vocab: int,
        is_worth: Callable[[int, int], bool],
        record: Callable[[int, float], None],
        by_channel: bool,
    ) -> None:
        self.index, self._n_vocab = index, n_vocab
        self._is_worth, self._record, self.by_channel = is_worth, record, by_channel
        self.nbytes = 0  # of the states that are being read
        self._pool = ThreadPoolExecutor(1, "llmcli-state-loader")

    def start(self, tokens: Sequence[int], scope: str, n_cached: int) -> Load:
        """Look for the state of the longest beginning of a text, and read it. The result is None if
        there is none that is worth reading. `n_cached`: tokens that the pool has.
        """
        return self._pool.submit(self._load, tuple(tokens), scope, n_cached)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _load(self, tokens: tuple[int, ...], scope: str, n_cached: int) -> SwappedState | None:
        self.index.refresh()
        chain = HashChain(self.index.folder.digest, scope)
        while True:
            matches = self.index.matches(tokens, chain, n_cached, MIN_LOADED_TOKENS)
            match = next(
                (each for each in matches if self._is_worth(each.length - n_cached, each.nbytes)),
                None,
            )
            if match is None:
                return None
            start_time, self.nbytes = time.perf_counter(), match.nbytes
            try:
                loaded = self._read(match, tokens)
            except MemoryError:
                return None
            finally:
                self.nbytes = 0
            if loaded is not None:
                self._record(match.nbytes, time.perf_counter() - start_time)
                self.index.folder.touch(entry.name for entry in match.entries)
                return loaded
            # one of the entries was dropped or is damaged: it is no longer in the index

    def _read(self, match: DiskMatch, tokens: tuple[int, ...]) -> SwappedState | None:
        """Read the entries of a match. Return None, with one of them removed from the index, if it
        cannot be used.
        """
        ranges: list[CellRange] = []
        at = match.start
        for found in match.entries:
            try:
                entry, body = self.index.folder.read(found.name, self._n_vocab)
                end = min(entry.end, match.length)
                if body.tokens[: end - entry.start] != tokens[entry.start : end]:
                    raise UnusableState("it is damaged: it has other tokens than its name")
                if entry.kind == "whole":
                    return _split_whole(entry, body)
                check_range(body.state, entry.start, entry.end)
                assert entry.start <= at, "entries with a gap"
                if end > at:  # parts of two processes may overlap
                    ranges.append(CellRange(body.state, at, end))
                    at = end
                state = join_ranges(ranges, self.by_channel) if found is match.entries[-1] else None
            except OSError:  # it was dropped meanwhile, or cannot be read
                self.index.discard(found.name)
                return None
            except UnusableState as error:
                self.index.reject(found.name, error)
                return None
            except ForeignLayout as error:
                self.index.reject(found.name, UnusableState(f"it is damaged: it has {error}"))
                return None
            if state is not None:
                return SwappedState(tokens[: match.length], match.start, state)
        return None


def _split_whole(entry: Entry, body: StateBody) -> SwappedState:
    """Return a whole state with its checkpoints, which follow it in the file."""
    at = len(body.state) - sum(nbytes for _, nbytes in entry.checkpoints)
    checkpoints, start = list[Checkpoint](), at
    for length, nbytes in entry.checkpoints:
        checkpoints.append(Checkpoint(length, body.state[start : start + nbytes]))
        start += nbytes
    return SwappedState(body.tokens, 0, body.state[:at], tuple(checkpoints))
