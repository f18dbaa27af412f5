"""Chains of llama.cpp's own samplers (src/llama-sampler.cpp). They are faster than the equivalent
numpy chain of sampling/chain.py.
"""

import ctypes
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcli.runtime.binding import contract
from llmcli.runtime.binding.kernels import row_draws, row_scan
from llmcli.runtime.binding.kernels.row_draws import ReadTokens, RowDraw
from llmcli.runtime.binding.kernels.row_scan import RowMaxima
from llmcli.runtime.binding.library import lib
from llmcli.runtime.sampling.base import Logits, NativeStep
from llmcli.runtime.sampling.chain import GreedyChain, PlannedDraw, SamplerChain
from llmcli.runtime.sampling.top_logprobs import Shortlist, find_shortlist

# samplers that look at earlier tokens and change only the logits of these, each with the index of
# the argument that says how many tokens they look at
HISTORY_SAMPLERS = {"penalties": 0, "dry": 3}
BIAS_SAMPLER = "logit_bias"  # it also changes single logits
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


@dataclass(frozen=True, slots=True)
class ChainShape:
    """What kinds of samplers a chain has.

    - `biases`: the tokens and numbers of the bias, which is the first sampler if there is one.
    - `history_start`, `history_end`: the samplers between them look at earlier tokens and change
      only the logits of these.
    - `top_k`: how many likeliest tokens the next sampler keeps; 0 if it is not top-k, or keeps so
      many tokens or has so few that the search for them would not pay.
    - `window`: how many of the last tokens the samplers before it look at.
    - `needs_history`: whether any sampler looks at earlier tokens.
    """

    biases: tuple[tuple[int, float], ...]
    history_start: int
    history_end: int
    top_k: int
    window: int
    needs_history: bool


def chain_shape(steps: Sequence[NativeStep], n_vocab: int) -> ChainShape:
    """Return the shape of a chain of these samplers."""
    first = int(bool(steps) and steps[0][0] == BIAS_SAMPLER)
    rest = first
    while rest < len(steps) and steps[rest][0] in HISTORY_SAMPLERS:
        rest += 1
    top_k = steps[rest][1][0] if rest < len(steps) and steps[rest][0] == "top_k" else 0
    is_short = top_k <= MAX_SHORTLIST and n_vocab >= min_shortlist_vocabulary()
    return ChainShape(
        steps[0][1] if first else (),
        first,
        rest,
        top_k if is_short else 0,
        max((steps[at][1][HISTORY_SAMPLERS[steps[at][0]]] for at in range(first, rest)), default=0),
        any(name in HISTORY_SAMPLERS for name, _ in steps),
    )


