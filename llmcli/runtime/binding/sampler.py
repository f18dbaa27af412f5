"""Chains of llama.cpp's own samplers (src/llama-sampler.cpp). They are faster than the equivalent
numpy chain of sampling/chain.py.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.kernels import row_scan
from llmcli.runtime.binding.kernels.row_scan import RowMaxima
from llmcli.runtime.binding.library import lib
from llmcli.runtime.sampling.base import Logits, NativeStep
from llmcli.runtime.sampling.chain import GreedyChain
from llmcli.runtime.sampling.top_logprobs import Shortlist, find_shortlist

HISTORY_SAMPLERS = {"penalties", "dry"}  # samplers that look at earlier tokens
SELECTING_SAMPLERS = {"mirostat_v2"}  # samplers that draw the token themselves
# largest top-k for which the likeliest tokens are found first (row.c has the same limit); for a
# larger top-k, the whole chain runs in llama.cpp
MAX_SHORTLIST = 256
MAX_SHORTLIST_COLUMNS = 2 * MAX_SHORTLIST  # maximum columns of a shortlist
INITIAL_CANDIDATES = 4096  # initial size of the candidate table
# the seed for which llama.cpp would draw a random seed
RANDOM_NATIVE_SEED = contract.CONSTANTS["LLAMA_DEFAULT_SEED"]


def min_shortlist_vocabulary() -> int:
    """Return the vocabulary size from which a top-k chain first searches the likeliest tokens and
    gives llama.cpp only these. For smaller vocabularies it is faster to let llama.cpp sort all
    tokens. The size depends on whether llmcli's C code is available for the search, or only numpy.
    """
    return 4096 if row_scan.load_row_scan() else 100_000


CANDIDATE_DTYPE = np.dtype(
    [("id", np.int32), ("logit", np.float32), ("p", np.float32)]
)  # llama_token_data


def candidate_array(rows: NDArray[np.void]) -> Any:
    """Return a C llama_token_data_array that points to `rows`, an array of CANDIDATE_DTYPE.
    Samplers change the rows in place. The rows must stay alive while the result is used.
    """
    array = lib().llama_token_data_array()
    data = ctypes.cast(rows.ctypes.data, type(array.data))
    contract.set_fields(array, data=data, size=len(rows), selected=-1, sorted=False)
    return array


class CandidateTable:
    """A reusable llama_token_data_array: the ids and logits of the tokens among which a sampler
    chain chooses. Samplers change it in place.

    It is reused, and plain addresses are passed to C, because creating ctypes objects is slow right
    after a forward pass.
    """

    class Array(ctypes.Structure):
        """The Python mirror of llama_token_data_array, with a plain address."""

        __slots__ = ()  # so that other attributes are refused
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("size", ctypes.c_size_t),
            ("selected", ctypes.c_int64),
            ("sorted", ctypes.c_bool),
        )

    def __init__(self) -> None:
        theirs = lib().llama_token_data_array
        for name, _ in self.Array._fields_:
            assert getattr(self.Array, name).offset == getattr(theirs, name).offset, name
        apply_address: Any = ctypes.cast(lib().llama_sampler_apply, ctypes.c_void_p).value
        self._apply, self._apply_address = (
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(apply_address),
            apply_address,
        )
        self._array = self.Array()
        self._array_address = ctypes.addressof(self._array)
        self._resize(INITIAL_CANDIDATES)

    def _resize(self, capacity: int) -> None:
        """Allocate rows for `capacity` candidates."""
        table = np.zeros(capacity, CANDIDATE_DTYPE)
        self._ids, self._logits, self._address = table["id"], table["logit"], table.ctypes.data
        self._indices, self._capacity = np.arange(capacity, dtype=np.int32), capacity

    def sample(
        self, chain: int, logits: NDArray[np.float32], ids: NDArray[Any] | None = None
    ) -> int:
        """Apply a sampler chain to the candidates, and return the id of the token that it chooses.
        Without `ids`, return the index of this token in `logits`.

        `chain`: the address of the llama_sampler. Shapes: logits `[candidates]`, ids
        `[candidates]`.
        """
        count, array = len(logits), self._array
        if count > self._capacity:
            self._resize(count)
        self._ids[:count] = self._indices[:count] if ids is None else ids
        self._logits[:count] = logits
        array.data, array.size, array.selected, array.sorted = self._address, count, -1, False
        self._apply(chain, self._array_address)
        chosen, size = array.selected, array.size
        assert 0 <= chosen < size <= count, (chosen, size, count)
        # the sampler XTC moves the start of the array
        start = (array.data - self._address) // CANDIDATE_DTYPE.itemsize
        return int(self._ids[start + chosen])

    def draw(self, chain: int, row: Any, maxima: RowMaxima, top_k: int) -> int | None:
        """Apply a sampler chain to the `top_k` likeliest tokens of a row, and return the id of the
        token that it chooses. All of this runs in one call of llmcli's C code.

        Return None when the C code is not available, when more tokens than the table holds reach
        the k-th largest strand maximum, or when fewer than k strands have a finite maximum.
        `chain`: the address of the llama_sampler. `maxima`: the strand maxima of the row, which are
        computed if they are not filled in.
        """
        if maxima.scan is None:
            return None
        count = len(row.logits)
        table = self._address, self._capacity
        token = maxima.scan.draw(
            row.address, count, *maxima.consume(count), top_k, *table, self._apply_address, chain
        )
        assert token >= -1, token
        return token if token >= 0 else None


class GreedyNative(GreedyChain):
    """Chooses the likeliest token with llmcli's C code. The code scans the row once, or reuses the
    maxima that log_sum() found for the same row.
    """

    def __init__(self, maxima: RowMaxima) -> None:
        super().__init__([])
        assert maxima.scan is not None
        self._maxima, self._find = maxima, maxima.scan.find_likeliest

    def log_sum(self, row: Any, near: float) -> float:
        """Return row.log_sum(near). The scan also stores the row's strand maxima, which the next
        call of draw() uses. That call must get the same row, unchanged.
        """
        return float(
            row.context.log_sum_exp.with_maxima(row.logits, row.address, near, self._maxima)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Return the id of the token with the largest logit; among equal logits, the lowest id."""
        count = len(row.logits)
        token: int = self._find(row.address, count, *self._maxima.consume(count))
        return token if token >= 0 else super().draw(row, tokens)


