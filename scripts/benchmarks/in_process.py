"""`llmcli bench` and llama-bench in one process: contexts and measurements of both.

The machine's speed changes by tens of percent within seconds, which alternating processes do not
cancel. Here both sides compute over the same loaded weights, a few tokens or a prompt each, in the
order A B B A, then B A A B. Each side has two contexts, opened in the order A B B A, because a
context's place in memory alone changes its speed by half a percent. The library is the one that
`llmcli` uses.

Source: tools/llama-bench/llama-bench.cpp (to_llama_cparams, the thread pool, test_prompt,
test_gen).
"""

import ctypes
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmcli.bench.speed.measure import SpeedTrial, open_trial
from llmcli.bench.speed.parameter_grid import SpeedTest
from llmcli.bench.speed.random_passes import run_passes
from llmcli.runtime.binding.cache_types import FLASH_MODES, KV_TYPES
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import Model, open_model

PIECE = 8  # generated tokens per turn
PROMPTS = 1.4  # tests with prompts get this share of time relative to the others
DRAWS = 4000  # of the bootstrap


class Side(Protocol):
    """One context and its measurement."""

    def begin(self) -> None:
        """Empty the context."""
        ...

    def piece(self, start: int, end: int) -> float:
        """Return the seconds of the tokens from `start` to `end`, or of the prompt if there are
        none.
        """
        ...


class Ours:
    """The measurement of `llmcli bench`: its passes and its timestamps."""

    def __init__(self, trial: SpeedTrial) -> None:
        self.trial = trial
        trial.warm_up()

    def begin(self) -> None:
        self.trial.context.clear()

    def piece(self, start: int, end: int) -> float:
        stamps = run_passes(self.trial.steps[start:end] if self.trial.steps else self.trial.prompt)
        return (stamps[-1] - stamps[0]) / 1e9


class Pool(ctypes.Structure):
    """struct ggml_threadpool_params (ggml/include/ggml.h)."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


class Theirs:
    """The measurement of llama-bench: only a random token between two calls of llama.cpp."""

    def __init__(self, pointer: Any, model: Model, test: SpeedTest) -> None:
        self.pointer, self.test, self.library = pointer, test, lib()
        self.memory = self.library.llama_get_memory(pointer)
        self.n_vocab, self.first = model.n_vocab, model.bos if model.add_bos else None
        self.random = random.Random(1)
        self.batch = self.library.llama_batch_init(1, 0, 1)
        self.batch.n_seq_id[0], self.batch.seq_id[0][0], self.batch.logits[0] = 1, 0, 1
        if test.n_prompt:
            self._prompt()
        if test.n_gen:
            self._tokens(0, 1)
        self.begin()

    def begin(self) -> None:
        self.library.llama_memory_clear(self.memory, False)

    def piece(self, start: int, end: int) -> float:
        return self._tokens(start, end) if self.test.n_gen else self._prompt()

    def _token(self, place: int) -> int:
        return (
            self.first
            if place == 0 and self.first is not None
            else self.random.randrange(self.n_vocab)
        )

    def _prompt(self) -> float:
        """Time test_prompt: batches without output flags, for which llama.cpp computes the last
        row.
        """
        library, test = self.library, self.test
        ids = [self._token(place) for place in range(test.n_prompt)]
        tokens: Any = (ctypes.c_int32 * test.n_prompt)(
            *ids
        )  # drawing 512 numbers is slower in Python than in C
        begun = time.perf_counter()
        library.llama_set_n_threads(self.pointer, test.n_threads, test.n_threads)
        for at in range(0, test.n_prompt, test.n_batch):
            here = ctypes.cast(ctypes.addressof(tokens) + 4 * at, ctypes.POINTER(ctypes.c_int32))
            count = min(test.n_batch, test.n_prompt - at)
            code = library.llama_decode(self.pointer, library.llama_batch_get_one(here, count))
            assert not code, code
        library.llama_synchronize(self.pointer)
        return time.perf_counter() - begun

    def _tokens(self, start: int, end: int) -> float:
        """Time test_gen: one token per batch with logits, and a synchronize after each."""
        library, pointer, batch = self.library, self.pointer, self.batch
        ids = [self._token(place) for place in range(start, end)]
        library.llama_set_n_threads(pointer, self.test.n_threads, self.test.n_threads)
        batch.n_tokens = 1
        token, position = batch.token, batch.pos
        begun = time.perf_counter()
        for place, drawn in enumerate(ids, start):
            token[0], position[0] = drawn, place
            code = library.llama_decode(pointer, batch)
            assert not code, code
            library.llama_synchronize(pointer)
        return time.perf_counter() - begun


@contextmanager
def theirs(model: Model, test: SpeedTest) -> Iterator[Theirs]:
    """Open a context with llama-bench's parameters and warm it up."""
    library = lib()
    params = library.llama_context_default_params()
    params.n_ctx = test.n_prompt + test.n_gen + test.n_depth
    params.n_batch, params.n_ubatch = test.n_batch, test.n_ubatch
    params.type_k, params.type_v = KV_TYPES[test.type_k], KV_TYPES[test.type_v]
    params.flash_attn_type = FLASH_MODES[test.flash_attn]
    params.offload_kqv, params.op_offload, params.embeddings, params.swa_full = (
        True,
        True,
        False,
        False,
    )
    pointer = library.llama_init_from_model(model.pointer, params)
    assert pointer, "llama.cpp refuses llama-bench's context"
    folder = Path(library.__file__).parent / "lib"
    base, cpu, llama = (
        ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu", "llama")
    )
    base.ggml_threadpool_params_default.restype = Pool
    cpu.ggml_threadpool_new.restype = ctypes.c_void_p
    wanted = base.ggml_threadpool_params_default(ctypes.c_int(test.n_threads))
    assert wanted.n_threads == test.n_threads, "struct ggml_threadpool_params has another layout"
    wanted.poll = 50
    pool = ctypes.c_void_p(cpu.ggml_threadpool_new(ctypes.byref(wanted)))
    llama.llama_attach_threadpool(ctypes.cast(pointer, ctypes.c_void_p), pool, None)
    made = Theirs(pointer, model, test)
    try:
        yield made
    finally:
        library.llama_batch_free(made.batch)
        library.llama_free(pointer)
        cpu.ggml_threadpool_free(pool)