class GreedyNative(GreedyChain):
    """Chooses the likeliest token with llmcli's C code. The code scans the row once, or reuses the
    maxima that log_sum() found for the same row.

    A bias and penalties may come first. Their samplers read the last tokens for each draw, so that
    a draw does not depend on earlier ones.
    """

    def __init__(
        self, maxima: RowMaxima, samplers: Sequence[Any] = (), shape: ChainShape | None = None
    ) -> None:
        """`samplers`: those of `shape` without the bias. They are freed by close()."""
        super().__init__([])
        assert maxima.scan is not None
        self._maxima, self._find = maxima, maxima.scan.find_likeliest
        self._samplers, self._window = list(samplers), shape.window if shape else 0
        self._plan = RowDraw()
        self._plan.set_samplers(addresses(samplers), 0, len(samplers), 0)
        self._plan.set_biases(shape.biases if shape else ())
        self._plan.replays = 1
        self._changes_logits = shape is not None

    def log_sum(self, row: Any, near: float) -> float:
        """Return row.log_sum(near). The scan also stores the row's strand maxima, which the next
        call of draw() uses. That call must get the same row, unchanged.
        """
        if self._changes_logits:
            return float(row.log_sum(near))
        return float(
            row.context.log_sum_exp.with_maxima(row.logits, row.address, near, self._maxima)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Return the id of the token with the largest logit; among equal logits, the lowest id."""
        count = len(row.logits)
        if self._changes_logits:
            token = draw_alone(self.plan(tokens), row.address, count)
        else:
            token = self._find(row.address, count, *self._maxima.consume(count))
        return token if token >= 0 else super().draw(row, tokens)

    def plan(
        self,
        tokens: list[int],
        banned: NDArray[np.int32] | None = None,
        near: float | None = None,
    ) -> RowDraw:
        """Return what the C code needs for a draw, except the row. `banned` and `near`: see
        RowDraw.set_options.
        """
        self._plan.set_options(banned, near)
        if self._window:
            self._plan.set_tokens(array("i", tokens[-self._window :]))
        return self._plan

    def record(self, token: int, tokens: list[int]) -> None:
        """Do nothing: no draw depends on earlier ones."""

    def close(self) -> None:
        """Free the samplers; a second call does nothing."""
        while self._samplers:
            lib().llama_sampler_free(self._samplers.pop())


def addresses(samplers: Sequence[Any]) -> list[int]:
    """Return the addresses of llama_samplers."""
    return [ctypes.cast(sampler, ctypes.c_void_p).value or 0 for sampler in samplers]


def draw_alone(plan: RowDraw, address: int, n_vocab: int) -> int:
    """Make one draw from the logits at `address`. Return the token, or -1 if it must be drawn in
    another way.
    """
    draws = row_draws.load_row_draws()
    assert draws is not None
    plan.logits = address
    draws.draw([plan], n_vocab, 1)
    token: int = plan.token
    assert token >= -1, token
    return token


class NativeChains:
    """Makes chains of llama.cpp samplers for one vocabulary. `make_chain` of sampling/ calls it
    when all steps of a chain have a llama.cpp sampler.
    """

    def __init__(self, n_vocab: int, vocab: Any = None, threads: int = 1) -> None:
        """`vocab`: the model's llama_vocab. Without it, the sampler DRY has no sequence breakers.
        `threads`: the number of threads of a forward pass with several rows. Draws from several
        rows use as many, because with fewer OpenMP would end the others.
        """
        self.n_vocab, self.vocab, self._candidates = n_vocab, vocab, CandidateTable()
        self.threads = threads
        self._dry: tuple[tuple[Any, ...], Any] | None = None

    def greedy(self, steps: list[NativeStep]) -> GreedyChain | None:
        """Return a chain that chooses the token with the largest logit after these samplers. Return
        None if llmcli's C code for it is missing, or if a sampler is neither a bias nor a penalty.
        """
        maxima = RowMaxima()
        if not steps:
            return GreedyNative(maxima) if maxima.scan else None
        if any(name not in (BIAS_SAMPLER, "penalties") for name, _ in steps):
            return None
        if not maxima.scan or not row_draws.load_row_draws():
            return None
        shape = chain_shape(steps, self.n_vocab)
        samplers = [self.make_sampler(step, 0) for step in steps[shape.history_start :]]
        return GreedyNative(maxima, samplers, shape)

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
        return NativeChain(samplers, chain_shape(steps, self.n_vocab), self._candidates)

    def can_plan(self, chain: SamplerChain) -> bool:
        """Return whether prepare_draws() accepts draws of a chain."""
        return isinstance(chain, NativeChain | GreedyNative) and bool(row_draws.load_row_draws())

    def prepare_draws(self, draws: Sequence[PlannedDraw]) -> "NativeJointDraw":
        """Prepare these draws of different sequences."""
        return NativeJointDraw(draws, self.n_vocab, self.threads)

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


class NativeJointDraw:
    """Draws of different sequences, made by one call of llmcli's C code."""

    def __init__(self, draws: Sequence[PlannedDraw], n_vocab: int, threads: int) -> None:
        begun = time.perf_counter()
        self._draws, self._n_vocab, self._threads = draws, n_vocab, threads
        self._chains: list[Any] = [draw.chain for draw in draws]
        self._plans: list[RowDraw] = [
            chain.plan(draw.tokens, draw.banned, draw.near)
            for chain, draw in zip(self._chains, draws, strict=True)
        ]
        self._prepare_seconds = time.perf_counter() - begun

    def draw(self, rows: Sequence[Any]) -> None:
        """Make the draws from the rows of the pass, and fill in their results. The tokens are those
        that the chains would draw one by one. A token stays None if only the chain can draw it.
        """
        begun = time.perf_counter()
        kernel = row_draws.load_row_draws()
        assert kernel is not None
        for draw, plan in zip(self._draws, self._plans, strict=True):
            draw.row = row = rows[draw.row_number]
            plan.logits = row.address
        kernel.draw(self._plans, self._n_vocab, self._threads)
        for chain, draw, plan in zip(self._chains, self._draws, self._plans, strict=True):
            token = plan.token
            assert token >= -1, token
            if token >= 0:
                draw.token = token
                chain.record(token, draw.tokens)
            if draw.near is not None:
                row = rows[draw.row_number]
                draw.log_sum = row.context.log_sum_exp.from_sum(
                    row.logits, row.address, draw.near, plan.sum
                )
        seconds = self._prepare_seconds + time.perf_counter() - begun
        share = seconds / len(self._draws)
        for draw in self._draws:
            draw.seconds = share


class NativeChain:
    """A chain of llama.cpp samplers for one sequence, which ends with a draw. It owns its samplers
    until close() frees them.

    If a sampler is top-k, and only a bias, penalties and DRY come before it, llama.cpp would still
    visit and sort the whole vocabulary. So the likeliest tokens are found first, and only these are
    given to top-k. The same tokens are drawn, except that tokens with bitwise equal logits may be
    exchanged.
    """

    def __init__(self, samplers: list[Any], shape: ChainShape, candidates: CandidateTable) -> None:
        """`candidates`: a table that several chains may share, because chains draw in turn."""
        library = lib()
        self.pointer: Any = library.llama_sampler_chain_init(
            library.llama_sampler_chain_default_params()
        )
        for sampler in samplers:
            library.llama_sampler_chain_add(self.pointer, sampler)
        self._address: int = ctypes.cast(self.pointer, ctypes.c_void_p).value or 0
        self._needs_history, self._seen = shape.needs_history, 0
        # top-k comes first, and no sampler needs the ids of the tokens
        self._is_simple = bool(shape.top_k) and not shape.history_end and not shape.needs_history
        self._top_k = shape.top_k
        self._candidates, self._maxima = candidates, RowMaxima()
        self._plan = RowDraw()
        self._plan.set_samplers(
            addresses(samplers), shape.history_start, shape.history_end, shape.top_k
        )
        self._plan.set_biases(shape.biases)
        self._read = ReadTokens(shape.window) if shape.window else None
        self._can_plan = row_draws.load_row_draws() is not None

    def log_sum(self, row: Any, near: float) -> float:
        """Return row.log_sum(near). For a top-k chain the scan also stores the row's strand maxima,
        which the next call of draw() uses. That call must get the same row, unchanged.
        """
        if not self._is_simple:
            return float(row.log_sum(near))
        return float(
            row.context.log_sum_exp.with_maxima(row.logits, row.address, near, self._maxima)
        )

    def draw(self, row: Any, tokens: list[int]) -> int:
        """Draw a token from a row of logits, and return its id. `tokens`: all tokens of the
        sequence so far. Samplers that depend on earlier tokens first get those that they have not
        seen yet, including the prompt, as in llama-cli.
        """
        if self._is_simple:
            token = self._candidates.draw(self._address, row, self._maxima, self._top_k)
            if token is not None:
                return token
            if (candidates := self.shortlist(row.logits)) is not None:
                # no sampler after top-k needs the token ids, so indices are enough
                return candidates.token_id(
                    self._candidates.sample(self._address, candidates.values)
                )
        elif self._top_k and self._can_plan:
            token = draw_alone(self.plan(tokens), row.address, len(row.logits))
            if token >= 0:
                self.record(token, tokens)
                return token
        self._follow(tokens)
        token = self._draw_from_all(row)
        # llama_sampler_sample has given the drawn token to the samplers
        self._note(token, tokens)
        return token

    def _draw_from_all(self, row: Any) -> int:
        """Give the samplers all tokens, and return the drawn one."""
        return int(lib().llama_sampler_sample(self.pointer, row.context.pointer, row.index))

    def plan(
        self,
        tokens: list[int],
        banned: NDArray[np.int32] | None = None,
        near: float | None = None,
    ) -> RowDraw:
        """Return what the C code needs for a draw, except the row. `banned` and `near`: see
        RowDraw.set_options. Call record() after the draw.
        """
        self._follow(tokens)
        self._plan.set_options(banned, near)
        if self._read is not None:
            self._plan.set_tokens(self._read.tokens)
        return self._plan

    def record(self, token: int, tokens: list[int]) -> None:
        """Give the samplers the token that was drawn after `tokens`."""
        if self._needs_history:
            lib().llama_sampler_accept(self.pointer, token)
            self._note(token, tokens)

    def _follow(self, tokens: list[int]) -> None:
        """Give the samplers the tokens that they have not seen yet."""
        if not self._needs_history:
            return
        accept, read = lib().llama_sampler_accept, self._read
        for token in tokens[self._seen :]:
            accept(self.pointer, token)
            if read is not None:
                read.add(token)
        self._seen = len(tokens)

    def _note(self, token: int, tokens: list[int]) -> None:
        """Record that the samplers have got the token that was drawn after `tokens`."""
        self._seen = len(tokens) + 1
        if self._read is not None:
            self._read.add(token)

    def draw_among(self, row: Any, ids: NDArray[np.int64], tokens: list[int]) -> int:
        """Draw one of the tokens in `ids`, and return its id. Other tokens are not considered, so
        the draw is fast. `tokens`: all tokens of the sequence so far.

        Shapes: ids `[allowed tokens]`. The steps are those of llama_sampler_sample.
        """
        self._follow(tokens)
        token = self._candidates.sample(self._address, row.logits[ids], ids)
        self.record(token, tokens)
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
