"""Chains of llama.cpp's own samplers (src/llama-sampler.cpp), the fast alternative to the numpy
chain of sampling/chain.py.
"""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding.kernels import row_scan
from llmcli.runtime.binding.kernels.row_scan import RowMaxima
from llmcli.runtime.binding.library import lib
from llmcli.runtime.sampling.base import Logits, NativeStep
from llmcli.runtime.sampling.chain import GreedyChain
from llmcli.runtime.sampling.top_logprobs import Shortlist, find_shortlist

HISTORY_SAMPLERS = {"penalties", "dry"}  # samplers that look at earlier tokens
SELECTING_SAMPLERS = {"mirostat_v2"}  # samplers that draw the token themselves
# for a larger top-k, the whole chain runs in llama.cpp (row.c has the same limit)
MAX_SHORTLIST = 256
MAX_SHORTLIST_COLUMNS = 2 * MAX_SHORTLIST  # maximum columns of a shortlist
INITIAL_CANDIDATES = 4096  # initial size of the candidate table
RANDOM_NATIVE_SEED = 2**32 - 1  # LLAMA_DEFAULT_SEED, for which llama.cpp would draw a random seed


def min_shortlist_vocabulary() -> int:
    """Return the vocabulary size from which it is faster to find the likeliest tokens first, with
    llmcli's C code or numpy, than to let llama.cpp sort the whole vocabulary.
    """
    return 4096 if row_scan.load_row_scan() else 100_000


CANDIDATE_DTYPE = np.dtype(
    [("id", np.int32), ("logit", np.float32), ("p", np.float32)]
)  # llama_token_data


def candidate_array(rows: NDArray[np.void]) -> Any:
    """Return a llama_token_data_array over `rows`, which have CANDIDATE_DTYPE. Samplers change the
    rows in place. The rows must stay alive while the array is used.
    """
    array = lib().llama_token_data_array()
    array.data = ctypes.cast(rows.ctypes.data, type(array.data))
    array.size, array.selected, array.sorted = len(rows), -1, False
    return array


class CandidateTable:
    """A reusable table of candidates, which samplers change in place. It is reused because creating
    one takes about 50 µs after a forward pass. For the same reason it passes plain addresses to C.
    """

    class Array(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("size", ctypes.c_size_t),
            ("selected", ctypes.c_int64),
            ("sorted", ctypes.c_bool),
        )

    def __init__(self) -> None:
        assert ctypes.sizeof(self.Array) == ctypes.sizeof(lib().llama_token_data_array)
        where: Any = ctypes.cast(lib().llama_sampler_apply, ctypes.c_void_p).value
        self._apply, self._where = (
            ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(where),
            where,
        )
        self._array = self.Array()
        self._put = ctypes.addressof(self._array)
        self._room(INITIAL_CANDIDATES)

    def _room(self, count: int) -> None:
        table = np.zeros(count, CANDIDATE_DTYPE)
        self._ids, self._logits, self._address = table["id"], table["logit"], table.ctypes.data
        self._numbers, self._count = np.arange(count, dtype=np.int32), count

    def sample(
        self, chain: int, logits: NDArray[np.float32], ids: NDArray[Any] | None = None
    ) -> int:
        """Apply the samplers at address `chain` to these logits. Return the token that they choose:
        its id, or its index if no ids are given.

        Shapes: logits `[candidates]`, ids `[candidates]`.
        """
        count, array = len(logits), self._array
        if count > self._count:
            self._room(count)
        self._ids[:count] = self._numbers[:count] if ids is None else ids
        self._logits[:count] = logits
        array.data, array.size, array.selected, array.sorted = self._address, count, -1, False
        self._apply(chain, self._put)
        chosen, size = array.selected, array.size
        assert 0 <= chosen < size <= count, (chosen, size, count)
        # the sampler XTC moves the start of the array
        moved = (array.data - self._address) // CANDIDATE_DTYPE.itemsize
        return int(self._ids[moved + chosen])

    def draw(self, chain: int, row: Any, strands: RowMaxima, few: int) -> int | None:
        """Apply the samplers at address `chain` to the `few` likeliest tokens of a row, all in
        llmcli's C code, and return the token that they choose. Return None when the C code is not
        available, and when it finds too many tokens or none.
        """
        if strands.scan is None:
            return None
        count = len(row.logits)
        table = self._address, self._count
        token = strands.scan.draw(
            row.address, count, *strands.consume(count), few, *table, self._where, chain
        )
        assert token >= -1, token
        return token if token >= 0 else None


