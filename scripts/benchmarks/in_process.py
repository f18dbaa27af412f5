"""Comparison of `llmcli bench` with the method of llama-bench in one process.

The machine's speed changes by tens of percent within seconds, and alternating processes do not
cancel that. Here both programs' measurements, A and B, use the same loaded weights and the same
build of llama.cpp. They compute a few tokens or one prompt each, in the order A B B A, then B A A
B. Each has two contexts, opened in the order A B B A, because the position of a context in memory
alone changes its speed by half a percent.

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
from llmcli.runtime.binding.contexts.cache_types import FLASH_MODES, KV_TYPES
from llmcli.runtime.binding.contract import set_fields
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.model import Model, open_model

TOKENS_PER_TURN = 8  # number of tokens that one measurement generates before the next one
PROMPT_TIME_SHARE = 1.4  # a test of prompts gets this many times the average time of a test
BOOTSTRAP_DRAWS = 4000


class Measurement(Protocol):
    """One context, measured as one of the two programs measures it."""

    def begin(self) -> None:
        """Empty the context."""
        ...

    def seconds_of_turn(self, start: int, end: int) -> float:
        """Return the seconds of generating the tokens from `start` to `end` of the test. In a test
        of prompts, return the seconds of one prompt; `start` and `end` are ignored.
        """
        ...


class Ours:
    """The measurement of `llmcli bench`, with its own forward passes and timestamps."""

    def __init__(self, trial: SpeedTrial) -> None:
        self.trial = trial
        trial.warm_up()

    def begin(self) -> None:
        self.trial.context.clear()

    def seconds_of_turn(self, start: int, end: int) -> float:
        stamps = run_passes(self.trial.steps[start:end] if self.trial.steps else self.trial.prompt)
        return (stamps[-1] - stamps[0]) / 1e9


class ThreadPoolParams(ctypes.Structure):
    """The C struct ggml_threadpool_params (ggml/include/ggml.h)."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    )


class Theirs:
    """The measurement of llama-bench: between two calls of llama.cpp it only draws a random token.

    `pointer` is the llama_context. The constructor warms it up.
    """

    def __init__(self, pointer: Any, model: Model, test: SpeedTest) -> None:
        self.pointer, self.test, self.library = pointer, test, lib()
        self.memory = self.library.llama_get_memory(pointer)
        self.n_vocab, self.bos = model.n_vocab, model.bos if model.add_bos else None
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

    def seconds_of_turn(self, start: int, end: int) -> float:
        return self._tokens(start, end) if self.test.n_gen else self._prompt()

    def _token(self, position: int) -> int:
        return (
            self.bos
            if position == 0 and self.bos is not None
            else self.random.randrange(self.n_vocab)
        )

    def _prompt(self) -> float:
        """Return the seconds of llama-bench's test_prompt. Its batches have no output flags, so
        llama.cpp computes the logits of the last row only.
        """
        library, test = self.library, self.test
        ids = [self._token(position) for position in range(test.n_prompt)]
        # Draw the tokens before the clock starts, because Python draws them more slowly than C.
        tokens: Any = (ctypes.c_int32 * test.n_prompt)(*ids)
        began = time.perf_counter()
        library.llama_set_n_threads(self.pointer, test.n_threads, test.n_threads)
        for start in range(0, test.n_prompt, test.n_batch):
            here = ctypes.cast(ctypes.addressof(tokens) + 4 * start, ctypes.POINTER(ctypes.c_int32))
            count = min(test.n_batch, test.n_prompt - start)
            code = library.llama_decode(self.pointer, library.llama_batch_get_one(here, count))
            assert not code, code
        library.llama_synchronize(self.pointer)
        return time.perf_counter() - began

    def _tokens(self, start: int, end: int) -> float:
        """Return the seconds of llama-bench's test_gen: batches of one token with logits, each
        followed by llama_synchronize.
        """
        library, pointer, batch = self.library, self.pointer, self.batch
        ids = [self._token(position) for position in range(start, end)]
        library.llama_set_n_threads(pointer, self.test.n_threads, self.test.n_threads)
        set_fields(batch, n_tokens=1)
        tokens, positions = batch.token, batch.pos
        began = time.perf_counter()
        for position, token_id in enumerate(ids, start):
            tokens[0], positions[0] = token_id, position
            code = library.llama_decode(pointer, batch)
            assert not code, code
            library.llama_synchronize(pointer)
        return time.perf_counter() - began