class NativeChains:
    """Makes chains of llama.cpp samplers for one vocabulary. `make_chain` of sampling/ calls it
    when all steps of a chain have a llama.cpp sampler.
    """

    def __init__(self, n_vocab: int, vocab: Any = None) -> None:
        """`vocab`: the model's llama_vocab. Without it, the sampler DRY has no sequence
        breakers.
        """
        self.n_vocab, self.vocab, self._candidates = n_vocab, vocab, CandidateTable()
        self._dry: tuple[tuple[Any, ...], Any] | None = None

    def greedy(self) -> GreedyChain:
        """Return a chain that chooses the token with the largest logit, without any sampler before
        it.
        """
        maxima = RowMaxima()
        return GreedyNative(maxima) if maxima.scan else GreedyChain([])

    def chain(self, steps: list[NativeStep], seed: int) -> "NativeChain":
        """Return a chain of the samplers for `steps`, in this order. Unless the last one draws a
        token itself (mirostat), the sampler `dist`, which draws by probability, is added at the
        end.
        """
        seed %= RANDOM_NATIVE_SEED
        samplers = [self.make_sampler(step, seed) for step in steps]
        # Without a selecting sampler at the end llama_sampler_sample aborts the process.
        if not steps or steps[-1][0] not in SELECTING_SAMPLERS:
            samplers.append(lib().llama_sampler_init_dist(seed))
        first = steps[0] if steps else ("", ())
        top_k = (
            first[1][0] if first[0] == "top_k" and self.n_vocab >= min_shortlist_vocabulary() else 0
        )
        return NativeChain(
            samplers, any(name in HISTORY_SAMPLERS for name, _ in steps), self._candidates, top_k
        )

    def make_sampler(self, step: NativeStep, seed: int) -> Any:
        """Return the llama.cpp sampler for a step, which is the name of a llama_sampler_init_*
        function and its arguments. Samplers that need the seed or the vocabulary also get these.
        The caller must free the sampler.
        """
        name, arguments = step
        new = getattr(lib(), f"llama_sampler_init_{name}")
        match name:
            case "penalties":
                return new(self.n_vocab, *arguments)
            case "logit_bias":
                return new(
                    self.n_vocab,
                    len(arguments),
                    (lib().llama_logit_bias * len(arguments))(*arguments),
                )
            case "dry":
                return self._make_dry(arguments)
            # XTC gets a separate seed: with the seed of `dist`, its decision would be correlated
            # with an earlier draw
            case "xtc":
                return new(*arguments, (seed ^ 0x5DEECE66) % RANDOM_NATIVE_SEED)
            case "mirostat_v2":
                return new(seed, *arguments)
            case _:
                return new(*arguments)

    def _make_dry(self, arguments: tuple[Any, ...]) -> Any:
        """Return a DRY sampler. It is a copy of the last one if the arguments are equal, because a
        new DRY sampler searches the whole vocabulary for the sequence breakers, which is slow.
        """
        library = lib()
        if self._dry is None or self._dry[0] != arguments:
            if self._dry:
                library.llama_sampler_free(self._dry[1])
            *values, breakers = arguments
            marks = (ctypes.c_char_p * len(breakers))(*breakers)
            sampler = library.llama_sampler_init_dry(
                self.vocab, *values, marks, len(breakers) if self.vocab else 0
            )
            self._dry = arguments, sampler
        return library.llama_sampler_clone(self._dry[1])


