"""A chain of llama.cpp's own samplers (src/llama-sampler.cpp): the fast path of sampling/chain.py."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding import look
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.look import Strands
from llmcli.runtime.ranked import Shortlist, shortlist
from llmcli.runtime.sampling.base import Logits, Native
from llmcli.runtime.sampling.chain import Greedy

REMEMBERING = {"penalties", "dry"}  # they look back at the tokens before
SELECTING = {"mirostat_v2"}  # they draw the token themselves
MOST_FEW = 256  # candidates beyond are left to llama.cpp (row.c knows it, too)
MOST_COLUMNS = 2 * MOST_FEW  # of those that the likeliest stand in
ROOM = 4096  # candidates at first
ANY_SEED = 2**32 - 1  # LLAMA_DEFAULT_SEED: another one each time


def many() -> int:
    """Tokens of a vocabulary, below which llama.cpp's own way takes no longer than our C, or numpy."""
    return 4096 if look.own() else 100_000


CANDIDATE = np.dtype(
    [("id", np.int32), ("logit", np.float32), ("p", np.float32)]
)  # llama_token_data


def candidates(rows: NDArray[np.void]) -> Any:
    """A llama_token_data_array over CANDIDATE rows, which samplers change in place; keep them while
    it is used.
    """
    array = lib().llama_token_data_array()
    array.data = ctypes.cast(rows.ctypes.data, type(array.data))
    array.size, array.selected, array.sorted = len(rows), -1, False
    return array


class Candidates:
    """A table of candidates that samplers change in place, used again and again: making one takes
    50 µs behind a forward pass. llama_token_data_array with a plain address in it, for the same
    reason.
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
        self._room(ROOM)

    def _room(self, count: int) -> None:
        table = np.zeros(count, CANDIDATE)
        self._ids, self._logits, self._address = table["id"], table["logit"], table.ctypes.data
        self._numbers, self._count = np.arange(count, dtype=np.int32), count

    def sample(
        self, chain: int, logits: NDArray[np.float32], ids: NDArray[Any] | None = None
    ) -> int:
        """What the samplers at address `chain` take of these: its id, or its number where no ids
        are given.
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
        moved = (array.data - self._address) // CANDIDATE.itemsize  # XTC has moved the beginning
        return int(self._ids[moved + chosen])

    def draw(self, chain: int, row: Any, strands: Strands, few: int) -> int | None:
        """What the samplers take of the `few` likeliest of a row, all in our own C; None where
        there is none of it, or it finds too many, or none.
        """
        if strands.own is None:
            return None
        count = len(row.logits)
        table = self._address, self._count
        token = strands.own.draw(
            row.address, count, *strands.take(count), few, *table, self._where, chain
        )
        assert token >= -1, token
        return token if token >= 0 else None


