"""How the time of an answer is divided among phases: tokenizing, prefill, decode, sampling,
detokenizing, output and the remaining Python code.

The answers are generated as by `run`, with equal prompts, seeds and numbers of tokens. No answer
reuses the cache of an earlier one. Computation in llama.cpp is a call of its own, which is timed
from outside. The phase "python" is the time that no timer measures: planning by the engine,
building the batch, events. Every other answer runs without timers, which shows what the timers
cost.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llmcli.bench.function_timers import FunctionTimers, TimedFunction
from llmcli.runtime.binding.context import Context
from llmcli.runtime.binding.library import lib
from llmcli.runtime.binding.sampler import GreedyNative, NativeChain
from llmcli.runtime.requests.request import Request
from llmcli.runtime.runner import Runner
from llmcli.runtime.sampling import Sampling
from llmcli.runtime.sampling.chain import GreedyChain, NumpyChain
from llmcli.runtime.text.detokenizer import Detokenizer
from llmcli.runtime.vocabulary import Vocabulary
from llmcli.types import Event, Message

PHASES = ("tokenize", "prefill", "decode", "sample", "detokenize", "screen", "python")
TOKEN_PHASES = PHASES[2:]
COMPUTE, SAMPLE, DETOKENIZE, SCREEN = "compute", "sample", "detokenize", "screen"
PROMPT_SENTENCE = (
    "The lighthouse keeper counted ships until the fog came in, and wrote their names down. "
)

PhaseSeconds = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """The times of one answer in seconds. `phases`: by name, for each of PHASES. `tokens`: for each
    token after the first, by name, for each of TOKEN_PHASES.
    """

    phases: PhaseSeconds
    tokens: tuple[PhaseSeconds, ...]


@dataclass(frozen=True, slots=True)
class PhaseBreakdown:
    """The times of all answers that were measured with timers.

    `clock_seconds`: what the timers cost per token; the phases include this time. It is the
    difference between the median times per token with and without timers, where decode is left out.
    """

    prompt_tokens: int
    answers: tuple[PhaseTimes, ...]
    clock_seconds: float

    def answer_seconds(self, phase: str) -> tuple[float, float, float]:
        """Return the seconds that a phase takes in an answer: median, minimum and maximum over the
        answers.
        """
        values = [answer.phases[phase] for answer in self.answers]
        return statistics.median(values), min(values), max(values)

    def token_seconds(self, phase: str) -> tuple[float, float, float]:
        """Return the seconds that a phase takes in a token: median, first decile and last decile
        over the tokens.
        """
        values = [token[phase] for answer in self.answers for token in answer.tokens]
        tenths = (
            statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
        )
        return statistics.median(values), tenths[0], tenths[-1]

    @property
    def total_seconds(self) -> float:
        """The sum of the medians of all phases in seconds. Medians are used so that one disturbed
        answer does not matter.
        """
        return sum(self.answer_seconds(phase)[0] for phase in PHASES)


def build_prompt(runner: Runner, tokens: int) -> str:
    """Return a prompt of about `tokens` tokens. It has at most that many, unless it is a single
    sentence.
    """
    each = max(1, len(runner.encode_text(PROMPT_SENTENCE * 8)) // 8)
    count = max(1, tokens // each)
    while count > 1 and len(encode_prompt(runner, PROMPT_SENTENCE * count)) > tokens:
        count -= 1
    return PROMPT_SENTENCE * count


def encode_prompt(runner: Runner, prompt: str) -> tuple[int, ...]:
    """Return the token ids of a prompt, formatted with the model's chat template if there is
    one.
    """
    return (
        runner.encode_chat([Message("user", prompt)])
        if runner.template
        else runner.encode_text(prompt)
    )


def measure_phases(
    runner: Runner,
    prompt: str,
    sampling: Sampling,
    n_gen: int,
    answers: int,
    show: Callable[[Event], None],
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> PhaseBreakdown:
    """Measure `answers` answers with timers and as many without, after a warm-up.

    `show` prints an event of an answer. `tick` is called after each answer.
    """
    timed_answers: list[PhaseTimes] = []
    with_clocks: list[float] = []
    without: list[float] = []
    n_prompt_tokens = 0
    for number in range(answers + 1):
        for has_timers in (True, False) if number % 2 else (False, True):
            probe = FunctionTimers(clock)
            with (
                ignore_end_tokens(runner, probe if has_timers else None),
                probe.install(_places() if has_timers else ()),
            ):
                times, gaps = _answer(runner, prompt, sampling, n_gen, show, probe)
            tick()
            if number:
                n_prompt_tokens = len(encode_prompt(runner, prompt))
                (with_clocks if has_timers else without).extend(gaps)
                timed_answers += [times] if has_timers else []
    cost = statistics.median(with_clocks) - statistics.median(without) if without else 0.0
    return PhaseBreakdown(n_prompt_tokens, tuple(timed_answers), max(0.0, cost))


def _answer(
    runner: Runner,
    prompt: str,
    sampling: Sampling,
    n_gen: int,
    show: Callable[[Event], None],
    probe: FunctionTimers,
) -> tuple[PhaseTimes, list[float]]:
    """Generate one answer with the timers of `probe`.

    Returns its times, and for each token after the first the seconds outside of decode, as the
    engine measures them.
    """
    runner.engine.ledger.evict_idle()
    clock = probe.clock
    screen = probe.wrap(SCREEN, show)
    probe.reset()
    begun = clock()
    tokens = encode_prompt(runner, prompt)
    encoded = clock()
    request = Request(
        tokens, sampling, n_gen, allow_repetition=True, start_time=time.perf_counter()
    )
    reply = runner.reply(request)
    # one entry for each token, and a last one for the time after the last token
    parts: list[dict[str, float]] = []
    last = encoded
    for event in reply:
        screen(event)
        if event.token:
            shown_at = clock()
            parts.append({**probe.reset(), "all": shown_at - last})
            last = shown_at
    parts.append({**probe.reset(), "all": clock() - last})
    rows = [
        _phases(part, "prefill" if index == 0 else "decode") for index, part in enumerate(parts)
    ]
    phases = {phase: sum(row.get(phase, 0.0) for row in rows) for phase in PHASES}
    phases["tokenize"] = encoded - begun
    gaps = [(token.ms - token.decode_ms) / 1e3 for token in reply.answer.tokens[1:]]
    return PhaseTimes(phases, tuple(rows[1:-1])), gaps


def _phases(part: PhaseSeconds, compute: str) -> dict[str, float]:
    """Divide the seconds before a token was shown into PHASES. Time that no timer measured belongs
    to "python".
    """
    seen = {phase: part.get(phase, 0.0) for phase in (SAMPLE, DETOKENIZE, SCREEN)}
    seen[compute] = part.get(COMPUTE, 0.0)
    return {**dict.fromkeys(TOKEN_PHASES, 0.0), **seen, "python": part["all"] - sum(seen.values())}


def _places() -> list[TimedFunction]:
    """Return the functions to time. Reading a row of logits belongs to the computation, because it
    waits for a GPU.
    """
    draws = [
        (SAMPLE, owner, "draw") for owner in (NativeChain, GreedyNative, GreedyChain, NumpyChain)
    ]
    return [
        (COMPUTE, lib(), "llama_decode"),
        (COMPUTE, Context, "logits_row"),
        *draws,
        (DETOKENIZE, Detokenizer, "feed"),
    ]


class _EndlessVocabulary:
    """A vocabulary in which no token ends the answer, although each is checked as usual."""

    def __init__(self, vocabulary: Vocabulary, probe: FunctionTimers | None) -> None:
        self.n_vocab, self.tokenize = vocabulary.n_vocab, vocabulary.tokenize
        self.piece = probe.wrap(DETOKENIZE, vocabulary.piece) if probe else vocabulary.piece
        self._is_end = vocabulary.is_end

    def is_end(self, token: int) -> bool:
        """Check the token as an ordinary vocabulary does, for the same cost, but return False."""
        self._is_end(token)
        return False


@contextmanager
def ignore_end_tokens(runner: Runner, probe: FunctionTimers | None = None) -> Iterator[None]:
    """Within the block, check whether each token ends the answer, but never end it. If `probe` is
    given, it times the conversion of tokens to text.
    """
    engine, means = runner.engine, runner.engine.resources
    engine.resources = replace(means, vocabulary=_EndlessVocabulary(means.vocabulary, probe))
    try:
        yield
    finally:
        engine.resources = means