class NativeChain:
    """A chain of llama.cpp samplers for one sequence, which ends with a draw. It owns its samplers
    until close() frees them.

    `top_k`: how many candidates the first sampler keeps, or 0 if the first sampler is not top-k.
    llama.cpp would sort the whole vocabulary, so the likeliest tokens are found first and only
    these are given to it. The same tokens are drawn, except that tokens with bitwise equal logits
    may be exchanged.
    """

    def __init__(
        self, samplers: list[Any], needs_history: bool, candidates: CandidateTable, top_k: int = 0
    ) -> None:
        """`needs_history`: whether a sampler depends on earlier tokens. `candidates`: a table that
        several chains may share, because chains draw in turn.
        """
        library = lib()
        self.pointer: Any = library.llama_sampler_chain_init(
            library.llama_sampler_chain_default_params()
        )
        for sampler in samplers:
            library.llama_sampler_chain_add(self.pointer, sampler)
        self._address: int = ctypes.cast(self.pointer, ctypes.c_void_p).value or 0
        self._needs_history, self._seen = needs_history, 0
        self._top_k = top_k if top_k <= MAX_SHORTLIST else 0
        self._candidates, self._maxima = candidates, RowMaxima()

    def log_sum(self, row: Any, near: float) -> float:
        """Return row.log_sum(near). For a top-k chain the scan also stores the row's strand maxima,
        which the next call of draw() uses. That call must get the same row, unchanged.
        """
        if not self._top_k:
            return float(row.log_sum(near))
        return float(
            row.context.log_sum_exp.with_maxima(row.logits, row.address, near, self._maxima)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Draw a token from a row of logits, and return its id. `tokens`: all tokens of the
        sequence so far. Samplers that depend on earlier tokens first get those that they have not
        seen yet, including the prompt, as in llama-cli.
        """
        if self._top_k:
            token = self._candidates.draw(self._address, row, self._maxima, self._top_k)
            if token is not None:
                return token
            if (candidates := self.shortlist(row.logits)) is not None:
                # no sampler after top-k needs the token ids, so indices are enough
                return candidates.token_id(
                    self._candidates.sample(self._address, candidates.values)
                )
        library = lib()
        for token in tokens[self._seen :] if self._needs_history else ():
            library.llama_sampler_accept(self.pointer, token)
        token = int(library.llama_sampler_sample(self.pointer, row.context.pointer, row.index))
        self._seen = len(tokens) + 1  # llama_sampler_sample has accepted the drawn token
        return token

    def draw_among(self, row: Any, ids: NDArray[np.int64], tokens: list[int]) -> int:
        """Draw one of the tokens in `ids`, and return its id. Other tokens are not considered, so
        the draw is fast. `tokens`: all tokens of the sequence so far.

        Shapes: ids `[allowed tokens]`. The steps are those of llama_sampler_sample.
        """
        library = lib()
        for token in tokens[self._seen :] if self._needs_history else ():
            library.llama_sampler_accept(self.pointer, token)
        token = self._candidates.sample(self._address, row.logits[ids], ids)
        library.llama_sampler_accept(self.pointer, token)
        self._seen = len(tokens) + 1
        return token

    def shortlist(self, logits: Logits) -> Shortlist | None:
        """Return a small set of candidates for a top-k chain, which contains the k likeliest
        tokens. Return None when this needs more than MAX_SHORTLIST_COLUMNS columns, or when too few
        tokens have a finite logit.

        Shapes: logits `[n_vocab]`.
        """
        candidates = find_shortlist(logits, self._top_k)
        return (
            candidates
            if candidates.threshold > -np.inf and len(candidates.columns) <= MAX_SHORTLIST_COLUMNS
            else None
        )

    def close(self) -> None:
        """Free the samplers; a second call does nothing."""
        if self.pointer:
            lib().llama_sampler_free(self.pointer)
            self.pointer = None
