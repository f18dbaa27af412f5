"""The thread that reads entries of the prefix cache, so that running answers do not wait for it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from llmcli.runtime.binding.kv_state.state_ranges import (
    CellRange,
    ForeignLayout,
    check_range,
    join_ranges,
)
from llmcli.runtime.disk_cache.entry import Entry
from llmcli.runtime.disk_cache.entry_index import DiskMatch, EntryIndex, PrefixSearch
from llmcli.runtime.disk_cache.token_hashes import HashChain
from llmcli.runtime.kv_cache.checkpoints import Checkpoint
from llmcli.runtime.kv_cache.context_protocols import SwappedState
from llmcli.runtime.state_file_format import StateBody, UnusableState

MIN_LOADED_TOKENS = 32  # fewer tokens are computed


@dataclass(slots=True, eq=False)
class StateLoad:
    """The search for the beginning of a text. `nbytes`: bytes of the states that are being read, or
    are read. `is_cancelled`: its result is not needed any more.
    """

    future: Future[SwappedState | None] = field(default_factory=Future)
    nbytes: int = 0
    is_cancelled: bool = False

    @property
    def is_running(self) -> bool:
        """Return whether the search has no result yet."""
        return not self.future.done()

    def drop_result(self) -> None:
        """Free the state, because a sequence that awaits this search may hold it for long."""
        ended: Future[SwappedState | None] = Future()
        ended.set_result(None)
        self.future, self.nbytes = ended, 0


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
        # The loader's thread calls it after each search. Without it, the engine waits for results.
        self.on_loaded: Callable[[], None] | None = None
        # whose states are not handed over, or are still being read
        self._open: set[StateLoad] = set()
        self._pool = ThreadPoolExecutor(1, "llmcli-state-loader")

    @property
    def nbytes(self) -> int:
        """Return the bytes of the states that are being read, or wait to be restored."""
        return sum(load.nbytes for load in tuple(self._open))

    @property
    def n_open(self) -> int:
        """Return the number of searches that were not ended."""
        return sum(not load.is_cancelled for load in tuple(self._open))

    def start(
        self, tokens: Sequence[int], scope: str, n_cached: int, reads_all: bool = False
    ) -> StateLoad:
        """Look for the state of the longest beginning of a text, and read it. The result is None if
        there is none that is worth reading. `n_cached`: tokens that the pool has, which are not
        read unless `reads_all`. The caller must `end` the search.
        """
        load = StateLoad()
        self._open.add(load)
        self._pool.submit(self._run, load, PrefixSearch(tuple(tokens), scope, n_cached, reads_all))
        return load

    def end(self, load: StateLoad) -> None:
        """Forget a search, whose state is handed over or not needed. A file that is being read is
        read to its end, and its bytes count until then.
        """
        load.is_cancelled = True
        if not load.is_running:
            self._forget(load)

    def close(self) -> None:
        """End the thread."""
        for load in tuple(self._open):
            self.end(load)
        self._pool.shutdown()

    def _forget(self, load: StateLoad) -> None:
        self._open.discard(load)
        load.drop_result()

    def _run(self, load: StateLoad, search: PrefixSearch) -> None:
        """Search, and hand the result or the error to the engine's thread."""
        try:
            load.future.set_result(self._load(load, search))
        except BaseException as error:  # noqa: BLE001 (the engine's thread reports it)
            load.future.set_exception(error)
        if load.is_cancelled:  # it was ended before it had a result
            self._forget(load)
        if self.on_loaded is not None:
            self.on_loaded()

    def _load(self, load: StateLoad, search: PrefixSearch) -> SwappedState | None:
        if load.is_cancelled:
            return None
        self.index.refresh()
        chain = HashChain(self.index.folder.digest, search.scope)
        while not load.is_cancelled:
            matches = self.index.matches(search, chain, MIN_LOADED_TOKENS)
            match = next(
                (
                    each
                    for each in matches
                    if self._is_worth(each.length - search.n_cached, each.nbytes)
                ),
                None,
            )
            if match is None:
                return None
            start_time, load.nbytes = time.perf_counter(), match.nbytes
            loaded = None
            try:
                loaded = self._read(load, match, search.tokens)
            except MemoryError:
                return None
            finally:
                load.nbytes = match.nbytes if loaded else 0  # with the checkpoints
            if loaded is not None:
                self._record(match.nbytes, time.perf_counter() - start_time)
                self.index.folder.touch(entry.name for entry in match.entries)
                return loaded
            # one of the entries was dropped or is damaged: it is no longer in the index
        return None

    def _read(
        self, load: StateLoad, match: DiskMatch, tokens: tuple[int, ...]
    ) -> SwappedState | None:
        """Read the entries of a match. Return None, with one of them removed from the index, if it
        cannot be used, and None if the load is cancelled.
        """
        ranges: list[CellRange] = []
        at = match.start
        for found in match.entries:
            if load.is_cancelled:
                return None
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
