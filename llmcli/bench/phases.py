"""Where an answer's time goes: tokenizing, prefill, decode, sampling, detokenizing, the screen, the
rest of Python.

Answers as `run` makes them, of the same prompt and seed and with as many tokens each, and nothing
of one kept for the next. What llama.cpp computes is its own call, timed from outside; the rest of
Python is what no clock has seen: the engine's plan, the batch, events. Every other answer has no
clocks but the engine's own, so that what the clocks cost is known. `scripts/benchmarks/token_overhead.py`
divides the rest of Python further.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llmcli.bench.function_timers import Place, Probe
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.sampler import GreedyNative, NativeChain
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.sampling.chain import GreedyChain, NumpyChain
from llmcli.runtime.text.detokenizer import Detokenizer
from llmcli.types import Event, Message

PHASES = ("tokenize", "prefill", "decode", "sample", "detokenize", "screen", "python")
PER_TOKEN = PHASES[2:]
COMPUTE, SAMPLE, DETOKENIZE, SCREEN = "compute", "sample", "detokenize", "screen"
SENTENCE = "The lighthouse keeper counted ships until the fog came in, and wrote their names down. "

Parts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Spent:
    """One answer: seconds of each of PHASES, and for each token after the first seconds of each of
    PER_TOKEN.
    """

    phases: Parts
    tokens: tuple[Parts, ...]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Answers with clocks. `clocks` is what those cost a token, in seconds, which is in the parts:
    the difference of the medians of all but decode, with them and without.
    """

    prompt_tokens: int
    answers: tuple[Spent, ...]
    clocks: float

    def answer(self, phase: str) -> tuple[float, float, float]:
        """A phase's seconds in an answer: median, least and most."""
        values = [one.phases[phase] for one in self.answers]
        return statistics.median(values), min(values), max(values)

    def token(self, phase: str) -> tuple[float, float, float]:
        """A phase's seconds in a token: median, first and last tenth."""
        values = [token[phase] for one in self.answers for token in one.tokens]
        tenths = (
            statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
        )
        return statistics.median(values), tenths[0], tenths[-1]

    @property
    def seconds(self) -> float:
        """All phases together: what a neighbour did to one answer is not in it."""
        return sum(self.answer(phase)[0] for phase in PHASES)


def text(runner: Runner, tokens: int) -> str:
    """A prompt of about as many tokens, and no more; at least one sentence."""
    each = max(1, len(runner.encode_text(SENTENCE * 8)) // 8)
    count = max(1, tokens // each)
    while count > 1 and len(encode(runner, SENTENCE * count)) > tokens:
        count -= 1
    return SENTENCE * count


def encode(runner: Runner, prompt: str) -> tuple[int, ...]:
    """The ids of a prompt, through the model's template where it has one."""
    return (
        runner.encode_chat([Message("user", prompt)])
        if runner.template
        else runner.encode_text(prompt)
    )


def measure(
    runner: Runner,
    prompt: str,
    sampling: Sampling,
    n_gen: int,
    answers: int,
    show: Callable[[Event], None],
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Breakdown:
    """Make `answers` with clocks and as many without, after one that does not count; `show` is the
    screen.
    """
    made: list[Spent] = []
    with_clocks: list[float] = []
    without: list[float] = []
    count = 0
    for number in range(answers + 1):
        for clocks in (True, False) if number % 2 else (False, True):
            probe = Probe(clock)
            with unending(runner, probe if clocks else None), probe.at(_places() if clocks else ()):
                spent, gaps = _answer(runner, prompt, sampling, n_gen, show, probe)
            tick()
            if number:
                count = len(encode(runner, prompt))
                (with_clocks if clocks else without).extend(gaps)
                made += [spent] if clocks else []
    cost = statistics.median(with_clocks) - statistics.median(without) if without else 0.0
    return Breakdown(count, tuple(made), max(0.0, cost))


def _answer(
    runner: Runner,
    prompt: str,
    sampling: Sampling,
    n_gen: int,
    show: Callable[[Event], None],
    probe: Probe,
) -> tuple[Spent, list[float]]:
    """One answer; and of each token after the first the seconds that its decode, as the engine sees
    it, leaves over.
    """
    runner.engine.ledger.evict_idle()
    clock = probe.clock
    screen = probe.wrap(SCREEN, show)
    probe.take()
    begun = clock()
    tokens = encode(runner, prompt)
    encoded = clock()
    request = Request(
        tokens, sampling, n_gen, allow_repetition=True, start_time=time.perf_counter()
    )
    reply = runner.reply(request)
    parts: list[dict[str, float]] = []  # the last one is what comes after the last token
    last = encoded
    for event in reply:
        screen(event)
        if event.token:
            now = clock()
            parts.append({**probe.take(), "all": now - last})
            last = now
    parts.append({**probe.take(), "all": clock() - last})
    rows = [
        _phases(part, "prefill" if index == 0 else "decode") for index, part in enumerate(parts)
    ]
    phases = {phase: sum(row.get(phase, 0.0) for row in rows) for phase in PHASES}
    phases["tokenize"] = encoded - begun
    gaps = [(token.ms - token.decode_ms) / 1e3 for token in reply.answer.tokens[1:]]
    return Spent(phases, tuple(rows[1:-1])), gaps


def _phases(part: Parts, compute: str) -> dict[str, float]:
    """Seconds by PHASES of what went on until a token was shown; what no clock has seen is
    Python's.
    """
    seen = {phase: part.get(phase, 0.0) for phase in (SAMPLE, DETOKENIZE, SCREEN)}
    seen[compute] = part.get(COMPUTE, 0.0)
    return {**dict.fromkeys(PER_TOKEN, 0.0), **seen, "python": part["all"] - sum(seen.values())}


def _places() -> list[Place]:
    """The functions that are a phase; asking for a row waits where a GPU computes."""
    draws = [
        (SAMPLE, owner, "draw") for owner in (NativeChain, GreedyNative, GreedyChain, NumpyChain)
    ]
    return [
        (COMPUTE, lib(), "llama_decode"),
        (COMPUTE, Context, "row"),
        *draws,
        (DETOKENIZE, Detokenizer, "feed"),
    ]


@contextmanager
def unending(runner: Runner, probe: Probe | None = None) -> Iterator[None]:
    """Ask of every token whether it ends the answer, and go on whatever is said; `probe` times its
    bytes.
    """
    engine, means = runner.engine, runner.engine.resources
    ends, piece = means.vocabulary.is_end, means.vocabulary.piece
    timed = probe.wrap(DETOKENIZE, piece) if probe else piece
    vocabulary = replace(means.vocabulary, is_end=lambda token: ends(token) and False, piece=timed)
    engine.resources = replace(means, vocabulary=vocabulary)
    try:
        yield
    finally:
        engine.resources = means