class Likeliest(Greedy):
    """The likeliest token, found by our own C: one look, and none where the log-sum has seen the
    row.
    """

    def __init__(self, strands: Strands) -> None:
        super().__init__([])
        assert strands.own is not None
        self._strands, self._find = strands, strands.own.likeliest

    def log_sum(self, row: Any, near: float) -> float:
        """row.log_sum(near); what it sees is kept for draw(), which must follow, with the same row,
        not written to.
        """
        return float(
            row.context.log_sum_exp.with_strands(row.logits, row.address, near, self._strands)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """The first of the largest logits."""
        count = len(row.logits)
        token: int = self._find(row.address, count, *self._strands.take(count))
        return token if token >= 0 else super().draw(row, tokens)


class NativeChains:
    """Makes native chains for one vocabulary; what `make_chain` takes."""

    def __init__(self, n_vocab: int, vocab: Any = None) -> None:
        """`vocab` is the model's llama_vocab; without one DRY knows no breakers."""
        self.n_vocab, self.vocab, self._candidates = n_vocab, vocab, Candidates()
        self._dry: tuple[tuple[Any, ...], Any] | None = None

    def greedy(self) -> Greedy:
        """What takes the likeliest token of a row as it is."""
        strands = Strands()
        return Likeliest(strands) if strands.own else Greedy([])

    def chain(self, steps: list[Native], seed: int) -> "NativeChain":
        """The samplers one after the other, and a draw where the last of them is none."""
        seed %= ANY_SEED
        made = [self.make(step, seed) for step in steps]
        # Without a selecting sampler at the end llama_sampler_sample aborts the process.
        if not steps or steps[-1][0] not in SELECTING:
            made.append(lib().llama_sampler_init_dist(seed))
        first = steps[0] if steps else ("", ())
        few = first[1][0] if first[0] == "top_k" and self.n_vocab >= many() else 0
        return NativeChain(
            made, any(name in REMEMBERING for name, _ in steps), self._candidates, few
        )

    def make(self, step: Native, seed: int) -> Any:
        """One llama.cpp sampler: a step's arguments, and what else llama.cpp wants to know."""
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
            case "xtc":  # a stream of its own: the draw's would tie the coin to an earlier draw
                return new(*arguments, (seed ^ 0x5DEECE66) % ANY_SEED)
            case "mirostat_v2":
                return new(seed, *arguments)
            case _:
                return new(*arguments)

    def _copy_of_dry(self, arguments: tuple[Any, ...]) -> Any:
        """Finding the tokens that hold a breaker takes 13 ms, a copy of the last sampler nothing."""
        library = lib()
        if self._dry is None or self._dry[0] != arguments:
            if self._dry:
                library.llama_sampler_free(self._dry[1])
            *values, breakers = arguments
            marks = (ctypes.c_char_p * len(breakers))(*breakers)
            made = library.llama_sampler_init_dry(
                self.vocab, *values, marks, len(breakers) if self.vocab else 0
            )
            self._dry = arguments, made
        return library.llama_sampler_clone(self._dry[1])


class NativeChain:
    """One sequence's llama.cpp chain, ending in a draw; free it with close(). The samplers become
    its own.

    `few`: how many candidates the first of them keeps, 0 where it is another. llama.cpp lays the
    whole vocabulary out and sorts it; the likeliest, found beforehand, are all that such a chain
    looks at (262,144 tokens, between two passes on a busy two-core Xeon: 1,060 µs against 200 where
    numpy finds them; with 49,152 it is 197 against 223; our own C takes 93 for 262,144, the
    fetching of the row in it). The same tokens are drawn; only of logits that are equal to the last
    bit others may come first.
    """

    def __init__(
        self, samplers: list[Any], remembers: bool, candidates: Candidates, few: int = 0
    ) -> None:
        library = lib()
        self.pointer: Any = library.llama_sampler_chain_init(
            library.llama_sampler_chain_default_params()
        )
        for sampler in samplers:
            library.llama_sampler_chain_add(self.pointer, sampler)
        self._address: int = ctypes.cast(self.pointer, ctypes.c_void_p).value or 0
        self._remembers, self._seen = remembers, 0
        self._few = few if few <= MOST_FEW else 0
        self._candidates, self._strands = candidates, Strands()

    def log_sum(self, row: Any, near: float) -> float:
        """row.log_sum(near); what it sees is kept for draw(), which must follow, with the same row,
        not written to.
        """
        if not self._few:
            return float(row.log_sum(near))
        return float(
            row.context.log_sum_exp.with_strands(row.logits, row.address, near, self._strands)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Sample from a row of the binding's; steps that look back are shown the prompt first, as
        in llama-cli.
        """
        if self._few:
            token = self._candidates.draw(self._address, row, self._strands, self._few)
            if token is not None:
                return token
            if (found := self.shortlist(row.logits)) is not None:
                # No sampler behind top-k asks which token it is: numbers will do.
                return found.token(self._candidates.sample(self._address, found.values))
        library = lib()
        for token in tokens[self._seen :] if self._remembers else ():
            library.llama_sampler_accept(self.pointer, token)
        token = int(library.llama_sampler_sample(self.pointer, row.context.pointer, row.index))
        self._seen = len(tokens) + 1  # sampling accepts what it drew
        return token

    def draw_among(self, row: Any, few: NDArray[np.int64], tokens: list[int]) -> int:
        """The same with all tokens but `few` left out, which is what makes it quick
        (llama_sampler_sample).
        """
        library = lib()
        for token in tokens[self._seen :] if self._remembers else ():
            library.llama_sampler_accept(self.pointer, token)
        token = self._candidates.sample(self._address, row.logits[few], few)
        library.llama_sampler_accept(self.pointer, token)
        self._seen = len(tokens) + 1
        return token

    def shortlist(self, logits: Logits) -> Shortlist | None:
        """What a chain of few needs to look at; None where that is too much, or holds what cannot
        be drawn.
        """
        found = shortlist(logits, self._few)
        return found if found.least > -np.inf and len(found.columns) <= MOST_COLUMNS else None

    def close(self) -> None:
        """Free the samplers; a second call does nothing."""
        if self.pointer:
            lib().llama_sampler_free(self.pointer)
            self.pointer = None