@contextmanager
def open_theirs(model: Model, test: SpeedTest) -> Iterator[Theirs]:
    """Open a llama_context with llama-bench's parameters and thread pool, and warm it up. It is
    freed at the end.
    """
    library = lib()
    params = library.llama_context_default_params()
    set_fields(
        params,
        n_ctx=test.n_prompt + test.n_gen + test.n_depth,
        n_batch=test.n_batch,
        n_ubatch=test.n_ubatch,
        type_k=KV_TYPES[test.type_k],
        type_v=KV_TYPES[test.type_v],
        flash_attn_type=FLASH_MODES[test.flash_attn],
        offload_kqv=True,
        op_offload=True,
        embeddings=False,
        swa_full=False,
    )
    pointer = library.llama_init_from_model(model.pointer, params)
    assert pointer, "llama.cpp refuses llama-bench's context"
    folder = Path(library.__file__).parent / "lib"
    base, cpu, llama = (
        ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu", "llama")
    )
    base.ggml_threadpool_params_default.restype = ThreadPoolParams
    cpu.ggml_threadpool_new.restype = ctypes.c_void_p
    pool_params = base.ggml_threadpool_params_default(ctypes.c_int(test.n_threads))
    assert pool_params.n_threads == test.n_threads, (
        "struct ggml_threadpool_params has another layout"
    )
    pool_params.poll = 50
    pool = ctypes.c_void_p(cpu.ggml_threadpool_new(ctypes.byref(pool_params)))
    llama.llama_attach_threadpool(ctypes.cast(pointer, ctypes.c_void_p), pool, None)
    measurement = Theirs(pointer, model, test)
    try:
        yield measurement
    finally:
        library.llama_batch_free(measurement.batch)
        library.llama_free(pointer)
        cpu.ggml_threadpool_free(pool)


@dataclass(slots=True)
class Paired:
    """The measured seconds of both programs; the values at one index are of the same moment.

    `tokens`: number of tokens that were computed in the time of one value.
    """

    tokens: int
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    def ratio(self) -> tuple[float, float, float]:
        """Return the ratio of median speeds, ours / theirs, and the low and the high end of its
        95 % bootstrap interval.
        """
        both = np.array([self.ours, self.theirs])  # [2, turns]
        draws = np.random.default_rng(1).integers(
            0, both.shape[1], (BOOTSTRAP_DRAWS, both.shape[1])
        )
        ours, others = np.median(both[:, draws], axis=2)
        low, high = np.quantile(others / ours, (0.025, 0.975))
        return (
            statistics.median(self.theirs) / statistics.median(self.ours),
            float(low),
            float(high),
        )

    def speeds(self) -> tuple[float, float]:
        """Return the median tokens per second, ours and theirs."""
        return self.tokens / statistics.median(self.ours), self.tokens / statistics.median(
            self.theirs
        )


def compare(model: Model, test: SpeedTest, seconds: float) -> Paired:
    """Measure one test by both programs' methods in turn for about `seconds`."""
    with ExitStack() as stack:
        measurements: list[Measurement] = []
        for is_ours in (True, False, False, True):
            context_manager = open_trial(model, test) if is_ours else open_theirs(model, test)
            opened: Any = stack.enter_context(context_manager)
            measurements.append(Ours(opened) if is_ours else opened)
        ours_1, theirs_1, theirs_2, ours_2 = measurements
        token_ranges = [
            (at, min(at + TOKENS_PER_TURN, test.n_gen))
            for at in range(0, test.n_gen, TOKENS_PER_TURN)
        ] or [(0, 0)]
        paired = Paired(2 * (TOKENS_PER_TURN if test.n_gen else test.n_prompt))
        begun, turn = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            for side in measurements:
                side.begin()
            for start, end in token_ranges:
                order = (
                    (ours_1, theirs_1, theirs_2, ours_2),
                    (theirs_1, ours_1, ours_2, theirs_2),
                )[turn % 2]
                seconds_by_side = {id(side): side.seconds_of_turn(start, end) for side in order}
                turn += 1
                if end - start == TOKENS_PER_TURN or not test.n_gen:
                    paired.ours.append(seconds_by_side[id(ours_1)] + seconds_by_side[id(ours_2)])
                    paired.theirs.append(
                        seconds_by_side[id(theirs_1)] + seconds_by_side[id(theirs_2)]
                    )
        return paired


def measure(
    path: Path, threads: list[int], prompt: int, gen: int, seconds: float
) -> Iterator[tuple[SpeedTest, Paired]]:
    """Measure a model with each number of threads: prompts of `prompt` tokens, then `gen` generated
    tokens. Yield each test with its result, after about `seconds` per test. A length of 0 leaves
    that test out.
    """
    with open_model(path) as model:
        for count in threads:
            for n_prompt, n_gen, share in (
                (prompt, 0, PROMPT_TIME_SHARE),
                (0, gen, 2 - PROMPT_TIME_SHARE),
            ):
                if n_prompt or n_gen:
                    test = SpeedTest(n_prompt, n_gen, 0, 2048, 512, "f16", "f16", count, -1, "auto")
                    yield test, compare(model, test, share * seconds)
