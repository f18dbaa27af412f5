"""How the time of an answer is divided into phases: tokenizing, prefill, decoding, sampling,
detokenizing, output and the remaining Python code.

The answers are generated as by `llmcli run`, with equal prompts, seeds and numbers of tokens. No
answer reuses the KV cache of an earlier answer. Timers are installed around the functions that do
the work, such as llama_decode. The phase "python" is the time that no timer measures: the engine's
planning, building the batch, and events. Every other answer runs without timers, which shows the
cost of the timers.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llmcli.bench.function_timers import FunctionTimers, TimedFunction
from llmcli.runtime.binding.contexts.context import Context
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
    """The times of one answer in seconds. `phases`: the time of each phase in PHASES. `tokens`: for
    each token after the first, the time of each phase in TOKEN_PHASES.
    """

    phases: PhaseSeconds
    tokens: tuple[PhaseSeconds, ...]


@dataclass(frozen=True, slots=True)
class PhaseBreakdown:
    """The times of all answers that were measured with timers.

    `clock_seconds`: the cost of the timers per token, which the phases include. It is the
    difference of the median time per token, without decoding, between answers with and without
    timers.
    """

    prompt_tokens: int
    answers: tuple[PhaseTimes, ...]
    clock_seconds: float

    def answer_seconds(self, phase: str) -> tuple[float, float, float]:
        """Return the seconds of a phase in one answer: the median, minimum and maximum over all
        answers.
        """
        values = [answer.phases[phase] for answer in self.answers]
        return statistics.median(values), min(values), max(values)

    def token_seconds(self, phase: str) -> tuple[float, float, float]:
        """Return the seconds of a phase for one token: the median, the first decile and the last
        decile over all tokens.
        """
        values = [token[phase] for answer in self.answers for token in answer.tokens]
        deciles = (
            statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values
        )
        return statistics.median(values), deciles[0], deciles[-1]

    @property
    def total_seconds(self) -> float:
        """The sum over the phases of their median seconds per answer. A median is not affected by
        one disturbed answer.
        """
        return sum(self.answer_seconds(phase)[0] for phase in PHASES)


def build_prompt(runner: Runner, tokens: int) -> str:
    """Return a prompt of at most `tokens` tokens that repeats one sentence. It has at least one
    sentence, even if that is longer.
    """
    each = max(1, len(runner.encode_text(PROMPT_SENTENCE * 8)) // 8)
    count = max(1, tokens // each)
    while count > 1 and len(encode_prompt(runner, PROMPT_SENTENCE * count)) > tokens:
        count -= 1
    return PROMPT_SENTENCE * count


def encode_prompt(runner: Runner, prompt: str) -> tuple[int, ...]:
    """Return the token ids of a prompt, formatted with the model's chat template if the model has
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
    """Measure `answers` answers with timers and as many without, in turn, after a warm-up.

    `n_gen`: tokens per answer. `show` prints an event of an answer. `tick` is called after each
    answer.
    """
    timed_answers: list[PhaseTimes] = []
    seconds_with_timers: list[float] = []
    seconds_without_timers: list[float] = []
    n_prompt_tokens = 0
    for number in range(answers + 1):
        for has_timers in (True, False) if number % 2 else (False, True):
            timers = FunctionTimers(clock)
            with (
                ignore_end_tokens(runner, timers if has_timers else None),
                timers.install(_timed_functions() if has_timers else ()),
            ):
                times, outside_decode = _time_answer(runner, prompt, sampling, n_gen, show, timers)
            tick()
            if number:
                n_prompt_tokens = len(encode_prompt(runner, prompt))
                (seconds_with_timers if has_timers else seconds_without_timers).extend(
                    outside_decode
                )
                timed_answers += [times] if has_timers else []
    cost = (
        statistics.median(seconds_with_timers) - statistics.median(seconds_without_timers)
        if seconds_without_timers
        else 0.0
    )
    return PhaseBreakdown(n_prompt_tokens, tuple(timed_answers), max(0.0, cost))