class GreedyNative(GreedyChain):
    """Draws the likeliest token with llmcli's C code, which scans the row once, or not at all if
    log_sum() has scanned it already.
    """

    def __init__(self, strands: RowMaxima) -> None:
        super().__init__([])
        assert strands.scan is not None
        self._strands, self._find = strands, strands.scan.find_likeliest

    def log_sum(self, row: Any, near: float) -> float:
        """Return row.log_sum(near), and keep the maxima found on the way for draw(). The next call
        of draw() must have the same row, unchanged.
        """
        return float(
            row.context.log_sum_exp.with_maxima(row.logits, row.address, near, self._strands)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Return the first of the largest logits."""
        count = len(row.logits)
        token: int = self._find(row.address, count, *self._strands.consume(count))
        return token if token >= 0 else super().draw(row, tokens)


class NativeChains:
    """Makes chains of llama.cpp samplers for one vocabulary. `make_chain` uses it."""

    def __init__(self, n_vocab: int, vocab: Any = None) -> None:
        """`vocab`: the model's llama_vocab. Without it, DRY has no sequence breakers."""
        self.n_vocab, self.vocab, self._candidates = n_vocab, vocab, CandidateTable()
        self._dry: tuple[tuple[Any, ...], Any] | None = None

    def greedy(self) -> GreedyChain:
        """Return a chain that takes the likeliest token of an unchanged row."""
        strands = RowMaxima()
        return GreedyNative(strands) if strands.scan else GreedyChain([])

    def chain(self, steps: list[NativeStep], seed: int) -> "NativeChain":
        """Return a chain of these samplers. A sampler that draws is added at the end unless the
        last one draws itself.
        """
        seed %= RANDOM_NATIVE_SEED
        samplers = [self.make_sampler(step, seed) for step in steps]
        # Without a selecting sampler at the end llama_sampler_sample aborts the process.
        if not steps or steps[-1][0] not in SELECTING_SAMPLERS:
            samplers.append(lib().llama_sampler_init_dist(seed))
        first = steps[0] if steps else ("", ())
        few = (
            first[1][0] if first[0] == "top_k" and self.n_vocab >= min_shortlist_vocabulary() else 0
        )
        return NativeChain(
            samplers, any(name in HISTORY_SAMPLERS for name, _ in steps), self._candidates, few
        )

    def make_sampler(self, step: NativeStep, seed: int) -> Any:
        """Return the llama.cpp sampler for a step. Some samplers also get the seed or the
        vocabulary.
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
                return self._copy_of_dry(arguments)
            # XTC gets a separate stream of random numbers: with that of the draw, its decision
            # would be correlated with an earlier draw
            case "xtc":
                return new(*arguments, (seed ^ 0x5DEECE66) % RANDOM_NATIVE_SEED)
            case "mirostat_v2":
                return new(seed, *arguments)
            case _:
                return new(*arguments)

    def _copy_of_dry(self, arguments: tuple[Any, ...]) -> Any:
        """Return a copy of the last DRY sampler. Creating one takes several milliseconds, because
        the tokens with a sequence breaker must be found.
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
    """The llama.cpp chain of one sequence, which ends with a draw. It owns its samplers until
    close() frees them.

    `few`: how many candidates the first sampler keeps, 0 if it is not top-k. llama.cpp itself would
    lay out and sort the whole vocabulary. With top-k only the likeliest tokens are needed, so these
    are found first. The same tokens are drawn, except that tokens with bitwise equal logits may
    change places.
    """

    def __init__(
        self, samplers: list[Any], remembers: bool, candidates: CandidateTable, few: int = 0
    ) -> None:
        library = lib()
        self.pointer: Any = library.llama_sampler_chain_init(
            library.llama_sampler_chain_default_params()
        )
        for sampler in samplers:
            library.llama_sampler_chain_add(self.pointer, sampler)
        self._address: int = ctypes.cast(self.pointer, ctypes.c_void_p).value or 0
        self._remembers, self._seen = remembers, 0
        self._few = few if few <= MAX_SHORTLIST else 0
        self._candidates, self._strands = candidates, RowMaxima()

    def log_sum(self, row: Any, near: float) -> float:
        """Return row.log_sum(near), and keep the maxima found on the way for draw(). The next call
        of draw() must have the same row, unchanged.
        """
        if not self._few:
            return float(row.log_sum(near))
        return float(
            row.context.log_sum_exp.with_maxima(row.logits, row.address, near, self._strands)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Draw a token from a row. Samplers that look at earlier tokens first get those of `tokens`
        that they have not seen, including the prompt, as in llama-cli.
        """
        if self._few:
            token = self._candidates.draw(self._address, row, self._strands, self._few)
            if token is not None:
                return token
            if (candidates := self.shortlist(row.logits)) is not None:
                # no sampler after top-k needs the token ids, so indices are enough
                return candidates.token_id(
                    self._candidates.sample(self._address, candidates.values)
                )
        library = lib()
        for token in tokens[self._seen :] if self._remembers else ():
            library.llama_sampler_accept(self.pointer, token)
        token = int(library.llama_sampler_sample(self.pointer, row.context.pointer, row.index))
        self._seen = len(tokens) + 1  # llama_sampler_sample has accepted the drawn token
        return token

    def draw_among(self, row: Any, few: NDArray[np.int64], tokens: list[int]) -> int:
        """Draw one of the tokens in `few`. All others are left out, which makes the draw fast (as
        llama_sampler_sample does it, but with few candidates).

        Shapes: few `[tokens]` (token ids).
        """
        library = lib()
        for token in tokens[self._seen :] if self._remembers else ():
            library.llama_sampler_accept(self.pointer, token)
        token = self._candidates.sample(self._address, row.logits[few], few)
        library.llama_sampler_accept(self.pointer, token)
        self._seen = len(tokens) + 1
        return token

    def shortlist(self, logits: Logits) -> Shortlist | None:
        """Return the tokens that a top-k chain needs. Return None when they are too many, or when
        fewer than k tokens are possible.

        Shapes: logits `[n_vocab]`.
        """
        candidates = find_shortlist(logits, self._few)
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