@dataclass(slots=True)
class Paired:
    """Seconds of each turn of both sides, in pairs."""

    tokens: int
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def ratio(self) -> tuple[float, float, float]:
        """Return our speed over theirs as a ratio of medians, with its 95 % bootstrap interval."""
        both = np.array([self.ours, self.theirs])  # [2, turns]
        draws = np.random.default_rng(1).integers(0, both.shape[1], (DRAWS, both.shape[1]))
        ours, others = np.median(both[:, draws], axis=2)
        low, high = np.quantile(others / ours, (0.025, 0.975))
        return (
            statistics.median(self.theirs) / statistics.median(self.ours),
            float(low),
            float(high),
        )

    def speeds(self) -> tuple[float, float]:
        """Return the tokens per second of both sides."""
        return self.tokens / statistics.median(self.ours), self.tokens / statistics.median(
            self.theirs
        )


def compare(model: Model, test: SpeedTest, seconds: float) -> Paired:
    """Measure both sides in turn for about `seconds`."""
    with ExitStack() as stack:
        made: list[Side] = []
        for mine in (True, False, False, True):
            way = open_trial(model, test) if mine else theirs(model, test)
            opened: Any = stack.enter_context(way)
            made.append(Ours(opened) if mine else opened)
        first, one, other, last = made
        pieces = [(at, min(at + PIECE, test.n_gen)) for at in range(0, test.n_gen, PIECE)] or [
            (0, 0)
        ]
        paired = Paired(2 * (PIECE if test.n_gen else test.n_prompt))
        begun, turn = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            for side in made:
                side.begin()
            for start, end in pieces:
                order = ((first, one, other, last), (one, first, last, other))[turn % 2]
                taken = {id(side): side.piece(start, end) for side in order}
                turn += 1
                if end - start == PIECE or not test.n_gen:
                    paired.ours.append(taken[id(first)] + taken[id(last)])
                    paired.theirs.append(taken[id(one)] + taken[id(other)])
        return paired


def measure(
    path: Path, threads: list[int], prompt: int, gen: int, seconds: float
) -> Iterator[tuple[SpeedTest, Paired]]:
    """Measure every test of a model, each for about `seconds`."""
    with open_model(path) as model:
        for count in threads:
            for n_prompt, n_gen, share in ((prompt, 0, PROMPTS), (0, gen, 2 - PROMPTS)):
                if n_prompt or n_gen:
                    test = SpeedTest(n_prompt, n_gen, 0, 2048, 512, "f16", "f16", count, -1, "auto")
                    yield test, compare(model, test, share * seconds)