def _time_answer(
    runner: Runner,
    prompt: str,
    sampling: Sampling,
    n_gen: int,
    show: Callable[[Event], None],
    timers: FunctionTimers,
) -> tuple[PhaseTimes, list[float]]:
    """Generate one answer, whose phases `timers` measures.

    Returns the times of the phases. Also returns, for each token after the first, the seconds
    outside of decoding according to the engine's own clock.
    """
    runner.engine.ledger.evict_idle()
    clock = timers.clock
    timed_show = timers.wrap(SCREEN, show)
    timers.reset()
    begun = clock()
    tokens = encode_prompt(runner, prompt)
    encoded = clock()
    request = Request(
        tokens, sampling, n_gen, allow_repetition=True, start_time=time.perf_counter()
    )
    reply = runner.reply(request)
    # one entry for each token, and a last one for the time after the last token
    steps: list[dict[str, float]] = []
    last_time = encoded
    for event in reply:
        timed_show(event)
        if event.token:
            shown_at = clock()
            steps.append({**timers.reset(), "all": shown_at - last_time})
            last_time = shown_at
    steps.append({**timers.reset(), "all": clock() - last_time})
    rows = [
        _split_into_phases(step, "prefill" if index == 0 else "decode")
        for index, step in enumerate(steps)
    ]
    phases = {phase: sum(row.get(phase, 0.0) for row in rows) for phase in PHASES}
    phases["tokenize"] = encoded - begun
    outside_decode = [(token.ms - token.decode_ms) / 1e3 for token in reply.answer.tokens[1:]]
    return PhaseTimes(phases, tuple(rows[1:-1])), outside_decode


def _split_into_phases(seconds: PhaseSeconds, compute: str) -> dict[str, float]:
    """Divide the seconds until a token was shown into phases. `seconds`: the seconds by timer, and
    the total as "all". `compute`: the phase to which computation belongs, "prefill" or "decode".
    Time that no timer measured belongs to "python".
    """
    phases = {phase: seconds.get(phase, 0.0) for phase in (SAMPLE, DETOKENIZE, SCREEN)}
    phases[compute] = seconds.get(COMPUTE, 0.0)
    return {
        **dict.fromkeys(TOKEN_PHASES, 0.0),
        **phases,
        "python": seconds["all"] - sum(phases.values()),
    }


def _timed_functions() -> list[TimedFunction]:
    """Return the functions to time, each with its phase. `logits_row` counts as computation,
    because it waits until a GPU has finished.
    """
    samplers = [
        (SAMPLE, owner, "draw") for owner in (NativeChain, GreedyNative, GreedyChain, NumpyChain)
    ]
    return [
        (COMPUTE, lib(), "llama_decode"),
        (COMPUTE, Context, "logits_row"),
        *samplers,
        (DETOKENIZE, Detokenizer, "feed"),
    ]


class _EndlessVocabulary:
    """A vocabulary in which no token ends the answer. Each token is still checked, so that the
    check costs its usual time.
    """

    def __init__(self, vocabulary: Vocabulary, timers: FunctionTimers | None) -> None:
        self.n_vocab, self.tokenize = vocabulary.n_vocab, vocabulary.tokenize
        self.piece = timers.wrap(DETOKENIZE, vocabulary.piece) if timers else vocabulary.piece
        self._is_end = vocabulary.is_end

    def is_end(self, token: int) -> bool:
        """Check the token like the wrapped vocabulary, but return False."""
        self._is_end(token)
        return False


@contextmanager
def ignore_end_tokens(runner: Runner, timers: FunctionTimers | None = None) -> Iterator[None]:
    """Within the block, check whether each token ends the answer, but never end it. `timers`, if
    given, times the conversion of tokens to text.
    """
    engine, resources = runner.engine, runner.engine.resources
    engine.resources = replace(
        resources, vocabulary=_EndlessVocabulary(resources.vocabulary, timers)
    )
    try:
        yield
    finally:
        engine.resources = resources
